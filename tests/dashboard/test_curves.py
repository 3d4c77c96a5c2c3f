"""A curve is thinned as it grows, and keeps its mean exact and its extremes whole."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.dashboard.curves import CAPACITY, Curve


def test_few_steps_are_kept_as_they_are():
    curve = Curve()
    curve.add(0, [0, 1, 2], [3.0, 2.0, 1.0])
    curve.add(1, [0, 1, 2], [5.0, 2.0, 3.0])
    assert curve.points() == [(0, 4.0, 3.0, 5.0), (1, 2.0, 2.0, 2.0), (2, 2.0, 1.0, 3.0)]


def test_a_million_steps_take_no_more_room_than_a_thousand():
    curve = Curve()
    for first in range(0, 1_000_000, 1000):
        steps = list(range(first, first + 1000))
        curve.add(0, steps, [float(step) for step in steps])
    assert CAPACITY / 2 <= len(curve.points()) <= CAPACITY
    assert curve.points()[0][2] == 0.0
    assert curve.points()[-1][3] == 999_999.0
    assert curve.step == 999_999


def test_one_spike_survives_any_thinning():
    curve = Curve()
    values = [1.0] * 50_000
    values[12_345] = 99.0
    for first in range(0, len(values), 50):
        curve.add(0, list(range(first, first + 50)), values[first : first + 50])
    assert max(high for _, _, _, high in curve.points()) == 99.0
    spike = next(step for step, _, _, high in curve.points() if high == 99.0)
    assert spike <= 12_345 < spike + 2**curve.shift


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-5_000, 200_000), st.floats(-1e6, 1e6)),
        min_size=1,
        max_size=200,
    )
)
def test_whatever_the_order_every_bucket_is_the_mean_and_extremes_of_its_values(logged):
    curve = Curve()
    for rank, step, value in logged:
        curve.add(rank, [step], [value])
    buckets: dict[int, list[float]] = {}
    for _, step, value in logged:
        buckets.setdefault((step >> curve.shift) << curve.shift, []).append(value)
    points = curve.points()
    assert [step for step, *_ in points] == sorted(buckets)
    for step, mean, low, high in points:
        assert mean == pytest.approx(math.fsum(buckets[step]) / len(buckets[step]), abs=1e-6)
        assert (low, high) == (min(buckets[step]), max(buckets[step]))


def test_values_that_are_not_finite_leave_a_gap_and_are_told():
    curve = Curve()
    curve.add(2, [7, 8, 9], [1.0, math.nan, math.inf])
    assert [step for step, *_ in curve.points()] == [7]
    assert curve.bad == (8, 2)
    assert curve.last[2] == math.inf


def test_a_view_takes_only_what_changed():
    curve = Curve()
    curve.add(0, list(range(10)), [0.0] * 10)
    assert curve.take_dirty() == (0, 9)
    assert curve.take_dirty() is None
    curve.add(1, [8], [2.0])
    assert curve.take_dirty() == (8, 8)
    assert list(curve.rows(8, 8)) == [2.0, 1.0, 0.0, 2.0, 0.0, 2.0]


def test_changes_are_not_lost_when_buckets_merge_between_two_frames():
    curve = Curve()
    curve.add(0, list(range(CAPACITY)), [0.0] * CAPACITY)
    curve.take_dirty()
    curve.add(0, [CAPACITY - 1], [5.0])
    curve.add(0, [CAPACITY], [6.0])
    first, last = curve.take_dirty()
    assert (first, last) == ((CAPACITY - 1) >> 1, CAPACITY >> 1)


def test_ranks_have_curves_of_their_own():
    curve = Curve()
    rng = random.Random(1)
    for rank in range(4):
        curve.add(rank, list(range(1000)), [rank + rng.random() for _ in range(1000)])
    row = curve.rows(0, 0)
    assert [math.floor(value) for value in row[4:]] == [0, 1, 2, 3]
