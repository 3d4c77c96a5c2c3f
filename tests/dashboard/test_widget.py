"""The widget without a page: one model a run, one message a frame, and the snapshot at the end."""

import threading
import time

import pytest
from comm import DummyComm

from nblaunch.dashboard import widget
from nblaunch.dashboard.widget import Feed, RunWidget, WidgetView
from tests.dashboard.scripted import ScriptedRun


class Comm(DummyComm):
    """Keeps what would be sent to a page."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[dict, list]] = []

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        if msg_type == "comm_msg":
            self.sent.append((data, buffers))


@pytest.fixture
def made():
    run = ScriptedRun(8).start().advance(5).talk()
    stopped = threading.Event()
    model = RunWidget(run.state, stopped.set)
    model.comm = Comm()
    return run, model, stopped


def test_a_frame_is_one_message(made):
    run, model, _ = made
    model.push()
    run.advance(0.25)
    model.push()
    assert len(model.comm.sent) == 2
    data, buffers = model.comm.sent[1]
    assert set(data["state"]) == {"frame"}
    assert data["buffer_paths"] == [["curves"]]
    assert len(buffers) == 1


def test_a_page_that_asks_for_the_state_gets_the_whole_run(made):
    run, model, _ = made
    model.push()
    run.advance(5)
    state = model.get_state()
    assert state["frame"]["full"]
    assert len(state["frame"]["rows"]) == 8
    assert len(state["curves"]) > 1_000


def test_a_page_that_missed_a_frame_gets_a_full_one(made):
    _, model, _ = made
    model._handle_custom_msg({"kind": "sync"}, [])
    model.push()
    model.push()
    assert [data["state"]["frame"].get("full", False) for data, _ in model.comm.sent] == [True, False]


def test_the_stop_button_asks_to_stop_and_is_seen_at_once(made):
    run, model, stopped = made
    model._handle_custom_msg({"kind": "stop"}, [])
    assert stopped.is_set()
    assert run.state.status == "stopping"
    assert model.woken.is_set()


@pytest.mark.parametrize("content", [{}, {"kind": "rm -rf"}, "stop", None, []])
def test_other_messages_are_passed_over(made, content):
    run, model, stopped = made
    model._handle_custom_msg(content, [])
    assert not stopped.is_set()
    assert run.state.status == "running"


class Shown:
    """Stands in for the notebook's outputs."""

    def __init__(self, state) -> None:
        self.events: list[str] = []

    def show(self, bundle=None, metadata=None):
        self.events.append("live" if bundle else "static")

    def replace(self):
        self.events.append("snapshot")


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(widget, "StaticDisplay", Shown)


def wait_until(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_views_of_one_run_share_a_model_and_all_end_as_snapshots(shown):
    run = ScriptedRun(2).start().advance(1)
    first, second = (WidgetView(run.state, lambda: None) for _ in range(2))
    first.start()
    second.start()
    assert first._feed is second._feed
    run.finish()
    wait_until(lambda: first._display.events == second._display.events == ["live", "snapshot"])
    first.finish()
    assert first._display.events == ["live", "snapshot"]


def test_a_view_that_is_finished_early_ends_the_thread_and_a_later_one_begins_anew(shown):
    run = ScriptedRun(2).start().advance(1)
    view = WidgetView(run.state, lambda: None)
    view.start()
    view.finish()
    wait_until(lambda: not view._feed._thread.is_alive())
    later = WidgetView(run.state, lambda: None)
    later.start()
    assert later._feed is not view._feed
    run.finish()
    wait_until(lambda: later._display.events == ["live", "snapshot"])


def test_a_view_of_a_run_that_is_over_is_the_snapshot(shown):
    run = ScriptedRun(2).start().advance(1).finish()
    view = WidgetView(run.state, lambda: None)
    view.start()
    assert view._display.events == ["static", "snapshot"]
    assert view._feed is None


def test_a_view_that_comes_just_too_late_is_finished_at_once(shown):
    run = ScriptedRun(2).start()
    feed = Feed(run.state, lambda: None)
    feed.closed = True
    assert not feed.attach(WidgetView(run.state, lambda: None))
