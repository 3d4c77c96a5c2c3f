"""What a rank writes: cut into whole lines, kept in its log, told to the kernel at a rate that a page can take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

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
        if b"\r" in self._rest[:-1]:
            self._rest = self._rest[self._rest.rfind(b"\r", 0, -1) + 1 :]
        return _overwritten(whole)

    def end(self) -> bytes:
        """The last line, if the stream ended without a newline."""
        rest, self._rest = self._rest, b""
        return _overwritten(rest + b"\n") if rest.strip() else b""


def _overwritten(data: bytes) -> bytes:
    if b"\r" not in data:
        return data
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join(line[line.rstrip(b"\r").rfind(b"\r") + 1 :].rstrip(b"\r") for line in lines)


class LogFile:
    """A log that keeps its first and its last part once it outgrows its limit."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._half = max(limit // 2, 4096)
        self._head = path.open("ab")
        self._tail = self._head
        self._written = 0
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Append whole lines.

        Raises:
            OSError: The disk is full or the like.
        """
        if self._written + len(data) > self._half:
            self._turn()
        self._tail.write(data)
        self._tail.flush()
        self._written += len(data)

    def _turn(self) -> None:
        """Go on in a fresh tail; the tail before the last one is dropped."""
        last, older = tails_of(self._path)
        if self._tail is not self._head:
            self._tail.close()
            self._dropped += older.stat().st_size if older.exists() else 0
            last.replace(older)
        self._tail = last.open("wb")
        self._written = 0

    def close(self) -> None:
        """Join the parts into one file."""
        try:
            if self._tail is not self._head:
                self._tail.close()
                self._head.write(_gap(self._dropped))
                for part in reversed(tails_of(self._path)):
                    if part.exists():
                        self._head.write(part.read_bytes())
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
        now = time.monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._refilled) * _LINES_A_SECOND)
        self._refilled = now
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
