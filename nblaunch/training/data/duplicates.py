"""Which rows of a pass are repeats, and leaving them out of what was gathered."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nblaunch.training.structures import map_leaves, tensors

_clock = itertools.count()
"""Orders the steps of all loaders of this process."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows that a loader handed out, in a step or in a pass."""

    rows: tuple[int, ...]
    """By rank, how many."""
    repeats: tuple[tuple[tuple[int, int], ...], ...]
    """By rank, which of them were repeats: ranges of positions."""

    def kept(self) -> list[tuple[int, int]]:
        """The ranges of rows that are no repeats, among the rows of all ranks joined in rank order."""
        kept: list[tuple[int, int]] = []
        offset = 0
        for count, repeats in zip(self.rows, self.repeats, strict=True):
            position = 0
            for start, stop in (*repeats, (count, count)):
                if start > position:
                    if kept and kept[-1][1] == offset + position:
                        kept[-1] = (kept[-1][0], offset + start)
                    else:
                        kept.append((offset + position, offset + start))
                position = stop
            offset += count
        return kept


class Record:
    """What a pass has handed out so far.

    Args:
        num_processes: The number of ranks.
    """

    def __init__(self, num_processes: int) -> None:
        self.at = -1
        """When the latest step was handed out, on the clock of all loaders."""
        self.ended = False
        """Whether that was the last one."""
        self._rows = [0] * num_processes
        self._repeats: list[list[tuple[int, int]]] = [[] for _ in range(num_processes)]
        self._step: tuple[tuple[int, ...], tuple[int, ...]] = ((0,) * num_processes, (0,) * num_processes)

    def add(self, rows: tuple[int, ...], repeated: tuple[int, ...], last: bool = False) -> None:
        """Note a step: by rank, the rows in its batch, and how many at its end are repeats."""
        self.at = next(_clock)
        self.ended = last
        self._step = (rows, repeated)
        for rank, count in enumerate(rows):
            total = self._rows[rank] = self._rows[rank] + count
            if repeated[rank]:
                self._repeats[rank].append((total - repeated[rank], total))

    @property
    def step(self) -> Span:
        """The step in the user's hands, or the last one."""
        rows, repeated = self._step
        ranges = ((((n - r, n),) if r else ()) for n, r in zip(rows, repeated, strict=True))
        return Span(rows, tuple(ranges))

    @property
    def whole(self) -> Span:
        """The pass so far."""
        return Span(tuple(self._rows), tuple(map(tuple, self._repeats)))

    @property
    def real_rows_of_step(self) -> int:
        """How many rows of the step are no repeats, over all ranks."""
        rows, repeated = self._step
        return sum(rows) - sum(repeated)


class Recorded(Protocol):
    """A loader that knows which rows it repeated."""

    @property
    def record(self) -> Record | None:
        """Of the present or latest pass."""
        ...


def drop_repeated(
    gathered: Any,
    inputs: Any,
    *,
    loaders: Iterable[Recorded],
    active: Recorded | None = None,
    loader: Recorded | None = None,
    objects: bool = False,
) -> Any:
    """Gathered values without the samples that a loader repeated to fill its last round; all else is kept.

    A leaf is per sample when its first dimension is the number of rows that the present step gave to this
    rank, or, once the loop is over, the whole pass. Every other leaf is returned as it is.

    Args:
        gathered: What `gather` made of `inputs`: nested tensors, joined along dim 0 in rank order; with
            `objects` the flat list that `gather_object` made of each rank's list.
        inputs: What was gathered: nested tensors, or with `objects` this rank's object.
        loaders: The prepared loaders that the values may come from.
        active: The loader that is being iterated over, if there is one.
        loader: The one that the values come from, where that isn't plain.
        objects: Whether these are objects instead of tensors.

    Returns:
        The same structure as `gathered`.

    Raises:
        ValueError: More than one loader could be meant, and they repeated different rows.
    """
    spans = _spans(loaders, active, loader)
    if not any(any(span.repeats) for span in spans):
        return gathered
    if objects:
        return _cut(gathered, None, spans) if isinstance(inputs, list | tuple) else gathered
    originals = iter(tensors(inputs))

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        original = next(originals)
        return _cut(tensor, original.shape[0], spans) if original.ndim else tensor

    return map_leaves(cut, gathered)


def _spans(loaders: Iterable[Recorded], active: Recorded | None, loader: Recorded | None) -> list[Span]:
    """What the values may be made of: the present step, and passes that have ended since it began."""
    present = None if active is None else active.record
    if loader is not None:
        if loader.record is None:
            return []
        return [loader.record.step if loader.record is present else loader.record.whole]
    known = {id(each.record): each.record for each in loaders if each.record is not None}
    if present is None:
        return [each.whole for each in known.values()]
    inner = [each.whole for each in known.values() if each.ended and each.at > present.at]
    return [present.step, *inner]


def _cut(values: Any, rows: int | None, spans: list[Span]) -> Any:
    """Gathered values without repeats, by the one span that fits them.

    Args:
        values: A tensor, or a list.
        rows: How many rows this rank gave, known for tensors.
        spans: What they may be made of.
    """
    total = len(values)
    fitting = [span for span in spans if sum(span.rows) == total and (rows is None or set(span.rows) == {rows})]
    if not fitting:
        return values
    kept = fitting[0].kept()
    if any(span.kept() != kept for span in fitting[1:]):
        raise ValueError(
            f"several loaders handed out {total} rows and repeated different ones of them, so it isn't plain "
            "which samples to leave out; say which loader the values come from: "
            "gather_for_metrics(values, loader=...)"
        )
    parts = [values[start:stop] for start, stop in kept]
    if isinstance(values, torch.Tensor):
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return list(itertools.chain.from_iterable(parts))
