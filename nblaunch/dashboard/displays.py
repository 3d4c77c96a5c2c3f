"""What ranks displayed, bounded in number and in size."""

from __future__ import annotations

from nblaunch.wire.messages import Display

MOST = 60
LARGEST = 1_000_000
"""Characters of the largest display that is kept; the cell shows rank 0's whatever its size."""
LARGEST_IN_ALL = 8_000_000


class Displays:
    """The latest displays of a run, numbered as they came; an update of one takes a new number.

    Example:
        >>> displays = Displays()
        >>> displays.add(Display(rank=1, data={"text/plain": "a"}, display_id="x"))
        >>> displays.add(Display(rank=1, data={"text/plain": "b"}, display_id="x", update=True))
        >>> {number: shown.data for number, shown in displays.kept.items()}
        {1: {'text/plain': 'b'}}
    """

    def __init__(self) -> None:
        self.kept: dict[int, Display] = {}
        self.dropped = 0
        """How many were too large, or made way for newer ones."""
        self._next = 0
        self._size = 0

    def add(self, shown: Display) -> None:
        """Take in a display, or the update of one."""
        size = _size(shown)
        if size > LARGEST:
            self.dropped += 1
            return
        if shown.display_id:
            same = (shown.rank, shown.display_id)
            for number in [n for n, old in self.kept.items() if (old.rank, old.display_id) == same]:
                self._drop(number)
        self.kept[self._next] = shown
        self._next += 1
        self._size += size
        while len(self.kept) > MOST or self._size > LARGEST_IN_ALL:
            self._drop(next(iter(self.kept)))
            self.dropped += 1

    def _drop(self, number: int) -> None:
        self._size -= _size(self.kept.pop(number))


def _size(shown: Display) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else 200 for value in shown.data.values())
