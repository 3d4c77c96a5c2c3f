"""What stays of a run in a saved notebook: a table, the charts as one picture, the root cause. No script, no link."""

from __future__ import annotations

import io
import uuid
from typing import TYPE_CHECKING, Any

from nblaunch.dashboard import failures, formats
from nblaunch.dashboard.snapshot_html import html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nblaunch.dashboard.state import RunState

__all__ = ["StaticDisplay", "figure", "html", "png", "text"]

PICTURE_LIMIT = 90_000
"""Bytes that the picture may have; together with the table a snapshot keeps under 150 kB."""
_MOST_CHARTS = 9
_GREY = "#7d8590"
"""Readable on white and on black: the picture has no background of its own."""
_COLOURS = ("#2f81f7", "#d4812f", "#3fa45b")


def text(state: RunState) -> str:
    """The run in a few lines without markup: how it ended, its metrics, its root cause."""
    frame = state.frame()
    head = frame["head"]
    facts = ", ".join(part for part in (head["elapsed"], head["steps"], head["setup"]) if part)
    ended = state.status if state.over else f"{state.status}, unfinished when this was written"
    lines = [f"{state.name}: {ended}, {facts}"]
    lines += [f"  {metric}" for metric in metric_lines(frame["charts"][:12])]
    if state.cause is not None:
        lines.append(f"{failures.title(state.cause)}:")
        lines += [f"  {line}" for line in failures.excerpt(state.cause).splitlines()]
    if head["closing"]:
        lines.append(head["closing"])
    return formats.plain("\n".join(lines))


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
    """The charts as a matplotlib figure: each metric's mean over ranks, and the band from the least to the greatest.

    Args:
        state: The run.
        metrics: Names of metrics, a chart each; none means all, those of one prefix sharing a chart.

    Raises:
        KeyError: A name that was never logged; the message lists those that were.
    """
    from matplotlib.figure import Figure

    with state.lock:
        data = state.snapshot_data()
    curves: dict[str, list[tuple[int, float, float, float]]] = data["curves"]
    for name in metrics:
        if name not in curves:
            raise KeyError(f"no metric {name!r} was logged; there are: {', '.join(curves) or 'none'}")
    charts = (
        [{"title": name, "series": [{"metric": name, "label": name}]} for name in metrics]
        or data["charts"][:_MOST_CHARTS]
    )  # fmt: skip
    columns = min(3, max(1, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    made = Figure(figsize=(3.3 * columns, 2.05 * rows), layout="constrained")
    made.patch.set_alpha(0)
    for i, chart in enumerate(charts):
        _draw(made.add_subplot(rows, columns, i + 1), chart, curves)
    return made


def png(state: RunState) -> bytes:
    """`figure(state)` as a PNG of bounded size, empty where nothing was logged."""
    if not state.metrics:
        return b""
    made = figure(state)
    for dpi in (144, 110, 80, 60):
        target = io.BytesIO()
        made.savefig(target, format="png", dpi=dpi, transparent=True)
        if target.tell() <= PICTURE_LIMIT:
            break
    return target.getvalue()


def _draw(axes: Axes, chart: dict[str, Any], curves: dict[str, list[tuple[int, float, float, float]]]) -> None:
    for series, colour in zip(chart["series"], _COLOURS * len(chart["series"]), strict=False):
        points = curves[series["metric"]]
        steps, means, lows, highs = zip(*points, strict=True) if points else ((), (), (), ())
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.2, linewidth=0)
        style = {"marker": "o", "markersize": 3} if len(points) == 1 else {}
        axes.plot(steps, means, color=colour, linewidth=1.4, label=formats.plain(series["label"]), **style)
    axes.set_title(_literal(chart["title"]), fontsize=9, loc="left", color=_GREY)
    if len(chart["series"]) > 1:
        axes.legend(fontsize=7, frameon=False, labelcolor=_GREY)
    axes.patch.set_alpha(0)
    axes.tick_params(labelsize=7, colors=_GREY, length=2)
    axes.grid(visible=True, axis="y", color=_GREY, alpha=0.25, linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)
    axes.margins(x=0.01)


def _literal(title: str) -> str:
    """A name from a rank, with what matplotlib would read as mathematics taken literally."""
    return formats.plain(title).replace("$", r"\$")


class StaticDisplay:
    """Two outputs of a cell, kept for the table and the picture, that are filled now and replaced later.

    The picture is an output of its own, not an image in the table: sites that clean a notebook's HTML keep it.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._table = f"nblaunch-{uuid.uuid4().hex}"
        self._picture = f"nblaunch-{uuid.uuid4().hex}"

    def show(self, bundle: dict[str, Any] | None = None) -> None:
        """Display both: `bundle` (a live view), or the table as it stands, and the place of the picture."""
        from IPython.display import display

        display(bundle or self._table_bundle(), raw=True, display_id=self._table)
        display({"text/html": "", "text/plain": ""}, raw=True, display_id=self._picture)

    def replace(self) -> None:
        """Put the table and the picture, as they stand now, where `show` kept their place."""
        import base64

        from IPython.display import update_display

        update_display(self._table_bundle(), raw=True, display_id=self._table)
        picture = png(self.state)
        if picture:
            data = {
                "image/png": base64.b64encode(picture).decode(),
                "text/plain": "charts of the run's metrics",
            }
            update_display(data, raw=True, display_id=self._picture)

    def _table_bundle(self) -> dict[str, str]:
        return {"text/html": html(self.state), "text/plain": text(self.state)}
