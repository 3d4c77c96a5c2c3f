"""What the ranks write, as the cell shows it: rank 0's stdout as it is, every rank's stderr behind its number."""

from __future__ import annotations

import string
import sys
import time
from collections import deque

from nblaunch.wire.messages import Display, Output

_MERGE_SECONDS = 0.1
"""How long a line on stderr waits for the same line of other ranks."""
_KEPT = 5000
"""Messages that are kept for a cell that does not show them yet."""


class CellOutput:
    """Takes output in the connection's thread, prints it in the cell's."""

    def __init__(self, prefix: str, first_rank: int) -> None:
        self._prefix = prefix
        self._first = first_rank
        self._queue: deque[Output | Display] = deque(maxlen=_KEPT)
        self._errors: dict[tuple[str, int], list[int]] = {}
        """A line and which of its rank's equal ones it is, to the ranks that wrote it."""
        self._counts: dict[tuple[int, str], int] = {}
        self._since = 0.0

    def add(self, message: Output | Display) -> None:
        """Take a message; what no cell shows is in the log and on the dashboard."""
        if isinstance(message, Display):
            if message.rank == self._first:
                self._queue.append(message)
        elif message.stream == "stderr" or message.rank == self._first:
            self._queue.append(message)

    def show(self, everything: bool = False) -> None:
        """Print what is due, in the thread of the cell."""
        while self._queue:
            message = self._queue.popleft()
            if isinstance(message, Display):
                self._flush_errors()
                show_display(message)
            elif message.stream == "stdout":
                self._print(message)
            else:
                self._note(message)
        if self._errors and (everything or time.monotonic() - self._since > _MERGE_SECONDS):
            self._flush_errors()

    def _print(self, message: Output) -> None:
        self._flush_errors()
        if message.skipped:
            sys.stdout.write(f"... {message.skipped:,} lines of rank {message.rank} are in its log alone ...\n")
        sys.stdout.write("\n".join(message.lines) + "\n")
        sys.stdout.flush()

    def _note(self, message: Output) -> None:
        if not self._errors:
            self._since = time.monotonic()
        lines = message.lines
        if message.skipped:
            lines = [f"... {message.skipped:,} lines are in the log alone ...", *lines]
        for line in lines:
            count = self._counts[message.rank, line] = self._counts.get((message.rank, line), 0) + 1
            self._errors.setdefault((line, count), []).append(message.rank)

    def _flush_errors(self) -> None:
        text = "".join(f"{self._label(ranks)}{line}\n" for (line, _), ranks in self._errors.items())
        self._errors.clear()
        self._counts.clear()
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()

    def _label(self, ranks: list[int]) -> str:
        if len(ranks) > 1 and self._prefix.startswith("[rank "):
            return f"[ranks {', '.join(map(str, sorted(ranks)))}] "
        names = ", ".join(map(str, sorted(ranks)))
        return string.Template(self._prefix).safe_substitute(rank=names, local_rank=names, role_name="default")


def show_display(message: Display) -> None:
    """Show a rank's mime bundle in the cell, or its text where there is no notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        sys.stdout.write(f"{message.data.get('text/plain', '')}\n")
        return
    from IPython.display import publish_display_data

    transient = {"display_id": message.display_id} if message.display_id else None
    publish_display_data(message.data, message.metadata, transient=transient, update=message.update)
