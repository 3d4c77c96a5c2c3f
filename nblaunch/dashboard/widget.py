"""The dashboard on a notebook's page: one anywidget model a run, however often it is displayed."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from nblaunch.dashboard.frames import FrameWriter
from nblaunch.dashboard.snapshot import StaticDisplay

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RunState

_PICTURES = "nblaunch.dashboard.pictures"
INTERVAL = 0.25
"""Seconds between two frames: Jupyter's limits on messages are far, and no eye needs more."""


class RunWidget(anywidget.AnyWidget):
    """The model behind every view of one run. A frame is one message: `frame` as JSON, `curves` as bytes."""

    _esm = Path(__file__).with_name("widget.js")
    _css = Path(__file__).with_name("widget.css")
    frame = traitlets.Dict().tag(sync=True)
    """See `frames.FrameWriter`."""
    curves = traitlets.Bytes().tag(sync=True)

    def __init__(self, state: RunState, stop: Callable[[], None]) -> None:
        self._state = state
        self._stop = stop
        self._writer = FrameWriter(state)
        self._behind = False
        self.woken = threading.Event()
        """Set when a frame is due before its time."""
        super().__init__()
        self.on_msg(self._on_message)

    def push(self) -> None:
        """Send what changed, or all, if a page has missed a frame. Called by one thread only."""
        frame, curves = self._writer.delta()
        if self._behind:
            self._behind = False
            frame, curves = self._writer.full()
        with self.hold_sync():
            self.frame = frame
            self.curves = curves

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The traits for a page; one that asks for all of them gets the whole run, not the last change."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if key is None:
            state["frame"], curves = self._writer.full()
            state["curves"] = memoryview(curves)
        return state

    def _on_message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "stop":
            self._state.stopping()
            self._stop()
            self.woken.set()
        elif kind == "sync":
            self._behind = True
            self.woken.set()


class Feed:
    """Keeps one run's model up to date from one thread; at the run's end its views become the snapshot."""

    def __init__(self, state: RunState, stop: Callable[[], None]) -> None:
        self.state = state
        self.widget = RunWidget(state, stop)
        self.closed = False
        self._views: list[WidgetView] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="nblaunch-dashboard", daemon=True)

    def attach(self, view: WidgetView) -> bool:
        """Count `view` among those that are live; False where it came too late."""
        with self._lock:
            if not self.closed:
                self._views.append(view)
                if not self._thread.ident:
                    self._thread.start()
            return not self.closed

    def detach(self, view: WidgetView) -> None:
        """`view` shows something else now."""
        with self._lock:
            if view in self._views:
                self._views.remove(view)

    def _run(self) -> None:
        while not self._close_if_unseen() and not self.state.over:
            self.widget.push()
            if self.state.metrics and _PICTURES not in sys.modules:
                importlib.import_module(_PICTURES)  # for the snapshot: now nobody waits for it
            self.widget.woken.wait(INTERVAL)
            self.widget.woken.clear()
        self.widget.push()
        with self._lock:
            self.closed = True
            views = list(self._views)
        for view in views:
            view.finish()
        self.widget.close()

    def _close_if_unseen(self) -> bool:
        with self._lock:
            self.closed = not self._views
            return self.closed


def _feed(state: RunState, stop: Callable[[], None]) -> Feed:
    """The feed of this run: displays of one run share a model."""
    if not isinstance(state.feed, Feed) or state.feed.closed:
        state.feed = Feed(state, stop)
    return state.feed


class WidgetView:
    """One place on the page where a run is shown: live while it lasts, then its snapshot."""

    shows_output = True

    def __init__(self, state: RunState, stop: Callable[[], None]) -> None:
        self.state = state
        self._stop = stop
        self._display = StaticDisplay(state)
        self._lock = threading.Lock()
        self._feed: Feed | None = None
        self._finished = False

    def start(self) -> None:
        """Show the run; of one that is over, only the snapshot."""
        if self.state.over:
            self._display.show()
            self.finish()
            return
        self._feed = _feed(self.state, self._stop)
        bundle: Any = self._feed.widget._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        data["text/plain"] = f"{self.state.name}: a run, unfinished when this notebook was saved"
        self._display.show(data, metadata)
        if not self._feed.attach(self):
            self.finish()

    def tick(self) -> None:
        """Nothing: the feed's thread updates the page."""

    def finish(self) -> None:
        """Put the snapshot in the live view's place."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self._display.replace()
        if self._feed is not None:
            self._feed.detach(self)
