"""The largest batch that fits: `find_executable_batch_size`; and giving memory back."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from nblaunch.training import devices, group

_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "unable to allocate",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "failed to allocate",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the accelerator's unused memory back.

    Args:
        garbage_collection: Also look for cycles of unused objects first, which is slow.
    """
    if garbage_collection:
        gc.collect()
    kind = devices.accelerator_type()
    if kind is not None:
        torch.get_device_module(kind).empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """As many Nones as there are objects, to assign to their names, and their memory given back.

    Example:
        >>> a, b = torch.ones(10), torch.ones(10)
        >>> a, b = release_memory(a, b)
    """
    number = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * number


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an error says that memory ran out, on an accelerator or on the CPU."""
    if isinstance(exception, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(word in str(exception) for word in _WORDS)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: call the function with a batch size as its first argument, with smaller ones until memory suffices.

    Each call starts afresh. Where there are several processes, all go to the next size if one ran out of memory;
    a process that the others wait for in a collective can't tell them before they have left it.

    Args:
        function: Takes the batch size first; may be left out to give the other arguments.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size; by default nine tenths of the last, rounded down.

    Raises:
        TypeError: The function was called with more arguments than it has beside the batch size.
        RuntimeError: Not even a batch of one fits.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size):
        ...     if batch_size > 50:
        ...         raise MemoryError
        ...     return batch_size
        >>> train()
        46
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        _refuse_own_batch_size(function, args, kwargs)
        clear_device_cache()
        size = starting_batch_size
        while size > 0:
            result, failure = _attempt(function, size, args, kwargs)
            if not _any_rank(failure is not None):
                return result
            failure = None  # lets go of the frames, and with them of the tensors
            clear_device_cache(garbage_collection=True)
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError(f"no batch size fits: {starting_batch_size} and all smaller ones ran out of memory")

    signature = inspect.signature(function)
    search.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # pyright: ignore
    return search


def _attempt(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str | None]:
    try:
        return function(size, *args, **kwargs), None
    except Exception as error:
        if not should_reduce_batch_size(error):
            raise
        return None, str(error)


def _any_rank(failed: bool) -> bool:
    return failed if group.size() == 1 else bool(group.all_reduce(torch.tensor(failed), "max"))


def _refuse_own_batch_size(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(
            f"{name} gets its batch size from find_executable_batch_size, as the first argument; leave it out of the "
            f"call ({error})"
        ) from None
