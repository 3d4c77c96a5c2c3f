"""Files that grow by whole pieces."""

from __future__ import annotations

import os
from pathlib import Path


class Appended:
    """A file to append to; a piece that the disk refuses is taken back whole, so that what follows can be read."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size
        """Bytes in the file."""

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def append(self, piece: bytes) -> None:
        """Write a piece, whole or not at all.

        Raises:
            OSError: The disk is full or the like.
        """
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            raise
        self.size += len(piece)

    def close(self) -> None:
        """End it."""
        self._file.close()
