"""The agent's event loop: one thread, descriptors that become readable or writable, and timers."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable

Callback = Callable[[], None]


class Timer:
    """A call that is due at some time; `cancel` takes it back."""

    def __init__(self, call: Callback) -> None:
        self._call: Callback | None = call

    def cancel(self) -> None:
        """Never make the call."""
        self._call = None

    def fire(self) -> None:
        """Make the call, unless it was cancelled."""
        if self._call is not None:
            self._call()


class Loop:
    """Calls back when a descriptor is ready or a time has come, until `stop`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._running = True

    def watch(self, fd: int, readable: Callback) -> None:
        """Call `readable` whenever `fd` has something to read."""
        self._selector.register(fd, selectors.EVENT_READ, [readable, None])

    def want_write(self, fd: int, writable: Callback | None) -> None:
        """Call `writable` too, whenever `fd` can take something; None ends that."""
        key = self._selector.get_key(fd)
        if (key.data[1] is None) != (writable is None):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writable else 0)
            self._selector.modify(fd, events, [key.data[0], writable])

    def forget(self, fd: int) -> None:
        """Watch `fd` no longer; call this before it is closed."""
        self._selector.unregister(fd)

    def later(self, seconds: float, call: Callback) -> Timer:
        """Make a call after so many seconds."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), timer))
        return timer

    def stop(self) -> None:
        """Leave `run` after the present callback."""
        self._running = False

    def run(self) -> None:
        """Serve until stopped."""
        while self._running:
            for key, events in self._selector.select(self._patience()):
                for event in (selectors.EVENT_WRITE, selectors.EVENT_READ):
                    if events & event:
                        self._call(key, event)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2].fire()

    def _call(self, key: selectors.SelectorKey, event: int) -> None:
        """Call back, unless a callback before this one gave the descriptor up, or to another."""
        present = self._selector.get_map().get(key.fd)
        if present is None or present.data[0] is not key.data[0]:
            return
        callback = present.data[0 if event == selectors.EVENT_READ else 1]
        if callback is not None:
            callback()

    def _patience(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
