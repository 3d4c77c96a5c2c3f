"""Index arithmetic: which rows each rank gets, compared with a model that is slow and plainly right."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.training.data.shards import Round, Sharding, chunks, topped_up

LENGTHS = st.integers(0, 40)
SIZES = st.integers(1, 9)
RANKS = st.integers(1, 5)


def rounds(length: int, batch_size: int, n: int, **options: bool) -> list[Round[int]]:
    """What all ranks get of `range(length)`."""
    drop_last = options.get("drop_last", False)
    batches = [b for b in chunks(range(length), batch_size) if not drop_last or len(b) == batch_size]
    return list(Sharding(n, batch_size, **options).rounds(batches))


def real_rows(steps: list[Round[int]]) -> list[int]:
    """The rows that are no repeats, in the order of a gather after every step."""
    return [
        row
        for step in steps
        for part, repeated in zip(step.parts, step.repeated, strict=True)
        for row in part[: len(part) - repeated]
    ]


@given(LENGTHS, SIZES, RANKS)
def test_every_row_is_counted_once_and_in_order(length: int, batch_size: int, n: int) -> None:
    assert real_rows(rounds(length, batch_size, n)) == list(range(length))


@given(LENGTHS, SIZES, st.integers(2, 5))
def test_the_last_round_is_filled_from_the_start_over_and_over(length: int, batch_size: int, n: int) -> None:
    total = n * batch_size
    padded = list(range(length)) + [i % length for i in range(-length % total)] if length else []
    steps = rounds(length, batch_size, n)
    assert list(chain.from_iterable(chain.from_iterable(step.parts for step in steps))) == padded
    assert all(step.rows == [batch_size] * n for step in steps)


@given(LENGTHS, SIZES, st.integers(2, 5), st.booleans(), st.booleans())
def test_splitting_a_batch_is_dealing_batches_of_a_slice(
    length: int, slice_size: int, n: int, even: bool, drop: bool
) -> None:
    split = rounds(length, slice_size * n, n, split_batches=True, even_batches=even, drop_last=drop)
    dealt = rounds(length, slice_size, n, even_batches=even, drop_last=drop)
    assert split == dealt


@given(LENGTHS, SIZES, RANKS)
def test_uneven_batches_repeat_nothing(length: int, batch_size: int, n: int) -> None:
    steps = rounds(length, batch_size, n, even_batches=False)
    assert real_rows(steps) == list(range(length))
    assert all(step.repeated == [0] * n for step in steps)
    per_rank = [sum(bool(step.parts[rank]) for step in steps) for rank in range(n)]
    assert max(per_rank) - min(per_rank) <= 1


@given(LENGTHS, SIZES, RANKS)
def test_drop_last_leaves_full_rounds_alone(length: int, batch_size: int, n: int) -> None:
    steps = rounds(length, batch_size, n, drop_last=True)
    assert len(steps) == length // (batch_size * n)
    assert all(step.rows == [batch_size] * n and step.repeated == [0] * n for step in steps)


@settings(max_examples=300)
@given(LENGTHS, SIZES, RANKS, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_steps_are_what_is_yielded(length: int, slice_size: int, n: int, choices: tuple[bool, bool, bool]) -> None:
    split, even, drop = choices
    batch_size = slice_size * n if split else slice_size
    sharding = Sharding(n, batch_size, split, even, drop)
    batches = [b for b in chunks(range(length), batch_size) if not drop or len(b) == batch_size]
    last = len(batches[-1]) if batches else None
    found = list(sharding.rounds(batches))
    for rank in range(n):
        assert sharding.steps(len(batches), rank, last) == sum(bool(step.parts[rank]) for step in found)


@given(st.lists(st.integers(1, 4), max_size=12), RANKS)
def test_batches_that_differ_by_design_stay_whole(sizes: list[int], n: int) -> None:
    rows = iter(range(100))
    batches = [[next(rows) for _ in range(size)] for size in sizes]
    steps = list(Sharding(n).rounds(batches))
    assert real_rows(steps) == list(chain.from_iterable(batches))
    assert all(all(step.parts) for step in steps), "no rank ever gets an empty batch"


def test_a_batch_sampler_without_a_declared_size_is_filled_to_the_size_that_it_shows() -> None:
    (step,) = Sharding(2).rounds([[0, 1, 2], [3]])
    assert step == Round([[0, 1, 2], [3, 0, 1]], [0, 2])


def test_a_short_batch_in_the_middle_is_given_out_as_it_is() -> None:
    steps = list(Sharding(2, batch_size=2).rounds([[0, 1], [2], [3, 4], [5, 6]]))
    assert [step.parts for step in steps] == [[[0, 1], [2]], [[3, 4], [5, 6]]]


def test_a_short_batch_is_topped_up_with_the_first() -> None:
    assert list(topped_up([[0, 1, 2], [3]], 3)) == [Round([[0, 1, 2]], [0]), Round([[3, 0, 1]], [2])]
    assert list(topped_up([[7]], 3)) == [Round([[7, 7, 7]], [2])]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="each batch of 6 among 4 ranks, which doesn't divide"):
        Sharding(4, batch_size=6, split_batches=True)
    with pytest.raises(ValueError, match="give the batch sampler one"):
        Sharding(2, batch_size=None, split_batches=True)
