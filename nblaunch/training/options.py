"""What a training function can choose: handlers of keyword arguments, and configurations of one concern each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import torch

from nblaunch.training.kinds import DDPCommunicationHookType, DynamoBackend


class KwargsHandler:
    """The base of options that are handed on to PyTorch as keyword arguments."""

    def to_dict(self) -> dict[str, Any]:
        """Every option by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # pyright: ignore[reportArgumentType]

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast` inside prepared models and `Accelerator.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of `torch.amp.GradScaler`, used with fp16."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao computes in fp8."""

    config: Any = None
    """A `torchao.float8.Float8LinearConfig`; None is torchao's default."""
    module_filter_func: Callable[[Any, str], bool] | None = None
    """Given a layer and its name: whether it computes in fp8."""
    pad_inner_dim: bool | None = None
    """Whether layers are padded to sizes that fp8 matrix products can take; counts where `config` is None."""


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`; None leaves the choice to the launch and to PyTorch."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`, and how it sends gradients."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """Compresses gradients: in half precision, or by PowerSGD."""
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """FP16 or BF16 around what `comm_hook` sends."""
    comm_state_option: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of `PowerSGDState`, such as `matrix_approximation_rank`."""
    sync_batch_norm: bool = False
    """Whether batch norm layers take their statistics over all ranks (CUDA)."""

    def to_dict(self) -> dict[str, Any]:
        """The options of the DDP constructor, without those that are applied beside it."""
        beside = ("comm_hook", "comm_wrapper", "comm_state_option", "sync_batch_norm")
        return {name: value for name, value in super().to_dict().items() if name not in beside}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`."""

    activities: list[str] | None = None
    """"cpu", "cuda", "xpu", "mtia" or "hpu"; None is all that there are."""
    schedule_option: dict[str, int] | None = None
    """`wait`, `warmup`, `active`, `repeat`, `skip_first`, in steps."""
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    """A folder that every rank writes its trace into, `profile_<rank>.json`, in Chrome's format."""

    def build(self) -> torch.profiler.profile:
        """The profiler that these options describe, not yet started.

        Raises:
            ValueError: An activity is unknown.
        """
        options = {name: value for name, value in self.to_dict().items() if name != "output_trace_dir"}
        schedule = options.pop("schedule_option")
        options["activities"] = None if self.activities is None else [_activity(word) for word in self.activities]
        if schedule is not None:
            options["schedule"] = torch.profiler.schedule(**schedule)
        return torch.profiler.profile(**options)


def _activity(word: str) -> torch.profiler.ProfilerActivity:
    known = torch.profiler.ProfilerActivity.__members__
    if word.upper() not in known:
        words = ", ".join(repr(name.lower()) for name in known)
        raise ValueError(f"the profiler's activity {word!r} is unknown; there are: {words}")
    return known[word.upper()]


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How `Accelerator.accumulate` gathers the gradients of several micro-steps into one step."""

    num_steps: int = 1
    """Micro-steps in one window, at least 1."""
    adjust_scheduler: bool = True
    """Taken for compatibility: a prepared scheduler advances once per window and process in either case, as it
    does with Accelerate."""
    sync_with_dataloader: bool = True
    """Whether a window ends where the loader ends, although it is short."""
    sync_each_batch: bool = False
    """Whether gradients are exchanged after each micro-step: slower, but without a second copy of them."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} accumulates nothing; it must be at least 1")


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share their data among the ranks."""

    split_batches: bool = False
    """Whether a loader's batch size is that of all ranks together; otherwise each rank has batches of that size."""
    dispatch_batches: bool | None = None
    """Whether rank 0 alone reads and sends each rank its part; None does so for iterable datasets."""
    even_batches: bool = True
    """Whether the last round is completed with samples from the start, so that all ranks do equally many steps."""
    use_seedable_sampler: bool = False
    """Whether a shuffled order comes from `data_seed + epoch` alone."""
    data_seed: int | None = None
    """The seed of the seedable sampler; None takes torch's initial seed of rank 0."""
    non_blocking: bool = False
    """Whether copies to the device may overlap with the host's work (with pinned memory)."""
    use_stateful_dataloader: bool = False
    """Whether loaders are torchdata's `StatefulDataLoader`, which resume their workers too."""

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            try:
                import torchdata.stateful_dataloader  # noqa: F401  # pyright: ignore[reportUnusedImport]
            except ImportError:
                raise ImportError(
                    "use_stateful_dataloader=True needs torchdata, which is not installed; pip install torchdata"
                ) from None


@dataclass
class ProjectConfiguration:
    """Where a project's checkpoints and logs go."""

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    """Where trackers that write files do so; by default `project_dir`."""
    automatic_checkpoint_naming: bool = False
    """Whether `save_state()` numbers its folders itself: `checkpoints/checkpoint_<iteration>`."""
    total_limit: int | None = None
    """How many automatically named checkpoints are kept."""
    iteration: int = 0
    """The number of the next automatic checkpoint."""
    save_on_each_node: bool = False
    """Whether every machine writes what is the same on all, for machines that share no file system."""

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit={self.total_limit} would keep no checkpoint; give at least 1, or None")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Make `project_dir` the project's folder, and that of its logs unless they have one."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile` for prepared models."""

    backend: DynamoBackend | str | None = None
    """None takes `ACCELERATE_DYNAMO_BACKEND`, or "no"."""
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    disable: bool = False

    def __post_init__(self) -> None:
        word = self.backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
        try:
            self.backend = DynamoBackend(word)
        except ValueError:
            words = ", ".join(name.lower() for name in DynamoBackend.list())
            raise ValueError(f"dynamo_backend={word!r} is unknown; there are: {words}") from None

    @property
    def enabled(self) -> bool:
        """Whether models are compiled at all."""
        return self.backend != DynamoBackend.NO

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        chosen = {name: value for name, value in self.to_dict().items() if value is not None}
        return {**chosen, "backend": str(self.backend).lower()}
