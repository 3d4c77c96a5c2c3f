"""Prepared loaders on real ranks, through `Accelerator`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from simulated_ranks import KINDS, Numbers, Stream
from test_resume import EVERY, LENGTH
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.errors import CollectiveError
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.options import DataLoaderConfiguration


def on_cpu(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def count_digits(sizes: list[int]) -> list[str]:
    """The cases in which metrics over the digits were not those of each digit once."""
    from sklearn.datasets import load_digits

    digits, labels = load_digits(return_X_y=True)
    data = list(zip(torch.from_numpy(digits).float(), labels.tolist(), strict=True))
    expected = np.bincount(labels).tolist()
    wrong: list[str] = []

    class DigitStream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(data)

    for given in sizes:
        for kind, options in {
            "indexed": {},
            "split": {"split_batches": True},
            "dispatched": {"dispatch_batches": True},
            "iterable": {},
            "iterable read by all": {"dispatch_batches": False},
        }.items():
            accelerator = on_cpu(**options)
            size = given * accelerator.num_processes if kind == "split" else given
            dataset: Any = DigitStream() if "iterable" in kind else data
            loader = accelerator.prepare(DataLoader(dataset, batch_size=size, shuffle="iterable" not in kind))
            found, mine = [], []
            for _, labels in loader:
                if given > 1:
                    found.append(accelerator.gather_for_metrics(labels))
                mine.append(labels)
            after = accelerator.gather_for_metrics(torch.cat(mine))
            for counted in [torch.cat(found), after] if found else [after]:
                if torch.bincount(counted).tolist() != expected:
                    wrong.append(f"{kind} {size}: {len(counted)}")
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_metrics_over_the_digits_count_each_once(launch: Any, n: int) -> None:
    assert launch(count_digits, [1, 7, 64, 1000, 2000], num_processes=n) == [[]] * n


def gather_every_kind() -> list[str]:
    wrong: list[str] = []
    for kind, (make, options) in KINDS.items():
        for length in (1, 5, 13):
            accelerator = on_cpu(**options)
            size = 3 * accelerator.num_processes if "split" in kind else 3
            loader = accelerator.prepare(make(length, size))
            per_step, mine, names = [], [], []
            for batch in loader:
                per_step += accelerator.gather_for_metrics({"labels": batch})["labels"].tolist()
                names += accelerator.gather_for_metrics([str(n) for n in batch.tolist()])
                mine.append(batch)
            after = accelerator.gather_for_metrics(torch.cat(mine)).tolist()
            if per_step != list(range(length)) or sorted(after) != per_step or names != [str(n) for n in per_step]:
                wrong.append(f"{kind} of {length}: {per_step} {after} {names}")
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_kind_of_loader_counts_once_on_real_ranks(launch: Any, n: int) -> None:
    assert launch(gather_every_kind, num_processes=n) == [[]] * n


def two_epochs(seed_by_rank: bool) -> dict[str, list[list[int]]]:
    """By kind of sampler, the rows of each of two epochs."""
    seen: dict[str, list[list[int]]] = {}
    for name, (make, options) in EVERY.items():
        if "worker" in name or "its own" in name or "noise" in name:
            continue
        accelerator = on_cpu(**options)
        seed = accelerator.process_index if seed_by_rank else 0
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        loader = accelerator.prepare(make())
        seen[name] = [
            [row for batch in loader for row in torch.as_tensor(batch).reshape(-1).tolist()] for _ in range(2)
        ]
    return seen


def test_ranks_draw_one_order_whatever_their_seeds(launch: Any) -> None:
    ranks = launch(two_epochs, True, num_processes=2)
    for name in ranks[0]:
        for epoch in range(2):
            parts = [rank[name][epoch] for rank in ranks]
            if name == "weighted":
                assert len(parts[0]) == len(parts[1])
            elif "drop" in name or name == "a batch sampler" or name.startswith("stateful, iterable"):
                assert len({*parts[0], *parts[1]}) == len(parts[0]) + len(parts[1]), name
            else:
                assert {*parts[0], *parts[1]} == set(range(LENGTH)), name
    shuffled = ranks[0]["shuffled"]
    assert shuffled[0] != shuffled[1]


def rounds_of(name: str) -> list[int]:
    make, options = EVERY[name]
    accelerator = on_cpu(**options, split_batches=False)
    torch.manual_seed(7)
    loader = accelerator.prepare(make())
    rows = []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch).tolist()
    return rows


@pytest.mark.parametrize("name", ["shuffled", "seedable", "shuffled by a generator"])
def test_the_order_is_that_of_one_process(launch: Any, name: str) -> None:
    alone, *_ = launch(rounds_of, name, num_processes=1)
    assert all(rows == alone for rows in launch(rounds_of, name, num_processes=2))
    if name == "shuffled":
        torch.manual_seed(7)
        assert alone == [row for batch in EVERY[name][0]() for row in batch.tolist()], "as in plain PyTorch"


class Sample(NamedTuple):
    tokens: torch.Tensor
    name: str
    mask: torch.Tensor


def pad(samples: list[int]) -> dict[str, Any]:
    """Batches padded to their own longest row, with names, and many dtypes."""
    longest = max(samples) + 1
    rows = torch.stack([torch.nn.functional.pad(torch.ones(n + 1), (0, longest - n - 1)) for n in samples])
    return {
        "batch": Sample(rows.bfloat16(), " ".join(map(str, samples)), rows.bool()),
        "labels": torch.tensor(samples),
        "scale": torch.tensor(0.5),
        "none": None,
        "array": np.array(samples),
        "empty": torch.empty(len(samples), 0, dtype=torch.complex64),
    }


def dispatch_anything() -> list[Any]:
    accelerator = on_cpu()
    loader = accelerator.prepare(DataLoader(Stream(7), batch_size=2, collate_fn=pad))
    seen = []
    for batch in loader:
        tokens, name, mask = batch["batch"]
        assert tokens.dtype == torch.bfloat16 and mask.dtype == torch.bool and batch["none"] is None
        assert batch["scale"].item() == 0.5 and batch["empty"].shape == (2, 0)
        assert isinstance(batch["array"], np.ndarray)
        assert name == " ".join(map(str, batch["labels"].tolist()))
        assert torch.equal(tokens.float().sum(1), batch["labels"] + 1.0)
        seen.append((list(tokens.shape), batch["labels"].tolist()))
    return seen


def test_dispatched_batches_keep_their_own_shapes_and_hold_anything(launch: Any) -> None:
    first, second = launch(dispatch_anything)
    assert first == [([2, 2], [0, 1]), ([2, 6], [4, 5])]
    assert second == [([2, 4], [2, 3]), ([2, 7], [6, 0])]


class Broken(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise OSError("disk gone")


def read_broken() -> str:
    loader = on_cpu().prepare(DataLoader(Broken(), batch_size=2))
    try:
        for _ in loader:
            pass
    except (OSError, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_ranks_hear_that_rank_0_could_not_read(launch: Any) -> None:
    reader, other = launch(read_broken)
    assert reader == "OSError: disk gone"
    assert other == "CollectiveError: rank 0 could not read the next batch: OSError: disk gone"


def read_shards() -> list[Any]:
    import datasets

    datasets.disable_progress_bars()
    found = []
    for length, shards in [(11, 3), (12, 2), (7, 5)]:
        accelerator = on_cpu(dispatch_batches=False)
        whole = datasets.Dataset.from_dict({"label": list(range(length))}).to_iterable_dataset(num_shards=shards)
        loader = accelerator.prepare(DataLoader(whole.with_format("torch"), batch_size=2))
        for _ in range(2):
            rows, mine = [], []
            for batch in loader:
                rows += accelerator.gather_for_metrics(batch["label"]).tolist()
                mine.append(batch["label"])
            after = accelerator.gather_for_metrics(torch.cat(mine)).tolist()
            found.append((sorted(rows) == list(range(length)), sorted(after) == list(range(length)), len(mine)))
    return found


def test_a_dataset_that_splits_itself_is_read_in_shards(launch: Any) -> None:
    first, second = launch(read_shards)
    assert first == second
    assert all(per_step and after for per_step, after, _ in first)


def resume_shards() -> list[bool]:
    import datasets

    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_dict({"label": list(range(9))}).to_iterable_dataset(num_shards=3)
    make = lambda: on_cpu(dispatch_batches=False).prepare(DataLoader(whole.with_format("torch"), batch_size=2))
    steps, states = [], []
    loader = make()
    for batch in loader:
        steps.append(batch["label"].tolist())
        states.append(loader.state_dict())
    right = []
    for number, state in enumerate(states, 1):
        resumed = make()
        resumed.load_state_dict(state)
        right.append([batch["label"].tolist() for batch in resumed] == steps[number:])
    return right


def test_shards_of_unequal_length_are_taken_up_in_the_middle(launch: Any) -> None:
    assert launch(resume_shards) == [[True] * 3] * 2


def nested() -> list[Any]:
    """An evaluation inside a training epoch, its values gathered in its loop and after it; one broken off."""
    accelerator = on_cpu()
    train, check = accelerator.prepare(DataLoader(Numbers(10), batch_size=2), DataLoader(Numbers(5), batch_size=2))
    found = []
    for batch in train:
        in_loop, mine = [], []
        for inner in check:
            in_loop += accelerator.gather_for_metrics(inner).tolist()
            mine.append(inner)
        after = accelerator.gather_for_metrics(torch.cat(mine)).tolist()
        for _ in check:
            break
        rows = accelerator.gather_for_metrics(batch).tolist()
        found.append((in_loop, sorted(after), rows, accelerator.gradient_state.end_of_dataloader))
    return found


def test_an_evaluation_inside_a_training_epoch(launch: Any) -> None:
    for found in launch(nested):
        assert [in_loop for in_loop, *_ in found] == [[0, 1, 2, 3, 4]] * 3
        assert [after for _, after, *_ in found] == [[0, 1, 2, 3, 4]] * 3
        assert [rows for *_, rows, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert [end for *_, end in found] == [False, False, True]


def which_loader() -> tuple[str, list[int], list[int]]:
    accelerator = on_cpu()
    one, other = accelerator.prepare(DataLoader(Numbers(7), batch_size=2), DataLoader(Numbers(8), batch_size=2))
    first = torch.cat(list(one))
    torch.cat(list(other))
    try:
        accelerator.gather_for_metrics(first)
        message = ""
    except ValueError as error:
        message = str(error)
    named = accelerator.gather_for_metrics(first, loader=one).tolist()
    return message, sorted(named), accelerator.gather_for_metrics(torch.tensor(1)).tolist()


def test_values_that_two_loaders_could_have_given_ask_for_one(launch: Any) -> None:
    for message, named, scalars in launch(which_loader):
        assert "gather_for_metrics(values, loader=...)" in message
        assert named == list(range(7))
        assert scalars == [1, 1]
