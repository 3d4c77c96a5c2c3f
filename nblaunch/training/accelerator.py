"""`Accelerator`: the whole of the training runtime inside a rank, each part of it delegated to its module."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from nblaunch.errors import ConfigError
from nblaunch.rank import context
from nblaunch.training import (
    batch_size,
    collectives,
    data,
    group,
    metrics,
    precision,
    strategies,
    trackers,
)
from nblaunch.training.accumulation import Accumulation
from nblaunch.training.checkpoints.keeper import Checkpointing
from nblaunch.training.gradients import GradientState
from nblaunch.training.handlers import by_kind
from nblaunch.training.keeping import Keeping
from nblaunch.training.kinds import PrecisionType, RNGType
from nblaunch.training.optimizers import PreparedOptimizer, PreparedScheduler
from nblaunch.training.options import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from nblaunch.training.preparing import KINDS, Prepared, prepare_all
from nblaunch.training.processes import identity, settle, settled
from nblaunch.training.scaling import Scaling
from nblaunch.training.stepping import Stepping
from nblaunch.training.tracking import Tracking


def _of(holder: str, name: str, doc: str) -> Any:
    """A property that reads `self.<holder>.<name>`."""
    return property(lambda self: getattr(getattr(self, holder), name), doc=doc)


class Accelerator(Stepping, Keeping, Tracking):
    """Trains on one process or many by the same code.

    It takes the arguments of Hugging Face Accelerate's class of this name, and does what that documents.

    Args:
        device_placement: Whether models and batches are moved to the device.
        split_batches: As in `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None takes the launch's, else `ACCELERATE_MIXED_PRECISION`.
        gradient_accumulation_steps: Micro-steps that `accumulate` makes one step of.
        cpu: Keep to the CPU.
        dataloader_config: How loaders are shared out.
        deepspeed_plugin: Not in this version.
        fsdp_plugin: Not in this version.
        torch_tp_plugin: Not in this version.
        megatron_lm_plugin: Not in this version.
        rng_types: Which generators are made equal at each epoch's start; by default the sampler's.
        log_with: Trackers, by name, "all", or of one's own.
        project_dir: Where checkpoints and logs go.
        project_config: The same and more.
        gradient_accumulation_plugin: Instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether a prepared scheduler advances with its optimizer's real steps.
        kwargs_handlers: Options for DDP, the scaler, autocast, the process group and the profiler, one of a kind.
        dynamo_backend: A backend for `torch.compile`; "no" or None leaves models uncompiled.
        dynamo_plugin: Instead of `dynamo_backend`.
        deepspeed_plugins: Not in this version.
        parallelism_config: Not in this version.

    Raises:
        ValueError: A word is unknown, or two arguments contradict each other.
        ConfigError: The device can't do what was asked for, or a first Accelerator decided otherwise.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(4, 2)).mean())
        >>> optimizer.step()
    """

    deepspeed_plugin = None
    fsdp_plugin = None

    def __init__(  # noqa: PLR0917  (as Accelerate's)
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        _refuse(
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
        )
        handlers = by_kind(kwargs_handlers or ())
        grouping = handlers.get(InitProcessGroupKwargs) or InitProcessGroupKwargs()
        super().__init__(cpu, **grouping.to_kwargs())
        name = settled("mixed_precision", mixed_precision and str(mixed_precision), precision.chosen)
        self.precision = precision.make(
            name,
            self.device,
            handlers.get(AutocastKwargs),
            handlers.get(GradScalerKwargs),
            handlers.get(AORecipeKwargs),
        )
        launch = context.current()
        if launch is not None:
            precision.leave_launchers_autocast(self.device)
        self.strategy = strategies.make(
            "auto" if launch is None else launch.config.strategy,
            self.num_processes,
            handlers.get(DistributedDataParallelKwargs),
        )
        self.device_placement = device_placement
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config.split_batches = split_batches
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        windows = _windows(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.gradient_state = GradientState(windows, identity().iterated)
        self._accumulation = Accumulation(self.gradient_state)
        self._scaling = None if self.precision.scaler is None else Scaling(self.precision.scaler)
        self._prepared = Prepared(
            self,
            self.strategy,
            self.precision,
            scaling=self._scaling,
            gradient_state=self.gradient_state,
            compiling=_compiling(dynamo_backend, dynamo_plugin),
        )
        self._checkpointing = Checkpointing(
            self._prepared, self.strategy, self._accumulation, self.project_configuration
        )
        self._profile = handlers.get(ProfileKwargs)
        self.log_with = trackers.choose(log_with, self.project_configuration.logging_dir)
        self.trackers: list[trackers.GeneralTracker] = []
        self._trigger = False
        settle("mixed_precision", name)

    # ---- what was chosen

    split_batches = _of("dataloader_config", "split_batches", "As in `DataLoaderConfiguration`.")
    dispatch_batches = _of("dataloader_config", "dispatch_batches", "As in `DataLoaderConfiguration`.")
    use_seedable_sampler = _of("dataloader_config", "use_seedable_sampler", "As in `DataLoaderConfiguration`.")
    non_blocking = _of("dataloader_config", "non_blocking", "As in `DataLoaderConfiguration`.")
    use_stateful_dataloader = _of("dataloader_config", "use_stateful_dataloader", "As in `DataLoaderConfiguration`.")
    project_dir = _of("project_configuration", "project_dir", "The project's folder.")
    logging_dir = _of("project_configuration", "logging_dir", "Where trackers write files.")
    save_iteration = _of("project_configuration", "iteration", "The number of the next automatic checkpoint.")
    mixed_precision = _of("precision", "name", 'The arithmetic of forwards: "no", "fp16", "bf16" or "fp8".')

    @property
    def even_batches(self) -> bool:
        """As in `DataLoaderConfiguration`, for loaders prepared from now on."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def state(self) -> Accelerator:
        """Who this process is and how it trains."""
        return self

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The fp16 loss scaler, its scale adapted to all steps so far."""
        return None if self._scaling is None else self._scaling.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of a prepared optimizer was left out because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    # ---- prepare

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | bool | None = None) -> Any:
        """Make models, optimizers, data loaders and schedulers ready for training on all processes.

        Args:
            *args: In any order; what is none of these is returned as it is.
            device_placement: For each whether it goes to the device; or one word for all.

        Returns:
            The prepared objects in the same order; the object itself if there is one.
        """
        places: Sequence[bool | None]
        if device_placement is None or isinstance(device_placement, bool):
            places = [device_placement] * len(args)
        elif len(device_placement) != len(args):
            raise ValueError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        else:
            places = device_placement
        makers = (self.prepare_model, self.prepare_data_loader, self.prepare_optimizer, self.prepare_scheduler)
        done = prepare_all(args, places, dict(zip(KINDS, makers, strict=True)))
        if any(isinstance(one, torch.nn.Module) for one in args):
            for optimizer in done:
                if isinstance(optimizer, PreparedOptimizer):  # one that came alone is checked at its first step
                    self._prepared.check_parameters(optimizer)
        return done[0] if len(done) == 1 else tuple(done)

    def _placed(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """A model on the device, in the launch's precision, wrapped for training unless `evaluation_mode`."""
        return self._prepared.model(model, self._placed(device_placement), evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """An optimizer that acts where gradients are exchanged."""
        return self._prepared.optimizer(optimizer, self._placed(device_placement))

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """A scheduler that advances with its optimizer's real steps."""
        return self._prepared.scheduler(scheduler, self.step_scheduler_with_optimizer, self.split_batches)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """A loader that yields this process's share, on the device."""
        known = self._prepared.known(data_loader)
        if known is data_loader:
            return known
        prepared = data.prepare_loader(
            data_loader,
            processes=self,
            gradient_state=self.gradient_state,
            options=self.dataloader_config,
            put_on_device=self._placed(device_placement),
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            rng_types=self.rng_types,
        )
        self._prepared.loaders.append(prepared)
        identity().loaders.add(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose first pass starts at batch `num_batches`."""
        return data.skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The user's module inside a prepared one.

        Args:
            model: A prepared model, or any.
            keep_fp32_wrapper: Whether calls of it still run in the launch's precision; its `forward` is the user's
                own in either case.
            keep_torch_compile: Whether a compiled model's is compiled too.
        """
        module = self._prepared.unwrap(model, keep_torch_compile)
        if not keep_fp32_wrapper:
            self.precision.detach(module)
        return module

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and give the device's unused memory back.

        Returns:
            As many Nones as there are objects, to assign to their names.
        """
        number = len(objects)
        del objects
        self._prepared.clear()
        self._accumulation.reset()
        batch_size.clear_device_cache(garbage_collection=True)
        return [None] * number

    clear = free_memory

    # ---- across processes

    def gather(self, tensor: Any) -> Any:
        """See `nblaunch.ops.gather`."""
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False, loader: Any = None) -> Any:
        """Every rank's values, without those of samples that a loader repeated to fill its last round.

        Args:
            input_data: Nested tensors, one row a sample; or objects.
            use_gather_object: Gather as objects although there are only tensors.
            loader: The prepared loader that the values are of, where more than one could be meant.

        Returns:
            Nested tensors of the same form; or a flat list of objects.
        """
        active = self.gradient_state.active_dataloader
        loaders = self._prepared.loaders or list(identity().loaders)  # maybe another Accelerator prepared them
        return metrics.gather_for_metrics(input_data, loaders, active, loader, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `nblaunch.ops.reduce`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """See `nblaunch.ops.pad_across_processes`."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` true on all processes, for instance to stop early."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process called `set_trigger` since the last check; all processes must call this."""
        triggered = self._trigger
        if self.use_distributed:
            triggered = bool(group.all_reduce(torch.tensor(triggered), "max"))
        self._trigger = False
        return triggered


def _refuse(**plugins: Any) -> None:
    given = [name for name, plugin in plugins.items() if plugin is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: this strategy is not available in this version")


def _windows(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    if plugin is None:
        return GradientAccumulationPlugin(int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)))
    if steps != 1:
        raise ValueError("pass either gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    return plugin


def _compiling(backend: str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    if plugin is not None and backend is not None:
        raise ValueError("pass either dynamo_backend or dynamo_plugin, not both")
    return plugin or TorchDynamoPlugin(backend=backend)
