"""What the ranks returned or raised, rebuilt in the notebook when it is asked for."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from typing import Any

from nblaunch.errors import ResultError
from nblaunch.wire import payload
from nblaunch.wire.messages import Failure

_SMALL = 1 << 14
"""Bytes of a file whose value is shown in the closing line."""


class Results:
    """Return values by rank, each a file until somebody looks at it.

    Args:
        home: Number to the notebook's own function or class, as the launch's payload has them.
    """

    def __init__(self, home: Mapping[int, Any]) -> None:
        self._home = home
        self._files: dict[int, int] = {}
        self._values: dict[int, Any] = {}
        self._owner = os.getpid()

    def add(self, rank: int, fd: int) -> None:
        """A rank's return value has come; one of an earlier attempt is dropped."""
        if rank in self._files:
            os.close(self._files[rank])
        self._values.pop(rank, None)
        self._files[rank] = fd

    @property
    def ranks(self) -> list[int]:
        """Those whose return value is here."""
        return sorted({*self._files, *self._values})

    def of(self, rank: int) -> Any:
        """What a rank returned.

        Raises:
            ResultError: It can't be rebuilt here.
        """
        if rank in self._files:
            try:
                self._values[rank] = payload.load_home(self._files.pop(rank), self._home)
            except Exception as error:
                text = f"what rank {rank} returned can't be rebuilt here: {type(error).__name__}: {error}"
                raise ResultError(text) from error
        return self._values[rank]

    def in_short(self, rank: int) -> str:
        """A return value in a few characters, where it is small and plain data, else ""; runs no code of its class."""
        file = self._files.get(rank)
        if file is None or os.fstat(file).st_size > _SMALL:
            return ""
        try:
            value = payload.load_plain(file)
        except Exception:
            return ""  # an instance of some class: whoever asks for the results will get it
        return "" if value is None else reprlib.repr(value)

    def exception(self, cause: Failure) -> BaseException | None:
        """The rank's own exception, if it can be made here; its text is known in any case."""
        if not cause.pickled:
            return None
        try:
            exception = payload.load_home(cause.pickled, self._home)
        except Exception:
            return None
        return exception if isinstance(exception, BaseException) else None

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # a forked child of the kernel has its own copies, and its end closes them
            for fd in self._files.values():
                os.close(fd)
