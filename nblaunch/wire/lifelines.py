"""How processes die together on Linux: the parent-death signal, adoption of grandchildren, descriptors to close."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; end at once if it already has.

    The signal is tied to the thread that arms it, and to the parent as it is now: arm it in the main thread, after this
    process was handed over to the parent it shall die with.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def await_parent(parent: int, former: int) -> None:
    """Wait until this process, forked by `former`, has been handed over to `parent`; end if it went to another."""
    while os.getppid() == former:
        time.sleep(0.0005)
    if os.getppid() != parent:
        os._exit(1)


def adopt_grandchildren() -> None:
    """Make this process the parent of those of its descendants whose own parent ends."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def close_all_but(keep: Collection[int]) -> None:
    """Close every descriptor of this process that is not in `keep`."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                continue  # the listing's own descriptor, closed by now


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")
