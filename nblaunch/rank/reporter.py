"""What a rank says: metrics and bars in batches from a thread of its own, everything else at once.

The public `log` (metrics.py) and `progress` (bars.py) only leave a note here; a reporter thread sends a batch every
50 ms, so that a training loop never waits for the agent, for the notebook, or for its device.
"""

from __future__ import annotations

import array
import itertools
import math
import threading
import time
import types
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch.rank import context
from nblaunch.rank.bars import RunningBar
from nblaunch.rank.metrics import checked_name, checked_step, is_ready, number_of, read
from nblaunch.rank.stacks import where_main_thread_is
from nblaunch.training.devices import Sampler
from nblaunch.wire.channel import Channel
from nblaunch.wire.messages import Collective, Device, Message, Metrics, Notice, Progress

BATCH_SECONDS = 0.05
PROGRESS_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
SAMPLE_SECONDS = 1.0
VALUES_A_SECOND = 1000
_CLOSED_BARS = 3


class Reporter:
    """A rank's voice. `log` and the bars only note; a thread sends what was noted."""

    def __init__(self, channel: Channel, rank: int, run: str) -> None:
        self._channel = channel
        self.rank = rank
        self._run = run
        self._lock = threading.Lock()
        self._rows: deque[tuple[float, int, Mapping[str, Any]]] = deque()
        self._steps = itertools.count()
        self._bars: dict[int, Any] = {}
        self._bar_numbers = itertools.count()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampler: Sampler | None = None
        self._tokens = float(VALUES_A_SECOND)
        self._last_batch = self._last_progress = self._last_sample = time.monotonic()
        self._sent_progress: Progress | None = None
        self._muted = False
        self._said_captured = False
        self._said_broken = False
        self._main_thread = threading.main_thread().ident
        self._sending = self._interrupted = False
        self._batching = threading.Lock()

    # ---- noted, sent by the thread

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Note metrics; tensors on a device are copied without waiting for them."""
        step = next(self._steps) if step is None else checked_step(step)
        for value in values.values():
            if type(value) is not float and type(value) is not int:
                values = self._numbers(values)
                break
        self._rows.append((time.time(), step, values))

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values that can be read later; nothing has a value while a CUDA graph is captured."""
        numbers = {checked_name(name): number_of(name, value) for name, value in values.items()}
        captured = [name for name, number in numbers.items() if number is None]
        if captured and not self._said_captured:
            self._said_captured = True
            text = f"log() of {', '.join(captured)} inside a CUDA graph capture has no value yet and is skipped"
            self.send(Notice(text, "warning", self.rank, self._run))
        return {name: number for name, number in numbers.items() if number is not None}

    def open_bar(self, description: str, total: float | None, unit: str) -> RunningBar:
        """A new bar, inside those that are open."""
        number = next(self._bar_numbers)
        depth = sum(not bar.closed for bar in list(self._bars.values()))
        bar = RunningBar(number, description, total, unit, depth)
        self.show_bar(number, bar)
        return bar

    def show_bar(self, number: int, bar: Any) -> None:
        """Show anything that has `closed` and `look()`; the newest closed ones stay."""
        self._bars[number] = bar
        closed = [key for key, value in list(self._bars.items()) if value.closed]
        for key in closed[:-_CLOSED_BARS]:
            del self._bars[key]

    def new_bar_number(self) -> int:
        """A number that no bar of this rank has."""
        return next(self._bar_numbers)

    # ---- at once

    def announce(self, collective: Collective) -> None:
        """Tell the agent what this rank is about to do with the others; no answer."""
        collective.rank = self.rank
        self.send(collective)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send at once, whatever else is going on; an interrupt waits until the frame is whole."""
        in_main = threading.get_ident() == self._main_thread
        self._sending = self._sending or in_main
        try:
            with self._lock:
                if not self._muted:
                    self._channel.send(message, fds)
                while self._channel.waiting and not self._muted:
                    self._channel.flush()
                    if self._channel.waiting:
                        time.sleep(0.001)
        finally:
            if in_main:
                self._sending = False
                if self._interrupted:
                    self._interrupted = False
                    raise KeyboardInterrupt

    def interrupt(self, number: int, frame: types.FrameType | None) -> None:
        """The rank's handler of SIGINT: Python's own, but that no frame is torn."""
        if self._sending:
            self._interrupted = True
        else:
            raise KeyboardInterrupt

    # ---- the thread

    def start(self, device: Device) -> None:
        """Begin to send what is noted."""
        self._sampler = Sampler(device)
        self._thread = threading.Thread(target=self._work, name="nblaunch-reporter", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Send all that has been noted so far."""
        with self._batching:
            self._send_metrics(everything=True)
            self._send_progress(time.monotonic())

    def stop(self) -> None:
        """End the thread, after a last batch."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
        if not self._muted:
            self._send_metrics(everything=True)

    def mute(self) -> None:
        """This is a forked child of the rank: nothing that it says is the rank's."""
        self._lock = threading.Lock()
        self._muted = True
        context.leave()

    def _work(self) -> None:
        while not self._stopped.wait(BATCH_SECONDS):
            try:
                self._send_batch(time.monotonic())
            except Exception as error:  # what one batch could not say must not silence the next
                if not self._said_broken:
                    self._said_broken = True
                    text = f"some metrics or bars of rank {self.rank} can't be shown: {type(error).__name__}: {error}"
                    self.send(Notice(text, "warning", self.rank, self._run))

    def _send_batch(self, now: float) -> None:
        with self._batching:
            if self._rows:
                self._send_metrics()
            if now - self._last_progress >= PROGRESS_SECONDS:
                self._send_progress(now)

    def _send_progress(self, now: float) -> None:
        bars = [bar.look() for bar in list(self._bars.values())]
        beat = now - self._last_progress >= HEARTBEAT_SECONDS
        if self._sent_progress is not None and bars == self._sent_progress.bars and not beat:
            return
        progress = Progress(self.rank, time.time(), bars, where=where_main_thread_is(), run=self._run)
        if self._sampler is not None and (beat or now - self._last_sample >= SAMPLE_SECONDS):
            progress.sample = self._sampler.sample()
            self._last_sample = now
        self._last_progress = now
        self._sent_progress = progress
        self.send(progress)

    def _send_metrics(self, everything: bool = False) -> None:
        rows = self._take(everything)
        kept, thinned = self._thin(rows)
        if not kept and not thinned:
            return
        names: dict[str, int] = {}
        which, steps = array.array("i"), array.array("q")
        values, times = array.array("d"), array.array("d")
        for when, step, row in kept:
            for name, value in row.items():
                which.append(names.setdefault(name, len(names)))
                steps.append(step)
                values.append(read(value))
                times.append(when)
        columns = (column.tobytes() for column in (which, steps, values, times))
        self.send(Metrics(self.rank, list(names), *columns, thinned=thinned, run=self._run))

    def _take(self, everything: bool) -> list[tuple[float, int, Mapping[str, Any]]]:
        """The rows whose values can be read without waiting, in order; all of them at the end."""
        rows: list[tuple[float, int, Mapping[str, Any]]] = []
        while self._rows:
            row = self._rows[0]
            if not everything and not all(is_ready(value) for value in row[2].values()):
                break
            rows.append(self._rows.popleft())
        return rows

    def _thin(self, rows: list[Any]) -> tuple[list[Any], int]:
        """Of more than `VALUES_A_SECOND` every k-th row and the last; gives the number of values left out too."""
        now = time.monotonic()
        self._tokens = min(VALUES_A_SECOND, self._tokens + (now - self._last_batch) * VALUES_A_SECOND)
        self._last_batch = now
        count = sum(len(row[2]) for row in rows)
        if count <= self._tokens:
            self._tokens -= count
            return rows, 0
        every = math.ceil(count / max(self._tokens, 1.0))
        kept = rows[::-every][::-1]
        kept_count = sum(len(row[2]) for row in kept)
        self._tokens = max(0.0, self._tokens - kept_count)
        return kept, count - kept_count
