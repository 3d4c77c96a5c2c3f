"""The process group: made once, and the few collectives that everything else is made of.

Each collective is announced just before it starts. In a launch the agent compares what the ranks announced and names
a mismatch, or the rank that never came; elsewhere the ranks compare among themselves, in debug mode only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from nblaunch.errors import CollectiveError
from nblaunch.rank import context
from nblaunch.wire.messages import Collective

_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
"""torch 2.13 gave it the first name, and calls the second deprecated."""
_numbers = itertools.count()
"""Counts this rank's collectives."""


def active() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def size() -> int:
    """The number of ranks; 1 without a group."""
    return dist.get_world_size() if active() else 1


def rank() -> int:
    """This process's rank; 0 without a group."""
    return dist.get_rank() if active() else 0


def debug() -> bool:
    """Whether collectives are compared in band outside a launch."""
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() in {"INFO", "DETAIL"}:
        return True
    return os.environ.get("ACCELERATE_DEBUG_MODE", "").lower() in {"1", "true", "yes"}


def announce(kind: str, tensors: Sequence[torch.Tensor] = (), places: Sequence[str] = ()) -> None:
    """Say that this rank is about to enter a collective.

    Args:
        kind: "gather", "broadcast", "all_reduce", "barrier", "all_gather_object", "broadcast_object".
        tensors: What it is about to send; every rank must send the same shapes and dtypes.
        places: Where each of them is in the user's data, such as `['loss']`.

    Raises:
        CollectiveError: Outside a launch, in debug mode: the ranks are about to do different things.
    """
    here = context.current()
    if here is None and not debug():
        return
    dtypes = [_name(tensor.dtype) for tensor in tensors]
    if places:
        dtypes = [f"{place} {dtype}".lstrip() for place, dtype in zip(places, dtypes, strict=True)]
    shapes = [list(tensor.shape) for tensor in tensors]
    if here is None:
        _compare(kind, list(zip(shapes, dtypes, strict=True)))
        return
    here.reporter.announce(Collective(here.rank, next(_numbers), kind, shapes, dtypes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(kind: str, sent: list[tuple[list[int], str]]) -> None:
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, (kind, sent))
    if all(one == everyone[0] for one in everyone):
        return
    lines = "\n".join(f"  rank {number}: {_describe(*one)}" for number, one in enumerate(everyone))
    raise CollectiveError(
        f"the ranks are about to do different things:\n{lines}\nevery rank must call the same collective with equal "
        "shapes and dtypes; pad_across_processes makes shapes equal, gather_object takes anything"
    )


def _describe(kind: str, sent: list[tuple[list[int], str]]) -> str:
    what = ", ".join(f"{dtype}{shape}" for shape, dtype in sent)
    return f"{kind} of {what}" if what else kind


@lru_cache
def _carrier(config: str, device: torch.device) -> torch.device:
    backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    backend = backends.get(device.type, config if ":" not in config else "")
    if backend and (backend == "gloo") == (device.type == "cpu"):
        return device
    if "gloo" in (backend, backends.get("cpu")):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return device
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradient, contiguous, where the group can send it (gloo: on the CPU; NCCL: on a GPU)."""
    return tensor.detach().to(_carrier(str(dist.get_backend_config()), tensor.device)).contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes: every backend moves them, whatever the dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def all_gather(tensor: torch.Tensor, announced: bool = False) -> torch.Tensor:
    """Every rank's tensor, stacked in rank order: shape (world size, *tensor.shape), on the tensor's device.

    Args:
        tensor: Of the same shape and dtype on all ranks.
        announced: Whether the caller has announced it, together with others.
    """
    if not announced:
        announce("all_gather", (tensor,))
    mine = _carried(tensor)
    everyone = torch.empty((size(), *mine.shape), dtype=mine.dtype, device=mine.device)
    if mine.numel():
        _all_gather(_bytes(everyone), _bytes(mine))
    return everyone.to(tensor.device)


def broadcast(tensor: torch.Tensor, source: int = 0, announced: bool = False) -> torch.Tensor:
    """Rank `source`'s tensor, on the tensor's device; the given one is not changed."""
    if not announced:
        announce("broadcast", (tensor,))
    mine = _carried(tensor)
    if mine.data_ptr() == tensor.data_ptr() and rank() != source:
        mine = torch.empty_like(mine)
    if mine.numel():
        dist.broadcast(_bytes(mine), src=source)
    return mine.to(tensor.device)


_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def all_reduce(tensor: torch.Tensor, operation: str = "sum", announced: bool = False) -> torch.Tensor:
    """The ranks' tensors combined by "sum", "mean", "max" or "min", as a new tensor on the tensor's device.

    As in PyTorch a sum of booleans counts them (int64), and a mean of integers is a float.
    """
    if not announced:
        announce("all_reduce", (tensor,))
    mine = _carried(tensor)
    if mine.dtype == torch.bool:
        mine = mine.to(torch.int64 if operation in ("sum", "mean") else torch.uint8)
    if mine.data_ptr() == tensor.data_ptr():
        mine = mine.clone()
    if mine.numel():
        dist.all_reduce(mine, op=_OPERATIONS[operation])
    if operation == "mean":
        mine = mine / size()
    elif tensor.dtype == torch.bool and operation != "sum":
        mine = mine.bool()
    return mine.to(tensor.device)


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's object, in rank order; sent by pickle between the ranks."""
    announce("all_gather_object")
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, value)
    return everyone


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Rank `source`'s object on every rank."""
    announce("broadcast_object")
    held = [value]
    dist.broadcast_object_list(held, src=source)
    return held[0]


def barrier() -> None:
    """Wait until every rank has come here."""
    announce("barrier")
    dist.barrier()


def agree(error: BaseException | None, what: str) -> None:
    """Let all ranks know whether one failed, and raise on all if so.

    Args:
        error: What happened here; None if all went well.
        what: What was being done, for the message on the other ranks.

    Raises:
        BaseException: `error` itself, on the rank that it happened on.
        CollectiveError: On the others, naming the ranks that failed and why.
    """
    if size() > 1:
        texts = all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
        failed = [f"rank {number}: {text}" for number, text in enumerate(texts) if text is not None]
        if failed and error is None:
            raise CollectiveError(f"{what} failed on " + "; ".join(failed))
    if error is not None:
        raise error


@contextmanager
def together(what: str) -> Generator[None]:
    """A block that all ranks run: where it fails on one, it raises on all, after all have run it.

    Args:
        what: What is being done, for the message on the other ranks.

    Raises:
        CollectiveError: On ranks where it went well, if it failed on another.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    agree(failure, what)
