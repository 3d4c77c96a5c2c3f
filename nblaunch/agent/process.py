"""One rank's process as the agent sees it: its pid, its channel, what it writes, how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Sequence

from nblaunch.agent import policy
from nblaunch.agent.loop import Loop
from nblaunch.agent.output import Lines, Teller
from nblaunch.wire import channel as wire
from nblaunch.wire.channel import Channel, Frame
from nblaunch.wire.messages import Failure, Message

_READ = 1 << 18
_LAST_WORDS = 1 << 24
"""Bytes that are still read from a pipe once its rank is dead."""
_PIPE_SIZE = 1 << 20
_LAST_LINES = 15


class Stream:
    """One of a rank's two pipes."""

    def __init__(self, name: str, tell: Callable[[list[str], int], None], log: Callable[[bytes], None]) -> None:
        self.name = name
        self.fd, self.rank_end = os.pipe()
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):  # a larger pipe is a convenience; unprivileged users have a quota of them
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self.teller = Teller(tell)
        self._log = log
        self._lines = Lines()
        self.open = True

    def read(self) -> int:
        """Take what is there now, a bounded piece; returns how much that was, 0 at the end or if there is nothing."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return 0
        self._take(self._lines.feed(data) if data else self._lines.end())
        if not data:
            self.open = False
        return len(data)

    def drain(self) -> None:
        """Take what a dead rank has left, bounded: a child of its own may still be writing."""
        left = _LAST_WORDS
        while self.open and left > 0:
            count = self.read()
            left -= count
            if not count:
                break
        self._take(self._lines.end())

    def _take(self, lines: bytes) -> None:
        if lines:
            self._log(lines)
            self.teller.add(lines)


class RankProcess:
    """A rank: from the descriptors made for it, over its process, to its exit status."""

    def __init__(
        self,
        rank: int,
        loop: Loop,
        tell: Callable[[int, str, list[str], int], None],
        log: Callable[[int, bytes], None],
    ) -> None:
        self.rank = rank
        self._loop = loop
        ours, self._rank_end = wire.pair()
        self.channel = Channel(ours)
        self.streams = [
            Stream(
                name,
                lambda lines, skipped, name=name: tell(rank, name, lines, skipped),
                lambda b: log(rank, b),
            )
            for name in ("stdout", "stderr")
        ]
        self.pid = 0
        self.unborn = False
        """It was to be forked, and never will be."""
        self._pidfd = -1
        self.state = "starting"
        self.failure: Failure | None = None
        self.told_to_stop_at: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its process exists and has not been reaped."""
        return self._pidfd >= 0

    @property
    def expected(self) -> bool:
        """Whether its process is still to come."""
        return not self.pid and not self.unborn

    def rank_fds(self, payload: int) -> list[int]:
        """Descriptors for the rank itself: channel, stdout, stderr, payload; whoever passes them on closes them."""
        fds = [self._rank_end.detach(), *(stream.rank_end for stream in self.streams)]
        return [*fds, payload]

    def watch(self, frame: Callable[[Frame], None], ended: Callable[[], None]) -> None:
        """Listen to it: its frames, its pipes."""
        self._on_frame, self._on_end = frame, ended
        self._loop.watch(self.channel.fileno(), self._read_channel)
        for stream in self.streams:
            self._loop.watch(stream.fd, lambda stream=stream: self._read_stream(stream))

    def born(self, pid: int) -> None:
        """Its process exists, as a child of the agent."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._loop.watch(self._pidfd, self._on_end)

    def say(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send it a message; these are few and small."""
        self.channel.send(message, fds)
        if self.channel.waiting:
            self._loop.want_write(self.channel.fileno(), self._write_channel)

    def signal(self, number: signal.Signals) -> None:
        """Signal it and all that it started in its process group; before it leads one, it alone."""
        if not self.alive:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)  # not reaped yet, so the pid is still its own

    def reap(self) -> int:
        """Take what is left of a dead rank, end its process group, and return its wait status."""
        self._read_channel()
        for stream in self.streams:
            stream.drain()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.close()
        return status

    def close(self) -> None:
        """Close every descriptor of it."""
        if self._pidfd >= 0:
            self._loop.forget(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        for stream in self.streams:
            self._close_stream(stream)
        if self.channel.fileno() >= 0:
            self._loop.forget(self.channel.fileno())
            self.channel.close()

    def flush(self) -> None:
        """Tell all that it wrote: there will be no more."""
        for stream in self.streams:
            stream.teller.flush(at_once=True)

    def last_lines(self) -> list[str]:
        """The newest lines that it wrote to stderr, or to stdout if it wrote none there."""
        self.flush()
        for stream in reversed(self.streams):
            if stream.teller.tail:
                return policy.crash_lines(list(stream.teller.tail))[-_LAST_LINES:]
        return []

    def _read_channel(self) -> None:
        if self.channel.fileno() < 0:
            return
        for frame in self.channel.take():
            self._on_frame(frame)
        if self.channel.closed and self.channel.fileno() >= 0:
            self._loop.forget(self.channel.fileno())
            self.channel.close()

    def _write_channel(self) -> None:
        self.channel.flush()
        if not self.channel.waiting:
            self._loop.want_write(self.channel.fileno(), None)

    def _read_stream(self, stream: Stream) -> None:
        stream.read()
        if not stream.open:
            self._close_stream(stream)

    def _close_stream(self, stream: Stream) -> None:
        stream.open = False
        if stream.fd >= 0:
            self._loop.forget(stream.fd)
            os.close(stream.fd)
            stream.fd = -1
