"""Where a prepared loader's batches come from: a DataLoader of this rank's, by index or over an iterable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from nblaunch.training.data.samplers import (
    Counts,
    Drawn,
    Exchange,
    RankBatches,
    Start,
    drawing_from,
    random_state,
)
from nblaunch.training.data.shards import Sharding
from nblaunch.training.structures import find_batch_size


@dataclass(slots=True)
class Fetched:
    """One rank's batch of one step."""

    batch: Any
    rows: tuple[int, ...]
    """By rank, the rows in its batch, repeats included."""
    repeated: tuple[int, ...]
    """By rank, how many rows at its batch's end were given out before in this pass."""
    last: bool | None = None
    """Whether this rank has no batch after this one; None where only reading on can tell."""


class Source(Protocol):
    """Reads one pass at a time."""

    dataset: Any
    """What is read."""
    sharding: Sharding
    stateful: bool
    """Whether the readers' state is kept, by torchdata's `StatefulDataLoader`."""
    indexed: bool
    """Whether this rank reads a dataset with indices, of which it is told its rows."""
    in_process: bool
    """Whether reading such a dataset draws from this process's random generators."""

    def read(self, start: Start, saved: dict[str, Any] | None = None) -> Iterator[Fetched]:
        """This rank's batches of one pass.

        Args:
            start: Where the pass begins; its random state is found out and noted there.
            saved: What `note` returned where the pass is to be taken up again.
        """
        ...

    def note(self, handed: int) -> dict[str, Any] | None:
        """What the readers need to go on after `handed` batches of the pass; None if they keep no state."""
        ...

    def __len__(self) -> int: ...


def reader(base: DataLoader[Any], *, stateful: bool, **changes: Any) -> DataLoader[Any]:
    """A DataLoader like `base` with some arguments changed, a torchdata `StatefulDataLoader` if asked.

    Batches come in the sampler's order, whatever `in_order` says: that is how their repeats are known.
    """
    names = (
        "dataset num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator "
        "prefetch_factor persistent_workers pin_memory_device"
    )
    options = {name: getattr(base, name) for name in names.split()} | changes
    if not stateful:
        return DataLoader(**options)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(snapshot_every_n_steps=getattr(base, "snapshot_every_n_steps", 1), **options)


def is_stateful(loader: DataLoader[Any]) -> bool:
    """Whether this is torchdata's loader, whose workers' state can be saved."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


class Reading:
    """What sources that read by themselves share: a DataLoader, and the state of its workers."""

    loader: DataLoader[Any]
    stateful: bool

    def _state(self) -> dict[str, Any] | None:
        """The workers' state, where they keep one."""
        return self.loader.state_dict() if self.stateful else None  # pyright: ignore[reportAttributeAccessIssue]

    def _iterator(self, saved: dict[str, Any] | None) -> Iterator[Any]:
        """Begin a pass, or take up the one of the readers' state."""
        if saved is not None:
            self.loader.load_state_dict(saved["reader"])  # pyright: ignore[reportAttributeAccessIssue]
        return iter(self.loader)

    def __getstate__(self) -> dict[str, Any]:
        """Without the DataLoader's iterator, which persistent workers keep."""
        loader = object.__new__(type(self.loader))
        loader.__dict__.update(self.loader.__dict__, _iterator=None)
        return {**self.__dict__, "loader": loader}


class MapSource(Reading):
    """Batches of a dataset with indices: the sampler is shared among the ranks, each rank reads its own rows.

    Args:
        base: The user's loader.
        sharding: How its batches are shared.
        exchange: What the ranks tell one another.
        stateful: Read by torchdata's `StatefulDataLoader`.
        all_ranks: Read every rank's batches in rank order, to be sent to them.
    """

    def __init__(
        self,
        base: DataLoader[Any],
        sharding: Sharding,
        exchange: Exchange,
        *,
        stateful: bool = False,
        all_ranks: bool = False,
    ) -> None:
        self.dataset = base.dataset
        self.sharding = sharding
        self.stateful = stateful
        self.indexed = not all_ranks
        self.in_process = base.num_workers == 0
        order = base.sampler if base.batch_sampler is None else base.batch_sampler
        self.batches = RankBatches(order, sharding, exchange, all_ranks=all_ranks)
        given = {"batch_size": None, "sampler": self.batches}
        if base.batch_sampler is not None:
            given = {"batch_sampler": self.batches}
        self.loader = reader(base, stateful=stateful, **given)

    def read(self, start: Start, saved: dict[str, Any] | None = None) -> Iterator[Fetched]:
        """This rank's batches of one pass, see `Source.read`."""
        passed = 0
        if saved is not None:  # the StatefulDataLoader skips by itself what had been read
            start.first -= saved["passed"]
            passed = saved["passed"] * (self.sharding.num_processes if self.batches.all_ranks else 1)
        drawn = self.batches.drawn = Drawn(start)
        # a resumed pass draws no seed for workers that an uninterrupted one wouldn't
        with drawing_from(random_state(), replay=True) if start.replay else nullcontext():
            iterator = self._iterator(saved)
        for batch in iterator:
            for _ in range(passed):
                drawn.counts.popleft()
            passed = 0
            yield _counted(batch, drawn.counts.popleft(), drawn.single)

    def note(self, handed: int) -> dict[str, Any] | None:
        """The readers' state, see `Source.note`."""
        state = self._state()
        return state and {"reader": state, "passed": handed - self.batches.drawn.start.first}

    def __len__(self) -> int:
        return len(self.batches)


def _counted(batch: Any, counts: Counts, single: bool) -> Fetched:
    if not single:
        return Fetched(batch, counts.rows, counts.repeated, counts.last)
    rows = rows_in(batch)
    return Fetched(batch, tuple(n * rows for n in counts.rows), tuple(n * rows for n in counts.repeated), counts.last)


def rows_in(batch: Any) -> int:
    """The number of samples in a batch that the loader itself didn't put together; 1 if it can't be seen."""
    try:
        rows = find_batch_size(batch)
    except TypeError:
        rows = None
    if rows is None and isinstance(batch, list):
        rows = len(batch)
    return 1 if rows is None else rows
