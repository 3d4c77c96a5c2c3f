"""How ranks are stopped: SIGINT, SIGTERM, SIGKILL, each wait bounded."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from nblaunch.agent.loop import Loop, Timer
from nblaunch.agent.process import RankProcess

WAITS = {"asked": (1.0, 0.5), "failed": (0.3, 0.2)}
"""Why ranks are stopped, to the seconds after SIGINT before SIGTERM, and after that before SIGKILL."""


class Stopping:
    """Stops the ranks of one attempt, once, for one reason."""

    def __init__(self, loop: Loop, ranks: Iterable[RankProcess]) -> None:
        self._loop = loop
        self._ranks = list(ranks)
        self._timers: list[Timer] = []
        self.why = ""
        """"asked", "failed", or "" while nobody stops them."""

    def begin(self, why: str) -> None:
        """Stop those that have not failed; one that has gets the same time to end by itself."""
        if self.why:
            return
        self.why = why
        first, second = WAITS[why]
        for process in self._ranks:
            if process.failure is None:
                signal_rank(process, signal.SIGINT)
        for wait, number in ((first, signal.SIGTERM), (first + second, signal.SIGKILL)):
            self._timers.append(self._loop.later(wait, lambda number=number: self._signal_all(number)))

    def kill(self) -> None:
        """End all of them at once."""
        self.why = self.why or "asked"
        self._signal_all(signal.SIGKILL)

    def born(self, process: RankProcess) -> None:
        """A process came to be only after all were to stop."""
        if self.why:
            signal_rank(process, signal.SIGKILL)

    def replace(self, former: RankProcess, process: RankProcess) -> None:
        """Another process takes this rank's place."""
        self._ranks = [process if known is former else known for known in self._ranks]

    def end(self) -> None:
        """All are gone."""
        for timer in self._timers:
            timer.cancel()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._ranks:
            signal_rank(process, number)


def signal_rank(process: RankProcess, number: signal.Signals) -> None:
    """Signal a rank, and remember since when what it says may follow from that."""
    if process.alive:
        process.told_to_stop_at = process.told_to_stop_at or time.time()
        process.signal(number)
