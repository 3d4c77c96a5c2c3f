"""`nblaunch.log`, and what may be logged. Imports no torch: the notebook imports this too."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

from nblaunch.rank import context


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **metrics: Any) -> None:
    """Record metrics of this rank: `log(loss=loss, step=i)`. Never waits for a device; does nothing outside a launch.

    Args:
        values: Metrics by name, where the names aren't identifiers; 0-d or one-element tensors, floats, ints, bools.
        step: The step that they belong to; by default the number of earlier calls without one.
        **metrics: More metrics by name.

    Raises:
        TypeError: A value is not a number or a tensor of one element.
    """
    current = context.current()
    if current is not None:
        current.reporter.log({**values, **metrics} if values else metrics, step)


def checked_step(step: Any) -> int:
    """The step as an int.

    Raises:
        TypeError: It is none.
    """
    try:
        index = operator.index(step)
    except TypeError:
        raise TypeError(f"log(step={step!r}) got {type(step).__name__}, expected an int") from None
    if not -(2**63) <= index < 2**63:
        raise TypeError(f"log(step={step!r}) is too large: steps are 64-bit integers")
    return index


def checked_name(name: Any) -> str:
    """A metric's name.

    Raises:
        TypeError: It is no text, or no valid Unicode.
    """
    if not isinstance(name, str) or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise TypeError(f"log() got the name {name!r}, expected text")
    return name


def number_of(name: str, value: Any) -> Any:
    """A value as something that can be read later without waiting for a device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(
                f"log({name}=...) got a tensor of shape {tuple(value.shape)}, expected one element; "
                "log its .mean(), or one metric for each element"
            )
        if value.device.type == "cpu":
            return float(value.detach())
        from nblaunch.training.devices import defer

        return defer(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"log({name}=...) got {type(value).__name__} {str(value)[:60]!r}, "
            "expected a number or a tensor of one element"
        ) from None


def is_ready(value: Any) -> bool:
    """Whether `read` would not wait for a device."""
    return isinstance(value, float | int) or value.ready()


def read(value: Any) -> float:
    """The number that `number_of` gave, or will give."""
    return float(value) if isinstance(value, float | int) else value.value()
