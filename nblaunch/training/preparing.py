"""What `prepare` does with each kind of object, and who was prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nblaunch.errors import ConfigError, UnpreparedError
from nblaunch.training.gradients import GradientState
from nblaunch.training.optimizers import PreparedOptimizer, PreparedScheduler, move_state
from nblaunch.training.options import TorchDynamoPlugin
from nblaunch.training.precision import Precision
from nblaunch.training.processes import PartialState
from nblaunch.training.scaling import Scaling
from nblaunch.training.strategies.base import Strategy


class Prepared:
    """The objects that an `Accelerator` prepared, and how it does so.

    Args:
        processes: Who this process is.
        strategy: Wraps models.
        precision: Of their forward.
        scaling: The fp16 loss scaling, or None.
        gradient_state: What optimizers and schedulers go by.
        compiling: Whether and how models are compiled.
    """

    def __init__(
        self,
        processes: PartialState,
        strategy: Strategy,
        precision: Precision,
        *,
        scaling: Scaling | None,
        gradient_state: GradientState,
        compiling: TorchDynamoPlugin,
    ) -> None:
        self.processes = processes
        self.strategy = strategy
        self.precision = precision
        self.scaling = scaling
        self.gradient_state = gradient_state
        self.compiling = compiling
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[Any] = []
        self._of: dict[int, tuple[Any, Any]] = {}
        """An object's id to the object, so that the id stays its own, and what was prepared from it."""

    def clear(self) -> None:
        """Forget everything."""
        for model in self.models:
            self.precision.detach(model)
        for kept in (self.models, self.optimizers, self.schedulers, self.loaders, self._of):
            kept.clear()

    def known(self, thing: Any) -> Any | None:
        """What was prepared from `thing`, or `thing` itself if it is prepared; None if it is new."""
        if any(thing is one for one in (*self.models, *self.optimizers, *self.schedulers, *self.loaders)):
            return thing
        return self._of.get(id(thing), (None, None))[1]

    def _keep(self, raw: Any, prepared: Any) -> Any:
        self._of[id(raw)] = (raw, prepared)
        return prepared

    # ---- models

    def model(self, model: torch.nn.Module, on_device: bool, evaluation: bool) -> torch.nn.Module:
        """The model on the device, wrapped by the strategy unless it is for evaluation only."""
        known = self.known(model)
        if known is not None:
            return known
        prepared = self.precision.convert(model)
        if on_device and not _stays_put(prepared):
            prepared = prepared.to(self.processes.device)
        if not evaluation:
            self._refuse_device_map(prepared)
            prepared = self.strategy.wrap(prepared, self.processes.device)
        if self.compiling.enabled:
            prepared = self.compiled(prepared)
        self.precision.attach(prepared)
        self.models.append(prepared)
        return self._keep(model, prepared)

    def compiled(self, model: torch.nn.Module) -> Any:
        """The model through `torch.compile`, which waits with compiling until it is called."""
        return torch.compile(model, **self.compiling.to_kwargs())

    def _refuse_device_map(self, model: torch.nn.Module) -> None:
        if self.processes.use_distributed and len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ConfigError(
                "the model is spread over several devices by its device map, so each of several processes can't have "
                "one; load it without device_map, or launch one process"
            )

    def unwrap(self, model: torch.nn.Module, keep_compiled: bool) -> torch.nn.Module:
        """The user's module."""
        inner = getattr(model, "_orig_mod", model) if is_compiled_module(model) else model
        module = self.strategy.unwrap(inner)
        if is_compiled_module(module):  # the user compiled it
            return module if keep_compiled else module._orig_mod  # pyright: ignore[reportReturnType]
        if not (keep_compiled and is_compiled_module(model)):
            return module
        return model if module is inner else self.compiled(module)

    def require_prepared(self, models: Sequence[torch.nn.Module]) -> None:
        """Check that these are what `prepare` returned.

        Raises:
            UnpreparedError: One is not.
        """
        for model in models:
            if not any(model is one for one in self.models):
                hint = (
                    "it was prepared, but pass what prepare returned" if id(model) in self._of else "prepare it first"
                )
                raise UnpreparedError(f"accumulate got a {type(model).__name__} that is not prepared; {hint}")

    # ---- optimizers, schedulers

    def optimizer(self, optimizer: Optimizer, on_device: bool) -> PreparedOptimizer:
        """The optimizer, acting with the exchanges of gradients."""
        known = self.known(optimizer)
        if known is not None:
            return known
        if on_device:
            move_state(optimizer, self.processes.device)
        prepared = PreparedOptimizer(optimizer, self.gradient_state, self.scaling, self.check_parameters)
        self.optimizers.append(prepared)
        return self._keep(optimizer, prepared)

    def check_parameters(self, optimizer: PreparedOptimizer) -> None:
        """Check that an optimizer's parameters are of prepared models.

        Raises:
            UnpreparedError: None is, or with several processes some aren't: those would differ from rank to rank.
        """
        trained = {id(parameter) for model in self.models for parameter in model.parameters()}
        parameters = optimizer.parameters()
        strange = [parameter for parameter in parameters if id(parameter) not in trained]
        if not strange or (len(strange) < len(parameters) and not self.processes.use_distributed):
            return
        kind = type(optimizer.optimizer).__name__
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:3])
        raise UnpreparedError(
            f"{len(strange)} of the {len(parameters)} parameters of this {kind} (of shapes {shapes}) belong "
            f"to none of the {len(self.models)} prepared models; prepare the model that the optimizer was made for"
        )

    def scheduler(self, scheduler: Any, with_optimizer: bool, split_batches: bool) -> PreparedScheduler:
        """The scheduler, advancing with its optimizer."""
        known = self.known(scheduler)
        if known is not None:
            return known
        own = getattr(scheduler, "optimizer", None)
        optimizers = [one for one in self.optimizers if own is one or own is one.optimizer] or self.optimizers
        prepared = PreparedScheduler(
            scheduler,
            optimizers,
            self.gradient_state,
            self.processes.num_processes,
            step_with_optimizer=with_optimizer,
            split_batches=split_batches,
        )
        self.schedulers.append(prepared)
        return self._keep(scheduler, prepared)


def is_compiled_module(module: Any) -> bool:
    """Whether this is what `torch.compile` made of a module."""
    return hasattr(module, "_orig_mod") and hasattr(module, "dynamo_ctx")


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """The user's module inside DDP, DataParallel or `torch.compile`, where there is no `Accelerator` to ask.

    Args:
        model: Any module.
        keep_fp32_wrapper: Otherwise calls of the module no longer run in the launch's precision.
        keep_torch_compile: Whether a module that was compiled itself stays so.
    """
    compiled = is_compiled_module(model)
    inner: Any = model._orig_mod if compiled else model
    wrapped = isinstance(inner, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
    module = inner.module if wrapped else inner
    if compiled and not wrapped and keep_torch_compile:
        module = model
    if not keep_fp32_wrapper:
        module.__dict__.pop("_call_impl", None)
    return module


def _stays_put(model: torch.nn.Module) -> bool:
    """Whether a model was placed by a device map, or holds quantised weights that can't be moved."""
    if getattr(model, "hf_device_map", None) or getattr(model, "hf_quantizer", None) is not None:
        return True
    return any(getattr(model, name, False) for name in ("is_loaded_in_8bit", "is_loaded_in_4bit", "is_quantized"))


def prepare_all(
    things: Sequence[Any], places: Sequence[bool | None], makers: dict[type, Callable[..., Any]]
) -> list[Any]:
    """Each thing prepared by the maker of its kind, models first and schedulers last; others as they are.

    Args:
        things: Anything.
        places: For each, whether it goes to the device; None leaves it to the accelerator.
        makers: Kind to what prepares it, in the order of preparing.
    """
    done = list(things)
    for kind, maker in makers.items():
        for index, thing in enumerate(things):
            if isinstance(thing, kind):
                done[index] = maker(thing, places[index]) if kind is not LRScheduler else maker(thing)
    return done


KINDS = (torch.nn.Module, DataLoader, Optimizer, LRScheduler)
"""What `prepare` knows, in its order."""
