"""What a death means: which of the things that went wrong is the cause, and which only followed from it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from nblaunch.agent import cgroups
from nblaunch.wire import signals
from nblaunch.wire.messages import Failure

SYMPTOM_PATIENCE = 0.5
"""Seconds that the loss of a peer waits for its cause."""

_PEER_ERRORS = re.compile(
    r"Dist(Backend|Network|Store)Error|ConnectionResetError|BrokenPipeError|RuntimeError|ValueError"
)
_PEER_LOST = re.compile(
    r"gloo/transport|"
    r"Connection closed by peer|Connection reset by peer|Socket closed|recvValue failed|failed to recv|"
    r"Application timeout caused pair closure|"
    r"NCCL communicator was aborted|remote process exited|ncclRemoteError|ncclSystemError|"
    r"Watchdog caught collective operation timeout|"
    r"Broken pipe.*TCPStore|TCPStore.*Broken pipe|The client socket has (timed out|failed)"
)


def is_symptom(failure: Failure) -> bool:
    """Whether an exception, or one that it came from, only says that another rank was lost."""
    if failure.kind != "exception" or _PEER_ERRORS.search(failure.text) is None:
        return False
    return _PEER_LOST.search(failure.text) is not None


def root_cause(failures: list[Failure], stopped: Mapping[int, float]) -> Failure | None:
    """The failure that explains the others.

    Args:
        failures: What is known, in any order.
        stopped: Rank to the time at which it was told to stop; what it said after that is no cause.
    """

    def weight(failure: Failure) -> tuple[bool, bool, bool, float]:
        after_stop = failure.rank in stopped and failure.time >= stopped[failure.rank]
        return failure.kind == "stopped", after_stop, failure.symptom, failure.time

    return min(failures, key=weight, default=None)


def death(rank: int, status: int, *, out_of_memory: bool) -> Failure:
    """What `waitpid`'s status of a rank that said nothing means."""
    now = time.time()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL and out_of_memory:
            text = "the system ran out of memory and killed it (SIGKILL)"
            return Failure(rank, "memory", now, message=text, code=number)
        return Failure(rank, "signal", now, message=f"was killed by {signal_name(number)}", code=number)
    code = os.waitstatus_to_exitcode(status)
    return Failure(rank, "exit", now, message=f"exited with code {code} before it returned", code=code)


def crash_lines(lines: list[str]) -> list[str]:
    """What faulthandler wrote before a crash, without nblaunch's own frames; all lines if it wrote nothing."""
    starts = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not starts:
        return lines
    report = [line for line in lines[starts[-1] :] if line.strip() and not line.startswith("Extension modules")]
    return [line for line in report if f"{os.sep}nblaunch{os.sep}" not in line]


def signal_name(number: int) -> str:
    """A signal as one says it: "SIGSEGV (segmentation fault)"; "signal 37" for one without a name."""
    name = signals.signal_name(number)
    words = signal.strsignal(number) if name.startswith("SIG") else None
    return f"{name} ({words.lower()})" if words else name


class MemoryKills:
    """The counters in which the kernel says that it killed for memory."""

    def __init__(self, proc: Path = cgroups.PROC, mount: Path = cgroups.MOUNT) -> None:
        inside = cgroups.folders("memory", proc, mount)
        self._files = [folder / name for folder in inside for name in ("memory.events", "memory.oom_control")]
        self._files.append(proc / "vmstat")
        self._before = self._read()

    def happened(self) -> bool:
        """Whether a counter has risen since this was made: several ranks may be killed by one shortage."""
        return any(now > self._before.get(file, now) for file, now in self._read().items())

    def _read(self) -> dict[Path, int]:
        counts: dict[Path, int] = {}
        for file in self._files:
            try:
                match = re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE)
            except OSError:
                continue
            if match:
                counts[file] = int(match[1])
        return counts
