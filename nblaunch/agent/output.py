"""What a rank writes: cut into whole lines, kept in its log, told to the kernel at a rate that a page can take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from nblaunch.agent.appending import Appended
from nblaunch.record import tails_of

_TAIL_LINES = 80
_LONGEST_LINE = 1 << 20
_BURST = 2000
_LINES_A_SECOND = 400.0
_FLOOD_SECONDS = 0.25
_KEPT = 50
"""Of a flood, the newest lines that are passed on each `_FLOOD_SECONDS`."""


class Lines:
    """Cuts a stream of bytes into lines; what stands before a lone carriage return was overwritten and is dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The whole lines that `data` completes, each with its newline."""
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        whole, self._rest = data[:end], data[end:]
        if len(self._rest) > _LONGEST_LINE:
            whole, self._rest = whole + self._rest + b"\n", b""
        self._rest = self._rest[_start_of_last(self._rest) :]
        return _overwritten(whole)

    def end(self) -> bytes:
        """The last line, if the stream ended without a newline."""
        rest, self._rest = self._rest, b""
        return _overwritten(rest + b"\n") if rest.strip() else b""


def _overwritten(data: bytes) -> bytes:
    if b"\r" not in data:
        return data
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join(line[_start_of_last(line) :].rstrip(b"\r") for line in lines)


def _start_of_last(line: bytes) -> int:
    """Where what a terminal would still show of a line begins: behind a return that more text follows."""
    return line.rstrip(b"\r").rfind(b"\r") + 1


class LogFile:
    """A log that keeps its first half and, at least, its last quarter once it outgrows its limit."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._room = max(limit // 2, 2048)
        self._quarter = max(limit // 4, 1024)
        self._head = self._last = Appended(path)
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Append whole lines.

        Raises:
            OSError: The disk is full or the like.
        """
        if len(data) > self._room:
            self._turn()
        self._last.append(data)
        self._room -= len(data)

    def _turn(self) -> None:
        """Go on in a fresh tail; the tail before the last one is dropped."""
        newest, older = tails_of(self._path)
        if self._last is not self._head:
            self._dropped += older.stat().st_size if older.exists() else 0
            newest.replace(older)
            self._last.close()
        self._last = Appended(newest)
        self._room = self._quarter

    def close(self) -> None:
        """Join the parts into one file; where the disk has no room for that they stay apart.

        Raises:
            OSError: They stayed apart.
        """
        try:
            if self._last is not self._head:
                self._last.close()
                parts = [part for part in reversed(tails_of(self._path)) if part.exists()]
                self._head.append(_gap(self._dropped) + b"".join(part.read_bytes() for part in parts))
                for part in parts:
                    part.unlink()
        finally:
            self._head.close()


def _gap(dropped: int) -> bytes:
    return f"... {dropped:,} bytes left out here by nblaunch (run_limit) ...\n".encode() if dropped else b""


class Teller:
    """Passes a stream's lines on, all of them while they are few, the newest of a flood."""

    def __init__(self, tell: Callable[[list[str], int], None]) -> None:
        self._tell = tell
        self._pending: deque[bytes] = deque()
        self._skipped = 0
        self._tokens = float(_BURST)
        self._refilled = time.monotonic()
        self._told = 0.0
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The newest lines that were passed on or skipped."""

    def add(self, lines: bytes) -> None:
        """Take whole lines; of what can't be passed on any more only the newest are kept."""
        self._refill()
        count = lines.count(b"\n")
        room = int(self._tokens) + _KEPT
        if count > room:
            cut = lines.split(b"\n")[-room - 1 :]
            self._skipped += count - room
            lines = b"\n".join(cut)
        self._pending.extend(lines[:-1].split(b"\n"))
        while len(self._pending) > room:
            self._pending.popleft()
            self._skipped += 1

    def flush(self, at_once: bool = False) -> bool:
        """Pass on what the rate allows; returns whether nothing is left waiting.

        Args:
            at_once: There will be no more: do not wait for the next time that a flood is told of.
        """
        now = self._refill()
        if not self._pending:
            return True
        flood = self._skipped > 0 or len(self._pending) > self._tokens
        if flood and not at_once and now - self._told < _FLOOD_SECONDS:
            return False
        allowed = max(int(self._tokens), _KEPT)
        while len(self._pending) > allowed:
            self._pending.popleft()
            self._skipped += 1
        lines = [line.decode("utf-8", "replace") for line in self._pending]
        self._tokens = max(0.0, self._tokens - len(lines))
        self._told = now
        self._tell(lines, self._skipped)
        self.tail.extend(lines)
        self._pending.clear()
        self._skipped = 0
        return True

    def _refill(self) -> float:
        """Allow what the time since the last look has earned; returns the time."""
        now = time.monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._refilled) * _LINES_A_SECOND)
        self._refilled = now
        return now
