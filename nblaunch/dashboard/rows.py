"""A rank as one row of a view: its bars, its figures, and what is unusual about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nblaunch.dashboard import failures, formats
from nblaunch.dashboard.series import DATA_WAIT
from nblaunch.wire.messages import Bar, Device, Sample

if TYPE_CHECKING:
    from nblaunch.dashboard.state import RankState, RunState

SILENT_AFTER = 5.0
"""Seconds without a sign from a rank after which it is greyed."""
STUCK_AFTER = 10.0
"""Seconds without a step, bar, or line, after which the line that a rank is in is shown."""


class Row(msgspec.Struct, array_like=True):
    """One rank as a row shows it. On the wire to the page it is a list in this order."""

    rank: int
    device: str
    state: str
    flags: str
    """Letters: "f" the root cause, "x" failed or stopped after it, "s" silent, "k" stuck, "l" late, "u" less
    utilised than the others, "w" waits for data more than the others."""
    note: str
    """What is unusual, in words."""
    main: str
    """The main metric's last value."""
    utilization: float
    """Percent, -1 where unknown."""
    memory: str
    memory_fraction: float
    """-1 where unknown."""
    memory_peak: str
    memory_title: str
    data_wait: float
    """0 to 1, -1 where unknown."""
    bars: list[tuple[int, str, float, str]]
    """Depth, description with n/total, fraction done (-1 where the total is unknown), rate and time left."""
    done: float
    """How far the rank is in all, 0 to 1; -1 where unknown."""


def row_of(state: RunState, rank: RankState, main: str) -> Row:
    """The row of `rank`; `main` is the metric whose value stands in it."""
    flags, note = _condition(state, rank)
    memory, memory_fraction, memory_title = _memory(rank)
    sample = rank.sample or Sample()
    curve = state.metrics.get(main)
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
        utilization=max(-1, round(sample.utilization)),
        memory=memory,
        memory_fraction=round(memory_fraction, 3),
        memory_peak=f"peak {formats.size(sample.memory_peak)}" if sample.memory_peak >= 0 else "",
        memory_title=memory_title,
        data_wait=round(wait, 3) if 0 <= wait <= 1 else -1,
        bars=[_bar(bar, over=rank.over) for bar in visible_bars(rank)],
        done=round(rank.done, 4) if rank.bars else -1,
    )


def _condition(state: RunState, rank: RankState) -> tuple[str, str]:
    """What is unusual about a rank by itself: its flag, and the same in words."""
    if state.cause is not None and state.cause.rank == rank.rank:
        return "f", failures.how(state.cause)
    if rank.state in ("failed", "stopped"):
        return "x", failures.how(rank.failure) if rank.failure else rank.detail or rank.state
    if rank.over or state.over:
        return "", ""
    silent, still = state.clock() - rank.heard, state.clock() - rank.moved
    if silent > SILENT_AFTER:
        where = f", last in {rank.where}" if rank.where else ""
        return "s", f"no sign for {formats.duration(silent)}{where}"
    if rank.state == "running" and still > STUCK_AFTER and rank.where:
        return "k", f"for {formats.duration(still)} in {rank.where}"
    return "", ""


def _place(device: Device | None) -> str:
    return "" if device is None else device.type if device.type == "cpu" else f"{device.type}:{device.index}"


def _memory(rank: RankState) -> tuple[str, float, str]:
    """The memory cell's text, how full its meter is, and what a pointer on it reads."""
    sample = rank.sample
    if sample is None:
        return "", -1, ""
    host = f"process {formats.size(sample.host_memory)}" if sample.host_memory >= 0 else ""
    if sample.memory_used < 0:
        return host.removeprefix("process "), -1, "resident memory of the rank's process"
    total = sample.memory_total if sample.memory_total > 0 else rank.device.memory if rank.device else 0
    if total <= 0:
        return formats.size(sample.memory_used), -1, host
    used = f"{sample.memory_used / 1e9:.1f}" if total >= 1e9 else formats.size(sample.memory_used)
    whole = f"{total / 1e9:.0f} GB" if total >= 1e9 else formats.size(total)
    return f"{used} of {whole}", min(1.0, sample.memory_used / total), host


def visible_bars(rank: RankState) -> list[Bar]:
    """The bars that a row shows, outermost first: one a depth, at most three; of closed ones the newest."""
    by_depth: dict[int, Bar] = {}
    for bar in sorted(rank.bars, key=lambda bar: (bar.depth, not bar.closed, bar.id)):
        by_depth[bar.depth] = bar  # an open one comes last
    bars = list(by_depth.values())
    if all(bar.closed for bar in bars):
        return bars[:1]
    return bars if len(bars) <= 3 else [bars[0], *bars[-2:]]


def innermost(rank: RankState) -> Bar | None:
    """The innermost bar that is open."""
    return next((bar for bar in reversed(visible_bars(rank)) if not bar.closed), None)


def fraction(bar: Bar) -> float | None:
    """How much of a bar is done, 0 to 1; None where its total is unknown."""
    return min(1.0, max(0.0, bar.n / bar.total)) if bar.total else None


def done_fraction(rank: RankState) -> float:
    """How far a rank's bars are in all, 0 to 1: the outermost, inner ones counted as parts."""
    done = 0.0
    for bar in reversed(visible_bars(rank)):
        if bar.total:
            inner = done if not bar.closed and bar.n < bar.total else 0.0
            done = 0.0 if bar.closed and bar.depth else min(1.0, (bar.n + inner) / bar.total)
    return done


def _bar(bar: Bar, over: bool) -> tuple[int, str, float, str]:
    total = f"/{formats.count(bar.total)}" if bar.total else f" {bar.unit}" if bar.unit != "it" else ""
    label = f"{bar.description.rstrip(': ')} {formats.count(bar.n)}{total}".strip()
    parts: list[str] = []
    if bar.postfix:
        parts.append(bar.postfix)
    if not over and not bar.closed and bar.rate:
        unit = "" if bar.unit == "it" else f" {bar.unit}"
        slow = bar.rate < 1
        parts.append(f"{formats.duration(1 / bar.rate)} each" if slow else f"{formats.rate(bar.rate)}{unit}/s")
        if bar.total and bar.n < bar.total:
            parts.append(f"{formats.roughly((bar.total - bar.n) / bar.rate)} left")
    done = fraction(bar)
    return bar.depth, label, -1 if done is None else round(done, 4), " · ".join(parts)
