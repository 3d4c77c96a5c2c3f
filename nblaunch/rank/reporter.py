"""What a rank says: metrics and bars in batches from a thread of its own, everything else at once.

The public `log` and `progress` only leave a note here; a reporter thread sends a batch every 50 ms, so that a training
loop never waits for the agent, for the notebook, or (DESIGN.md, rule 10) for its device.
"""

from __future__ import annotations

import array
import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from nblaunch.rank import context
from nblaunch.rank.stacks import where_main_thread_is
from nblaunch.training.devices import Sampler, defer
from nblaunch.wire.channel import Channel
from nblaunch.wire.messages import Bar, Collective, Device, Message, Metrics, Notice, Progress

BATCH_SECONDS = 0.05
PROGRESS_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
SAMPLE_SECONDS = 1.0
VALUES_A_SECOND = 1000
_CLOSED_BARS = 3

T = TypeVar("T")


def log(values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **metrics: Any) -> None:
    """Record metrics of this rank: `log(loss=loss, step=i)`. Never waits for a device; does nothing outside a launch.

    Args:
        values: Metrics by name, where the names aren't identifiers; 0-d or one-element tensors, floats, ints, bools.
        step: The step that they belong to; by default the number of earlier calls without one.
        **metrics: More metrics by name.

    Raises:
        TypeError: A value is not a number or a tensor of one element.
    """
    current = context.current()
    if current is not None:
        current.reporter.log({**values, **metrics} if values else metrics, step)


def progress(iterable: Iterable[T], *, desc: str = "", total: float | None = None, unit: str = "it") -> Iterator[T]:
    """Iterate, and show this rank's bar on the dashboard. Outside a launch it only iterates.

    Args:
        iterable: What to iterate over; bars in bars are shown indented.
        desc: What stands before the bar.
        total: The number of items, where `len(iterable)` can't tell.
        unit: What one item is called.
    """
    current = context.current()
    if current is None:
        yield from iterable
        return
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # pyright: ignore[reportArgumentType]
    bar = current.reporter.open_bar(desc, total, unit)
    try:
        for item in iterable:
            yield item
            bar.n += 1
    finally:
        bar.close()


class RunningBar:
    """A bar that is being counted up; the reporter looks at it a few times a second."""

    def __init__(self, number: int, description: str, total: float | None, unit: str, depth: int) -> None:
        self.number, self.description, self.total, self.unit, self.depth = (
            number,
            description,
            total,
            unit,
            depth,
        )
        self.n: float = 0
        self.postfix = ""
        self.closed = False
        self._marks: deque[tuple[float, float]] = deque([(time.monotonic(), 0)], maxlen=20)

    def close(self) -> None:
        """The loop has ended."""
        self.closed = True

    def look(self) -> Bar:
        """The bar as it stands; the rate is over the last few looks."""
        now = time.monotonic()
        self._marks.append((now, self.n))
        then, before = self._marks[0]
        rate = (self.n - before) / (now - then) if now > then and self.n > before else None
        return Bar(
            self.number,
            self.description,
            self.n,
            self.total,
            rate,
            self.unit,
            self.depth,
            self.closed,
            self.postfix,
        )


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
        self._batching = threading.Lock()

    # ---- noted, sent by the thread

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Note metrics; tensors on a device are copied without waiting for them."""
        if step is None:
            step = next(self._steps)
        for value in values.values():
            if type(value) is not float and type(value) is not int:
                values = self._numbers(values)
                break
        self._rows.append((time.time(), step, values))

    def _numbers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values that can be read later; nothing has a value while a CUDA graph is captured."""
        numbers = {name: _number(name, value) for name, value in values.items()}
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
        interrupt: KeyboardInterrupt | None = None
        with self._lock:
            if self._muted:
                return
            self._channel.send(message, fds)
            while self._channel.waiting:
                try:
                    self._channel.flush()
                    if self._channel.waiting:
                        time.sleep(0.001)
                except KeyboardInterrupt as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt

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
            now = time.monotonic()
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
                values.append(_read(value))
                times.append(when)
        columns = (column.tobytes() for column in (which, steps, values, times))
        self.send(Metrics(self.rank, list(names), *columns, thinned=thinned, run=self._run))

    def _take(self, everything: bool) -> list[tuple[float, int, Mapping[str, Any]]]:
        """The rows whose values can be read without waiting, in order; all of them at the end."""
        rows: list[tuple[float, int, Mapping[str, Any]]] = []
        while self._rows:
            row = self._rows[0]
            if not everything and not all(_ready(value) for value in row[2].values()):
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


def _number(name: str, value: Any) -> Any:
    """A value as something that can be read later without waiting for a device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(
                f"log({name}=...) got a tensor of shape {tuple(value.shape)}, expected one element; "
                "log its .mean(), or one metric for each element"
            )
        return float(value.detach()) if value.device.type == "cpu" else defer(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"log({name}=...) got {type(value).__name__} {str(value)[:60]!r}, "
            "expected a number or a tensor of one element"
        ) from None


def _ready(value: Any) -> bool:
    return isinstance(value, float | int) or value.ready()


def _read(value: Any) -> float:
    return float(value) if isinstance(value, float | int) else value.value()
