"""The collectives on nested data: lists, tuples, namedtuples, dicts, Mappings and dataclasses of tensors."""

from __future__ import annotations

from typing import Any

import torch

from nblaunch.training import group
from nblaunch.training.processes import PartialState
from nblaunch.training.structures import is_tensor, map_leaves, send_to_device, tensors, walk

REDUCTIONS = ("sum", "mean", "max", "min")


def gather(tensor: Any) -> Any:
    """Every rank's tensors, joined along dim 0 in rank order, on every rank.

    Args:
        tensor: Nested tensors of any dtype, with the same shapes on all ranks; 0-d ones give a vector of one value
            per rank.

    Returns:
        Nested tensors of the same form, without gradient; with one process the given ones, on its device.

    Raises:
        TypeError: A leaf is no tensor.
        CollectiveError: In debug mode outside a launch: the shapes differ (in a launch the run ends, saying so).

    Example:
        >>> gather({"loss": torch.tensor([1.0])})
        {'loss': tensor([1.])}
    """
    if group.size() == 1:
        return send_to_device(map_leaves(_same, tensor, refuse="gather"), PartialState().device)
    _announce("gather", tensor)
    return map_leaves(_gather_one, tensor)


def _announce(kind: str, data: Any) -> None:
    """Tell what is about to be sent, all of a nested structure at once.

    Raises:
        TypeError: A leaf is no tensor.
    """
    if isinstance(data, torch.Tensor):
        group.announce(kind, (data,))
        return
    leaves: list[tuple[str, torch.Tensor]] = []
    for place, leaf in walk(data):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{kind} takes tensors and containers of tensors, found {type(leaf).__name__} at {place}")
        leaves.append((place, leaf))
    group.announce(kind, [leaf for _, leaf in leaves], [place for place, _ in leaves])


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _gather_one(tensor: torch.Tensor) -> torch.Tensor:
    everyone = group.all_gather(tensor, announced=True)
    return everyone if tensor.ndim == 0 else everyone.flatten(0, 1)


def gather_object(object: Any) -> list[Any]:
    """Every rank's object, in rank order; lists are joined to one flat list.

    Args:
        object: Anything that pickles.

    Raises:
        TypeError: Some ranks gave lists and others did not.
    """
    everyone = group.all_gather_object(object) if group.size() > 1 else [object]
    if not any(isinstance(one, list | tuple) for one in everyone):
        return everyone
    if not all(isinstance(one, list | tuple) for one in everyone):
        found = ", ".join(f"rank {rank}: {type(one).__name__}" for rank, one in enumerate(everyone))
        raise TypeError(f"gather_object takes a list on every rank or on none, found {found}")
    return [item for one in everyone for item in one]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Rank `from_process`'s tensors on every rank; the given ones are not changed.

    Args:
        tensor: Nested tensors, with the same shapes and dtypes on all ranks.
        from_process: Whose values count.

    Raises:
        TypeError: A leaf is no tensor.
    """
    if group.size() == 1:
        return map_leaves(_same, tensor, refuse="broadcast")
    _announce("broadcast", tensor)
    return map_leaves(group.broadcast, tensor, from_process, announced=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the list's items, in place, by those of rank `from_process`.

    Args:
        object_list: Anything that pickles; equally long on all ranks.
        from_process: Whose items count.

    Returns:
        The same list.
    """
    if group.size() > 1:
        object_list[:] = group.broadcast_object(list(object_list), from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The ranks' tensors combined element by element, on every rank; the given ones are not changed.

    Args:
        tensor: Nested tensors, with the same shapes and dtypes on all ranks.
        reduction: "sum", "mean", "max" or "min". Sums of booleans count; means of integers are floats.
        scale: Multiplies the result.

    Raises:
        ValueError: `reduction` is unknown.
        TypeError: A leaf is no tensor.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; there are: {', '.join(REDUCTIONS)}")
    if group.size() == 1:
        return map_leaves(_reduce_alone, tensor, reduction, scale, refuse="reduce")
    _announce(f"reduce to {reduction}", tensor)
    return map_leaves(_reduce_one, tensor, reduction, scale)


def _reduce_one(tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    reduced = group.all_reduce(tensor, reduction, announced=True)
    return reduced if scale == 1.0 else reduced * scale


def _reduce_alone(tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    reduced = tensor.detach().clone()
    if reduction == "mean":
        reduced = reduced / 1
    elif reduction == "sum" and reduced.dtype == torch.bool:
        reduced = reduced.long()
    return reduced if scale == 1.0 else reduced * scale


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Tensors padded along one dimension to the largest size on any rank, so that they can be gathered.

    Args:
        tensor: Nested tensors; along the other dimensions all ranks have the same sizes.
        dim: Which dimension; negative ones count from the end.
        pad_index: The value to fill with.
        pad_first: Whether to pad before the values instead of after them.

    Raises:
        ValueError: A tensor has no such dimension.
        TypeError: A leaf is no tensor.
    """
    for leaf in tensors(tensor):
        if not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(f"can't pad along dim {dim}: found a tensor of shape {tuple(leaf.shape)}")
    if group.size() == 1:
        return map_leaves(_same, tensor, refuse="pad_across_processes")
    leaves = [leaf.shape[dim] for leaf in tensors(map_leaves(_same, tensor, refuse="pad_across_processes"))]
    sizes = torch.tensor(leaves, dtype=torch.int64)
    largest = iter(group.all_reduce(sizes, "max").tolist())
    return map_leaves(lambda leaf: _padded(leaf, next(largest), dim, pad_index, pad_first), tensor)


def _padded(tensor: torch.Tensor, largest: int, dim: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    size = tensor.shape[dim]
    if largest == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = largest
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, largest - size if pad_first else 0, size).copy_(tensor)
    return padded


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor that one rank alone has, on every rank; the others pass None.

    Raises:
        ValueError: Not exactly one rank has a tensor.
    """
    state = PartialState()
    if group.size() == 1:
        if not is_tensor(tensor):
            raise ValueError("no rank has a tensor; exactly one must pass it")
        return tensor.to(state.device)  # pyright: ignore[reportOptionalMemberAccess]
    forms = group.all_gather_object(None if tensor is None else (tensor.shape, tensor.dtype))
    owners = [rank for rank, form in enumerate(forms) if form is not None]
    if len(owners) != 1:
        raise ValueError(f"ranks {owners} have a tensor; exactly one must pass it")
    shape, dtype = forms[owners[0]]
    mine = torch.empty(shape, dtype=dtype, device=state.device) if tensor is None else tensor.to(state.device)
    return group.broadcast(mine, owners[0])
