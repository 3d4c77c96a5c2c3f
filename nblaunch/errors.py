"""What can go wrong, one class each. All are `NblaunchError`."""

from __future__ import annotations


class NblaunchError(Exception):
    """The base of every error that nblaunch raises on its own account."""


class ConfigError(NblaunchError, ValueError):
    """A launch was asked for in a way that can't work; nothing was started."""


class PayloadError(NblaunchError, TypeError):
    """The function, or something that it needs, can't be sent to the ranks; the message names the path to it."""


class ResultError(NblaunchError):
    """A rank's return value can't be sent home, or not be rebuilt here; metrics and logs of the run stay."""


class AgentError(NblaunchError):
    """The agent, the process that starts the ranks, could not start or died."""


class CollectiveError(NblaunchError, RuntimeError):
    """The ranks did different things where all must do the same, or one of them failed at it."""
