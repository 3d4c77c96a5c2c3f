"""The snapshot's table: HTML that needs no style sheet, so that it reads well where styles are taken out."""

from __future__ import annotations

import base64
import time
from html import escape
from typing import TYPE_CHECKING, Any

from nblaunch.dashboard import failures, formats
from nblaunch.dashboard.rows import Row
from nblaunch.wire.messages import Display

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RunState

_MOST_ROWS = 16
_MOST_LINES = 40
_MOST_METRICS = 24
_TEXT_LIMIT = 8_000
_DISPLAY_LIMIT = 20_000
"""Characters of other ranks' displays in the table; the rest is told and left out."""
_COLOURS = {"failed": "#cf222e", "done": "#2da44e"}
_LEFT = "text-align:left"
_RIGHT = "text-align:right"


def html(state: RunState) -> str:
    """The run as static HTML; everything that came from a rank is escaped."""
    data = state.snapshot_data()
    parts = [
        _head(state, data["head"]),
        _cause(data),
        _ranks(data),
        _metrics(data["charts"]),
        _displays(data["displays"]),
        _output(state, data),
        f"<p>{escape(data['head']['closing'])}</p>" if data["head"]["closing"] else "",
    ]
    return f'<div class="nblaunch-snapshot">{"".join(parts)}</div>'


def _head(state: RunState, head: dict[str, str]) -> str:
    word = f"<b>{head['status'].capitalize()}</b>"
    if state.status in _COLOURS:
        word = f'<b style="color:{_COLOURS[state.status]}">{head["status"].capitalize()}</b>'
    facts = [escape(head[key]) for key in ("elapsed", "steps", "setup") if head[key]]
    line = f"{word} &nbsp;<code>{escape(state.name)}</code> &nbsp;{' &nbsp;·&nbsp; '.join(facts)}"
    if not state.over:
        line += f" &nbsp;·&nbsp; <i>unfinished: as it stood at {time.strftime('%H:%M:%S')}</i>"
    return f"<p>{line}</p>"


def _cause(data: dict[str, Any]) -> str:
    cause = data["cause"]
    if cause is None:
        return ""
    excerpt = escape(failures.excerpt(cause)[:_TEXT_LIMIT])
    block = f"<p><b>{escape(failures.title(cause))}</b></p><pre>{excerpt}</pre>"
    if cause.text:
        block += _fold("Whole traceback", f"<pre>{escape(formats.plain(cause.text)[-_TEXT_LIMIT:])}</pre>")
    if data["others"]:
        followed = "".join(f"<li>{escape(failures.title(other))}</li>" for other in data["others"][:64])
        count = len(data["others"])
        block += _fold(f"What followed on {count} more rank{'s' * (count > 1)}", f"<ul>{followed}</ul>")
    return block


def _ranks(data: dict[str, Any]) -> str:
    rows: list[Row] = data["rows"]
    if not rows:
        return ""
    shown = rows
    if len(rows) > _MOST_ROWS:
        shown = [row for i, row in enumerate(rows) if i < 2 or row.flags][:_MOST_ROWS]
    main = data["head"]["main"]
    titles = ["rank", "device", "state", "progress", main, "memory"]
    cells = [
        [str(r.rank), r.device, r.note or r.state, " · ".join(bar[1] for bar in r.bars), r.main, r.memory]
        for r in shown
    ]
    table = _table(titles, cells)
    if len(shown) < len(rows):
        table += f"<p>and {len(rows) - len(shown)} more ranks</p>"
    return table


def _metrics(charts: list[dict[str, Any]]) -> str:
    series = [s for chart in charts for s in chart["series"]]
    cells = [[s["metric"], s["now"], s["low"], s["high"], f"{s['step']:,}"] for s in series[:_MOST_METRICS]]
    if not cells:
        return ""
    more = f"<p>and {len(series) - len(cells)} more metrics</p>" if len(series) > len(cells) else ""
    return _table(["metric", "last, mean of ranks", "least", "greatest", "step"], cells) + more


def _output(state: RunState, data: dict[str, Any]) -> str:
    lines = [
        f"[{formats.rank_list(ranks)}] {formats.plain(text)[:200]}" for ranks, _, text in data["output"][-_MOST_LINES:]
    ]
    notices = "".join(f"<li>{escape(formats.plain(text))}</li>" for _, _, text in data["notices"][-10:])
    block = f"<ul>{notices}</ul>" if notices else ""
    if not lines:
        return block
    written, warnings = state.output.written, state.output.warnings
    summary = f"Last lines of output ({written:,} in all" + (
        f", {warnings:,} warning{'s' * (warnings > 1)})" if warnings else ")"
    )
    return block + _fold(summary, f"<pre>{escape(chr(10).join(lines))}</pre>")


def _displays(displays: list[Display]) -> str:
    """What ranks other than 0 displayed; what rank 0 did stands in the cell itself."""
    left, blocks, dropped = _DISPLAY_LIMIT, list[str](), 0
    for display in displays:
        if display.rank == 0:
            continue
        shown = _display(display)
        if len(shown) > left:
            dropped += 1
            continue
        left -= len(shown)
        blocks.append(f"<p>rank {display.rank}</p>{shown}")
    if dropped:
        blocks.append(f"<p>{dropped} more left out for their size</p>")
    return _fold("Displayed by other ranks", "".join(blocks)) if blocks else ""


def _display(display: Display) -> str:
    for kind in ("image/png", "image/jpeg"):
        picture = display.data.get(kind)
        if picture:
            encoded = base64.b64encode(picture).decode() if isinstance(picture, bytes) else str(picture)
            source = escape(f"data:{kind};base64,{''.join(encoded.split())}")
            return f'<img alt="shown by rank {display.rank}" src="{source}">'
    return f"<pre>{escape(formats.plain(str(display.data.get('text/plain', ''))))}</pre>"


def _table(titles: list[str], rows: list[list[str]]) -> str:
    used = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    style = [_RIGHT if all(_is_figure(row[i]) for row in rows) else _LEFT for i in range(len(titles))]
    head = "".join(f'<th style="{style[i]}">{escape(titles[i])}</th>' for i in used)
    body = "".join(
        "<tr>" + "".join(f'<td style="{style[i]}">{escape(formats.plain(row[i]))}</td>' for i in used) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _is_figure(cell: str) -> bool:
    return not cell or cell.replace(",", "").replace(".", "").lstrip("-").isdigit() or cell == "nan"


def _fold(summary: str, inner: str) -> str:
    return f'<details style="margin-bottom:8px"><summary>{escape(summary)}</summary>{inner}</details>'
