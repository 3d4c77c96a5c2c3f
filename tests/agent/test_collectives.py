"""The ranks' collectives are compared as they are announced: what does not fit is named at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.agent.collectives import CollectiveCheck
from nblaunch.wire.messages import Collective


@pytest.fixture
def check():
    return CollectiveCheck([0, 1])


def gather(rank, number=0, shape=(2, 3), dtype="float32"):
    return Collective(rank, number, "all_gather", [list(shape)], [dtype])


def barrier(rank, number=0, group=""):
    return Collective(rank, number, "barrier", group=group)


def test_what_fits_is_no_failure(check):
    assert check.arrived(gather(0)) is None
    assert check.arrived(gather(1)) is None
    assert check.arrived(barrier(1, 1)) is None
    assert check.arrived(barrier(0, 1)) is None
    assert check.ended(0) is None and check.ended(1) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            gather(1, shape=(3, 3)),
            "rank 0: all_gather number 0 of float32[2, 3]; rank 1: all_gather number 0 of float32[3, 3]",
        ),
        (gather(1, dtype="float64"), "float32[2, 3]; rank 1: all_gather number 0 of float64[2, 3]"),
        (barrier(1), "rank 0: all_gather number 0 of float32[2, 3]; rank 1: barrier number 0"),
    ],
    ids=["shape", "dtype", "kind"],
)
def test_what_does_not_fit_names_each_ranks(check, other, words):
    assert check.arrived(gather(0)) is None
    failure = check.arrived(other)
    assert failure is not None and failure.kind == "collective" and failure.rank == 1
    assert failure.message.endswith(words)


def test_objects_may_differ_in_size(check):
    assert check.arrived(Collective(0, 0, "gather_object", [[10]], ["uint8"])) is None
    assert check.arrived(Collective(1, 0, "gather_object", [[99]], ["uint8"])) is None


def test_a_rank_may_run_ahead(check):
    for number in range(5):
        assert check.arrived(gather(0, number)) is None
    for number in range(5):
        assert check.arrived(gather(1, number)) is None


def test_a_rank_that_returned_while_others_wait_is_named(check):
    check.arrived(gather(0))
    failure = check.ended(1)
    assert failure is not None and failure.rank == 1
    assert failure.message == (
        "returned and never came to the collective that others wait in: rank 0: all_gather number 0 of float32[2, 3]"
    )


def test_a_rank_that_had_returned_before_others_came_is_named_too(check):
    assert check.ended(1) is None
    failure = check.arrived(gather(0))
    assert failure is not None and failure.rank == 1 and "never came" in failure.message


def test_a_smaller_group_may_go_on_without_a_rank_that_returned(check):
    assert check.ended(0) is None
    assert check.arrived(barrier(1, group="1")) is None


@given(
    st.integers(2, 5).flatmap(lambda n: st.tuples(st.just(n), st.permutations([r for r in range(n) for _ in range(3)])))
)
def test_any_order_of_arrival_fits(case):
    count, order = case
    check = CollectiveCheck(list(range(count)))
    numbers = dict.fromkeys(range(count), 0)
    for rank in order:
        assert check.arrived(gather(rank, numbers[rank])) is None
        numbers[rank] += 1
    assert not any(check.ended(rank) for rank in range(count))
    assert check._open == {}
