"""Reading a checkpoint: everything is read and compared before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import CheckpointError
from nblaunch.training import group, seeds, weights
from nblaunch.training.checkpoints import folder as folders
from nblaunch.training.checkpoints.contents import Training, counts, file_name, rank_file
from nblaunch.training.processes import PartialState


def load(
    training: Training, folder: Path, manifest: dict[str, Any], strict: bool, model_options: dict[str, Any]
) -> None:
    """Go on from a whole checkpoint.

    Everything is read and compared before anything is changed.

    Args:
        training: What to restore into, of the same form as what was saved.
        folder: Of `folder.find`.
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
    have = counts(training)
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
