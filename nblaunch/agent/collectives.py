"""Compares what the ranks say before each collective of `nblaunch.ops`."""

from __future__ import annotations

import time
from collections import defaultdict

from nblaunch.wire.messages import Collective, Failure

_ANY_SHAPE = {"gather_object", "broadcast_object_list", "all_gather_object", "barrier"}


class CollectiveCheck:
    """Knows which collective each rank has come to, and says what does not fit."""

    def __init__(self, ranks: list[int]) -> None:
        self._ranks = ranks
        self._returned: set[int] = set()
        self._open: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)

    def arrived(self, collective: Collective) -> Failure | None:
        """A rank is about to enter a collective; gives a failure if it does not fit the others'."""
        key = (collective.group, collective.number)
        there = self._open[key]
        there[collective.rank] = collective
        first = there[min(there)]
        if any(_signature(other) != _signature(first) for other in there.values()):
            return _failure(collective.rank, f"the ranks' collectives do not fit: {_rows(there)}")
        if len(there) == len(self._ranks) or collective.group:
            del self._open[key]
        else:
            return self._missing(there)
        return None

    def ended(self, rank: int) -> Failure | None:
        """A rank has returned; gives a failure if others wait for it in a collective."""
        self._returned.add(rank)
        missing = (self._missing(there) for there in self._open.values())
        return next((failure for failure in missing if failure is not None), None)

    def _missing(self, there: dict[int, Collective]) -> Failure | None:
        """A failure if a rank that has returned can't come any more."""
        for rank in sorted(self._returned - there.keys()):
            text = f"returned and never came to the collective that others wait in: {_rows(there)}"
            return _failure(rank, text)
        return None


def _signature(collective: Collective) -> tuple[object, ...]:
    if collective.kind in _ANY_SHAPE:
        return (collective.kind,)
    return collective.kind, collective.shapes, collective.dtypes


def _rows(there: dict[int, Collective]) -> str:
    return "; ".join(f"rank {rank}: {_described(collective)}" for rank, collective in sorted(there.items()))


def _described(collective: Collective) -> str:
    tensors = ", ".join(f"{t}{shape}" for t, shape in zip(collective.dtypes, collective.shapes, strict=False))
    return f"{collective.kind} number {collective.number}" + (f" of {tensors}" if tensors else "")


def _failure(rank: int, text: str) -> Failure:
    return Failure(rank, "collective", time.time(), message=text)
