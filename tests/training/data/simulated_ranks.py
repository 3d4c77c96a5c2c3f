"""N ranks in one process: rank 0 runs first and its words are written down, the others read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.training.data import PreparedLoader, drop_repeated, prepare_loader
from nblaunch.training.gradients import GradientState
from nblaunch.training.options import DataLoaderConfiguration


class Tape:
    """What rank 0 said; played back to each other rank."""

    def __init__(self, num_processes: int, process_index: int, said: list[Any]) -> None:
        self.num_processes = num_processes
        self.process_index = process_index
        self.said = said
        self.heard = iter(said)

    def share(self, value: Any) -> Any:
        if self.process_index == 0:
            self.said.append(value)
            return value
        return next(self.heard)

    def scatter(self, values: list[Any] | None) -> Any:
        if values is not None:
            self.said.append(values)
            return values[0]
        return next(self.heard)[self.process_index]

    def gather(self, value: Any) -> list[Any]:
        raise NotImplementedError("needs real ranks")


@dataclass
class Rank:
    """One of the simulated ranks."""

    num_processes: int
    process_index: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None


@dataclass
class Seen:
    """What one rank got."""

    loader: PreparedLoader
    state: GradientState
    steps: list[Any] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    remainders: list[int] = field(default_factory=list)


class Frozen:
    """A step's record as it was when the step was in hand."""

    def __init__(self, loader: PreparedLoader) -> None:
        assert loader.record is not None
        self.at, self.step, self.whole = loader.record.at, loader.record.step, loader.record.whole
        self.record = self


Change = Callable[[PreparedLoader], Any]


def iterate(
    make: Callable[[], DataLoader[Any]],
    num_processes: int,
    *,
    change: Change = lambda loader: loader,
    passes: int = 1,
    **options: Any,
) -> list[Seen]:
    """What each of `num_processes` ranks gets from the loader that `make` makes, after `change`."""
    said: list[Any] = []
    ranks: list[Seen] = []
    for rank in range(num_processes):
        state = GradientState()
        loader = prepare_loader(
            make(),
            processes=Rank(num_processes, rank),
            gradient_state=state,
            options=DataLoaderConfiguration(**options),
            exchange=Tape(num_processes, rank, said),
        )
        loader = change(loader)
        seen = Seen(loader, state)
        for _ in range(passes):
            for batch in loader:
                seen.steps.append(batch)
                seen.records.append(Frozen(loader))
                seen.ends.append(state.end_of_dataloader)
                seen.remainders.append(state.remainder)
        ranks.append(seen)
    return ranks


def gathered_per_step(ranks: list[Seen]) -> list[int]:
    """Labels as `gather_for_metrics` in every step returns them."""
    labels: list[int] = []
    for step, parts in enumerate(zip(*(rank.steps for rank in ranks), strict=True)):
        record = ranks[-1].records[step]
        labels += drop_repeated(torch.cat(parts), parts[-1], loaders=[], active=record).tolist()
    return labels


def gathered_after(ranks: list[Seen]) -> list[int]:
    """Labels as one `gather_for_metrics` after the loop returns them."""
    mine = [torch.cat(rank.steps) for rank in ranks if rank.steps]
    if not mine:
        return []
    return drop_repeated(torch.cat(mine), mine[-1], loaders=[ranks[-1].loader]).tolist()


class Stream(IterableDataset[int]):
    """An iterable dataset without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class SizedStream(Stream):
    """One that knows its length."""

    def __len__(self) -> int:
        return self.length


class Batches:
    """A batch sampler that only iterates and has a length."""

    def __init__(self, length: int, size: int) -> None:
        self.rows = range(length)
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        return (list(self.rows[start : start + self.size]) for start in range(0, len(self.rows), self.size))

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.size)


@dataclass
class Numbers:
    """A dataset whose samples are their indices."""

    length: int
    read: list[int] = field(default_factory=list)

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index

    def __len__(self) -> int:
        return self.length


Make = Callable[[int, int], DataLoader[Any]]

KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "indexed": (lambda d, b: DataLoader(Numbers(d), batch_size=b), {}),
    "split": (lambda d, b: DataLoader(Numbers(d), batch_size=b), {"split_batches": True}),
    "batch sampler": (lambda d, b: DataLoader(Numbers(d), batch_sampler=Batches(d, b)), {}),
    "dispatched": (lambda d, b: DataLoader(Numbers(d), batch_size=b), {"dispatch_batches": True}),
    "iterable": (lambda d, b: DataLoader(Stream(d), batch_size=b), {}),
    "iterable split": (lambda d, b: DataLoader(Stream(d), batch_size=b), {"split_batches": True}),
    "iterable sized": (lambda d, b: DataLoader(SizedStream(d), batch_size=b), {}),
    "iterable read by all": (lambda d, b: DataLoader(Stream(d), batch_size=b), {"dispatch_batches": False}),
}
"""Loaders of D numbers in batches of B."""
