"""Each sample counts once, whatever the loader, the batch size and the number of ranks."""

from __future__ import annotations

import itertools

import pytest
from simulated_ranks import KINDS, gathered_after, gathered_per_step, iterate

from nblaunch.training.data import skip_first_batches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gathered_labels_are_the_dataset(kind: str, n: int) -> None:
    make, options = KINDS[kind]
    for length, given in itertools.product(range(21), [1, 2, 3, 7, 64]):
        size = given * n if "split" in kind and given % n else given
        ranks = iterate(lambda: make(length, size), n, **options)
        case = f"D={length} B={size}"
        assert gathered_per_step(ranks) == list(range(length)), case
        assert sorted(gathered_after(ranks)) == list(range(length)), case
        for rank in ranks:
            assert rank.ends == [False] * (len(rank.steps) - 1) + [True] * bool(rank.steps), case
            assert all(len(batch) for batch in rank.steps), case
            if kind not in ("iterable", "iterable split", "iterable read by all"):
                assert len(rank.loader) == len(rank.steps), case
            if rank.steps:
                total = rank.loader.total_batch_size or size * n
                assert rank.remainders[-1] == (length - 1) % total + 1, case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_skipped_pass_is_the_rest_of_the_pass(kind: str, n: int) -> None:
    make, options = KINDS[kind]
    for length, given, skip in itertools.product([1, 5, 12, 13], [1, 3, 64], [0, 1, 2, 5]):
        size = given * n if "split" in kind and given % n else given
        whole = iterate(lambda: make(length, size), n, **options)
        rest = iterate(lambda: make(length, size), n, change=lambda loader: skip_first_batches(loader, skip), **options)
        for one, other in zip(whole, rest, strict=True):
            assert [batch.tolist() for batch in other.steps] == [batch.tolist() for batch in one.steps[skip:]]
        assert (
            gathered_per_step(rest) == gathered_per_step(whole)[skip * (whole[0].loader.total_batch_size or size * n) :]
        )
        assert sorted(gathered_after(rest)) == sorted(gathered_per_step(rest))
