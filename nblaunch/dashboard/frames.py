"""What goes to the page: one small message a frame, what changed as JSON, the curves' new buckets as bytes.

A frame is absolute in what it holds (a row, a bucket, a line by its number), so that a frame seen twice, or
after a full one that already had it, changes nothing. A page that missed one notices by `seq` and asks for a
full one.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from nblaunch.dashboard import failures, formats
from nblaunch.dashboard.output import Line
from nblaunch.dashboard.rows import Row
from nblaunch.wire.messages import Display, Failure

if TYPE_CHECKING:
    from nblaunch.dashboard.curves import Curve
    from nblaunch.dashboard.state import RunState

LINES_A_FRAME = 40
"""New lines that one frame carries, the newest; the page says how many it was not sent."""
LINES_IN_FULL = 600
_BLOCK = struct.Struct("<IIIId")
"""Before each curve's rows: series, shift, rows, columns of a row, the first row's bucket."""
_SHOWN_AS = ("image/png", "image/jpeg", "image/svg+xml", "text/html", "text/plain")


class FrameWriter:
    """Writes the frames of one page model: `full()` all that is known, `delta()` what changed."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.sequence = 0
        self._series: dict[str, int] = {}
        self._sent: dict[str, Any] = {}
        """Part of a frame to what was last sent of it."""
        self._rows: dict[int, Row] = {}
        self._next_line = 0
        self._shown: set[int] = set()
        """The displays that were sent."""

    def delta(self) -> tuple[dict[str, Any], bytes]:
        """What changed since the last delta."""
        with self.state.lock:
            self.sequence += 1
            now = self.state.frame()
            frame: dict[str, Any] = {"seq": self.sequence}
            self._changed(frame, "head", now["head"])
            self._changed(frame, "remark", now["remark"])
            self._changed(frame, "extremes", now["extremes"])
            self._changed(frame, "charts", self._layout(now["charts"]))
            self._changed(frame, "now", _latest(now["charts"]))
            self._changed(frame, "failure", _failure(self.state.cause, self.state.others))
            self._changed(frame, "notices", self._notices())
            self._displays(frame)
            rows = [row for row in now["rows"] if self._rows.get(row.rank) != row]
            if rows:
                self._rows.update((row.rank, row) for row in rows)
                frame["rows"] = msgspec.to_builtins(rows)
            self._lines(frame)
            return frame, self._changed_curves()

    def full(self) -> tuple[dict[str, Any], bytes]:
        """All that is known, as of now."""
        with self.state.lock:
            now = self.state.frame()
            lines = self.state.output.kept()[-LINES_IN_FULL:]
            layout = self._layout(now["charts"])
            frame = {
                "seq": self.sequence,
                "full": True,
                "head": now["head"],
                "remark": now["remark"],
                "extremes": now["extremes"],
                "charts": layout,
                "now": _latest(now["charts"]),
                "failure": _failure(self.state.cause, self.state.others),
                "notices": self._notices(),
                "displays": {"keep": [], "new": [_display(n, shown) for n, shown in self._others().items()]},
                "rows": msgspec.to_builtins(now["rows"]),
                "lines": [_line(line) for line in lines],
                "written": self.state.output.written,
                "warnings": self.state.output.warnings,
            }
            blocks = [
                self._block(name, curve, curve.base, curve.base + len(curve.counts) - 1)
                for name, curve in self.state.metrics.items()
                if name in self._series and curve.counts
            ]
            return frame, b"".join(blocks)

    def _changed(self, frame: dict[str, Any], part: str, value: Any) -> None:
        """Put `part` into the frame if it is not what was last sent of it."""
        if self._sent.get(part) != value:
            self._sent[part] = value
            frame[part] = value

    # ---- curves

    def _layout(self, charts: list[dict[str, Any]]) -> list[list[Any]]:
        """Which series stand in which chart: of each its number, label, metric, what is wrong, its ranks."""
        layout: list[list[Any]] = []
        for chart in charts:
            series = [
                [
                    self._series.setdefault(one["metric"], len(self._series)),
                    one["label"],
                    one["metric"],
                    one["bad"],
                    list(self.state.metrics[one["metric"]].ranks),
                ]
                for one in chart["series"]
            ]
            layout.append([chart["title"], series])
        return layout

    def _changed_curves(self) -> bytes:
        blocks: list[bytes] = []
        for name in self._series:
            curve = self.state.metrics[name]
            changed = curve.take_dirty()
            if changed is not None:
                blocks.append(self._block(name, curve, *changed))
        return b"".join(blocks)

    def _block(self, name: str, curve: Curve, first: int, last: int) -> bytes:
        columns = 4 + len(curve.ranks)
        rows = curve.rows(first, last)
        return _BLOCK.pack(self._series[name], curve.shift, len(rows) // columns, columns, first) + rows.tobytes()

    # ---- what ranks wrote and showed

    def _lines(self, frame: dict[str, Any]) -> None:
        output = self.state.output
        joined, fresh = output.take_joined(), output.since(self._next_line)
        if not fresh and not joined:
            return
        self._next_line = output.next_number
        oldest = fresh[0].number if fresh else self._next_line
        again = [line for line in joined if line.number < oldest]
        frame["lines"] = [_line(line) for line in again[-LINES_A_FRAME:] + fresh[-LINES_A_FRAME:]]
        frame["written"], frame["warnings"] = output.written, output.warnings

    def _notices(self) -> list[list[Any]]:
        return [[notice.level, notice.rank, notice.text] for notice in list(self.state.notices)[-6:]]

    def _others(self) -> dict[int, Display]:
        """What other ranks than 0 showed; rank 0's appear in the cell as they would have without a launch."""
        return {number: shown for number, shown in self.state.displays.kept.items() if shown.rank != 0}

    def _displays(self, frame: dict[str, Any]) -> None:
        others, known = self._others(), self._shown
        if others.keys() != known:
            new = [_display(number, shown) for number, shown in others.items() if number not in known]
            frame["displays"] = {"keep": sorted(known & others.keys()), "new": new}
            self._shown = set(others)


def _latest(charts: list[dict[str, Any]]) -> list[list[str]]:
    """Each series' last mean, least and greatest over ranks, in the order of the layout."""
    return [
        [one["now"]] if one["low"] == one["high"] else [one["now"], one["low"], one["high"]]
        for chart in charts
        for one in chart["series"]
    ]


def _line(line: Line) -> list[Any]:
    return [
        line.number,
        int(line.stream == "stderr"),
        formats.rank_list(line.ranks),
        list(line.ranks),
        line.text,
    ]


def _failure(cause: Failure | None, others: list[Failure]) -> dict[str, Any] | None:
    if cause is None:
        return None
    return {
        "rank": cause.rank,
        "title": failures.title(cause),
        "excerpt": failures.excerpt(cause),
        "text": formats.plain(cause.text)[-20_000:],
        "others": [failures.title(other) for other in others],
    }


def _display(number: int, shown: Display) -> list[Any]:
    """A display's number, rank, the richest kind that the page can show safely, and its data as text."""
    for kind in _SHOWN_AS:
        value = shown.data.get(kind)
        if isinstance(value, str) and value:
            return [number, shown.rank, kind, value]
    return [number, shown.rank, "text/plain", f"({', '.join(shown.data) or 'nothing'})"]
