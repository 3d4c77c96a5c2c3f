"""The order of a pass: the same on all ranks, and drawn again the same when a pass is resumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from nblaunch.training import seeds
from nblaunch.training.data.shards import Round, Sharding


class Exchange(Protocol):
    """What loaders tell one another."""

    num_processes: int
    process_index: int

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        ...

    def scatter(self, values: list[Any] | None) -> Any:
        """Each rank's entry of rank 0's list, tensors on the device of the exchange."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        ...


# ---- random states

_CPU = torch.device("cpu")


def random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's (once imported) and torch's CPU generator."""
    plain, tensors = seeds.states(_CPU)
    return {**plain, **tensors}


@contextmanager
def drawing_from(state: dict[str, Any], *, replay: bool = False) -> Generator[None]:
    """Random numbers inside come from `state`.

    Afterwards a generator that agreed with `state` goes on from where the block left it, as if nothing had
    been borrowed; one that didn't is as it was.

    Args:
        state: What `random_state` returned, here or on another rank.
        replay: The block draws again what was drawn before: leave all generators as they were.
    """
    mine = random_state()
    _restore({**mine, **state})
    try:
        yield
    finally:
        drawn = random_state()
        agreed = [] if replay else [name for name in mine if _equal(mine[name], state.get(name))]
        _restore({**drawn, **mine, **{name: drawn[name] for name in agreed}})


def _restore(state: dict[str, Any]) -> None:
    plain = {name: value for name, value in state.items() if name != "torch"}
    seeds.restore(plain, {"torch": state["torch"]}, _CPU)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def generators_of(*holders: object) -> list[torch.Generator]:
    """The generators that loaders, samplers and datasets hold as `.generator`, each once."""
    found: dict[int, torch.Generator] = {}
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order comes from `data_seed + epoch` alone, whatever was drawn before.

    Args:
        *args: As for `torch.utils.data.RandomSampler`.
        data_seed: The seed; None takes torch's initial seed.
        **kwargs: As for `torch.utils.data.RandomSampler`.

    Example:
        >>> sampler = SeedableRandomSampler(range(3), data_seed=1)
        >>> list(sampler) == list(sampler)
        True
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generator = torch.Generator()
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration draws."""
        self.epoch = epoch


class SkippingSampler:
    """A sampler or batch sampler without its first entries.

    Args:
        sampler: The whole one.
        num_skipped: How many entries to leave out.
    """

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self.whole = sampler
        self.num_skipped = num_skipped

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # not there yet, while unpickling
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.whole, self.num_skipped, None)

    def __len__(self) -> int:
        return max(0, len(self.whole) - self.num_skipped)


def is_fixed(order: Any) -> bool:
    """Whether a sampler or batch sampler gives the same order on every rank without any exchange."""
    if isinstance(order, SkippingSampler):
        return is_fixed(order.whole)
    if type(order) is BatchSampler:
        return is_fixed(order.sampler)
    return type(order) in (SequentialSampler, SeedableRandomSampler)


# ---- the batches of one rank


@dataclass
class Start:
    """From where a pass begins."""

    first: int = 0
    """How many of this rank's batches are left out."""
    replay: bool = False
    """Whether the pass began before, perhaps in another process, and its order must come out the same."""
    random: dict[str, Any] | None = None
    """The random state that the order is drawn from; found out when it is drawn, given for a replay."""


@dataclass(slots=True)
class Counts:
    """How many rows a step gives to each rank."""

    rows: tuple[int, ...]
    repeated: tuple[int, ...]
    last: bool = False
    """Whether this rank has no batch after this one."""


@dataclass
class Drawn:
    """What a pass has drawn from the sampler and not yet handed out."""

    start: Start
    counts: deque[Counts] = field(default_factory=deque[Counts])
    single: bool = False
    """Whether each row turned out to be a batch of its own (a loader with `batch_size=None`)."""


class RankBatches:
    """A batch sampler for one rank: its part of what the user's sampler yields.

    Args:
        order: The user's batch sampler, or a sampler whose rows are batches of their own (a loader's
            `batch_size=None`). It must yield the same on all ranks when it starts from the same random state.
        sharding: How batches are shared.
        exchange: Shares rank 0's random state.
        all_ranks: Yield every rank's part in rank order, on rank 0 alone, instead of this rank's.
    """

    def __init__(self, order: Any, sharding: Sharding, exchange: Exchange, *, all_ranks: bool = False) -> None:
        self.order = order
        self.sharding = sharding
        self.exchange = exchange
        self.all_ranks = all_ranks
        self.drawn = Drawn(Start())
        """Of the next iteration; set it anew before each."""

    def __iter__(self) -> Iterator[Any]:
        return self._parts(self.drawn)

    def __len__(self) -> int:
        rank = self.exchange.process_index
        return self.sharding.steps(len(self.order), rank, self._last_batch())

    def _last_batch(self) -> int | None:
        """Rows in the last batch, where the sampler lets one know."""
        size = self.sharding.batch_size
        if size is None or self.sharding.drop_last:
            return None
        try:
            rows = len(self.order.sampler)
        except (AttributeError, TypeError):
            return None
        return (rows - 1) % size + 1 if rows else 0

    def _parts(self, drawn: Drawn) -> Iterator[Any]:
        rounds = self._rounds(drawn)
        step = next(rounds, None)
        while step is not None:
            following = next(rounds, None)
            parts = step.parts if self.all_ranks else [step.parts[self.exchange.process_index]]
            for part in parts:
                if part:
                    drawn.counts.append(Counts(tuple(step.rows), tuple(step.repeated), following is None))
                    yield part[0] if drawn.single else part
            step = following

    def _rounds(self, drawn: Drawn) -> Iterator[Round[Any]]:
        """The rounds in which this rank has a part; all ranks draw the first from the same random state."""
        start, rank = drawn.start, self.exchange.process_index
        rounds = islice(self.sharding.rounds(self._batches(drawn)), start.first, None)
        if not is_fixed(self.order):
            if start.random is None:
                mine = random_state()
                start.random = mine if self.all_ranks else self.exchange.share(mine)
            with drawing_from(start.random or {}, replay=start.replay):
                first = list(islice(rounds, 1))
            rounds = chain(first, rounds)
        return (step for step in rounds if self.all_ranks or step.parts[rank])

    def _batches(self, drawn: Drawn) -> Iterator[list[Any]]:
        for batch in self.order:
            drawn.single = not isinstance(batch, list)
            yield [batch] if drawn.single else batch
