"""The arithmetic inside a prepared model's forward: one class for each of "no", "fp16", "bf16" and "fp8".

Parameters stay in fp32, autocast makes matrix products cheaper, and what a model returns is fp32 again.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nblaunch.errors import ConfigError
from nblaunch.rank import context
from nblaunch.training.float8 import convert_to_float8
from nblaunch.training.kinds import PrecisionType
from nblaunch.training.options import AORecipeKwargs, AutocastKwargs, GradScalerKwargs
from nblaunch.training.structures import to_fp32


class Precision:
    """Full precision, and the contract of the others."""

    name = "no"
    dtype: torch.dtype | None = None
    """What autocast computes in; None without autocast."""

    def __init__(self, device: torch.device, autocast: AutocastKwargs | None = None) -> None:
        self.device = device
        self.options = autocast or AutocastKwargs()
        self.scaler: torch.amp.GradScaler | None = None

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The context that a forward runs in; `options` count instead of those given at first."""
        options = options or self.options
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(
            self.device.type, self.dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its layers changed for this precision, before it is wrapped or optimised."""
        return model

    def attach(self, model: torch.nn.Module) -> None:
        """Let calls of `model`, in its final wrapping, run in autocast and return fp32; `forward` stays as it is."""
        if self.dtype is not None and self.options.enabled:
            model.__dict__["_call_impl"] = AutocastCall(model, self.device.type, self.dtype, self.options.cache_enabled)

    def detach(self, model: torch.nn.Module) -> None:
        """Undo `attach`."""
        model.__dict__.pop("_call_impl", None)


class AutocastCall:
    """A module's call inside autocast, with outputs in fp32.

    It takes the place of the instance's `_call_impl`, which `nn.Module.__call__` looks up: unlike a pair of forward
    hooks it leaves autocast on an interrupt too, and unlike a replaced `forward` it leaves the user's in place and
    survives pickling.
    """

    def __init__(self, module: torch.nn.Module, device: str, dtype: torch.dtype, cache: bool | None) -> None:
        self.module = module
        self.device = device
        self.dtype = dtype
        self.cache = cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        with torch.autocast(self.device, self.dtype, cache_enabled=self.cache):
            outputs = type(self.module)._call_impl(self.module, *args, **kwargs)
        return to_fp32(outputs)


class BFloat16(Precision):
    """bf16 autocast; its range is that of fp32, so losses aren't scaled."""

    name = "bf16"
    dtype = torch.bfloat16

    def __init__(self, device: torch.device, autocast: AutocastKwargs | None = None) -> None:
        super().__init__(device, autocast)
        if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f'mixed_precision="bf16" needs compute capability 8.0, {name} has less; use "fp16"')


class Float16(Precision):
    """fp16 autocast; losses are scaled so that small gradients don't vanish, and a step that overflowed is skipped."""

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self,
        device: torch.device,
        autocast: AutocastKwargs | None = None,
        scaling: GradScalerKwargs | None = None,
    ) -> None:
        super().__init__(device, autocast)
        self.scaler = torch.amp.GradScaler(device.type, **(scaling or GradScalerKwargs()).to_dict())


class Float8(BFloat16):
    """Linear layers in fp8 by torchao, everything else in bf16 autocast; compute capability 8.9 or more."""

    name = "fp8"

    def __init__(
        self, device: torch.device, autocast: AutocastKwargs | None = None, recipe: AORecipeKwargs | None = None
    ) -> None:
        if device.type != "cuda":
            raise ConfigError(f'mixed_precision="fp8" needs a CUDA device, this process has {device}; use "bf16"')
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise ConfigError(
                f'mixed_precision="fp8" needs compute capability 8.9, {torch.cuda.get_device_name(device)} has '
                f'{major}.{minor}; use "bf16"'
            )
        super().__init__(device, autocast)
        self.recipe = recipe or AORecipeKwargs()

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its linear layers, but for the first and the last, computing in fp8."""
        return convert_to_float8(model, self.recipe)


def leave_launchers_autocast(device: torch.device) -> None:
    """End the autocast that a launch in bf16 switches on for functions without an Accelerator, for this thread."""
    torch.set_autocast_enabled(device.type, False)
    torch.set_autocast_cache_enabled(True)


def chosen(argument: str | None) -> str:
    """The precision's name: the argument, else the launch's, else `ACCELERATE_MIXED_PRECISION`, else "no".

    Raises:
        ValueError: The name is unknown.
    """
    launch = context.current()
    word = argument or (launch.config.mixed_precision if launch is not None else None)
    word = str(word or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    if word not in PrecisionType:
        raise ValueError(f"mixed_precision={word!r} is unknown; there are: {', '.join(PrecisionType.list())}")
    return word


def make(
    name: str,
    device: torch.device,
    autocast: AutocastKwargs | None,
    scaling: GradScalerKwargs | None,
    recipe: AORecipeKwargs | None,
) -> Precision:
    """The precision of this name on `device`, with the options that concern it."""
    makers = {
        "no": lambda: Precision(device, autocast),
        "bf16": lambda: BFloat16(device, autocast),
        "fp16": lambda: Float16(device, autocast, scaling),
        "fp8": lambda: Float8(device, autocast, recipe),
    }
    return makers[name]()
