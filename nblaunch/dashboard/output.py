"""The last lines that the ranks wrote: bounded, in order, what several ranks say alike said once."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

KEPT_ALL = 400
"""Lines kept over all ranks."""
KEPT_RANK = 200
"""Lines kept of each rank, whatever the others write."""
LONGEST = 2_000
"""Characters kept of a line; the run's log has the rest."""
_ALIKE = 60
"""How many lines back a line of another rank is looked for."""
_WARNING = re.compile(r"\b(?:[A-Z]\w*)?Warning: ")


@dataclass(slots=True, eq=False)
class Line:
    """One line, and which ranks wrote it."""

    number: int
    """Counts up from 0 over all lines of the run."""
    stream: str
    """"stdout" or "stderr"."""
    text: str
    ranks: list[int]


class OutputTail:
    """The newest lines of a run.

    Example:
        >>> tail = OutputTail()
        >>> tail.add(0, "stderr", ["UserWarning: careful"]); tail.add(1, "stderr", ["UserWarning: careful"])
        >>> [(line.ranks, line.text) for line in tail.all], tail.warnings
        ([([0, 1], 'UserWarning: careful')], 1)
    """

    def __init__(self) -> None:
        self.all: deque[Line] = deque(maxlen=KEPT_ALL)
        self.by_rank: dict[int, deque[Line]] = {}
        self.written = 0
        """Lines that came, alike or not; those that the agent left to the log included."""
        self.skipped = 0
        """Lines that the agent left to the log."""
        self.warnings = 0
        self._next = 0
        self._recent: dict[tuple[str, str], Line] = {}
        self._joined: list[Line] = []

    def add(self, rank: int, stream: str, lines: list[str], skipped: int = 0) -> None:
        """Take in whole lines of one rank, oldest first."""
        own = self.by_rank.setdefault(rank, deque(maxlen=KEPT_RANK))
        self.written += len(lines) + skipped
        self.skipped += skipped
        for raw in lines[-KEPT_ALL:]:
            text = raw if len(raw) <= LONGEST else raw[:LONGEST] + " …"
            line = self._alike(rank, stream, text)
            if line is None:
                line = Line(self._next, stream, text, [rank])
                self._next += 1
                self.all.append(line)
                self._remember(line)
                if _WARNING.search(text):
                    self.warnings += 1
            own.append(line)

    def take_joined(self) -> list[Line]:
        """The lines that more ranks turned out to have written since this was last asked."""
        joined, self._joined = self._joined, []
        return joined

    def since(self, number: int) -> list[Line]:
        """The lines kept that are numbered `number` or later, oldest first."""
        found: list[Line] = []
        for line in reversed(self.all):
            if line.number < number:
                break
            found.append(line)
        return found[::-1]

    @property
    def next_number(self) -> int:
        """The number that the next line will have."""
        return self._next

    def kept(self) -> list[Line]:
        """Every line kept, of all ranks and of each, in order."""
        lines = {line.number: line for own in self.by_rank.values() for line in own}
        lines.update({line.number: line for line in self.all})
        return [lines[number] for number in sorted(lines)]

    def _alike(self, rank: int, stream: str, text: str) -> Line | None:
        line = self._recent.get((stream, text))
        if line is None or rank in line.ranks or not text.strip():
            return None
        line.ranks.append(rank)
        if len(self._joined) < KEPT_ALL:
            self._joined.append(line)
        return line

    def _remember(self, line: Line) -> None:
        self._recent[line.stream, line.text] = line
        if len(self._recent) > _ALIKE:
            self._recent.pop(next(iter(self._recent)))
