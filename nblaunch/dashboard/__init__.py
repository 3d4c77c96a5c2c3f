"""What a person watches: the state of a run, built from its messages, and the views of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nblaunch.dashboard.detect import choose

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RunState


class View(Protocol):
    """One place where a person watches a run. Its methods are called in the thread that runs the cell."""

    @property
    def shows_output(self) -> bool:
        """Whether the view itself shows what every rank writes."""
        ...

    def start(self) -> None:
        """Show the run, and keep what is shown up to date from now on."""
        ...

    def tick(self) -> None:
        """Called about ten times a second while the cell waits: print what is due, where the view prints."""
        ...

    def finish(self) -> None:
        """The run has ended, or nobody waits any more: leave what shall stay. A second call does nothing."""
        ...


def open_view(state: RunState, choice: str, stop: Callable[[], None]) -> View:
    """The view of a run that fits where this process shows its output.

    Args:
        state: The run.
        choice: "auto", "widget", "text" or "none", as in `LaunchConfig.dashboard`.
        stop: Asks the run to stop and returns at once; for the view's Stop button.

    Returns:
        A view that was not started yet.
    """
    kind = choose(choice)
    if kind == "widget":
        from nblaunch.dashboard.widget import WidgetView

        return WidgetView(state, stop)
    from nblaunch.dashboard import terminal

    views: dict[str, Callable[[RunState], View]] = {
        "terminal": terminal.LiveView,
        "captured": terminal.CapturedView,
        "lines": terminal.LinesView,
        "none": terminal.NoView,
    }
    return views[kind](state)
