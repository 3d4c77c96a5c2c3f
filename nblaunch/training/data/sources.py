"""Where a prepared loader's batches come from: a DataLoader of this rank's, by index or over an iterable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nblaunch.training.data.samplers import (
    Counts,
    Drawn,
    Exchange,
    RankBatches,
    Start,
    drawing_from,
    random_state,
)
from nblaunch.training.data.shards import Round, Sharding, chunks, topped_up
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

    sharding: Sharding
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
    """A DataLoader like `base` with some arguments changed, a torchdata `StatefulDataLoader` if asked."""
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


class _Reading:
    """What both kinds share: a DataLoader of this rank's, and the state of its workers."""

    loader: DataLoader[Any]

    def _state(self) -> dict[str, Any] | None:
        """The workers' state, where they keep one."""
        return self.loader.state_dict() if is_stateful(self.loader) else None  # pyright: ignore[reportAttributeAccessIssue]

    def _iterator(self, start: Start, saved: dict[str, Any] | None) -> Iterator[Any]:
        """Begin a pass; a resumed one draws no random number that an uninterrupted one wouldn't."""
        if saved is not None:
            self.loader.load_state_dict(saved)  # pyright: ignore[reportAttributeAccessIssue]
        if not start.replay:
            return iter(self.loader)
        with drawing_from(random_state(), replay=True):
            return iter(self.loader)

    def __getstate__(self) -> dict[str, Any]:
        """Without the DataLoader's iterator, which persistent workers keep."""
        loader = object.__new__(type(self.loader))
        loader.__dict__.update(self.loader.__dict__, _iterator=None)
        return {**self.__dict__, "loader": loader}


class MapSource(_Reading):
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
        self.sharding = sharding
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
        iterator = self._iterator(start, saved and saved["reader"])
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
    return Fetched(
        batch, tuple(n * rows for n in counts.rows), tuple(n * rows for n in counts.repeated), counts.last
    )


def rows_in(batch: Any) -> int:
    """The number of samples in a batch that the loader itself didn't put together; 1 if it can't be seen."""
    try:
        rows = find_batch_size(batch)
    except TypeError:
        rows = None
    if rows is None and isinstance(batch, list):
        rows = len(batch)
    return 1 if rows is None else rows


# ---- iterable datasets


class _Row(NamedTuple):
    """A sample on its way to `collate_fn`; the first of each batch carries the counts."""

    sample: Any
    counts: tuple[list[int], list[int]] | None


class IterableShard(IterableDataset[_Row]):
    """One rank's samples of an iterable dataset that every rank reads whole, or all of them.

    Args:
        dataset: The user's.
        sharding: How its batches are shared.
        rank: Whose samples; None for all, with only the short last batch filled.
    """

    def __init__(self, dataset: Any, sharding: Sharding, rank: int | None) -> None:
        self.dataset = dataset
        self.sharding = sharding
        self.rank = rank

    def __iter__(self) -> Iterator[_Row]:
        for step in self._rounds():
            counts = (step.rows, step.repeated)
            for sample in step.parts[self.rank or 0]:
                yield _Row(sample, counts)
                counts = None

    def _rounds(self) -> Iterator[Round[Any]]:
        size = self.sharding.batch_size or 1
        batches = chunks(self.dataset, size)
        if self.sharding.drop_last:
            batches = (batch for batch in batches if len(batch) == size)
        if self.rank is not None:
            return self.sharding.rounds(batches)
        if self.sharding.even_batches:
            return topped_up(batches, size)
        return Sharding(1).rounds(batches)


class StatefulIterableShard(IterableShard):
    """The same of a dataset that can save where it stands; it stands at the end of a round whenever it is asked."""

    def state_dict(self) -> dict[str, Any]:
        """The dataset's own state."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the dataset go on from that state."""
        self.dataset.load_state_dict(state)


class _Collate:
    """The user's `collate_fn` on samples that carry counts."""

    def __init__(self, collate: Callable[[Any], Any], batched: bool) -> None:
        self.collate = collate
        self.batched = batched

    def __call__(self, rows: Any) -> tuple[Any, tuple[list[int], list[int]]]:
        if self.batched:
            return self.collate([row.sample for row in rows]), rows[0].counts
        return self.collate(rows.sample), rows.counts


class _InitWorker:
    """Shows the user's `worker_init_fn` and dataset the dataset that they know."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, IterableShard):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(number)


class IterableSource(_Reading):
    """Batches of an iterable dataset: this rank's, of which it reads all (`rank`), or all of them (None).

    Args:
        base: The user's loader.
        sharding: How its batches are shared.
        exchange: What the ranks tell one another.
        rank: Whose batches.
        stateful: Read by torchdata's `StatefulDataLoader`.
    """

    def __init__(
        self,
        base: DataLoader[Any],
        sharding: Sharding,
        exchange: Exchange,
        *,
        rank: int | None,
        stateful: bool = False,
    ) -> None:
        self.single = base.batch_size is None
        self.indexed = self.in_process = False
        self.sharding = replace(sharding, batch_size=1) if self.single else sharding
        self.exchange = exchange
        self.rank = rank
        self.dataset: Any = base.dataset
        kind = StatefulIterableShard if hasattr(base.dataset, "load_state_dict") else IterableShard
        self.loader = reader(
            base,
            stateful=stateful,
            dataset=kind(base.dataset, self.sharding, rank),
            batch_size=None if self.single else self.sharding.batch_size,
            collate_fn=_Collate(base.collate_fn, not self.single),
            worker_init_fn=_InitWorker(base.worker_init_fn),
        )

    def read(self, start: Start, saved: dict[str, Any] | None = None) -> Iterator[Fetched]:
        """This rank's batches of one pass, see `Source.read`."""
        if start.random is None:
            mine = random_state()
            start.random = mine if self.rank is None else self.exchange.share(mine)
        with drawing_from(start.random or {}, replay=start.replay):
            iterator = self._iterator(start, saved and saved["reader"])
            passed = start.first if saved is None else 0
            first = list(islice(iterator, passed, passed + 1))
        for batch, counts in chain(first, iterator):
            each = rows_in(batch) if self.single else 1
            rows, repeated = (tuple(n * each for n in numbers) for numbers in counts)
            yield Fetched(batch, rows, repeated)

    def note(self, handed: int) -> dict[str, Any] | None:
        """The readers' state, see `Source.note`."""
        state = self._state()
        return state and {"reader": state, "passed": handed}

    def __len__(self) -> int:
        samples, size = len(self.dataset), self.sharding.batch_size or 1
        batches = samples // size if self.sharding.drop_last else -(-samples // size)
        return self.sharding.steps(batches, self.exchange.process_index)
