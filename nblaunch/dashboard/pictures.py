"""A run's charts as a matplotlib figure. Importing this imports matplotlib; `snapshot` does so only when asked."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from nblaunch.dashboard import formats

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RunState

LIMIT = 65_000
"""Bytes that the picture may have: with the table, a snapshot keeps under 150 kB in the notebook."""
DOTS = 144
_COLOURS_KEPT = 64
"""Colours of the picture: enough for a few lines and their bands, at a quarter of the bytes."""
_MOST_CHARTS = 9
_GREY = "#7d8590"
"""Readable on white and on black: the picture has no background of its own."""
_COLOURS = ("#2f81f7", "#d4812f", "#3fa45b")

Points = list[tuple[int, float, float, float]]


class RunFigure(Figure):
    """A figure that a notebook shows also where matplotlib's inline backend was never loaded."""

    def _repr_png_(self) -> bytes:
        return self.picture(DOTS)

    def picture(self, dots: int) -> bytes:
        """The figure as a PNG of few colours."""
        whole, small = io.BytesIO(), io.BytesIO()
        self.savefig(whole, format="png", dpi=dots, transparent=True)
        reduced = Image.open(whole).quantize(_COLOURS_KEPT, method=Image.Quantize.FASTOCTREE)
        reduced.save(small, format="png", optimize=True)
        return small.getvalue()

    def bounded_picture(self) -> bytes:
        """The figure as a PNG of at most `LIMIT` bytes, with fewer dots if need be."""
        pictures = (self.picture(dots) for dots in (DOTS, 100, 70))
        return next((picture for picture in pictures if len(picture) <= LIMIT), b"")


def figure(state: RunState, *metrics: str) -> RunFigure:
    """See `snapshot.figure`."""
    data = state.snapshot_data()
    curves: dict[str, Points] = data["curves"]
    for name in metrics:
        if name not in curves:
            raise KeyError(f"no metric {name!r} was logged; there are: {', '.join(curves) or 'none'}")
    chosen = [{"title": name, "series": [{"metric": name, "label": name}]} for name in metrics]
    charts = chosen or data["charts"][:_MOST_CHARTS]
    columns = min(3, max(1, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    made = RunFigure(figsize=(3.3 * columns, 2.05 * rows), layout="constrained")
    made.patch.set_alpha(0)
    for i, chart in enumerate(charts):
        _draw(made.add_subplot(rows, columns, i + 1), chart, curves)
    return made


def _draw(axes: Axes, chart: dict[str, Any], curves: dict[str, Points]) -> None:
    for series, colour in zip(chart["series"], _COLOURS * len(chart["series"]), strict=False):
        points = curves[series["metric"]]
        steps, means, lows, highs = zip(*points, strict=True) if points else ((), (), (), ())
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.2, linewidth=0)
        label = _literal(series["label"])
        marker = "o" if len(points) == 1 else None
        axes.plot(steps, means, color=colour, marker=marker, markersize=3, linewidth=1.4, label=label)
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


def _literal(name: str) -> str:
    """A name from a rank, with what matplotlib would read as mathematics taken literally."""
    return formats.plain(name).replace("$", r"\$")
