"""What a checkpoint holds: models, optimizers, schedulers, scaler, loaders, generators and counters of a training."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import nblaunch
from nblaunch.errors import CheckpointError
from nblaunch.training import checkpoint_folder as folders
from nblaunch.training import group, seeds, weights
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.processes import PartialState


@dataclass
class Training:
    """Everything that makes up the state of a training, as its `Accelerator` holds it."""

    models: Sequence[torch.nn.Module]
    """The prepared ones."""
    unwrap: Callable[[torch.nn.Module], torch.nn.Module]
    state_dict: Callable[[torch.nn.Module], dict[str, Any]]
    """A prepared model's whole state, on rank 0."""
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    loaders: Sequence[Any]
    scaling: Any | None
    registered: Sequence[Any]
    """The user's own objects with `state_dict` and `load_state_dict`."""
    save_hooks: Sequence[Callable[..., Any]] = ()
    load_hooks: Sequence[Callable[..., Any]] = ()
    counters: dict[str, int] = field(default_factory=dict[str, int])


def file_name(stem: str, number: int, suffix: str) -> str:
    """`model.safetensors`, `model_1.safetensors`, ..."""
    return f"{stem}.{suffix}" if number == 0 else f"{stem}_{number}.{suffix}"


def rank_file(rank: int) -> str:
    """The file of what each rank has of its own."""
    return f"rank_{rank}.bin"


# ---- saving


def save(training: Training, target: Path, project: ProjectConfiguration, safe: bool) -> None:
    """Write a checkpoint; when this returns, on any rank, it is whole for all.

    Args:
        training: What to save.
        target: The folder, replaced in one step if it is there.
        project: Says whether each machine keeps one, and how many are kept.
        safe: Whether weights are safetensors, else `torch.save`.

    Raises:
        CheckpointError: Something can't be saved, on the rank that met it; `CollectiveError` on the others.
            What was there before is untouched.
    """
    state = PartialState()
    owner = state.is_main_process or (project.save_on_each_node and state.is_local_main_process)
    partial = folders.beside(target.absolute(), "partial")
    what = f"saving {target}"
    with group.together(what):
        if owner:
            folders.begin(target)
    with group.together(what):
        partial.mkdir(parents=True, exist_ok=True)  # where a machine keeps none of its own
        _write(training, partial, owner, safe)
        _write_checked(_rank_state(training, state), partial / rank_file(state.process_index), "a data loader")
    with group.together(what):
        if owner:
            if not project.save_on_each_node:
                _require_rank_files(partial, state.num_processes)
            folders.finish(partial, target, _facts(training, state))
            if project.automatic_checkpoint_naming and project.total_limit is not None:
                folders.prune(target.parent, project.total_limit)


def _write(training: Training, folder: Path, owner: bool, safe: bool) -> None:
    """What is the same on all ranks; all take part in collecting it, the owner writes."""
    states = [training.state_dict(model) for model in training.models]
    for hook in training.save_hooks:
        hook(list(training.models), states, str(folder))
    if not owner:
        return
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    for number, model_state in enumerate(states):
        weights.write(model_state, folder / file_name(stem, number, suffix), safe)
    for number, optimizer in enumerate(training.optimizers):
        torch.save(optimizer.state_dict(), folder / file_name("optimizer", number, "bin"))
    for number, scheduler in enumerate(training.schedulers):
        _write_checked(scheduler.state_dict(), folder / file_name("scheduler", number, "bin"), _kind(scheduler))
    if training.scaling is not None:
        torch.save(training.scaling.state_dict(), folder / "scaler.bin")
    for number, thing in enumerate(training.registered):
        _write_checked(thing.state_dict(), folder / f"registered_{number}.bin", _kind(thing))


def _write_checked(state: Any, path: Path, what: str) -> None:
    """Write a small state, and see at once whether it can be read without pickle's powers."""
    torch.save(state, path)
    try:
        torch.load(path, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"the state of {what} holds something that can't be read back without running code from the file; "
            "have its state_dict() return tensors, numbers, text, lists and dicts"
        ) from error


def _kind(thing: Any) -> str:
    inner = getattr(thing, "scheduler", thing)
    return type(inner).__name__


def _rank_state(training: Training, state: PartialState) -> dict[str, Any]:
    plain, tensors = seeds.states(state.device)
    return {"rng": plain, "rng_tensors": tensors, "loaders": [loader.state_dict() for loader in training.loaders]}


def _require_rank_files(partial: Path, num_processes: int) -> None:
    missing = [rank for rank in range(num_processes) if not (partial / rank_file(rank)).is_file()]
    if missing:
        raise CheckpointError(
            f"ranks {missing} wrote their files where rank 0 can't see them; checkpoint to a folder that all machines "
            "share, or pass ProjectConfiguration(save_on_each_node=True)"
        )


def _facts(training: Training, state: PartialState) -> dict[str, Any]:
    return {
        "world_size": state.num_processes,
        "counters": training.counters,
        "holds": _holds(training),
        "models": [type(training.unwrap(model)).__qualname__ for model in training.models],
        "versions": {
            "nblaunch": nblaunch.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "time": time.time(),
    }


def _holds(training: Training) -> dict[str, int]:
    return {
        "optimizers": len(training.optimizers),
        "schedulers": len(training.schedulers),
        "loaders": len(training.loaders),
        "registered": len(training.registered),
    }


# ---- loading


def load(
    training: Training, folder: Path, manifest: dict[str, Any], strict: bool, model_options: dict[str, Any]
) -> None:
    """Go on from a whole checkpoint.

    Everything is read and compared before anything is changed.

    Args:
        training: What to restore into, of the same form as what was saved.
        folder: Of `checkpoint_folder.find`.
        manifest: Its manifest.
        strict: Otherwise what can't be restored of generators and loaders is a warning, and models may lack keys.
        model_options: Of `Module.load_state_dict`.

    Raises:
        CheckpointError: The checkpoint was damaged, or is of another training; the message says what differs.
    """
    state = PartialState()
    with group.together(f"loading {folder}"):
        mine = rank_file(state.process_index)
        shared = [name for name in manifest["files"] if not name.startswith("rank_")]
        folders.verify(folder, [*(shared if state.is_local_main_process else []), mine])
        _compare(training, manifest, strict)
        models = list(training.models)
        for hook in training.load_hooks:
            hook(models, str(folder))
        modules = [training.unwrap(model) for model in models]
        states = [_model_state(folder, number) for number in range(len(modules))]
        for module, model_state in zip(modules, states, strict=True):
            compare_weights(module, model_state, strict)
        own = _read(folder / mine, required=strict or manifest["world_size"] == state.num_processes)
    with group.together(f"loading {folder}"):
        for module, model_state in zip(modules, states, strict=True):
            module.load_state_dict(model_state, strict=strict, **model_options)
        _restore_shared(training, folder)
        if own is not None:
            _restore_own(training, own, state, strict)


def _compare(training: Training, manifest: dict[str, Any], strict: bool) -> None:
    size = group.size()
    if manifest["world_size"] != size:
        text = (
            f"the checkpoint was written by {manifest['world_size']} processes, this run has {size}: generators and "
            "positions in the data belong to ranks"
        )
        if strict:
            raise CheckpointError(f"{text}; launch {manifest['world_size']} processes, or load with strict=False")
        warnings.warn(f"{text}; they start afresh where a rank has no file", stacklevel=2)
    have = _holds(training)
    differing = [
        f"{have[kind]} {kind} here, {count} in it" for kind, count in manifest["holds"].items() if have[kind] != count
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint is of another training: {'; '.join(differing)}; prepare and register the same objects "
            "before load_state"
        )


def _model_state(folder: Path, number: int) -> dict[str, Any]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        path = folder / file_name(stem, number, suffix)
        if path.exists():
            return weights.read(path)
    raise CheckpointError(
        f"{folder} holds no weights of model number {number} ({file_name('model', number, 'safetensors')}); "
        "prepare the same models in the same order before load_state"
    )


def compare_weights(module: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Whether a state is of this module.

    Raises:
        CheckpointError: Names or shapes differ; the message names them.
    """
    own = module.state_dict()
    lacking = [name for name in own if name not in state] if strict else []
    unknown = [name for name in state if name not in own] if strict else []
    shapes = [
        f"{name} {tuple(state[name].shape)}, here {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and name in state and state[name].shape != value.shape
    ]
    found = [
        f"{title}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for title, names in (("missing in it", lacking), ("unknown here", unknown), ("other shapes", shapes))
        if names
    ]
    if found:
        kind = type(module).__name__
        raise CheckpointError(f"the checkpoint is of another architecture than {kind}: {'; '.join(found)}")


def _read(path: Path, required: bool = True) -> Any:
    if not path.exists() and not required:
        return None
    return torch.load(path, map_location="cpu", weights_only=True)


def _restore_shared(training: Training, folder: Path) -> None:
    for number, optimizer in enumerate(training.optimizers):
        name = file_name("optimizer", number, "bin")
        try:
            optimizer.load_state_dict(_read(folder / name))
        except ValueError as error:
            raise CheckpointError(f"{name} is of another optimizer than number {number} here: {error}") from error
    for number, scheduler in enumerate(training.schedulers):
        scheduler.load_state_dict(_read(folder / file_name("scheduler", number, "bin")))
    if training.scaling is not None:
        scaler = _read(folder / "scaler.bin", required=False)
        if scaler is None:
            warnings.warn("the checkpoint has no fp16 scale, so scaling starts afresh", stacklevel=2)
        else:
            training.scaling.load_state_dict(scaler)
    for number, thing in enumerate(training.registered):
        thing.load_state_dict(_read(folder / f"registered_{number}.bin"))


def _restore_own(training: Training, own: dict[str, Any], state: PartialState, strict: bool) -> None:
    for loader, loader_state in zip(training.loaders, own["loaders"], strict=True):
        loader.load_state_dict(loader_state)
    missing = seeds.restore(own["rng"], own["rng_tensors"], state.device)
    if not missing:
        return
    if strict:
        raise CheckpointError(f"{'; '.join(missing)}; load with strict=False to go on without")
    warnings.warn(f"{'; '.join(missing)}; going on without", stacklevel=2)
