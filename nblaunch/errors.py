"""What can go wrong, one class each. All are `NblaunchError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nblaunch.wire.signals import signal_name

if TYPE_CHECKING:
    from nblaunch.wire.messages import Failure


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


DistributedOperationException = CollectiveError
"""Accelerate's name of it."""


class UnpreparedError(NblaunchError, ValueError):
    """A model or an optimizer was used that should have gone through `Accelerator.prepare` first."""


class UnusedParametersError(NblaunchError, RuntimeError):
    """The last loss did not depend on some parameters, so their gradients were never exchanged."""


class CheckpointError(NblaunchError, RuntimeError):
    """A checkpoint can't be written, or is not whole, or is of something else."""


class RankError(NblaunchError):
    """A rank did not return. Its own exception, where it could be rebuilt here, is the `__cause__`.

    Attributes:
        rank: The rank that failed first.
        host: The machine that it ran on.
        kind: "exception", "signal", "exit", "memory" or "collective".
        exit_code: Its exit code, where it exited.
        signal: The signal's name, where one killed it.
        failure: All that is known of it.
        others: What followed from it in other ranks.
        log: Where the rank's log is, or "".
    """

    def __init__(self, failure: Failure, others: Sequence[Failure] = (), folder: str = "") -> None:
        self.failure = failure
        self.others = list(others)
        self.rank = failure.rank
        self.host = failure.host
        self.kind = failure.kind
        self.exit_code = failure.code if failure.kind == "exit" else None
        self.signal = signal_name(failure.code) if failure.kind in ("signal", "memory") else None
        self._folder = folder
        self.log = f"{folder}/rank-{failure.rank}.log" if folder else ""
        super().__init__(self.headline)

    @property
    def headline(self) -> str:
        """One line: which rank, and what happened."""
        failure = self.failure
        message = failure.message.strip().partition("\n")[0]
        if failure.kind == "exception":
            return f"rank {failure.rank} raised {failure.type}: {message}".rstrip(": ")
        if failure.kind == "exit" and failure.type:
            return f"rank {failure.rank} exited with code {failure.code}: {message}"
        separator = ": " if failure.kind == "collective" else " "
        return f"rank {failure.rank}{separator}{message}"

    def __str__(self) -> str:
        from nblaunch.traceback import plain_lines

        return "\n".join(plain_lines(self))

    def __reduce__(self) -> tuple[type[RankError], tuple[Failure, list[Failure], str]]:
        return type(self), (self.failure, self.others, self._folder)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the root cause, the cell's own line, the other ranks in a line each."""
        from nblaunch.traceback import notebook_lines

        return notebook_lines(self)
