"""A run is known by its messages alone."""

import sys
import threading

from nblaunch.config import LaunchConfig
from nblaunch.dashboard.displays import LARGEST
from nblaunch.dashboard.state import RunState
from nblaunch.wire.messages import (
    Display,
    Failure,
    Finished,
    Metrics,
    Notice,
    Output,
    Progress,
    RankUpdate,
    Refused,
)
from tests.dashboard.scripted import RUN, ScriptedRun, metrics


def test_a_run_from_start_to_end():
    run = ScriptedRun(2, cpu=True)
    assert run.state.status == "starting"
    run.start()
    assert run.state.status == "running"
    assert [rank.device.type for rank in run.state.ranks.values()] == ["cpu", "cpu"]
    run.advance(2).finish()
    assert run.state.status == "done"
    assert run.state.elapsed == 2.0
    assert {rank.state for rank in run.state.ranks.values()} == {"returned"}


def test_metrics_are_combined_over_ranks():
    state = RunState("train", LaunchConfig())
    state.apply(metrics(0, {"loss": [1.0, 0.5], "accuracy": [10.0, 20.0]}, 0, 0.0))
    state.apply(metrics(1, {"loss": [3.0, 1.5]}, 0, 0.0))
    assert state.metrics["loss"].points() == [(0, 2.0, 1.0, 3.0), (1, 1.0, 0.5, 1.5)]
    assert state.metrics["accuracy"].last == {0: 20.0}


def test_an_empty_batch_is_no_trouble():
    state = RunState("train", LaunchConfig())
    state.apply(Metrics(rank=0, names=[], which=b"", steps=b"", values=b"", times=b"", thinned=3))
    assert state.metrics == {}
    assert state.thinned == 3


def test_stopping_is_seen_until_the_run_has_ended():
    run = ScriptedRun(2).start()
    run.state.stopping()
    assert run.state.status == "stopping"
    run.state.apply(Finished(run=RUN, status="stopped", time=run.now))
    run.state.stopping()
    assert run.state.status == "stopped"


def test_the_cause_and_what_followed():
    run = ScriptedRun(4).start().advance(1).fail(rank=2)
    assert run.state.status == "failed"
    assert run.state.cause.rank == 2
    assert run.state.ranks[2].state == "failed"
    assert run.state.ranks[0].state == "stopped"


def test_a_returned_rank_stays_returned_when_its_process_ends():
    run = ScriptedRun(1).start()
    for word in ("returned", "ended"):
        run.state.apply(RankUpdate(run=RUN, rank=0, state=word, time=run.now))
    assert run.state.ranks[0].state == "returned"


def test_what_says_nothing_to_a_watcher_is_passed_over():
    state = RunState("train", LaunchConfig())
    state.apply(Refused(run=RUN, reason="no"))
    assert state.version == 0


def test_displays_are_bounded_and_updated_in_place():
    state = RunState("train", LaunchConfig())
    state.apply(Display(rank=1, data={"image/png": "x" * (LARGEST + 1)}))
    assert state.displays.dropped == 1
    for text in ("first", "second"):
        state.apply(Display(rank=1, data={"text/plain": text}, display_id="a", update=True))
    assert [shown.data["text/plain"] for shown in state.displays.kept.values()] == ["second"]
    for i in range(500):
        state.apply(Display(rank=1, data={"text/plain": str(i)}))
    assert len(state.displays.kept) <= 60


def test_readers_and_writer_in_different_threads():
    run = ScriptedRun(4).start()
    failures = []

    def read():
        try:
            for _ in range(50):
                run.state.frame()
                run.state.snapshot_data()
        except Exception as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    run.advance(5).talk().finish()
    for reader in readers:
        reader.join()
    assert failures == []


def test_no_message_can_make_it_grow_without_bound():
    state = RunState("train", LaunchConfig())
    for i in range(3_000):
        state.apply(Notice(text=f"notice {i}"))
        state.apply(Output(run=RUN, rank=0, stream="stdout", lines=[f"line {i}"]))
        state.apply(metrics(0, {f"metric {i}": [1.0]}, 0, 0.0))
        state.apply(Progress(rank=0, time=float(i)))
    assert len(state.notices) <= 50
    assert len(state.metrics) <= 500
    assert state.unshown == 2_500


def test_importing_the_state_loads_nothing_heavy():
    import subprocess

    code = "import sys, nblaunch.dashboard, nblaunch.dashboard.state; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "numpy", "matplotlib", "rich", "IPython", "anywidget", "ipywidgets"}
    assert heavy.isdisjoint(loaded)


def test_a_failure_without_a_rank():
    state = RunState("train", LaunchConfig())
    cause = Failure(rank=-1, kind="exit", time=0.0, code=1, message="the agent died")
    state.apply(Finished(run=RUN, status="failed", time=1.0, cause=cause))
    assert state.ranks == {}
    assert state.frame()["head"]["status"] == "failed"
