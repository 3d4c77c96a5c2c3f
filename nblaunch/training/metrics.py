"""Gathering values of an evaluation so that each sample counts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nblaunch.training.collectives import gather, gather_object
from nblaunch.training.data.duplicates import drop_repeated
from nblaunch.training.structures import is_tensor, walk


def gather_for_metrics(
    values: Any, loaders: Sequence[Any], active: Any | None, loader: Any | None, as_objects: bool
) -> Any:
    """Every rank's values, without those of repeated samples; see `Accelerator.gather_for_metrics`.

    Args:
        values: Nested tensors, or objects.
        loaders: The prepared loaders that they may come from.
        active: The one that is being iterated over.
        loader: The one that they come from, where that isn't plain.
        as_objects: Whether tensors too are gathered as objects.
    """
    as_objects = as_objects or not all(is_tensor(leaf) for _, leaf in walk(values))
    gathered = gather_object(values) if as_objects else gather(values)
    return drop_repeated(gathered, values, loaders=loaders, active=active, loader=loader, objects=as_objects)
