"""A metric over a run, thinned as it comes: a million steps take the memory and the time of a thousand."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from operator import add
from typing import Any

CAPACITY = 400
"""Buckets of steps that a curve may have; one more, and all are merged in pairs."""

_INF = math.inf


class Curve:
    """One metric's values by step, over all ranks and of each rank.

    Steps fall into buckets of `2**shift` steps, bucket `b` holding the steps from `b << shift`. A bucket
    keeps the sum, the number, the least and the greatest of what all ranks logged there, and each rank's own
    sum and number: so the mean is exact and no extreme is ever lost. Values that aren't finite are left out
    and told by `bad`.

    Example:
        >>> curve = Curve()
        >>> curve.add(0, [0, 1], [1.0, 3.0]); curve.add(1, [0, 1], [2.0, 5.0])
        >>> [(step, mean, low, high) for step, mean, low, high in curve.points()]
        [(0, 1.5, 1.0, 2.0), (1, 4.0, 3.0, 5.0)]
    """

    __slots__ = ("bad", "base", "counts", "dirty", "highs", "last", "lows", "ranks", "shift", "step", "sums")

    def __init__(self) -> None:
        self.shift = 0
        """A bucket is `2**shift` steps wide."""
        self.base = 0
        """The number of the first bucket kept: its steps start at `base << shift`."""
        self.sums = array("d")
        self.counts = array("L")
        self.lows = array("d")
        self.highs = array("d")
        self.ranks: dict[int, tuple[array[float], array[int]]] = {}
        """Each rank's own sums and counts, in the order in which the ranks first logged."""
        self.last: dict[int, float] = {}
        """Each rank's last value."""
        self.step = 0
        """The greatest step."""
        self.bad: tuple[int, int] | None = None
        """Step and rank of the first value that was not finite."""
        self.dirty: tuple[int, int] | None = None
        """The first and the last bucket, by number, that changed since a view last took the changes."""

    def add(self, rank: int, steps: list[int], values: list[float], own_line: bool = True) -> None:
        """Take in what `rank` logged, `values[i]` at `steps[i]`; with `own_line` keep its own curve too."""
        self.last[rank] = values[-1]
        if not math.isfinite(sum(values)):
            steps, values = self._finite(rank, steps, values)
            if not steps:
                return
        low_step, high_step = min(steps), max(steps)
        if high_step > self.step or not self.counts:
            self.step = high_step
        self._cover(low_step, high_step)
        shift, base, sums, counts, lows, highs = (
            self.shift, self.base, self.sums, self.counts, self.lows, self.highs,
        )  # fmt: skip
        buckets = [(step >> shift) - base for step in steps]
        for i, value in zip(buckets, values, strict=True):
            sums[i] += value
            counts[i] += 1
            lows[i] = min(lows[i], value)
            highs[i] = max(highs[i], value)
        if own_line:
            own_sums, own_counts = self._of(rank)
            for i, value in zip(buckets, values, strict=True):
                own_sums[i] += value
                own_counts[i] += 1
        first, last = low_step >> shift, high_step >> shift
        if self.dirty is not None:
            first, last = min(first, self.dirty[0]), max(last, self.dirty[1])
        self.dirty = (first, last)

    def take_dirty(self) -> tuple[int, int] | None:
        """The first and the last bucket that changed since this was last asked, or None."""
        changed, self.dirty = self.dirty, None
        return changed

    def rows(self, first: int, last: int) -> array[float]:
        """The buckets numbered `first` to `last` as flat float32, what is empty as NaN.

        Of each: the count, the mean, the least, the greatest, then each rank's mean.
        """
        flat = array("f")
        own = list(self.ranks.values())
        for i in range(max(0, first - self.base), min(last - self.base + 1, len(self.counts))):
            n = self.counts[i]
            if n:
                flat.extend((n, self.sums[i] / n, self.lows[i], self.highs[i]))
            else:
                flat.extend((0.0, math.nan, math.nan, math.nan))
            flat.extend(s[i] / c[i] if c[i] else math.nan for s, c in own)
        return flat

    def points(self) -> list[tuple[int, float, float, float]]:
        """Every bucket that holds something: its first step, mean, least and greatest."""
        return [
            ((self.base + i) << self.shift, self.sums[i] / n, self.lows[i], self.highs[i])
            for i, n in enumerate(self.counts)
            if n
        ]

    def _finite(self, rank: int, steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
        kept = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
        if self.bad is None and len(kept) < len(steps):
            self.bad = (next(s for s, v in zip(steps, values, strict=True) if not math.isfinite(v)), rank)
        return [s for s, _ in kept], [v for _, v in kept]

    def _of(self, rank: int) -> tuple[array[float], array[int]]:
        own = self.ranks.get(rank)
        if own is None:
            n = len(self.counts)
            own = self.ranks[rank] = (array("d", bytes(8 * n)), array("L", [0]) * n)
        return own

    def _cover(self, low_step: int, high_step: int) -> None:
        """Make room for these steps, in wider buckets where there are too many."""
        if not self.counts:
            self.base = low_step >> self.shift
        first = min(self.base, low_step >> self.shift)
        end = max(self.base + len(self.counts), (high_step >> self.shift) + 1)
        while end - first > CAPACITY:
            self._halve()
            first = min(self.base, low_step >> self.shift)
            end = max(self.base + len(self.counts), (high_step >> self.shift) + 1)
        self._pad(self.base - first, end - self.base - len(self.counts))

    def _pad(self, front: int, back: int) -> None:
        """Add empty buckets before and after."""
        if not front and not back:
            return
        self.base -= front
        columns: list[tuple[array[Any], float]] = [
            (self.sums, 0.0),
            (self.counts, 0),
            (self.lows, _INF),
            (self.highs, -_INF),
        ]
        for sums, counts in self.ranks.values():
            columns += [(sums, 0.0), (counts, 0)]
        for column, empty in columns:
            if front:
                column[:0] = array(column.typecode, [empty]) * front
            if back:
                column.extend(array(column.typecode, [empty]) * back)

    def _halve(self) -> None:
        """Merge the buckets in pairs."""
        self._pad(self.base & 1, (self.base + len(self.counts)) & 1)
        self.shift += 1
        self.base >>= 1
        self.sums, self.counts = _pairs(add, self.sums), _pairs(add, self.counts)
        self.lows, self.highs = _pairs(min, self.lows), _pairs(max, self.highs)
        for rank, (sums, counts) in self.ranks.items():
            self.ranks[rank] = (_pairs(add, sums), _pairs(add, counts))
        if self.dirty is not None:
            self.dirty = (self.dirty[0] >> 1, self.dirty[1] >> 1)


def _pairs(merge: Callable[[Any, Any], Any], column: array[Any]) -> array[Any]:
    return array(column.typecode, map(merge, column[0::2], column[1::2]))
