"""What training functions ask before they use something: is this package, or this kind of device, to be had?

The names are Accelerate's. Nothing is imported to answer, and no driver is started for a package.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from nblaunch.training import devices


def _installed(*packages: str) -> Callable[[], bool]:
    """A function that tells whether one of these can be imported."""

    def is_available() -> bool:
        return any(importlib.util.find_spec(package) is not None for package in packages)

    is_available.__doc__ = f"Whether {' or '.join(packages)} is installed."
    return is_available


is_aim_available = _installed("aim")
is_bnb_available = _installed("bitsandbytes")
is_boto3_available = _installed("boto3")
is_clearml_available = _installed("clearml")
is_comet_ml_available = _installed("comet_ml")
is_datasets_available = _installed("datasets")
is_deepspeed_available = _installed("deepspeed")
is_dvclive_available = _installed("dvclive")
is_matplotlib_available = _installed("matplotlib")
is_mlflow_available = _installed("mlflow")
is_pandas_available = _installed("pandas")
is_peft_available = _installed("peft")
is_pynvml_available = _installed("pynvml")
is_pytest_available = _installed("pytest")
is_rich_available = _installed("rich")
is_schedulefree_available = _installed("schedulefree")
is_swanlab_available = _installed("swanlab")
is_tensorboard_available = _installed("tensorboard", "tensorboardX")
is_timm_available = _installed("timm")
is_torchao_available = _installed("torchao")
is_torchdata_available = _installed("torchdata")
is_torchvision_available = _installed("torchvision")
is_trackio_available = _installed("trackio")
is_transformers_available = _installed("transformers")
is_triton_available = _installed("triton")
is_wandb_available = _installed("wandb")


def _never(kind: str) -> Callable[..., bool]:
    """A function that tells that nblaunch does not know this kind of accelerator."""

    def is_available(*args: object, **kwargs: object) -> bool:
        return False

    is_available.__doc__ = f"False: nblaunch does not train on {kind}, whatever is installed."
    return is_available


is_hpu_available = _never("Gaudi")
is_mlu_available = _never("MLUs")
is_musa_available = _never("MUSA devices")
is_neuron_available = _never("Neuron devices")
is_npu_available = _never("NPUs")
is_sdaa_available = _never("SDAA devices")
is_torch_xla_available = _never("XLA devices")


def is_cuda_available() -> bool:
    """Whether this process may use a CUDA device; asked through NVML, so that CUDA is not started by the question."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether this process may use an Intel XPU."""
    return torch.xpu.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether this process may use Apple's GPU."""
    return torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device that this process would train on computes in bfloat16."""
    return devices.accelerator_type() != "cuda" or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    """Whether the device computes in float16: all that nblaunch trains on do."""
    return True


@contextmanager
def patch_environment(**variables: object) -> Generator[None]:
    """Set environment variables, their names in capitals, and put them back as they were.

    Example:
        >>> with patch_environment(my_choice=1):
        ...     os.environ["MY_CHOICE"]
        '1'
    """
    former = {name.upper(): os.environ.get(name.upper()) for name in variables}
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
