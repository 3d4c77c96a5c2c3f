"""A pass taken up in the middle goes on as if it had never been interrupted, and so do later epochs."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from simulated_ranks import Numbers, Rank, Stream, Tape
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from nblaunch.training import seeds
from nblaunch.training.data import PreparedLoader, prepare_loader
from nblaunch.training.gradients import GradientState
from nblaunch.training.options import DataLoaderConfiguration

CPU = torch.device("cpu")
LENGTH, SIZE = 22, 3


class PythonShuffle:
    """A user's sampler, which draws from Python's and NumPy's global generators."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())

    def __len__(self) -> int:
        return LENGTH


class ShuffledStream(IterableDataset[int]):
    """An iterable dataset in a new order each time."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


class Augmented(Numbers):
    """Samples with noise drawn while they are read."""

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(()).item() / 2 + random.random() / 4


class Counting(IterableDataset[int]):
    """An iterable dataset that can say where it stands."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.read += 1
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i for i in range(LENGTH)], 19)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


Make = Callable[[], DataLoader[Any]]

SEEDABLE = {"use_seedable_sampler": True, "data_seed": 3}
STATEFUL = {"use_stateful_dataloader": True}
EVERY: dict[str, tuple[Make, dict[str, Any]]] = {
    "in order": (lambda: DataLoader(Numbers(LENGTH), SIZE), {}),
    "shuffled": (lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True), {}),
    "shuffled by a generator": (
        lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True, generator=seeded()),
        {},
    ),
    "seedable": (lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True), SEEDABLE),
    "weighted": (lambda: DataLoader(Numbers(LENGTH), SIZE, sampler=weighted()), {}),
    "a user's sampler": (lambda: DataLoader(Numbers(LENGTH), SIZE, sampler=PythonShuffle()), {}),
    "a batch sampler": (
        lambda: DataLoader(Numbers(LENGTH), batch_sampler=BatchSampler(PythonShuffle(), SIZE, True)),
        {},
    ),
    "batches as samples": (
        lambda: DataLoader(Numbers(LENGTH), batch_size=None, sampler=PythonShuffle()),
        {},
    ),
    "read with noise": (lambda: DataLoader(Augmented(LENGTH), SIZE, shuffle=True), {}),
    "with workers": (lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True, num_workers=1), {}),
    "dispatched": (lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True), {"dispatch_batches": True}),
    "iterable": (lambda: DataLoader(Stream(LENGTH), SIZE), {}),
    "iterable, shuffled": (lambda: DataLoader(ShuffledStream(), SIZE), {}),
    "iterable, read by all": (lambda: DataLoader(ShuffledStream(), SIZE), {"dispatch_batches": False}),
    "stateful": (lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True), STATEFUL),
    "stateful, seedable": (lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True), STATEFUL | SEEDABLE),
    "stateful of its own": (lambda: StatefulDataLoader(Numbers(LENGTH), SIZE, shuffle=True), {}),
    "stateful, with workers": (
        lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True, num_workers=1),
        STATEFUL,
    ),
    "stateful, dispatched": (
        lambda: DataLoader(Numbers(LENGTH), SIZE, shuffle=True),
        STATEFUL | {"dispatch_batches": True},
    ),
    "stateful, iterable": (lambda: DataLoader(Counting(), SIZE, drop_last=True), STATEFUL),
    "stateful, iterable, read by all": (
        lambda: DataLoader(Counting(), SIZE, drop_last=True),
        STATEFUL | {"dispatch_batches": False},
    ),
    "stateful, iterable, with workers": (
        lambda: DataLoader(Counting(), SIZE, drop_last=True, num_workers=1),
        STATEFUL | {"dispatch_batches": False},
    ),
}


def prepared(make: Make, tape: Tape, options: dict[str, Any]) -> PreparedLoader:
    return prepare_loader(
        make(),
        processes=Rank(tape.num_processes, tape.process_index),
        gradient_state=GradientState(),
        options=DataLoaderConfiguration(**options),
        exchange=tape,
    )


def train(loader: PreparedLoader, epochs: int, log: list[Any], stop: tuple[int, int] | None = None) -> Any:
    """Log each batch and numbers as dropout draws them; at `stop` (epoch, batches) return a checkpoint."""
    while loader.iteration < epochs:
        epoch = loader.iteration
        for batch in loader:
            log.append((epoch, torch.as_tensor(batch).tolist(), torch.rand(()).item(), random.random()))
            if stop == (epoch, sum(entry[0] == epoch for entry in log)):
                return copy.deepcopy((loader.state_dict(), seeds.states(CPU)))
    return None


def saved_and_loaded(state: Any) -> Any:
    """Through a file, without pickle."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", EVERY)
def test_a_resumed_run_is_the_uninterrupted_one(name: str) -> None:
    make, options = EVERY[name]
    n = 1 if "its own" in name else 2
    stops = [[(1, 2)]] if "workers" in name else [[(0, 1)], [(1, 1)], [(1, 3)], [(0, 1), (0, 3), (2, 1)]]
    for several in stops:
        said: list[list[Any]] = [[] for _ in range(2 + len(several))]
        for rank in range(n):
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            whole: list[Any] = []
            train(prepared(make, Tape(n, rank, said[0]), options), 3, whole)

            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            broken: list[Any] = []
            loader = prepared(make, Tape(n, rank, said[1]), options)
            for number, stop in enumerate(several, 2):
                state, generators = train(loader, 3, broken, stop)
                torch.manual_seed(99)
                loader = prepared(make, Tape(n, rank, said[number]), options)
                loader.load_state_dict(saved_and_loaded(state))
                seeds.restore(*generators, CPU)
            train(loader, 3, broken)
            assert broken == whole, f"rank {rank}, stopped at {several}"
