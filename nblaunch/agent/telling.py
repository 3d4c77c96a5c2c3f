"""What is told of a run, to the kernel and to the run's folder alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from nblaunch.agent.folder import RunFolder
from nblaunch.agent.loop import Loop, Timer
from nblaunch.agent.output import Teller
from nblaunch.config import LaunchConfig
from nblaunch.wire.messages import Failure, Finished, Launch, Message, Notice, Output, RankUpdate

TELL_SECONDS = 0.05
"""How long lines wait for more of their kind before they go to the kernel."""


class Telling:
    """Writes down and passes on what happens in one run.

    Raises:
        OSError: The run's folder can't be made anywhere.
    """

    def __init__(
        self, launch: Launch, config: LaunchConfig, ranks: list[int], loop: Loop, to_kernel: Callable[[Message], None]
    ) -> None:
        self._run = launch.run
        self._loop = loop
        self._to_kernel = to_kernel
        self._flush_timer: Timer | None = None
        self._early: list[Notice] | None = []
        """Warnings from before there is a folder."""
        self.tellers: Callable[[], Iterable[Teller]] = lambda: ()
        """The streams of the present attempt's ranks."""
        self.folder = RunFolder(launch, config.name or "run", config.run_limit_bytes, ranks, self.warn)
        early, self._early = self._early, None
        for notice in early:
            self.folder.event(notice)

    def event(self, message: Message) -> None:
        """Something happened: kept, and told."""
        self.folder.event(message)
        self._to_kernel(message)

    def state(self, rank: int, state: str, when: float, detail: str = "") -> None:
        """A rank's state changed."""
        self.event(RankUpdate(self._run, rank, state, when, detail))

    def warn(self, text: str) -> None:
        """Something that a person should know."""
        notice = Notice(text, "warning", run=self._run)
        self._to_kernel(notice)
        if self._early is None:
            self.folder.event(notice)
        else:
            self._early.append(notice)

    def lines(self, rank: int, stream: str, lines: list[str], skipped: int) -> None:
        """Lines for the kernel; the log has them already."""
        self._to_kernel(Output(self._run, rank, stream, lines, skipped))

    def wrote(self, rank: int, lines: bytes) -> None:
        """A rank wrote whole lines: into its log at once, to the kernel soon."""
        self.folder.log(rank, lines)
        if self._flush_timer is None:
            self._flush_timer = self._loop.later(TELL_SECONDS, self._flush)

    def finished(self, status: str, cause: Failure | None, others: list[Failure]) -> None:
        """The run is over: the folder is closed, and the kernel told."""
        message = Finished(self._run, status, time.time(), cause, others)
        self.folder.event(message)
        self.folder.close()
        self._to_kernel(message)

    def abandoned(self) -> None:
        """The notebook is gone: only the folder is told."""
        self.folder.event(Notice("the notebook's kernel ended, and the run with it", "warning", run=self._run))
        self.folder.event(Finished(self._run, "stopped", time.time()))
        self.folder.close()

    def _flush(self) -> None:
        """Pass on what the ranks wrote; what the rate does not allow yet waits for the next time."""
        self._flush_timer = None
        if not all([teller.flush() for teller in self.tellers()]):
            self._flush_timer = self._loop.later(TELL_SECONDS, self._flush)
