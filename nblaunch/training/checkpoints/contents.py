"""What a checkpoint holds, and in which files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


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


def counts(training: Training) -> dict[str, int]:
    """How many objects of each kind there are."""
    return {
        "optimizers": len(training.optimizers),
        "schedulers": len(training.schedulers),
        "loaders": len(training.loaders),
        "registered": len(training.registered),
    }
