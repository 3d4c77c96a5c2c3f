"""The last lines of a run: bounded, in order, what several ranks say alike said once."""

from nblaunch.dashboard.output import KEPT_ALL, KEPT_RANK, OutputTail


def test_what_ranks_say_alike_is_one_line_with_all_of_them():
    tail = OutputTail()
    for rank in range(3):
        tail.add(rank, "stderr", ["UserWarning: careful"])
    assert [(line.ranks, line.text) for line in tail.all] == [([0, 1, 2], "UserWarning: careful")]
    assert tail.warnings == 1
    assert [line.number for line in tail.take_joined()] == [0, 0]


def test_what_one_rank_says_twice_is_two_lines():
    tail = OutputTail()
    tail.add(0, "stdout", ["epoch", "epoch"])
    assert len(tail.all) == 2


def test_a_flood_of_one_rank_does_not_push_out_the_others_last_lines():
    tail = OutputTail()
    tail.add(1, "stdout", ["about to fail"])
    for i in range(5_000):
        tail.add(0, "stdout", [f"line {i}"])
    assert len(tail.all) == KEPT_ALL
    assert len(tail.by_rank[0]) == KEPT_RANK
    assert [line.text for line in tail.by_rank[1]] == ["about to fail"]
    assert tail.written == 5_001


def test_lines_left_to_the_log_are_counted():
    tail = OutputTail()
    tail.add(0, "stdout", ["newest"], skipped=99_999)
    assert (tail.written, tail.skipped) == (100_000, 99_999)


def test_a_very_long_line_is_cut():
    tail = OutputTail()
    tail.add(0, "stdout", ["x" * 1_000_000])
    assert len(tail.all[0].text) < 3_000
