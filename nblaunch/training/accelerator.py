"""`Accelerator`: the whole of the training runtime inside a rank, each part of it delegated to its module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

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
    weights,
)
from nblaunch.training.accumulation import Accumulation, MicroStep
from nblaunch.training.checkpointing import Checkpointing
from nblaunch.training.gradients import GradientState
from nblaunch.training.handlers import by_kind
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
from nblaunch.training.processes import PartialState, forget_settings, settle, settled
from nblaunch.training.scaling import Scaling


def _of(holder: str, name: str, doc: str) -> Any:
    """A property that reads `self.<holder>.<name>`."""
    return property(lambda self: getattr(getattr(self, holder), name), doc=doc)


class Accelerator(PartialState):
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

    def __init__(
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
        self.gradient_state = GradientState(_windows(gradient_accumulation_steps, gradient_accumulation_plugin))
        self._accumulation = Accumulation(self.gradient_state)
        self._scaling = None if self.precision.scaler is None else Scaling(self.precision.scaler)
        self._prepared = Prepared(
            self,
            self.strategy,
            self.precision,
            self._scaling,
            self.gradient_state,
            _compiling(dynamo_backend, dynamo_plugin),
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
    use_stateful_dataloader = _of(
        "dataloader_config", "use_stateful_dataloader", "As in `DataLoaderConfiguration`."
    )
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
        if self._prepared.models:
            for optimizer in done:
                if isinstance(optimizer, PreparedOptimizer):
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
        self._accumulation.step = 0
        batch_size.clear_device_cache(garbage_collection=True)
        return [None] * number

    clear = free_memory

    # ---- steps

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None, **kwargs: Any) -> None:
        """Compute gradients of a loss, divided by the micro-steps of this window.

        Args:
            loss: A scalar of this process's batch: a mean; or with `weight` a sum.
            weight: How much the sum is over, such as its number of tokens: the window's gradients are divided by the
                total weight of its micro-steps on all ranks, which is exact however the tokens are spread.
            **kwargs: Of `Tensor.backward`.

        Raises:
            ValueError: The loss is no scalar, or depends on no parameter.
        """
        if loss.numel() != 1 and "gradient" not in kwargs:
            raise ValueError(f"backward takes a scalar loss, found shape {tuple(loss.shape)}; take its mean() first")
        if not loss.requires_grad:
            raise ValueError(
                "this loss depends on no trainable parameter, so there is nothing to compute; a gathered or reduced "
                "tensor carries no gradient: call backward on this process's own loss"
            )
        accumulation = self._accumulation
        accumulation.weigh(weight)
        if weight is None and accumulation.length != 1:
            loss = loss / accumulation.length
        if self._scaling is not None:
            loss = self._scaling.scale(loss)
        loss.backward(**kwargs)
        if weight is not None and self.gradient_state.sync_gradients:
            accumulation.finish_weighted(self._gradients(accumulation.models or self._prepared.models))

    def _gradients(self, models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
        return [one.grad for model in models for one in model.parameters() if one.grad is not None]

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """A micro-step: gradients are exchanged, and prepared optimizers act, only in the last of each window.

        Args:
            *models: The prepared models that are trained in it.

        Raises:
            UnpreparedError: One was not prepared.
        """
        self._prepared.require_prepared(models)
        return MicroStep(self._accumulation, self.strategy, models)

    @property
    def step(self) -> int:
        """Micro-steps since a loader ended last."""
        return self._accumulation.step

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step exchanges gradients."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps in a window; may be set between two windows."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin.num_steps = value
        self._accumulation.length = value

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward leaves this model's gradients on their rank."""
        return self.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward exchanges gradients although the forward ran in `no_sync`."""
        return self.strategy.sync_in_backward(model)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[torch.nn.Module], even_batches: bool | None = None
    ) -> Iterator[None]:
        """A context in which ranks may take different numbers of steps: those that are done shadow the others.

        Args:
            joinables: The prepared models that are trained in it.
            even_batches: What prepared map-style loaders do inside, instead of what they were prepared for.
        """
        with data.even_batches(self._prepared.loaders, even_batches), self.strategy.join(joinables):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the fp16 scale, once a step.

        Args:
            optimizer: One prepared optimizer or several; None is all.
        """
        if self._scaling is None:
            return
        chosen = self._prepared.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            self._scaling.unscale(getattr(one, "optimizer", one))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Limit the gradients' norm, on a micro-step that exchanges them.

        Args:
            parameters: Whose gradients.
            max_norm: The largest norm they may have.
            norm_type: Of the p-norm.

        Returns:
            The norm before, 0-d, over the whole model; between exchanges that of this rank so far, nothing clipped.
        """
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.sync_gradients:
            gradients = [one.grad for one in held if one.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients, norm_type)
            return norm if self._scaling is None else norm / self._scaling.scaler.get_scale()
        self.unscale_gradients(self._optimizers_of(held))
        return self.strategy.clip_grad_norm(held, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Limit each gradient's elements to [-clip_value, clip_value], on a micro-step that exchanges them."""
        if self.sync_gradients:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self.unscale_gradients(self._optimizers_of(held))
            self.strategy.clip_grad_value(held, clip_value)

    def _optimizers_of(self, parameters: Iterable[torch.Tensor]) -> list[PreparedOptimizer]:
        if self._scaling is None:
            return []
        ids = {id(parameter) for parameter in parameters}
        return [one for one in self._prepared.optimizers if not ids.isdisjoint(map(id, one.parameters()))]

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context in the launch's precision, for work outside a prepared model's forward."""
        return self.precision.autocast(autocast_handler)

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
        return metrics.gather_for_metrics(input_data, self._prepared.loaders, active, loader, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `nblaunch.ops.reduce`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
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

    # ---- checkpoints

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Write a checkpoint of everything that was prepared or registered; all processes must call this.

        When it returns, on any process, the checkpoint is whole; whatever fails or ends the run before, it is not
        there, and what was there before is untouched.

        Args:
            output_dir: The folder; None with automatic naming is the next number.
            safe_serialization: Whether weights are safetensors.
            **kwargs: Kept for compatibility.

        Returns:
            The folder.
        """
        return self._checkpointing.save(output_dir, safe_serialization)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on from a checkpoint; prepare and register the same objects first. All processes must call this.

        Args:
            input_dir: The folder; None is the newest whole one that was named automatically.
            load_kwargs: Kept for compatibility.
            **load_model_func_kwargs: Of `Module.load_state_dict`. `strict=False` also goes on where generators
                can't be restored, or the number of processes differs.

        Raises:
            CheckpointError: There is none, it is damaged, or it is of something else.
        """
        self._checkpointing.load(input_dir, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have `save_state` and `load_state` keep objects with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: One lacks these methods.
        """
        self._checkpointing.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before `save_state` writes; it may write, and remove from `weights`."""
        return self._checkpointing.add_hook(self._checkpointing.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before `load_state` reads; it may read, and remove from `models`."""
        return self._checkpointing.add_hook(self._checkpointing.load_hooks, hook)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's whole state; complete on rank 0 whatever the strategy."""
        return self.strategy.state_dict(self._prepared.unwrap(model, False)) if unwrap else model.state_dict()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, on the main process only (one per machine with `save_on_each_node`).

        Args:
            obj: Of `torch.save`; a state dict with `safe_serialization`.
            f: The file, which is replaced when the new one is whole.
            safe_serialization: Whether to write safetensors.
        """
        if self.is_main_process or (self.project_configuration.save_on_each_node and self.is_local_main_process):
            weights.replace_file(Path(f), lambda path: weights.write_any(obj, path, safe_serialization))

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for other programs; all processes must call this.

        Args:
            model: A prepared model, or any.
            save_directory: Gets `model.safetensors`, or shards of it and `model.safetensors.index.json`.
            max_shard_size: Such as "10GB", or in bytes.
            safe_serialization: Otherwise `pytorch_model.bin` and its shards.
        """
        state = self.get_state_dict(model)
        with group.together(f"saving a model to {save_directory}"):
            if self.is_main_process or (
                self.project_configuration.save_on_each_node and self.is_local_main_process
            ):
                weights.export(state, Path(save_directory), max_shard_size, safe_serialization)

    # ---- tracking, profiling, the end

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Begin a run with every tracker of `log_with`, on the main process.

        Args:
            project_name: What trackers call the project.
            config: To be stored with the run; may be nested and hold anything.
            init_kwargs: A tracker's name to options of its own.
        """
        if self.is_main_process:
            self.trackers = trackers.start(self.log_with, project_name, self.logging_dir, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker, or with `unwrap` its library's own run; on other processes one that does nothing.

        Raises:
            ValueError: There is none of this name.
        """
        if not self.is_main_process:
            return trackers.GeneralTracker(_blank=True)
        found = next((one for one in self.trackers if getattr(one, "name", None) == name), None)
        if found is None:
            there = ", ".join(str(getattr(one, "name", "")) for one in self.trackers) or "none"
            raise ValueError(f"there is no tracker {name!r}; there are: {there} (init_trackers begins them)")
        return getattr(found, "tracker", None) if unwrap else found

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Show numbers on the dashboard, from every process, and store values with all trackers, from the main one.

        Args:
            values: Numbers, 0-d tensors or text by name.
            step: The step that they are of.
            log_kwargs: A tracker's name to options of its `log`.
        """
        here = context.current()
        if here is not None:
            here.reporter.log(trackers.numbers(values), step)
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(getattr(tracker, "name", ""), {}))

    def log_images(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Store images with all trackers, from the main process."""
        for tracker in self.trackers:
            tracker.log_images(values, step=step, **(log_kwargs or {}).get(getattr(tracker, "name", ""), {}))

    def end_training(self) -> None:
        """End the trackers' runs, and outside a launch the process group."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        forget_settings()
        if context.current() is None:
            self.destroy_process_group()

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Profile a block; see `ProfileKwargs`.

        Yields:
            The profiler; call its `step()` if there is a schedule.
        """
        options = profile_handler or self._profile or ProfileKwargs()
        with options.build() as profiler:
            yield profiler
        if options.output_trace_dir is not None:
            folder = Path(options.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))
            self.wait_for_everyone()


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
