"""What a person is told of a run: pace, time left, who deviates."""

import pytest

from nblaunch.config import LaunchConfig
from nblaunch.dashboard.reading import device_name
from nblaunch.dashboard.rows import done_fraction
from nblaunch.dashboard.series import charts, main_metric, split_role
from nblaunch.dashboard.state import RunState
from nblaunch.wire.messages import Bar, Device, Progress
from tests.dashboard.scripted import RUN, ScriptedRun, metrics


def test_the_line_at_the_top():
    head = ScriptedRun(8).start().advance(60).state.frame()["head"]
    assert head["elapsed"] == "1m 00s"
    assert head["steps"] == "40.0 steps/s"
    assert head["left"] == "about 57 s left"
    assert head["setup"] == "8 \u00d7 H100 · DDP · bf16 · nccl"


def test_samples_a_second_where_bars_count_samples():
    run = ScriptedRun(2).start()
    for rank in range(2):
        run.state.apply(Progress(rank=rank, time=run.now, bars=[Bar(id=1, n=5, rate=640.0, unit="samples")]))
    assert run.state.frame()["head"]["samples"] == "1,280 samples/s"


def test_bars_give_the_pace_where_no_metric_does():
    run = ScriptedRun(2).start()
    for rank in range(2):
        run.state.apply(Progress(rank=rank, time=run.now, bars=[Bar(id=1, n=5, total=10, rate=2.0)]))
    assert run.state.frame()["head"]["steps"] == "2.0 it/s"


def test_nested_bars_count_as_parts():
    run = ScriptedRun(1).start()
    bars = [Bar(id=1, n=1, total=4), Bar(id=2, n=50, total=100, depth=1)]
    run.state.apply(Progress(rank=0, time=run.now, bars=bars))
    assert done_fraction(run.state.ranks[0]) == pytest.approx(0.375)


def test_a_bar_as_it_is_shown():
    run = ScriptedRun(1).start().advance(10)
    outer, inner = run.state.frame()["rows"][0].bars
    assert outer == (0, "epoch 0/5", 0.0, "22.8 s each · 2 min left")
    assert inner == (1, "batch 390/938", 0.4158, "41.2/s · 13 s left")


def test_an_uneven_rank_is_named():
    frame = ScriptedRun(8, late=5).start().advance(60).state.frame()
    assert {row.rank for row in frame["rows"] if row.flags} == {5}
    assert frame["rows"][5].note == "168 behind"
    assert frame["remark"] == (
        "Rank 5 is late, 168 behind the others; it waits 31 % of its time for data, more than the others."
    )


def test_even_ranks_are_not_remarked_upon():
    frame = ScriptedRun(8).start().advance(20).state.frame()
    assert frame["remark"] == ""
    assert all(row.flags == "" for row in frame["rows"])


def test_a_rank_without_a_sign_is_grey_and_says_where_it_was_last():
    run = ScriptedRun(2).start().advance(5)
    run.now += 6
    run.state.apply(run._progress(0))
    rows = run.state.frame()["rows"]
    assert rows[0].flags == ""
    assert rows[1].flags == "s"
    assert rows[1].note == "no sign for 6.0 s, last in all_reduce · Cell In[3], line 21"


def test_a_rank_that_lives_but_does_not_move_says_where_it_is():
    run = ScriptedRun(2).start().advance(5)
    for _ in range(13):
        run.now += 1
        run.apply(run._progress(rank) for rank in range(2))
    row = run.state.frame()["rows"][0]
    assert row.flags == "k"
    assert row.note == "for 12.0 s in all_reduce · Cell In[3], line 21"


def test_of_many_ranks_the_extremes_are_named():
    frame = ScriptedRun(64, late=5).start().advance(30).state.frame()
    reasons = dict(frame["extremes"])
    assert "behind" in reasons[5]
    assert "most memory" in reasons.values()
    assert len(reasons) <= 10


def test_training_and_validation_share_a_chart():
    state = RunState("train", LaunchConfig())
    for name in ("train/loss", "val/loss", "lr", "accuracy_val", "accuracy"):
        state.apply(metrics(0, {name: [1.0]}, 0, 0.0))
    shared = {chart["title"]: [series["label"] for series in chart["series"]] for chart in charts(state)}
    assert shared == {"loss": ["train", "val"], "lr": ["lr"], "accuracy": ["accuracy", "val"]}
    assert main_metric(state) == "train/loss"


@pytest.mark.parametrize("name", ["train", "val", "evaluate", "trainable_parameters", "", "/", "train/"])
def test_names_that_only_look_like_a_role_stay_whole(name):
    assert split_role(name) == (name, "")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "Tesla T4"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("", "cuda"),
    ],
)
def test_device_names_are_short(name, short):
    assert device_name(Device(type="cuda", name=name)) == short


def test_the_closing_line():
    assert ScriptedRun(2).start().advance(401, tick=1).finish().state.frame()["head"]["closing"] == (
        "Both ranks returned in 6m 41s. Result: {'accuracy': 0.9412}"
    )


def test_a_loss_that_is_not_finite_is_told_with_step_and_rank():
    state = RunState("train", LaunchConfig())
    state.apply(metrics(1, {"loss": [0.5, float("nan")]}, 1203, 0.0))
    assert charts(state)[0]["series"][0]["bad"] == "not finite from step 1,204 on rank 1"
    assert state.frame()["rows"][0].main == "nan"


def test_a_frame_is_plain_data():
    import json

    import msgspec

    frame = ScriptedRun(3).start().advance(2).talk().state.frame()
    assert json.loads(json.dumps(msgspec.to_builtins(frame)))["head"]["name"] == "train"
    assert RUN


def test_between_two_inner_loops_the_row_keeps_its_shape_and_never_goes_back():
    run = ScriptedRun(1).start()
    epoch = Bar(id=1, description="epoch", n=1, total=4)
    batch = Bar(id=2, description="batch", n=99, total=100, depth=1)
    run.state.apply(Progress(rank=0, time=run.now, bars=[epoch, batch]))
    before = run.state.frame()["rows"][0].done
    batch.n, batch.closed = 100, True
    run.state.apply(Progress(rank=0, time=run.now, bars=[epoch, batch]))
    row = run.state.frame()["rows"][0]
    assert [label for _, label, _, _ in row.bars] == ["epoch 1/4", "batch 100/100"]
    assert row.done == before


def test_who_is_first_in_the_next_epoch_makes_nobody_late():
    run = ScriptedRun(2).start()
    for rank, epoch, batch in ((0, 1, 10), (1, 2, 0)):
        bars = [
            Bar(id=1, description="epoch", n=epoch, total=5),
            Bar(id=2, description="batch", n=batch, total=11, depth=1),
        ]
        run.state.apply(Progress(rank=rank, time=run.now, bars=bars))
    assert [row.flags for row in run.state.frame()["rows"]] == ["", ""]


def test_who_is_an_epoch_behind_is_late():
    run = ScriptedRun(2).start()
    for rank, epoch, batch in ((0, 1, 10), (1, 3, 0)):
        bars = [
            Bar(id=1, description="epoch", n=epoch, total=5),
            Bar(id=2, description="batch", n=batch, total=11, depth=1),
        ]
        run.state.apply(Progress(rank=rank, time=run.now, bars=bars))
    assert [row.note for row in run.state.frame()["rows"]] == ["12 behind", ""]
