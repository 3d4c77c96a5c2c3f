"""How the ranks of a launch are started: what each is told, and by fork or by exec."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import nblaunch
from nblaunch.agent import launching
from nblaunch.config import LaunchConfig
from nblaunch.wire.messages import Begin, Launch

_PORT_ACROSS_MACHINES = 29500


class Starter:
    """A launch's part that stays the same over restarts: its plan, its payload, its port."""

    def __init__(self, launch: Launch, config: LaunchConfig, plan: launching.Plan, payload: int) -> None:
        self.plan = plan
        self._launch = launch
        self._config = config
        self._payload = payload
        self._listening: socket.socket | None = launching.listen(config)

    @property
    def port(self) -> int:
        """Where the process group's store is."""
        if self._listening is not None:
            return self._listening.getsockname()[1]
        return self._config.use_port or _PORT_ACROSS_MACHINES

    def store_socket(self) -> int | None:
        """A descriptor of the store's listening socket, to be given away; None where rank 0 holds the store."""
        return None if self._listening is None else os.dup(self._listening.fileno())

    def begin(self, rank: int, attempt: int) -> Begin:
        """What a rank is told."""
        local_rank = self.plan.ranks.index(rank)
        return Begin(
            self._launch,
            rank,
            local_rank,
            self._environment(local_rank, attempt),
            self.plan.threads,
            (self._config.seed or 0) + rank,
            self.plan.devices[local_rank],
        )

    def payload(self) -> int:
        """A descriptor of the payload, to be given away."""
        return os.dup(self._payload)

    def exec(self, rank: int, attempt: int, fds: list[int]) -> int:
        """Start a rank in a fresh interpreter, which takes these descriptors; returns its process id."""
        start = Path(nblaunch.__file__).parent / "_start.py"
        flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
        arguments = ["nblaunch.rank.main", str(os.getpid()), *map(str, fds)]
        own = self._environment(self.plan.ranks.index(rank), attempt)
        try:
            child = subprocess.Popen(
                [sys.executable, *flags, "-P", str(start), *arguments],
                env=launching.exec_environment(self._launch, own, self.plan.threads),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
            )
        finally:
            for fd in fds:
                os.close(fd)
        child.returncode = 0  # the run waits for it itself
        return child.pid

    def close(self) -> None:
        """No further attempt will be made."""
        os.close(self._payload)
        self.free_port()

    def free_port(self) -> None:
        """The port may be taken by others."""
        if self._listening is not None:
            self._listening.close()

    def _environment(self, local_rank: int, attempt: int) -> dict[str, str]:
        return launching.rank_environment(
            self._launch, self._config, self.plan, local_rank, port=self.port, attempt=attempt
        )
