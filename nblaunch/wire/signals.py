"""The names of signals."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """A signal's name, such as "SIGSEGV".

    Example:
        >>> signal_name(9), signal_name(250)
        ('SIGKILL', 'signal 250')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
