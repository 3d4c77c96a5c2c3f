"""What a prepared loader keeps of the user's, and what it tells."""

from __future__ import annotations

import pickle
import random
import warnings
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from simulated_ranks import (
    KINDS,
    Batches,
    Numbers,
    Rank,
    SizedStream,
    Stream,
    Tape,
    gathered_per_step,
    iterate,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nblaunch.training import seeds
from nblaunch.training.data import PreparedLoader, even_batches, prepare_loader, skip_first_batches
from nblaunch.training.gradients import GradientState
from nblaunch.training.options import DataLoaderConfiguration


def prepared(loader: DataLoader[Any], n: int = 1, rank: int = 0, **options: Any) -> PreparedLoader:
    return prepare_loader(
        loader,
        processes=Rank(n, rank),
        gradient_state=GradientState(),
        options=DataLoaderConfiguration(**options),
        exchange=Tape(n, rank, []),
    )


def rows(loader: Any) -> list[list[int]]:
    return [torch.as_tensor(batch).tolist() for batch in loader]


# ---- what is kept


class Worker(IterableDataset[int]):
    """Splits itself in a `worker_init_fn`, as PyTorch's documentation shows."""

    def __init__(self) -> None:
        self.start, self.stop = 0, 20

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


def split_among_workers(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    each = 20 // info.num_workers
    info.dataset.start, info.dataset.stop = number * each, (number + 1) * each  # type: ignore[attr-defined]


@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_an_iterable_dataset_split_among_workers_counts_once(n: int, dispatch: bool) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Worker(), 3, num_workers=2, worker_init_fn=split_among_workers, persistent_workers=True)

    ranks = iterate(make, n, dispatch_batches=dispatch, passes=2)
    assert sorted(gathered_per_step(ranks)) == sorted([*range(20), *range(20)])
    assert len({len(rank.steps) for rank in ranks}) == 1


def double(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 2


def test_workers_and_collate_fn_are_kept() -> None:
    ranks = iterate(
        lambda: DataLoader(Numbers(9), 2, collate_fn=double, num_workers=2, persistent_workers=True),
        2,
        passes=2,
    )
    assert gathered_per_step(ranks) == [2 * i for i in range(9)] * 2


def test_samples_that_are_batches_of_their_own() -> None:
    ranks = iterate(lambda: DataLoader(list(torch.arange(10).view(5, 2)), batch_size=None), 2)
    assert gathered_per_step(ranks) == list(range(10))
    stream = iterate(lambda: DataLoader(Stream(5), batch_size=None), 2)
    assert [rank.steps for rank in stream] == [[0, 2, 4], [1, 3, 0]]


class Lists(Numbers):
    """A dataset that reads many samples at once."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)


def test_a_sampler_that_yields_lists_is_a_batch_sampler() -> None:
    ranks = iterate(lambda: DataLoader(Lists(8), batch_size=None, sampler=Batches(8, 3)), 2)
    assert gathered_per_step(ranks) == list(range(8))
    assert [len(batch) for rank in ranks for batch in rank.steps] == [3, 3, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"even_batches": False}, {"even_batches": True}])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_is_what_is_yielded(kind: str, options: dict[str, bool], drop_last: bool) -> None:
    for length in range(14):
        make, given = KINDS[kind]
        if kind == "batch sampler":
            continue  # nothing tells how large its last batch is
        base = make(length, 6)
        if isinstance(base.dataset, Stream):
            base = DataLoader(SizedStream(length), batch_size=6)
        loader_of = lambda base=base: DataLoader(base.dataset, 6, drop_last=drop_last)
        ranks = iterate(loader_of, 3, **given, **options)
        lengths = [len(rank.steps) for rank in ranks]
        assert [len(rank.loader) for rank in ranks] == lengths, length
        assert max(lengths) - min(lengths) <= 1
        if options["even_batches"] or drop_last:
            assert len({len(batch) for rank in ranks for batch in rank.steps}) <= 1
        if drop_last:
            total = 6 if given.get("split_batches") else 18
            assert lengths == [length // total] * 3


def test_what_can_be_read_off() -> None:
    base = DataLoader(Numbers(10), batch_size=4, drop_last=True)
    loader = prepared(base, n=2)
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.dataset) == (4, True, base.dataset)
    assert loader.sampler is base.sampler and loader.batch_sampler is base.batch_sampler
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (8, 10, 1)
    assert prepared(base, n=2, split_batches=True).total_batch_size == 4
    assert prepared(DataLoader(Stream(9), 4), n=2, split_batches=True).total_batch_size == 4
    assert prepared(loader) is loader, "preparing a prepared loader returns it"


def test_batches_left_and_the_end() -> None:
    loader = prepared(DataLoader(Numbers(5), batch_size=2))
    seen = [(loader.batches_left, loader.end_of_dataloader, loader.remainder) for _ in loader]
    assert seen == [(2, False, -1), (1, False, -1), (0, True, 1)]
    assert [(stream.batches_left) for stream in [prepared(DataLoader(Stream(3)))] for _ in stream] == [
        None,
        None,
        0,
    ]


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass
class Record:
    x: torch.Tensor


class Encoding(UserDict[str, Any]):
    """As tokenizers return."""

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def nested(samples: list[int]) -> dict[str, Any]:
    x = torch.tensor(samples)
    return {
        "pair": Pair(x, "a"),
        "record": Record(x),
        "list": [x, "b"],
        "array": np.ones(2),
        "hf": Encoding(x=x),
    }


def test_tensors_anywhere_in_a_batch_go_to_the_device_and_nothing_else_changes() -> None:
    loader = prepare_loader(
        DataLoader(Numbers(2), 2, collate_fn=nested),
        processes=Rank(1, 0, device=torch.device("meta")),
        gradient_state=GradientState(),
    )
    (batch,) = loader
    found = (batch["pair"].x, batch["record"].x, batch["list"][0], batch["hf"]["x"])
    assert all(tensor.device.type == "meta" for tensor in found)
    assert (batch["pair"].name, batch["list"][1]) == ("a", "b")
    assert isinstance(batch["array"], np.ndarray) and isinstance(batch["hf"], Encoding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_loader_pickles(kind: str) -> None:
    make, options = KINDS[kind]
    loader = prepared(make(8, 4), **options)
    first = rows(loader)
    assert rows(pickle.loads(pickle.dumps(loader))) == first
    for _ in loader:
        assert rows(pickle.loads(pickle.dumps(loader))) == first, "also while it is iterated over"


def test_a_loader_with_living_workers_pickles() -> None:
    loader = prepared(DataLoader(Numbers(4), 2, num_workers=1, persistent_workers=True))
    assert rows(loader) == rows(pickle.loads(pickle.dumps(loader)))


def test_two_loaders_of_one_dataset_and_one_loader_prepared_twice_are_independent_and_silent() -> None:
    dataset = Numbers(6)
    base = DataLoader(dataset, 2, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two, three = prepared(base), prepared(base), prepared(DataLoader(dataset, 3))
        for _ in one:
            assert sorted(chain.from_iterable(rows(two))) == list(range(6))
            assert rows(three) == [[0, 1, 2], [3, 4, 5]]
        assert sorted(chain.from_iterable(rows(base))) == list(range(6)), "the user's loader is as it was"


# ---- epochs


class Epochs(Numbers):
    """Notes the epochs that it is told."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset() -> None:
    class EpochBatches(Batches):
        set_epoch = Epochs.set_epoch

    dataset, sampler, batches = Epochs(4), Epochs(4), EpochBatches(4, 2)
    batches.epochs = []
    batches.sampler = Epochs(4)
    one = prepared(DataLoader(dataset, batch_size=2, sampler=sampler))
    two = prepared(DataLoader(dataset, batch_sampler=batches))
    one.set_epoch(5)
    two.set_epoch(6)
    assert dataset.epochs == [5, 6]
    assert (sampler.epochs, batches.epochs, batches.sampler.epochs) == ([5], [6], [6])


def test_each_pass_counts_one_epoch_also_one_that_was_broken_off() -> None:
    dataset = Epochs(4)
    loader = prepared(DataLoader(dataset, batch_size=2))
    for _ in loader:
        pass
    for _ in loader:
        break
    for _ in loader:
        pass
    assert dataset.epochs == [0, 1, 2]
    loader.set_epoch(7)
    rows(loader)
    rows(loader)
    assert dataset.epochs[3:] == [7, 7, 8]


def test_a_seedable_order_is_that_of_seed_and_epoch_whatever_the_number_of_ranks() -> None:
    make = lambda: DataLoader(Numbers(12), 2, shuffle=True)
    options = {"use_seedable_sampler": True, "data_seed": 11}
    alone = gathered_per_step(iterate(make, 1, passes=2, **options))
    assert gathered_per_step(iterate(make, 3, passes=2, **options)) == alone
    assert alone[:12] == torch.randperm(12, generator=torch.Generator().manual_seed(11)).tolist()
    assert alone[12:] == torch.randperm(12, generator=torch.Generator().manual_seed(12)).tolist()


# ---- skipping and resuming


def test_samples_that_are_skipped_are_not_read() -> None:
    for make in (lambda d: d, prepared):
        dataset = Numbers(10)
        loader = make(DataLoader(dataset, batch_size=2))
        assert rows(skip_first_batches(loader, 3)) == [[6, 7], [8, 9]]
        assert dataset.read == [6, 7, 8, 9]
        assert len(skip_first_batches(loader, 3)) == 2
        assert len(skip_first_batches(loader, 9)) == 0
        assert rows(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], "the next pass is whole"


def test_skipping_in_what_was_never_prepared() -> None:
    stream = DataLoader(SizedStream(5), 2)
    assert rows(skip_first_batches(stream, 1)) == [[2, 3], [4]] and len(skip_first_batches(stream, 1)) == 2
    singles = DataLoader(Numbers(3), batch_size=None)
    assert rows(skip_first_batches(singles, 1)) == [1, 2]
    indexed = skip_first_batches(DataLoader(Numbers(8), 2), 1)
    assert [rows(prepared(indexed, 2, rank)) for rank in range(2)] == [[[2, 3], [6, 7]], [[4, 5], [2, 3]]]
    with pytest.raises(ValueError, match="prepare the loader first"):
        prepared(skip_first_batches(stream, 1))
    with pytest.raises(ValueError, match="num_batches=-1 is negative"):
        skip_first_batches(stream, -1)


def test_a_skipped_pass_is_an_epoch_of_the_loader() -> None:
    make = lambda: prepared(DataLoader(Numbers(8), 2, shuffle=True), use_seedable_sampler=True, data_seed=0)
    whole, skipped = make(), make()
    first, second = rows(whole), rows(whole)
    assert rows(skip_first_batches(skipped, 2)) == first[2:]
    assert rows(skipped) == second


def test_a_script_that_loads_a_state_and_skips_as_well_skips_once() -> None:
    make = lambda: prepared(DataLoader(Numbers(10), 2, shuffle=True, generator=torch.Generator().manual_seed(1)))
    whole, broken, resumed = make(), make(), make()
    first, second = rows(whole), rows(whole)
    for index, _ in enumerate(broken):
        if index == 1:
            break
    resumed.load_state_dict(broken.state_dict())
    resumed.set_epoch(0)
    assert rows(skip_first_batches(resumed, 2)) == first[2:]
    assert rows(resumed) == second


@pytest.mark.parametrize("stateful", [False, True])
def test_states_saved_at_the_last_batch_and_between_passes(stateful: bool) -> None:
    make = lambda: prepared(
        DataLoader(Numbers(5), 2, shuffle=True, generator=torch.Generator().manual_seed(1)),
        use_stateful_dataloader=stateful,
    )
    whole = make()
    states = []
    orders = []
    for _ in range(3):
        order = []
        for batch in whole:
            order.append(batch.tolist())
            last = whole.state_dict()
        orders.append(order)
        states.append((last, whole.state_dict()))
    for epoch in range(2):
        at_the_end, between = make(), make()
        at_the_end.load_state_dict(states[epoch][0])
        assert at_the_end.state_dict()["batches"] == 3
        assert rows(at_the_end) == [], "nothing was left of that epoch"
        assert rows(at_the_end) == orders[epoch + 1]
        between.load_state_dict(states[epoch][1])
        assert between.iteration == epoch + 1
        assert rows(between) == orders[epoch + 1]


def test_another_epoch_asked_for_lets_a_loaded_position_go() -> None:
    loader = prepared(DataLoader(Numbers(6), 2))
    next(iter(loader))
    state = loader.state_dict()
    other = prepared(DataLoader(Numbers(6), 2))
    other.load_state_dict(state)
    other.set_epoch(4)
    assert len(rows(other)) == 3


def test_a_position_of_other_ranks_or_generators_is_refused() -> None:
    loader = prepared(DataLoader(Numbers(6), 2), n=2)
    next(iter(loader))
    with pytest.raises(ValueError, match="saved by 2 ranks after 1 batches each, and there are 1 now"):
        prepared(DataLoader(Numbers(6), 2)).load_state_dict(loader.state_dict())
    other = DataLoader(Numbers(6), 2, shuffle=True, generator=torch.Generator())
    with pytest.raises(ValueError, match="holds 0 generators, and this loader has 1"):
        prepared(other, n=2).load_state_dict(loader.state_dict())


def test_a_readers_state_and_a_loader_without_one_go_together() -> None:
    make = lambda stateful: prepared(DataLoader(Numbers(8), 2), use_stateful_dataloader=stateful)
    for saving in (True, False):
        loader, other = make(saving), make(not saving)
        next(iter(loader))
        other.load_state_dict(loader.state_dict())
        assert rows(other) == [[2, 3], [4, 5], [6, 7]]


class Noisy(Numbers):
    """Draws while it is read."""

    def __getitem__(self, index: int) -> float:
        return index + torch.rand(()).item() / 2 + random.random() / 4


class CopiesAhead:
    """Copies that go on beside the computation, as on a GPU."""

    device = None
    overlap = True

    def send(self, batch: Any) -> Any:
        return batch

    arrived = send


def test_a_batch_fetched_ahead_is_fetched_again_with_the_same_random_numbers() -> None:
    def make() -> PreparedLoader:
        loader = prepared(DataLoader(Noisy(10), 2, shuffle=True))
        loader._copies = CopiesAhead()  # type: ignore[assignment]
        return loader

    torch.manual_seed(0)
    random.seed(0)
    whole, loader = [], make()
    for index, batch in enumerate(loader):
        whole.append((batch.tolist(), torch.rand(()).item()))
        if index == 1:
            state, generators = loader.state_dict(), seeds.states(torch.device("cpu"))
    resumed = make()
    resumed.load_state_dict(state)
    seeds.restore(*generators, torch.device("cpu"))
    assert [(batch.tolist(), torch.rand(()).item()) for batch in resumed] == whole[2:]


# ---- loaders in loops


def test_the_end_is_that_of_the_loader_whose_batch_is_in_hand() -> None:
    state = GradientState()
    outer, inner = (
        prepare_loader(DataLoader(Numbers(d), 2), processes=Rank(1, 0), gradient_state=state) for d in (4, 6)
    )
    ends = []
    kept = []
    for _ in outer:
        for _ in inner:
            ends.append(state.end_of_dataloader)
        iterator = iter(inner)
        next(iterator)
        kept.append(iterator)  # a loop left with its iterator alive
        ends.append(state.end_of_dataloader)
    assert ends == [False, False, True, False] * 2
    kept.clear()
    del iterator
    assert not state.in_dataloader


def test_passes_of_one_loader_inside_one_another() -> None:
    loader = prepared(DataLoader(Numbers(4), 2))
    pairs = [(a.tolist(), b.tolist(), loader.end_of_dataloader) for a in loader for b in loader]
    assert pairs == [
        ([0, 1], [0, 1], False),
        ([0, 1], [2, 3], True),
        ([2, 3], [0, 1], False),
        ([2, 3], [2, 3], True),
    ]


def test_even_batches_is_overridden_inside_for_datasets_with_indices() -> None:
    indexed = [prepared(DataLoader(Numbers(6), 2), 2, rank) for rank in range(2)]
    stream = prepared(DataLoader(SizedStream(6), 2), 2, 0, dispatch_batches=False)
    with even_batches([*indexed, stream], False):
        assert [len(rows(loader)) for loader in indexed] == [2, 1]
        assert len(stream) == 2 and stream.source.sharding.even_batches
    assert [len(rows(loader)) for loader in indexed] == [2, 2]
    with even_batches(indexed, None):
        assert [len(loader) for loader in indexed] == [2, 2]


# ---- what is refused


def test_what_cannot_be_prepared_is_said() -> None:
    with pytest.raises(ValueError, match="each batch of 5 among 2 ranks"):
        prepared(DataLoader(Numbers(6), 5), n=2, split_batches=True)
    with pytest.raises(ValueError, match="needs to know its size"):
        prepared(DataLoader(Stream(6), batch_size=None), n=2, split_batches=True)
    with pytest.raises(TypeError, match=r"expected a torch.utils.data.DataLoader, found list"):
        prepared([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slice_fn_for_dispatch is not supported"):
        prepare_loader(
            DataLoader(Numbers(6)),
            processes=Rank(1, 0),
            gradient_state=GradientState(),
            slice_fn_for_dispatch=lambda batch: batch,
        )
    with pytest.raises(TypeError, match="has no len"):
        len(prepared(DataLoader(Stream(3))))
