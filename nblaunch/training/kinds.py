"""The words that options are given in, as enums whose members compare equal to their text."""

from __future__ import annotations

from enum import EnumMeta, StrEnum
from typing import Any


class _Listed(EnumMeta):
    """Lets one ask `"bf16" in PrecisionType`, and for the list of all words."""

    def __contains__(cls, value: object) -> bool:
        return any(value == member for member in cls)

    def list(cls) -> list[str]:
        """All words of this kind."""
        return [str(member.value) for member in cls]  # pyright: ignore[reportAttributeAccessIssue]


class DistributedType(StrEnum):
    """How the processes of a run work together; the values are those of Hugging Face Accelerate."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def of(cls, device_type: str, num_processes: int) -> DistributedType:
        """The plain data-parallel kind for this many processes on this type of device ("cuda", "cpu", ...)."""
        if num_processes == 1:
            return cls.NO
        return cls.__members__.get(f"MULTI_{device_type.upper()}", cls.MULTI_GPU)


class PrecisionType(StrEnum, metaclass=_Listed):
    """The arithmetic inside a prepared model's forward."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(StrEnum, metaclass=_Listed):
    """The experiment trackers that are known by name."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    MLFLOW = "mlflow"


class RNGType(StrEnum, metaclass=_Listed):
    """The random number generators that can be made equal on all ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    XPU = "xpu"
    GENERATOR = "generator"


class DDPCommunicationHookType(StrEnum, metaclass=_Listed):
    """How DDP compresses gradients on their way between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(StrEnum, metaclass=_Listed):
    """The backends of `torch.compile`; NO leaves models uncompiled."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    OPENXLA = "OPENXLA"
    TVM = "TVM"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return next((member for member in cls if isinstance(value, str) and member.value == value.upper()), None)
