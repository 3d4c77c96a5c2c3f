"""Checkpoints that Hugging Face Accelerate wrote: models, optimizers, schedulers and scaler are taken over."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from nblaunch.errors import CheckpointError
from nblaunch.training import group
from nblaunch.training.checkpoints.contents import Training, file_name
from nblaunch.training.checkpoints.loading import compare_weights
from nblaunch.training.weights import read


def recognised(folder: Path) -> bool:
    """Whether `folder` looks like a checkpoint that Accelerate 1.x wrote."""
    return (folder / "random_states_0.pkl").exists() and any(
        (folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin")
    )


def load(training: Training, folder: Path, strict: bool, model_options: dict[str, Any]) -> None:
    """Restore what can be read without unpickling: all but the generators and the loaders' positions.

    Args:
        training: What to restore into.
        folder: One that is `recognised`.
        strict: Whether models must have exactly the saved keys.
        model_options: Of `Module.load_state_dict`.

    Raises:
        CheckpointError: A file is missing, needs unpickling, or is of another training.
    """
    with group.together(f"loading {folder}"):
        models = list(training.models)
        for hook in training.load_hooks:
            hook(models, str(folder))
        for number, model in enumerate(models):
            module = training.unwrap(model)
            safe = folder / file_name("model", number, "safetensors")
            state = read(safe) if safe.exists() else _read(folder / file_name("pytorch_model", number, "bin"))
            for name, first in _tied(module).items():  # saved under one of their names
                if name not in state and first in state:
                    state[name] = state[first]
                elif first not in state and name in state:
                    state[first] = state[name]
            compare_weights(module, state, strict)
            module.load_state_dict(state, strict=strict, **model_options)
        for kind, things in (("optimizer", training.optimizers), ("scheduler", training.schedulers)):
            for number, thing in enumerate(things):
                thing.load_state_dict(_read(folder / file_name(kind, number, "bin")))
        for number, thing in enumerate(training.registered):
            thing.load_state_dict(_read(folder / f"custom_checkpoint_{number}.pkl"))
        if training.scaling is not None and (folder / "scaler.pt").exists():
            training.scaling.load_state_dict(_read(folder / "scaler.pt"))
    warnings.warn(
        f"{folder} was written by Accelerate: its random generators and positions in the data are stored as pickle, "
        "which is not read; both start afresh",
        stacklevel=2,
    )


def _tied(module: torch.nn.Module) -> dict[str, str]:
    """Second name to first name of parameters that a module holds twice."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied


def _read(path: Path) -> Any:
    if not path.exists():
        raise CheckpointError(f"{path} is missing; prepare the same objects as when it was written")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} can't be read without unpickling code from it") from error
