"""What a state says of the run as a whole, worked out for a person: pace, time left, who deviates.

All of it is plain data, so that page, terminal and snapshot show the same and tests need no browser.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nblaunch.dashboard import formats
from nblaunch.dashboard.rows import SILENT_AFTER, Row, innermost, row_of, visible_bars
from nblaunch.dashboard.series import charts, main_metric
from nblaunch.wire.messages import Device

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RunState

FOLD_ABOVE = 16
"""With more ranks than this, views show the extremes and fold the others."""
COUNTED = frozenset(
    ["sample", "samples", "img", "image", "images", "example", "examples", "token", "tokens", "row", "rows"]
)
"""A bar with one of these units counts samples: its rate is the rank's throughput."""

_STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed", "tensor_parallel": "tensor parallel"}
_VENDOR = re.compile(r"^(NVIDIA|AMD|Intel\(R\)|Intel)\s+|\s+\d+\s?GB.*$|\s+PCIe$|-SXM\d?.*$|-\d+GB.*$")


def frame(state: RunState) -> dict[str, Any]:
    """See `RunState.frame`."""
    main = main_metric(state)
    rows = [row_of(state, rank, main) for rank in state.ranks.values()]
    _compare(state, rows)
    return {
        "head": _head(state, main),
        "rows": rows,
        "charts": charts(state),
        "remark": _remark(rows),
        "extremes": extremes(state, rows),
    }


def snapshot(state: RunState) -> dict[str, Any]:
    """See `RunState.snapshot_data`."""
    return {
        **frame(state),
        "curves": {name: curve.points() for name, curve in state.metrics.items()},
        "output": [(line.ranks, line.stream, line.text) for line in state.output.all],
        "notices": [(notice.level, notice.rank, notice.text) for notice in state.notices],
        "cause": state.cause,
        "others": state.others,
        "displays": list(state.displays.kept.values()),
    }


# ---- the run as a whole


def _head(state: RunState, main: str) -> dict[str, str]:
    steps, samples, left = pace(state), throughput(state), "" if state.over else time_left(state)
    span = formats.duration(state.elapsed)
    words = {"done": f"in {span}", "failed": f"after {span}", "stopped": f"after {span}"}
    return {
        "status": state.status,
        "name": state.name,
        "elapsed": words.get(state.status, span),
        "steps": steps,
        "samples": samples,
        "left": left,
        "setup": setup(state),
        "main": main,
        "closing": closing(state),
    }


def setup(state: RunState) -> str:
    """How the run was set up, as in `2 x cpu · DDP · bf16 · gloo`."""
    names = {device_name(rank.device) for rank in state.ranks.values() if rank.device}
    ranks = state.world_size or len(state.ranks) or state.config.num_processes
    precision = state.config.mixed_precision
    parts = [
        f"{ranks} \u00d7 {', '.join(sorted(names))}" if names else f"{ranks} ranks" if ranks else "",
        _STRATEGIES.get(state.config.strategy, ""),
        precision if precision and precision != "no" else "",
        state.backend,
    ]
    return " · ".join(part for part in parts if part)


def device_name(device: Device) -> str:
    """A device's model, short: `H100`, or its type where it has no name."""
    if device.type == "cpu" or not device.name:
        return device.type
    name = device.name
    while (shorter := _VENDOR.sub("", name).strip()) != name and shorter:
        name = shorter
    return name


def pace(state: RunState) -> str:
    """Steps a second: of late while it runs, on average once it is over; from metrics, else from bars."""
    recent = list(state.pace)
    if len(recent) >= 2 and state.pace_start is not None:
        start = state.pace_start if state.over else _window(recent)
        (t0, s0), (t1, s1) = start, recent[-1]
        if t1 > t0 and (state.over or state.clock() - t1 < max(10.0, 4 * (t1 - t0))):
            return f"{formats.rate((s1 - s0) / (t1 - t0))} steps/s"
    if state.over:
        return ""
    bars = [bar for rank in state.ranks.values() if (bar := innermost(rank)) and bar.rate and bar.unit not in COUNTED]
    if not bars:
        return ""
    return f"{formats.rate(statistics.median(bar.rate or 0 for bar in bars))} {bars[0].unit or 'it'}/s"


def _window(recent: list[tuple[float, int]]) -> tuple[float, int]:
    """Where the last ten seconds of the pace begin."""
    since = recent[-1][0] - 10.0
    return next((point for point in recent if point[0] >= since and point is not recent[-1]), recent[-2])


def throughput(state: RunState) -> str:
    """Samples a second of all ranks together, where their bars count samples."""
    bars = [bar for rank in state.ranks.values() for bar in rank.bars if bar.unit in COUNTED and bar.rate]
    if not bars or state.over:
        return ""
    return f"{formats.rate(sum(bar.rate or 0 for bar in bars))} {bars[0].unit.removesuffix('s')}s/s"


def time_left(state: RunState) -> str:
    """An estimate by the slowest rank's outermost bar."""
    now = state.clock()
    spans: list[float] = []
    for rank in state.ranks.values():
        if rank.over or not rank.bars:
            continue
        outer = visible_bars(rank)[0]
        done, (since, before) = rank.done, rank.bars_seen.get(outer.id, (now, 0.0))
        if done - before > 0.005 and now - since > 1.0:
            spans.append((1 - done) * (now - since) / (done - before))
    return f"about {formats.roughly(max(spans))} left" if spans and max(spans) >= 1 else ""


def closing(state: RunState) -> str:
    """The last line of a run that is over: what came of it, and the audit's verdict."""
    if not state.over:
        return ""
    returned = [rank.rank for rank in state.ranks.values() if rank.state in ("returned", "ended")]
    if state.status == "done":
        few = {0: "Done", 1: "The rank returned", 2: "Both ranks returned"}
        what = few.get(len(returned), f"All {len(returned)} ranks returned")
        text = f"{what} in {formats.duration(state.elapsed)}."
    elif state.status == "stopped":
        text = f"Stopped after {formats.duration(state.elapsed)}."
    else:
        text = ""
    if state.result and state.status == "done":
        text = f"{text} Result: {state.result}"
    return " ".join(part for part in (text, state.verdict) if part)


# ---- ranks beside one another


def _compare(state: RunState, rows: list[Row]) -> None:
    """Flag what deviates from the other ranks."""
    if state.over or len(rows) < 2:
        return
    late = _late(state)
    busy = [row.utilization for row in rows if row.utilization >= 0]
    usual = statistics.median(busy) if busy else 0
    waits = [row.data_wait for row in rows if row.data_wait >= 0]
    patience = statistics.median(waits) if waits else 0
    for row in rows:
        if row.rank in late:
            row.flags += "l"
            row.note = row.note or f"{late[row.rank]} behind"
        if 0 <= row.utilization < 0.75 * usual and usual >= 20:
            row.flags += "u"
        if row.data_wait > max(0.1, 1.5 * patience):
            row.flags += "w"


def _late(state: RunState) -> dict[int, str]:
    """The ranks that are clearly behind the others, and by how many iterations of the innermost bar.

    Ranks report at different moments, so that what one does in a second is no lag; nor are 3 % of an inner loop.
    """
    bars = {rank.rank: visible_bars(rank) for rank in state.ranks.values() if not rank.over}
    shapes = {tuple((bar.description, bar.total) for bar in own) for own in bars.values()}
    totals = [total or 0 for _, total in shapes.pop()] if len(shapes) == 1 else []
    if len(bars) < 2 or not all(totals) or not totals:
        return {}
    position = {rank: state.ranks[rank].done * math.prod(totals) for rank in bars}
    middle = statistics.median_high(position.values())
    slack = max(2.0, 0.03 * totals[-1], statistics.median(own[-1].rate or 0 for own in bars.values()))
    return {rank: formats.count(round(middle - at)) for rank, at in position.items() if middle - at > slack}


def extremes(state: RunState, rows: list[Row]) -> list[tuple[int, str]]:
    """Of many ranks, those to look at, each with the reason: what deviates, then who is first in what.

    Few ranks have none: they are all shown.
    """
    if len(rows) <= FOLD_ABOVE:
        return []
    deviating = sorted((row for row in rows if row.flags and row.flags != "x"), key=_urgency)
    named = {row.rank: row.note for row in deviating[:6]}
    curve = state.metrics.get(main_metric(state))
    best: list[tuple[str, Callable[[Row], float]]] = [
        ("furthest behind", lambda row: -row.done if row.done >= 0 else -9),
        ("most memory", lambda row: row.memory_fraction),
        ("least busy", lambda row: -row.utilization if row.utilization >= 0 else -999),
    ]
    if curve is not None:
        best.append((f"highest {main_metric(state)}", lambda row: curve.last.get(row.rank, -math.inf)))
    for why, key in best:
        top = max(rows, key=key)
        if len({key(row) for row in rows}) > 1:
            named.setdefault(top.rank, why)
    return list(named.items())


def _urgency(row: Row) -> int:
    return min("fxskluw".index(flag) for flag in row.flags) if row.flags else 9


def _remark(rows: list[Row]) -> str:
    """One sentence on what deviates, if anything does."""
    silent = [row.rank for row in rows if "s" in row.flags]
    if silent:
        return f"No sign from {formats.rank_list(silent)} for more than {SILENT_AFTER:.0f} s."
    odd = [row for row in rows if set("lw") & set(row.flags)]
    if len(odd) > 1:
        return f"{formats.rank_list(row.rank for row in odd).capitalize()} are slower than the others."
    if not odd:
        return ""
    row = odd[0]
    waits = f"waits {round(100 * row.data_wait)} % of its time for data, more than the others"
    if "l" not in row.flags:
        return f"Rank {row.rank} {waits}."
    return f"Rank {row.rank} is late, {row.note} the others" + (f"; it {waits}." if "w" in row.flags else ".")
