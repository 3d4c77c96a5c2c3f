"""What a state says, worked out for a person: pace, time left, who is late, which series share a chart.

Everything here returns plain data, so that page, terminal and snapshot show the same and tests need no browser.
"""

from __future__ import annotations

import re
import statistics
from typing import TYPE_CHECKING, Any

import msgspec

from nblaunch.dashboard import failures, formats
from nblaunch.wire.messages import Bar, Device, Display

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RankState, RunState

SILENT_AFTER = 5.0
"""Seconds without a sign from a rank after which it is greyed."""
STUCK_AFTER = 10.0
"""Seconds without a step, bar, or line, after which the line that a rank is in is shown."""
DATA_WAIT = "data_wait"
"""A metric of this name, from 0 to 1, is the share of a step that a rank spent waiting for data: a column, no chart."""
COUNTED = frozenset(
    ["sample", "samples", "img", "image", "images", "example", "examples", "token", "tokens", "row", "rows"]
)
"""A bar with one of these units counts samples: its rate is the rank's throughput."""

_ROLES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "eval": "val", "dev": "val",
    "test": "test",
}  # fmt: skip
_STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed", "tensor_parallel": "tensor parallel"}
_VENDOR = re.compile(r"^(NVIDIA|AMD|Intel\(R\)|Intel)\s+|\s+\d+\s?GB.*$|\s+PCIe$|-SXM\d?.*$|-\d+GB.*$")


class Row(msgspec.Struct, array_like=True):
    """One rank as a row shows it. On the wire to the page it is a list in this order."""

    rank: int
    device: str
    state: str
    flags: str
    """Letters: "f" the root cause, "x" failed or stopped after it, "s" silent, "k" stuck, "l" late, "u" utilisation
    below the others', "w" waits for data more than the others."""
    note: str
    """What is unusual, in words."""
    main: str
    """The main metric's last value."""
    utilization: float
    """Percent, -1 where unknown."""
    memory: str
    memory_fraction: float
    """-1 where unknown."""
    memory_title: str
    data_wait: float
    """0 to 1, -1 where unknown."""
    bars: list[tuple[int, str, float, str]]
    """Depth, description with n/total, fraction done (-1 where the total is unknown), rate and time left."""
    done: float
    """How far the rank is in all, 0 to 1; -1 where unknown."""


def frame(state: RunState) -> dict[str, Any]:
    """See `RunState.frame`."""
    main = main_metric(state)
    rows = [_row(state, rank, main) for rank in state.ranks.values()]
    _compare(state, rows)
    return {
        "head": _head(state, main),
        "rows": rows,
        "charts": charts(state),
        "remark": _remark(state, rows),
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
        "displays": list(state.displays),
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
        f"{ranks} × {', '.join(sorted(names))}" if names else f"{ranks} ranks" if ranks else "",
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
    """Steps a second: of late while it runs, on average once it is over. From metrics, else from bars; or nothing."""
    recent = list(state.pace)
    if len(recent) >= 2 and state.pace_start is not None:
        start = state.pace_start if state.over else _window(recent)
        (t0, s0), (t1, s1) = start, recent[-1]
        if t1 > t0 and (state.over or state.clock() - t1 < max(10.0, 4 * (t1 - t0))):
            return f"{formats.rate((s1 - s0) / (t1 - t0))} steps/s"
    if state.over:
        return ""
    bars = [bar for rank in state.ranks.values() if (bar := _innermost(rank)) and bar.rate and bar.unit not in COUNTED]
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
        outer = min(rank.bars, key=lambda bar: bar.depth)
        done, (since, before) = done_fraction(rank), rank.bars_seen.get(outer.id, (now, 0.0))
        if done - before > 0.005 and now - since > 1.0:
            spans.append((1 - done) * (now - since) / (done - before))
    return f"about {formats.roughly(max(spans))} left" if spans and max(spans) >= 1 else ""


def closing(state: RunState) -> str:
    """The last line of a run that is over: what came of it, and the audit's verdict."""
    if not state.over:
        return ""
    returned = [rank.rank for rank in state.ranks.values() if rank.state in ("returned", "ended")]
    if state.status == "done":
        what = f"All {len(returned)} ranks returned" if len(returned) > 1 else "The rank returned"
        if not returned:
            what = "Done"
        text = f"{what} in {formats.duration(state.elapsed)}."
    elif state.status == "stopped":
        text = f"Stopped after {formats.duration(state.elapsed)}."
    else:
        text = ""
    if state.result and state.status == "done":
        text = f"{text} Result: {state.result}"
    return " ".join(part for part in (text, state.verdict) if part)


# ---- a rank's row


def _row(state: RunState, rank: RankState, main: str) -> Row:
    now, curve = state.clock(), state.metrics.get(main)
    silent, still = now - rank.heard, now - rank.moved
    flags, note = "", ""
    if state.cause is not None and state.cause.rank == rank.rank:
        flags, note = "f", failures.how(state.cause)
    elif rank.state in ("failed", "stopped"):
        flags, note = "x", failures.how(rank.failure) if rank.failure else rank.detail or rank.state
    elif not (rank.over or state.over) and silent > SILENT_AFTER:
        flags, note = (
            "s",
            f"no sign for {formats.duration(silent)}" + (f", last in {rank.where}" if rank.where else ""),
        )
    elif rank.state == "running" and not state.over and still > STUCK_AFTER and rank.where:
        flags, note = "k", f"for {formats.duration(still)} in {rank.where}"
    memory, fraction_used, title = _memory(rank)
    utilization = rank.sample.utilization if rank.sample else -1
    last = curve.last.get(rank.rank) if curve else None
    waits = state.metrics.get(DATA_WAIT)
    wait = waits.last.get(rank.rank, -1.0) if waits else -1.0
    return Row(
        rank=rank.rank,
        device=_place(rank.device),
        state=rank.state,
        flags=flags,
        note=note,
        main="" if last is None else formats.number(last),
        utilization=round(utilization) if utilization >= 0 else -1,
        memory=memory,
        memory_fraction=round(fraction_used, 3),
        memory_title=title,
        data_wait=round(wait, 3) if 0 <= wait <= 1 else -1,
        bars=[_bar(bar, over=rank.over) for bar in visible_bars(rank)],
        done=round(done_fraction(rank), 4) if rank.bars else -1,
    )


def _place(device: Device | None) -> str:
    return "" if device is None else device.type if device.type == "cpu" else f"{device.type}:{device.index}"


def _memory(rank: RankState) -> tuple[str, float, str]:
    """The memory cell's text, how full its meter is, and what a pointer on it reads."""
    sample = rank.sample
    if sample is None:
        return "", -1, ""
    host = f"process {formats.size(sample.host_memory)}" if sample.host_memory >= 0 else ""
    if sample.memory_used < 0:
        return (
            (formats.size(sample.host_memory) if host else ""),
            -1,
            host and "resident memory of the rank's process",
        )
    total = sample.memory_total if sample.memory_total > 0 else rank.device.memory if rank.device else 0
    peak = f"peak {formats.size(sample.memory_peak)}" if sample.memory_peak >= 0 else ""
    title = " · ".join(part for part in (peak, host) if part)
    if total <= 0:
        return formats.size(sample.memory_used), -1, title
    used = f"{sample.memory_used / 1e9:.1f}" if total >= 1e9 else formats.size(sample.memory_used)
    whole = f"{total / 1e9:.0f} GB" if total >= 1e9 else formats.size(total)
    return f"{used} of {whole}", min(1.0, sample.memory_used / total), title


def visible_bars(rank: RankState) -> list[Bar]:
    """The bars that a row shows, outermost first: at most three that are open, else the outermost closed one."""
    bars = sorted(rank.bars, key=lambda bar: bar.depth)
    open_bars = [bar for bar in bars if not bar.closed]
    if not open_bars:
        return bars[:1]
    return open_bars if len(open_bars) <= 3 else [open_bars[0], *open_bars[-2:]]


def _innermost(rank: RankState) -> Bar | None:
    bars = visible_bars(rank)
    return bars[-1] if bars and not bars[-1].closed else None


def fraction(bar: Bar) -> float | None:
    """How much of a bar is done, 0 to 1; None where its total is unknown."""
    return min(1.0, max(0.0, bar.n / bar.total)) if bar.total else None


def done_fraction(rank: RankState) -> float:
    """How far a rank is in all, 0 to 1: its outermost bar, with the inner ones as parts of its present iteration."""
    done = 0.0
    for bar in reversed(visible_bars(rank)):
        if bar.total:
            inner = 0.0 if bar.closed or bar.n >= bar.total else done
            done = min(1.0, (bar.n + inner) / bar.total)
    return done


def _bar(bar: Bar, over: bool) -> tuple[int, str, float, str]:
    total = f"/{formats.count(bar.total)}" if bar.total else f" {bar.unit}" if bar.unit != "it" else ""
    label = f"{bar.description.rstrip(': ')} {formats.count(bar.n)}{total}".strip()
    parts: list[str] = []
    if bar.postfix:
        parts.append(bar.postfix)
    if not over and not bar.closed and bar.rate:
        unit = "" if bar.unit == "it" else f" {bar.unit}"
        parts.append(
            f"{formats.rate(bar.rate)}{unit}/s" if bar.rate >= 0.1 else f"{formats.duration(1 / bar.rate)} each"
        )
        if bar.total and bar.n < bar.total:
            parts.append(f"{formats.roughly((bar.total - bar.n) / bar.rate)} left")
    done = fraction(bar)
    return bar.depth, label, -1 if done is None else round(done, 4), " · ".join(parts)


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
    """The ranks whose innermost bar is clearly behind the others', and by how much."""
    bars = {rank.rank: bar for rank in state.ranks.values() if (bar := _innermost(rank)) and bar.total}
    if len(bars) < 2 or len({(bar.description, bar.total, bar.depth) for bar in bars.values()}) > 1:
        return {}
    middle = statistics.median_high(bar.n for bar in bars.values())
    total = next(iter(bars.values())).total or 1
    slack = max(2.0, 0.03 * total)
    return {r: f"{formats.count(middle - bar.n)} {bar.unit}" for r, bar in bars.items() if middle - bar.n > slack}


def _remark(state: RunState, rows: list[Row]) -> str:
    """One sentence on what deviates, if anything does."""
    late = [row for row in rows if "l" in row.flags]
    silent = [row.rank for row in rows if "s" in row.flags]
    waiting = [row for row in rows if "w" in row.flags]
    if silent:
        return f"No sign from {formats.rank_list(silent)} for more than {SILENT_AFTER:.0f} s."
    if waiting:
        worst = max(waiting, key=lambda row: row.data_wait)
        return f"Rank {worst.rank} waits {worst.data_wait:.0%} of its time for data, more than the others."
    if len(late) == 1:
        return f"Rank {late[0].rank} is late: {late[0].note} the others."
    if late:
        return f"{formats.rank_list(row.rank for row in late).capitalize()} are late."
    return ""


# ---- metrics


def main_metric(state: RunState) -> str:
    """The metric that stands in each rank's row: a loss if there is one, else the first that was logged."""
    names = [name for name in state.metrics if name != DATA_WAIT]
    for fits in (
        lambda n: split_role(n)[0] == "loss" and split_role(n)[1] != "val",
        lambda n: "loss" in n.lower(),
    ):
        for name in names:
            if fits(name):
                return name
    return names[0] if names else ""


def split_role(name: str) -> tuple[str, str]:
    """A metric's name without the word for its data, and that word: "train", "val", "test", or "".

    Example:
        >>> split_role("train/loss"), split_role("val_loss"), split_role("loss"), split_role("evaluate")
        (('loss', 'train'), ('loss', 'val'), ('loss', ''), ('evaluate', ''))
    """
    words = re.split(r"([/_. -])", name)
    for at, rest in ((0, words[2:]), (-1, words[:-2])):
        role = _ROLES.get(words[at].lower())
        if role and rest:
            return "".join(rest), role
    return name, ""


def charts(state: RunState) -> list[dict[str, Any]]:
    """Which series share a chart: title, and for each series its metric, its label, its last mean, least, greatest."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, curve in state.metrics.items():
        if name == DATA_WAIT and all(0 <= value <= 1 for value in curve.last.values()):
            continue
        title, role = split_role(name)
        last = list(curve.last.values())
        found.setdefault(title, []).append({
            "metric": name,
            "label": role or name,
            "now": formats.number(sum(last) / len(last)),
            "low": formats.number(min(last)),
            "high": formats.number(max(last)),
            "bad": f"not finite from step {curve.bad[0]:,} on rank {curve.bad[1]}" if curve.bad else "",
            "step": curve.step,
        })  # fmt: skip
    return [
        {
            "title": title if len(series) > 1 else series[0]["metric"],
            "series": sorted(series, key=lambda s: s["label"] == "val"),
        }
        for title, series in found.items()
    ]


def display_size(message: Display) -> int:
    """How large a display is, in characters or bytes of its contents."""
    return sum(len(value) if isinstance(value, str | bytes) else 200 for value in message.data.values())
