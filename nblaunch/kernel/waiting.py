"""Waiting in a cell so that an interrupt neither gets lost nor leaves a lock behind."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any


class Bell:
    """One thread rings, another waits. A bare lock: an interrupt in the middle of a Condition would leave it torn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake whoever waits, or the next who does."""
        try:
            self._lock.release()
        except RuntimeError:
            return  # it has been rung, and nobody has listened yet

    def wait(self, seconds: float) -> None:
        """Wait until it rings, at most so long."""
        self._lock.acquire(timeout=seconds)


def uninterrupted(call: Callable[[], None]) -> None:
    """Make a short call whatever the user presses meanwhile; what it has done already, it does not do again."""
    for _ in range(5):
        try:
            call()
        except KeyboardInterrupt:
            continue
        return


def is_the_cell(task: asyncio.Task[Any] | None) -> bool:
    """Whether this task is IPython's own, which runs the cell: then it was interrupted, not cancelled by the user."""
    coroutine = task.get_coro() if task is not None else None
    return getattr(coroutine, "__qualname__", "").endswith("run_cell_async")


def present_cell() -> Any:
    """What tells one execution of a cell from another; None outside IPython."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return None if shell is None else shell.execution_count
