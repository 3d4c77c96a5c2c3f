"""What stays of a run in a saved notebook: a table, the charts as one picture, the root cause; no script."""

from __future__ import annotations

import base64
import uuid
from typing import TYPE_CHECKING, Any

from nblaunch.dashboard import failures, formats
from nblaunch.dashboard.snapshot_html import html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nblaunch.dashboard.rows import Row
    from nblaunch.dashboard.state import RunState

_MOST_RANKS = 8

__all__ = ["StaticDisplay", "figure", "html", "png", "text"]


def text(state: RunState) -> str:
    """The run in a few lines without markup: how it ended, its metrics, its root cause."""
    frame = state.frame()
    head = frame["head"]
    facts = ", ".join(part for part in (head["elapsed"], head["steps"], head["setup"]) if part)
    ended = state.status if state.over else f"{state.status}, unfinished when this was written"
    lines = [f"{state.name}: {ended}, {facts}"]
    lines += [f"  {rank}" for rank in bar_lines(frame["rows"])]
    lines += [f"  {metric}" for metric in metric_lines(frame["charts"][:12])]
    if state.cause is not None:
        lines.append(f"{failures.title(state.cause)}:")
        lines += [f"  {line}" for line in failures.excerpt(state.cause).splitlines()]
    if head["closing"]:
        lines.append(head["closing"])
    return formats.plain("\n".join(lines))


def bar_lines(rows: list[Row]) -> list[str]:
    """Each of the first ranks that have bars as one line: how far it is in each, and how fast."""
    lines: list[str] = []
    for row in rows[:_MOST_RANKS]:
        parts = [f"{label} {pace}".strip() for _, label, _, pace in row.bars]
        if parts:
            lines.append(formats.plain(f"rank {row.rank}: {', '.join(parts)}"))
    return lines


def metric_lines(charts: list[dict[str, Any]]) -> list[str]:
    """Each chart as one line: every series' last mean over ranks, and the extremes where ranks differ."""
    lines: list[str] = []
    for chart in charts:
        parts: list[str] = []
        for series in chart["series"]:
            label = "" if len(chart["series"]) == 1 else f"{series['label']} "
            spread = "" if series["low"] == series["high"] else f" ({series['low']} to {series['high']})"
            parts.append(f"{label}{series['now']}{spread}")
        lines.append(formats.plain(f"{chart['title']} {', '.join(parts)}"))
    return lines


def figure(state: RunState, *metrics: str) -> Figure:
    """The charts as a matplotlib figure: each metric's mean over ranks, and the band from least to greatest.

    Args:
        state: The run.
        metrics: Names of metrics, a chart each; none means all, those of one prefix sharing a chart.

    Raises:
        KeyError: A name that was never logged; the message lists those that were.
    """
    from nblaunch.dashboard import pictures

    return pictures.figure(state, *metrics)


def png(state: RunState) -> bytes:
    """`figure(state)` as a PNG of bounded size, empty where nothing was logged."""
    if not state.metrics:
        return b""
    from nblaunch.dashboard import pictures

    return pictures.figure(state).bounded_picture()


class StaticDisplay:
    """Two outputs of a cell, kept for the table and the picture, that are filled now and replaced later.

    The picture is an output of its own, not an image in the table: sites that clean HTML keep it.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._table = f"nblaunch-{uuid.uuid4().hex}"
        self._picture = f"nblaunch-{uuid.uuid4().hex}"

    def show(self, bundle: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None) -> None:
        """Display both: `bundle` (a live view), or the table as it stands, and the place of the picture."""
        from IPython.display import display

        display(bundle or self._table_bundle(), metadata=metadata or {}, raw=True, display_id=self._table)
        display({"text/html": "", "text/plain": ""}, raw=True, display_id=self._picture)

    def replace(self) -> None:
        """Put the table and the picture, as they stand now, where `show` kept their place."""
        from IPython.display import update_display

        update_display(self._table_bundle(), raw=True, display_id=self._table)
        picture = png(self.state)
        if picture:
            data = {"image/png": base64.b64encode(picture).decode(), "text/plain": "charts of the run's metrics"}
            width = int.from_bytes(picture[16:20], "big")  # from the PNG's header
            metadata = {"image/png": {"width": round(width / 1.5), "alt": "charts of the run's metrics"}}
            update_display(data, metadata=metadata, raw=True, display_id=self._picture)

    def _table_bundle(self) -> dict[str, str]:
        return {"text/html": html(self.state), "text/plain": text(self.state)}
