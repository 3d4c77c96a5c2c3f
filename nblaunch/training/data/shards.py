"""Which rows each rank gets in each step: index arithmetic alone, without torch.

A *batch* is a list of rows (indices, or samples). A *round* is what one step gives to all ranks. Rank r of N
takes batches r, r + N, r + 2N, ... of a pass; with `split_batches` each batch is cut into N slices instead.
What the last round lacks is filled with the pass's first rows, and a round says which rows are such repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Round(Generic[T]):
    """What one step gives to each rank."""

    parts: list[list[T]]
    """The rows by rank; an empty list where a rank has no batch in this round."""
    repeated: list[int]
    """By rank, how many rows at the end of its part were given out before in this pass."""

    @property
    def rows(self) -> list[int]:
        """By rank, the number of rows in its part, repeats included."""
        return [len(part) for part in self.parts]


@dataclass(slots=True)
class Sharding:
    """How the batches of a pass are shared among the ranks.

    Args:
        num_processes: N, the number of ranks.
        batch_size: Rows in a full batch, or None where batches differ in size by design.
        split_batches: Cut each batch into N slices, instead of giving each rank whole batches.
        even_batches: Fill the last round, so that all ranks do equally many steps with equal batches.
        drop_last: Leave out a last round that lacks batches.

    Raises:
        ValueError: `split_batches` with a batch size that is unknown or not a multiple of N.
    """

    num_processes: int
    batch_size: int | None = None
    split_batches: bool = False
    even_batches: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not self.split_batches:
            return
        if self.batch_size is None:
            raise ValueError(
                "split_batches=True cuts each batch among the ranks and needs to know its size, but neither "
                "the loader nor its batch sampler has a batch_size; give the batch sampler one, or use "
                "split_batches=False"
            )
        if self.batch_size % self.num_processes:
            raise ValueError(
                f"split_batches=True cuts each batch of {self.batch_size} among {self.num_processes} ranks, "
                "which doesn't divide; choose a batch_size that is a multiple of the number of ranks"
            )

    @property
    def total_batch_size(self) -> int | None:
        """Rows in a full round, over all ranks; None where batches differ in size by design."""
        if self.batch_size is None or self.split_batches:
            return self.batch_size
        return self.batch_size * self.num_processes

    def rounds(self, batches: Iterable[list[T]]) -> Iterator[Round[T]]:
        """Share the batches of one pass among the ranks.

        Args:
            batches: The pass's batches, each a non-empty list of rows.

        Example:
            >>> for step in Sharding(2, batch_size=3).rounds([[0, 1, 2], [3, 4, 5], [6]]):
            ...     print(step.parts, step.repeated)
            [[0, 1, 2], [3, 4, 5]] [0, 0]
            [[6, 0, 1], [2, 3, 4]] [2, 3]
        """
        if self.num_processes == 1:
            return (Round([batch], [0]) for batch in batches)
        return self._cut(batches) if self.split_batches else self._deal(batches)

    def steps(self, num_batches: int, rank: int, last_batch: int | None = None) -> int:
        """How many rounds of a pass have a part for `rank`.

        Args:
            num_batches: The number of batches in the pass.
            rank: Whose steps are counted; they differ among ranks without `even_batches` alone.
            last_batch: Rows in the last batch; None takes it to be full.
        """
        if self.split_batches:
            size = (self.batch_size or 0) // self.num_processes
            lacking = last_batch is not None and rank * size >= last_batch
            return num_batches - (lacking and not self.even_batches and num_batches > 0)
        full, rest = divmod(num_batches, self.num_processes)
        if self.drop_last:
            return full
        return full + (rest > (0 if self.even_batches else rank))

    def _deal(self, batches: Iterable[list[T]]) -> Iterator[Round[T]]:
        n = self.num_processes
        stream = _Ahead(batches)
        head: list[list[T]] = []
        dealt: list[list[T]] = []
        sizes = _Sizes()
        for batch in stream:
            sizes.add(len(batch))
            if len(head) < n:
                head.append(batch)
            dealt.append(batch)
            if len(dealt) == n and (len(batch) == self.batch_size or not stream.ended()):
                yield Round(dealt, [0] * n)
                dealt = []
        if dealt and (len(dealt) == n or not self.drop_last):
            missing: list[list[T]] = [[] for _ in range(n - len(dealt))]
            if self.even_batches:
                yield _filled([*dealt, *missing], head, self.batch_size or sizes.common)
            else:
                yield Round([*dealt, *missing], [0] * n)

    def _cut(self, batches: Iterable[list[T]]) -> Iterator[Round[T]]:
        n, full = self.num_processes, self.batch_size or 0
        stream = _Ahead(batches)
        head: list[T] = []
        for batch in stream:
            head = head or batch
            size = -(-len(batch) // n)
            if len(batch) < full and stream.ended():
                size = full // n
            parts = [batch[rank * size : (rank + 1) * size] for rank in range(n)]
            if self.even_batches:
                yield _filled(parts, [head], size)
            else:
                yield Round(parts, [0] * n)


def chunks(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """Consecutive rows in lists of `size`, the last one perhaps shorter."""
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def topped_up(batches: Iterable[list[T]], size: int) -> Iterator[Round[T]]:
    """Each batch as a round of one rank, short ones filled to `size` with the first batch's rows."""
    head: list[T] = []
    for batch in batches:
        head = head or batch
        yield _filled([batch], [head], size)


def _filled(parts: list[list[T]], head: list[list[T]], size: int | None) -> Round[T]:
    """Parts filled to `size` with the rows of `head`, over and over; without a size, with whole batches."""
    if size is None:
        whole = cycle(head)
        filled = [part or list(next(whole)) for part in parts]
    else:
        rows = cycle(chain.from_iterable(head))
        filled = [[*part, *islice(rows, max(0, size - len(part)))] for part in parts]
    return Round(filled, [len(new) - len(part) for new, part in zip(filled, parts, strict=True)])


class _Sizes:
    """Finds out whether all batches but the last are equally large, where nothing declares a size."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.latest = 0
        self.varied = False

    def add(self, size: int) -> None:
        if self.first is None:
            self.first = size
        else:
            self.varied = self.varied or self.latest != self.first
        self.latest = size

    @property
    def common(self) -> int | None:
        """The size of all batches but the last, which may be shorter; None if they vary."""
        return None if self.varied or self.first is None or self.latest > self.first else self.first


class _Ahead(Iterator[T]):
    """An iterator that can tell whether it has ended; it looks ahead only when asked."""

    def __init__(self, items: Iterable[T]) -> None:
        self._next: Callable[[], T] = iter(items).__next__
        self._held: list[T] = []

    def __next__(self) -> T:
        return self._held.pop() if self._held else self._next()

    def ended(self) -> bool:
        if not self._held:
            try:
                self._held.append(self._next())
            except StopIteration:
                return True
        return False
