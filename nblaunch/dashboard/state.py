"""What is known of a run: built from its messages alone, bounded however long it is, read by every view."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nblaunch.config import LaunchConfig
from nblaunch.dashboard import reading
from nblaunch.dashboard.curves import Curve
from nblaunch.dashboard.displays import Displays
from nblaunch.dashboard.output import OutputTail
from nblaunch.dashboard.rows import done_fraction, fraction
from nblaunch.wire.messages import (
    Bar,
    Device,
    Display,
    Failure,
    Finished,
    Message,
    Metrics,
    Notice,
    Output,
    Progress,
    RankUpdate,
    Sample,
    Started,
)

MAX_METRICS = 500
"""Metrics that get a curve; the run's folder has them all."""
MAX_LINES = 4_000
"""Curves of single ranks kept over all metrics; beyond, a metric has its mean and extremes only."""


@dataclass(slots=True)
class RankState:
    """Where one rank stands."""

    rank: int
    device: Device | None = None
    pid: int = 0
    state: str = "starting"
    """"starting", "running", "returned", "failed", "stopped", "ended"."""
    detail: str = ""
    bars: list[Bar] = field(default_factory=list[Bar])
    sample: Sample | None = None
    where: str = ""
    """The line of the user's code that its main thread was last seen in."""
    heard: float = 0
    """When anything last came from it, by the kernel's clock."""
    moved: float = 0
    """When its bars, metrics or output last changed."""
    done: float = 0
    """How far its bars are in all, 0 to 1; while the outermost bar is the same, it only grows."""
    bars_seen: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    """For each bar, when it was first seen and how far it was then, as a fraction."""
    failure: Failure | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.state not in ("starting", "running")


class RunState:
    """One run as its messages tell it. An I/O thread applies them, any thread may read; `lock` guards both.

    Example:
        >>> from nblaunch.wire.messages import RankUpdate
        >>> state = RunState("train", LaunchConfig(num_processes=2))
        >>> state.apply(RankUpdate(run="1", rank=0, state="running", time=0.0))
        >>> state.status
        'running'
    """

    def __init__(self, name: str, config: LaunchConfig, *, clock: Callable[[], float] = time.time) -> None:
        self.name = name
        self.config = config
        self.clock = clock
        self.lock = threading.RLock()
        self.status = "starting"
        """"starting", "running", "stopping", "done", "failed", "stopped"."""
        self.ranks: dict[int, RankState] = {}
        self.world_size = 0
        self.created = clock()
        self.started: float | None = None
        self.ended: float | None = None
        self.folder = ""
        self.backend = ""
        self.start_method = ""
        self.metrics: dict[str, Curve] = {}
        self.thinned = 0
        """Values that ranks left out because they logged more than 1,000 a second."""
        self.unshown = 0
        """Values of metrics beyond the first `MAX_METRICS`."""
        self.output = OutputTail()
        self.displays = Displays()
        self.notices: deque[Notice] = deque(maxlen=50)
        self.cause: Failure | None = None
        self.others: list[Failure] = []
        self.result = ""
        """What came of it, one line, set by whoever holds the results; shown in the closing line."""
        self.verdict = ""
        """The audit's sentence, set by whoever has audited the run; shown in the closing line."""
        self.version = 0
        """Grows with every message."""
        self.pace: deque[tuple[float, int]] = deque(maxlen=64)
        """When which step was reached, at most four times a second: for the steps a second."""
        self.pace_start: tuple[float, int] | None = None
        self.feed: object = None
        """What the page's views of this run share, theirs alone."""
        self._lines = 0
        self._appliers: dict[type[Message], Callable[[Any], None]] = {
            Started: self._started,
            RankUpdate: self._rank_update,
            Output: self._output,
            Progress: self._progress,
            Metrics: self._metrics,
            Display: self._display,
            Notice: self.notices.append,
            Failure: self._failure,
            Finished: self._finished,
        }

    def apply(self, message: Message) -> None:
        """Take in one message of this run; kinds that say nothing to a watcher are passed over."""
        applier = self._appliers.get(type(message))
        if applier is None:
            return
        with self.lock:
            self.version += 1
            applier(message)

    def stopping(self) -> None:
        """Someone asked the run to stop."""
        with self.lock:
            if not self.over:
                self.status = "stopping"
                self.version += 1

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status in ("done", "failed", "stopped")

    @property
    def elapsed(self) -> float:
        """Seconds since the ranks started, or, before that, since the launch."""
        return max(0.0, (self.ended or self.clock()) - (self.started or self.created))

    def frame(self) -> dict[str, Any]:
        """What a view shows of the present, as plain data: `head`, `rows`, `charts`, `remark`."""
        with self.lock:
            return reading.frame(self)

    def snapshot_data(self) -> dict[str, Any]:
        """`frame()`, and besides `curves`, `output`, `notices`, `cause`, `others`, `displays`."""
        with self.lock:
            return reading.snapshot(self)

    # ---- one method a message

    def _rank(self, rank: int) -> RankState:
        now = self.clock()
        found = self.ranks.get(rank)
        if found is None:
            found = self.ranks[rank] = RankState(rank, moved=now)
            self.ranks = dict(sorted(self.ranks.items()))
        found.heard = now
        return found

    def _alive(self, rank: RankState) -> None:
        if rank.state == "starting":
            rank.state = "running"
        if self.status == "starting":
            self.status = "running"

    def _started(self, message: Started) -> None:
        self.started = message.time
        self.folder = message.folder
        self.backend = message.backend
        self.start_method = message.start_method
        self.world_size = message.world_size
        for i, rank in enumerate(message.ranks):
            fresh = self.ranks[rank] = RankState(rank, heard=self.clock(), moved=self.clock())
            fresh.pid = message.pids[i] if i < len(message.pids) else 0
            fresh.device = message.devices[i] if i < len(message.devices) else None
        self.ranks = dict(sorted(self.ranks.items()))

    def _rank_update(self, message: RankUpdate) -> None:
        rank = self._rank(message.rank)
        if message.state == "ended" and rank.over:
            return  # how it came to its end says more
        rank.state, rank.detail, rank.moved = message.state, message.detail, rank.heard
        if message.state == "running":
            self._alive(rank)

    def _output(self, message: Output) -> None:
        rank = self._rank(message.rank)
        rank.moved = rank.heard
        self.output.add(message.rank, message.stream, message.lines, message.skipped)

    def _progress(self, message: Progress) -> None:
        rank = self._rank(message.rank)
        self._alive(rank)
        if [(bar.id, bar.n) for bar in message.bars] != [(bar.id, bar.n) for bar in rank.bars]:
            rank.moved = rank.heard
        known = {bar.id for bar in rank.bars if bar.depth == 0}
        rank.bars = message.bars
        same = any(bar.id in known for bar in message.bars if bar.depth == 0)
        rank.done = max(rank.done if same else 0.0, done_fraction(rank))
        rank.sample = message.sample or rank.sample
        rank.where = message.where
        seen = rank.bars_seen
        rank.bars_seen = {bar.id: seen.get(bar.id) or (rank.heard, fraction(bar) or 0.0) for bar in message.bars}

    def _metrics(self, message: Metrics) -> None:
        rank = self._rank(message.rank)
        self._alive(rank)
        self.thinned += message.thinned
        which = memoryview(message.which).cast("i").tolist()
        if not which:
            return
        rank.moved = rank.heard
        steps = memoryview(message.steps).cast("q").tolist()
        values: list[float] = memoryview(message.values).cast("d").tolist()  # pyright: ignore[reportAssignmentType]
        if len(message.names) == 1:
            self._curve(message.names[0], message.rank, steps, values)
        else:
            parts: list[tuple[list[int], list[float]]] = [([], []) for _ in message.names]
            for name, step, value in zip(which, steps, values, strict=True):
                part = parts[name]
                part[0].append(step)
                part[1].append(value)
            for name, part in zip(message.names, parts, strict=True):
                if part[0]:
                    self._curve(name, message.rank, *part)
        self._keep_pace(memoryview(message.times).cast("d")[-1], max(steps))

    def _curve(self, name: str, rank: int, steps: list[int], values: list[float]) -> None:
        curve = self.metrics.get(name)
        if curve is None:
            if len(self.metrics) >= MAX_METRICS:
                self.unshown += len(steps)
                return
            curve = self.metrics[name] = Curve()
        before = len(curve.ranks)
        curve.add(rank, steps, values, own_line=rank in curve.ranks or self._lines < MAX_LINES)
        self._lines += len(curve.ranks) - before

    def _keep_pace(self, at: float, step: int) -> None:
        pace = self.pace
        if self.pace_start is None:
            self.pace_start = (at, step)
        if not pace or (step > pace[-1][1] and at - pace[-1][0] >= 0.25):
            pace.append((at, step))

    def _display(self, message: Display) -> None:
        self._rank(message.rank)
        self.displays.add(message)

    def _failure(self, message: Failure) -> None:
        rank = self._rank(message.rank)
        rank.failure = message
        if not rank.over:
            rank.state = "stopped" if message.kind == "stopped" else "failed"

    def _finished(self, message: Finished) -> None:
        self.status = message.status
        self.ended = message.time
        self.cause = message.cause
        self.others = list(message.others)
        for failure in (*message.others, *((message.cause,) if message.cause else ())):
            if failure.rank >= 0:
                rank = self._rank(failure.rank)
                rank.failure = failure
                rank.state = "stopped" if failure.symptom or failure.kind == "stopped" else "failed"
