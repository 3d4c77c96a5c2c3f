"""The collectives, and what belongs to them, by their public names.

In a launch a mismatch between ranks (another collective, other shapes or dtypes) ends the run with an error that names
each rank's; under torchrun it does so in debug mode (`ACCELERATE_DEBUG_MODE=1` or `TORCH_DISTRIBUTED_DEBUG=DETAIL`).
"""

from __future__ import annotations

from typing import Any

from nblaunch.training.collectives import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from nblaunch.training.processes import PartialState
from nblaunch.training.structures import (
    concatenate,
    find_batch_size,
    send_to_device,
    slice_tensors,
)
from nblaunch.training.structures import is_tensor as is_torch_tensor
from nblaunch.training.structures import to_fp32 as convert_to_fp32

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "gather",
    "gather_object",
    "is_torch_tensor",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "wait_for_everyone",
]


def wait_for_everyone() -> None:
    """Wait until every process has come here."""
    PartialState().wait_for_everyone()


def recursively_apply(
    func: Any, data: Any, *args: Any, test_type: Any = is_torch_tensor, error_on_other_type: bool = False, **kwargs: Any
) -> Any:
    """Nested data with `func(leaf, *args, **kwargs)` in the place of each leaf.

    Args:
        func: Called with each leaf.
        data: Nested containers; they keep their types.
        *args: Handed on to `func`.
        test_type: What is a leaf; by default tensors are.
        error_on_other_type: Whether another leaf is a TypeError, or left as it is.
        **kwargs: Handed on to `func`.
    """
    from nblaunch.training.structures import map_leaves

    name = getattr(func, "__name__", "this function") if error_on_other_type else ""
    return map_leaves(func, data, *args, leaf=test_type, refuse=name, **kwargs)
