"""The views that print, only in the cell's thread: rich's live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from nblaunch.dashboard import formats, snapshot
from nblaunch.dashboard.rows import Row

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nblaunch.dashboard.state import RunState

_FRAME = 0.25
"""Seconds between two frames in a terminal."""
_MOST_ROWS = 16
"""From one rank more on, a terminal shows only those that deviate, and the first."""


class NoView:
    """Shows nothing."""

    shows_output = False

    def __init__(self, state: RunState) -> None:
        self.state = state

    def start(self) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class LinesView:
    """A few plain lines: at the start, at each tenth, at the end. For a file, and for what reads along."""

    shows_output = False

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._tenths = 0
        self._announced = False
        self._finished = False

    def start(self) -> None:
        """Print nothing yet: how the run is set up is known only once its ranks exist."""

    def tick(self) -> None:
        """Print a line if a tenth more is done."""
        if not self._announced and self.state.status != "starting":
            self._announced = True
            self._print(f"{self.state.name}: running, {self.state.frame()['head']['setup']}")
        if self._announced and not self._finished:
            frame = self.state.frame()
            known = [row.done for row in frame["rows"] if row.done >= 0]
            tenths = int(min(known) * 10 + 1e-9) if known else 0
            if tenths > self._tenths:
                self._tenths = tenths
                if tenths < 10:
                    self._print(f"{self.state.name}: {tenths * 10} %, {_summary(frame)}")

    def finish(self) -> None:
        """Print how it ended."""
        if not self._finished:
            self._finished = True
            self.conclude()

    def conclude(self) -> None:
        """Print the last lines."""
        self._print(snapshot.text(self.state))

    def _print(self, line: str) -> None:
        print(formats.plain(line), flush=True)


class CapturedView(LinesView):
    """As `LinesView`, in a notebook that a program executes; at the end it leaves the snapshot.

    From the start it holds the place of the snapshot with one marked unfinished, so that a run that nobody
    waits for is never shown as live in the saved notebook.
    """

    def __init__(self, state: RunState) -> None:
        super().__init__(state)
        self._display = snapshot.StaticDisplay(state)

    def start(self) -> None:
        """Display the snapshot as it stands, marked unfinished."""
        self._display.show()

    def conclude(self) -> None:
        """Put the final snapshot in its place."""
        self._display.replace()


class LiveView:
    """A view in a terminal that is drawn anew four times a second."""

    shows_output = False

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._live: Any = None
        self._drawn = 0.0
        self._finished = False

    def start(self) -> None:
        """Begin to draw; what is printed meanwhile appears above the view."""
        from rich.live import Live

        self._live = Live(self._draw(), auto_refresh=False, transient=True)
        self._live.start()

    def tick(self) -> None:
        """Draw a frame if one is due."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= _FRAME:
            self._drawn = now
            self._live.update(self._draw(), refresh=True)

    def finish(self) -> None:
        """Take the live view away and leave a few lines."""
        if self._finished:
            return
        self._finished = True
        if self._live is not None:
            self._live.stop()
            self._live = None
        print(snapshot.text(self.state), file=sys.stdout, flush=True)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        frame = self.state.frame()
        rows: list[Row] = frame["rows"]
        table = Table.grid(padding=(0, 2))
        for row in shown_rows(rows):
            style = "red" if set("fx") & set(row.flags) else "yellow" if row.flags else ""
            table.add_row(*map(Text, _cells(row)), style=style)
        head = Text(formats.plain(f"{frame['head']['status']}  {self.state.name}  {_summary(frame)}"), style="bold")
        lines: list[RenderableType] = [head, table]
        if len(rows) > _MOST_ROWS:
            lines.append(Text(f"{len(rows)} ranks, {len(rows) - len(shown_rows(rows))} of them as usual", style="dim"))
        lines += [Text(line, style="dim") for line in snapshot.metric_lines(frame["charts"][:8])]
        if frame["remark"]:
            lines.append(Text(frame["remark"], style="yellow"))
        return Group(*lines)


def shown_rows(rows: list[Row]) -> list[Row]:
    """The rows that fit a screen: all of a few, else the first and those that deviate."""
    if len(rows) <= _MOST_ROWS:
        return rows
    return [row for row in rows if row.flags or row is rows[0]][:_MOST_ROWS]


def _summary(frame: dict[str, Any]) -> str:
    head = frame["head"]
    return ", ".join(head[key] for key in ("elapsed", "steps", "samples", "left", "setup") if head[key])


def _cells(row: Row) -> list[str]:
    """A rank's row, a line for each bar in the columns of the bars."""
    labels = "\n".join("  " * depth + label for depth, label, _, _ in row.bars)
    blocks = "\n".join(_blocks(done) for _, _, done, _ in row.bars)
    rates = "\n".join(right for _, _, _, right in row.bars)
    busy = f"{row.utilization:.0f} %" if row.utilization >= 0 else ""
    return [
        formats.plain(c)
        for c in (f"{row.rank} {row.device}", labels, blocks, rates, row.main, busy, row.memory, row.note)
    ]


def _blocks(done: float, width: int = 16) -> str:
    if done < 0:
        return ""
    full = round(done * width)
    return "━" * full + "╌" * (width - full)
