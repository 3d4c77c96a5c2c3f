"""The contiguous part of some inputs that one of several processes takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def bounds(length: int, index: int, count: int) -> tuple[int, int]:
    """Start and end of part `index` of `count`; the first `length % count` parts are one longer.

    Example:
        >>> [bounds(5, index, 3) for index in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    size, longer = divmod(length, count)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def partition(inputs: Any, index: int, count: int, pad: bool = False) -> Any:
    """Part `index` of `count` of `inputs`, padded by its last element to the longest part's length if asked.

    Raises:
        ValueError: The values of a mapping have different lengths.
        TypeError: `inputs` can't be split.
    """
    if count == 1:
        _refuse_unknown(inputs)
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"all values of a dict must have the same length to be split, found {lengths}")
        return {key: partition(value, index, count, pad) for key, value in inputs.items()}
    _refuse_unknown(inputs)
    length = len(inputs)
    start, end = bounds(length, index, count)
    missing = -(-length // count) - (end - start) if pad and length else 0
    if isinstance(inputs, torch.Tensor):
        part = inputs[start:end]
        return torch.cat([part, *[inputs[-1:]] * missing]) if missing else part
    if _is_dataset(inputs):
        return inputs.select([*range(start, end), *[length - 1] * missing])
    return inputs[start:end] + inputs[length - 1 :] * missing


def _is_dataset(inputs: Any) -> bool:
    """Whether this is a map-style `datasets.Dataset`, without importing that library."""
    return any(
        kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset" for kind in type(inputs).__mro__
    )


def _refuse_unknown(inputs: Any) -> None:
    if not isinstance(inputs, list | tuple | str | torch.Tensor | Mapping) and not _is_dataset(inputs):
        raise TypeError(
            f"can't split {type(inputs).__name__} between processes; expected a list, tuple, tensor, a dict of these, "
            "or a datasets.Dataset"
        )
