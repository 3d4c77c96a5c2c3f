"""Reading an iterable dataset: whole on every rank, which keeps its part; on rank 0 for all; or shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nblaunch.errors import CollectiveError
from nblaunch.training.data.samplers import Exchange, Start, drawing_from, random_state
from nblaunch.training.data.shards import Round, Sharding, chunks, topped_up
from nblaunch.training.data.sources import Fetched, Reading, reader, rows_in


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
    """The same of a dataset that can save where it stands; when it is asked, it stands at a round's end.

    A pass taken up from its state fills its last round with the first samples read since then.
    """

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


class IterableSource(Reading):
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
        self.stateful = stateful
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
            iterator = self._iterator(saved)
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


class ShardedSource:
    """Batches of an iterable dataset that splits itself: each rank reads its own shards.

    Their lengths may differ, so the ranks agree on the end.

    Args:
        source: Reads this rank's shards.
        sharding: How rounds are filled.
        exchange: What the ranks tell one another, once a step with `even_batches`.
    """

    def __init__(self, source: IterableSource, sharding: Sharding, exchange: Exchange) -> None:
        self.source = source
        self.stateful = False
        self.dataset = source.dataset
        self.sharding = sharding
        self.exchange = exchange
        self.indexed = self.in_process = False

    def read(self, start: Start, saved: dict[str, Any] | None = None) -> Iterator[Fetched]:
        """This rank's batches of one pass, see `Source.read`.

        Raises:
            CollectiveError: This rank's shards hold no sample, while those of others do.
        """
        # what is left out is read all the same: a rank whose shards end early goes on with its very first batch
        begun = Start(0, start.replay, start.random)
        rounds = self._rounds(self.source.read(begun))
        with drawing_from(random_state(), replay=True) if start.replay else nullcontext():
            kept = list(islice(rounds, start.first, start.first + 1))
        start.random = begun.random
        yield from chain(kept, rounds)

    def _rounds(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        first: Fetched | None = None
        while True:
            mine = next(fetched, None)
            first = first or (mine and replace(mine, batch=copy.deepcopy(mine.batch)))
            if not self.sharding.even_batches:
                if mine is None:
                    return
                yield replace(mine, rows=mine.rows * self.exchange.num_processes, repeated=self._none)
                continue
            everyone = self.exchange.gather(mine and (mine.rows[0], mine.repeated[0]))
            if not any(everyone) or (self.sharding.drop_last and not all(everyone)):
                return
            yield self._filled(mine, first, everyone)

    @property
    def _none(self) -> tuple[int, ...]:
        return (0,) * self.exchange.num_processes

    def _filled(self, mine: Fetched | None, first: Fetched | None, everyone: list[Any]) -> Fetched:
        """This rank's batch, or its first one again where its shards have ended before others'."""
        given = mine or first
        if given is None:
            raise CollectiveError(
                "this rank's shards of the dataset hold no sample, those of other ranks do; pass "
                "DataLoaderConfiguration(dispatch_batches=True), so that rank 0 reads for all"
            )
        size = max(each[0] for each in everyone if each)
        rows = tuple(each[0] if each else size for each in everyone)
        repeated = tuple(each[1] if each else size for each in everyone)
        return Fetched(given.batch if mine else copy.deepcopy(given.batch), rows, repeated)

    def note(self, handed: int) -> dict[str, Any] | None:
        """None: a resumed pass reads from its beginning."""
        return None

    def __len__(self) -> int:
        raise TypeError(
            "a loader whose ranks read shards of an iterable dataset has no length: each knows its own alone"
        )
