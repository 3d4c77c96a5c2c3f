"""Walking nested data: lists, tuples, namedtuples, dicts, Mappings and dataclasses, down to their tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def is_tensor(data: object) -> bool:
    """Whether `data` is a tensor."""
    return isinstance(data, torch.Tensor)


def is_record(data: object) -> bool:
    """Whether `data` is an instance of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def map_leaves(
    function: Callable[..., Any],
    data: Any,
    *args: Any,
    leaf: Callable[[Any], bool] = is_tensor,
    refuse: str = "",
    **kwargs: Any,
) -> Any:
    """`data` anew, with `function(leaf, *args, **kwargs)` in the place of each leaf.

    Args:
        function: Called with each leaf.
        data: Nested containers; they keep their types.
        *args: Handed on to `function`.
        leaf: What is a leaf; by default tensors are.
        refuse: What is being done, for the error about a leaf of another type; "" leaves such ones as they are.
        **kwargs: Handed on to `function`.

    Raises:
        TypeError: With `refuse`, something in `data` is neither leaf nor container; the message names where it is.
    """
    if leaf(data):
        return function(data, *args, **kwargs)
    if refuse:  # before anything is done, so that ranks stay in step
        strange = next(((path, part) for path, part in walk(data) if not leaf(part)), None)
        if strange is not None:
            path, part = strange
            where = f" at {path}" if path else ""
            raise TypeError(f"{refuse} takes tensors and containers of tensors, found {type(part).__name__}{where}")
    try:
        return rebuild(data, lambda part: map_leaves(function, part, *args, leaf=leaf, **kwargs))
    except _NotContainer:
        return data


class _NotContainer(Exception):
    """`rebuild` was given something that holds nothing."""


def rebuild(data: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same type as `data`, with `change(part)` in the place of each direct part."""
    if isinstance(data, tuple):
        parts = [change(part) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if isinstance(data, list):
        return type(data)(change(part) for part in data)
    if isinstance(data, MutableMapping):
        new = copy.copy(data)
        for key, part in data.items():
            new[key] = change(part)
        return new
    if isinstance(data, Mapping):
        return type(data)({key: change(part) for key, part in data.items()})  # pyright: ignore[reportCallIssue]
    if is_record(data):
        new = copy.copy(data)
        for item in dataclasses.fields(data):
            object.__setattr__(new, item.name, change(getattr(data, item.name)))
        return new
    raise _NotContainer


def children(data: Any) -> Iterator[tuple[str, Any]] | None:
    """How each direct part of a container is reached, and the part; None for what is no container."""
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return ((f".{name}", getattr(data, name)) for name in data._fields)  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(data, list | tuple):
        return ((f"[{index}]", part) for index, part in enumerate(data))
    if isinstance(data, Mapping):
        return ((f"[{key!r}]", part) for key, part in data.items())
    if is_record(data):
        return ((f".{item.name}", getattr(data, item.name)) for item in dataclasses.fields(data))
    return None


def walk(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of nested data with the path to it, such as `['labels'][0]`; containers are no leaves."""
    parts = children(data)
    if parts is None:
        yield path, data
        return
    for step, part in parts:
        yield from walk(part, path + step)


def tensors(data: Any) -> list[torch.Tensor]:
    """The tensors in nested data, in order."""
    if isinstance(data, torch.Tensor):
        return [data]
    return [part for _, part in walk(data) if isinstance(part, torch.Tensor)]


def send_to_device(
    tensor: Any, device: torch.device | str, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Nested data with its tensors on `device`; what is no tensor and has no `.to(device)` is left alone.

    Args:
        tensor: Nested containers; anything with a `to` method is sent by it.
        device: Where to.
        non_blocking: Whether copies from pinned memory may overlap with the host's work.
        skip_keys: Keys of mappings whose values stay where they are.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    if hasattr(tensor, "to") and not isinstance(tensor, type):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` of its own that takes the device alone
            return tensor.to(device)
    stay = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if stay and isinstance(tensor, Mapping):
        moved = [v if k in stay else send_to_device(v, device, non_blocking, stay) for k, v in tensor.items()]
        parts = iter(moved)
        return rebuild(tensor, lambda _: next(parts))
    try:
        return rebuild(tensor, lambda part: send_to_device(part, device, non_blocking, stay))
    except _NotContainer:
        return tensor


def find_batch_size(data: Any) -> int | None:
    """The first dimension of the first tensor with one; None where there is no such tensor.

    Raises:
        TypeError: There is nothing in `data` at all.
    """
    if children(data) is None and not is_tensor(data):
        raise TypeError(f"found {type(data).__name__}, which has no batch size; expected tensors or containers of them")
    return next((part.shape[0] for part in tensors(data) if part.ndim), None)


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """The same rows of each tensor."""
    return map_leaves(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Nested structures of equal form, joined leaf by leaf along `dim`.

    Raises:
        TypeError: A leaf is no tensor.
    """
    first = data[0]
    if is_tensor(first):
        return torch.cat(data, dim=dim)
    if isinstance(first, Mapping):
        keys = list(first)
        parts = iter([concatenate([item[key] for item in data], dim) for key in keys])
        return rebuild(first, lambda _: next(parts))
    if isinstance(first, list | tuple) or is_record(first):
        columns = zip(*([part for _, part in children(item) or ()] for item in data), strict=True)
        parts = iter([concatenate(list(column), dim) for column in columns])
        return rebuild(first, lambda _: next(parts))
    raise TypeError(f"concatenate takes tensors and containers of tensors, found {type(first).__name__}")


def to_fp32(data: Any) -> Any:
    """Nested data with its half-precision floats in fp32; all else as it is."""
    if isinstance(data, torch.Tensor):
        return data.float() if data.dtype in (torch.float16, torch.bfloat16) else data
    return map_leaves(lambda tensor: tensor.float(), data, leaf=_is_half)


def _is_half(data: object) -> bool:
    return isinstance(data, torch.Tensor) and data.dtype in (torch.float16, torch.bfloat16)
