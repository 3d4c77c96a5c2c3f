"""Where agents start, and the kernel's end of the connection to one.

One thread a connection sends and receives, so that an interrupt of the notebook's main thread never tears a message.
The kernel is never forked: an agent is exec'd, in a session of its own, by the path of its file.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import nblaunch
from nblaunch.config import agent_environment
from nblaunch.errors import AgentError
from nblaunch.wire import channel as wire
from nblaunch.wire.channel import Channel
from nblaunch.wire.messages import Goodbye, Launch, Message, Started, Stop

_THREADS_WHILE_IMPORTING = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LAST_WORDS = 2000


class Listener(Protocol):
    """What is told of one run."""

    def receive(self, message: Message, fds: tuple[int, ...]) -> None:
        """A message of the run; the listener owns the descriptors. Called in the connection's thread."""
        ...

    def agent_lost(self, error: AgentError) -> None:
        """The agent ended before the run did, and the ranks with it."""
        ...


class Agent:
    """A running agent, as the kernel holds it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = agent_environment(environment)
        self._log = os.memfd_create("nblaunch-agent-log", os.MFD_CLOEXEC)
        ours, theirs = wire.pair()
        self._wake_read, self._wake_write = os.pipe()
        self._channel = Channel(ours)
        self._outgoing: deque[tuple[Message, Sequence[int]]] = deque()
        self._listeners: dict[str, Listener] = {}
        self._pids: dict[str, list[int]] = {}
        self.alive = True
        self._ending = threading.Lock()
        self._problem = ""
        self._process = _start(theirs.fileno(), self._log, environment)
        theirs.close()
        threading.Thread(target=self._work, name="nblaunch-agent", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether it can be asked for a launch."""
        return self.alive and self._process.poll() is None

    def launch(self, message: Launch, payload: int, listener: Listener) -> None:
        """Ask for a run; the agent owns the payload's descriptor from here on.

        Raises:
            AgentError: It has ended meanwhile.
        """
        with self._ending:
            if self.alive:
                self._listeners[message.run] = listener
                self.say(message, (payload,))
                return
        os.close(payload)
        raise AgentError("the agent, which starts the ranks, has just ended; launch again")

    def stop(self, run: str, *, now: bool = False) -> None:
        """Ask for the end of a run; returns at once."""
        self.say(Stop(run, now))

    def retire(self) -> None:
        """Another agent takes the next launch; this one ends with its last run."""
        self.say(Goodbye())

    def say(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send a message, from any thread."""
        if self.alive:
            self._outgoing.append((message, fds))
            os.write(self._wake_write, b".")

    def forget(self) -> None:
        """This is a forked child of the kernel: close what it inherited, and touch nothing else."""
        if self.alive:
            self.alive = False
            for fd in (self._channel.fileno(), self._wake_read, self._wake_write, self._log):
                os.close(fd)

    # ---- the connection's thread

    def _work(self) -> None:
        try:
            self._converse()
        except Exception as error:
            self._problem = f"; the notebook's end of the connection failed: {type(error).__name__}: {error}"
            self._process.kill()
        self._ended()

    def _converse(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        while not self._channel.closed:
            events = select.POLLIN | (select.POLLOUT if self._channel.waiting else 0)
            poll.register(self._channel.fileno(), events)
            ready = dict(poll.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            while self._outgoing:
                self._channel.send(*self._outgoing.popleft())
            self._channel.flush()
            self._receive()

    def _receive(self) -> None:
        for frame in self._channel.take():
            message = frame.open()
            run = getattr(message, "run", "")
            listener = self._listeners.get(run)
            if isinstance(message, Started):
                self._pids[run] = message.pids
            if listener is not None:
                listener.receive(message, frame.fds)
            else:
                for fd in frame.fds:
                    os.close(fd)

    def finished(self, run: str) -> None:
        """Nothing of this run will follow."""
        self._listeners.pop(run, None)
        self._pids.pop(run, None)

    def _ended(self) -> None:
        code = self._process.wait()
        for pids in self._pids.values():
            _kill_groups(pids)
        with self._ending:
            error = AgentError(self._why(code))
            self._close()
        for listener in list(self._listeners.values()):
            listener.agent_lost(error)
        self._listeners.clear()

    def _close(self) -> None:
        """Give up every descriptor, once; nobody uses one of them afterwards."""
        self.alive = False
        while self._outgoing:
            for fd in self._outgoing.popleft()[1]:
                os.close(fd)
        self._channel.close()
        for fd in (self._wake_read, self._wake_write, self._log):
            os.close(fd)

    def _why(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        size = os.fstat(self._log).st_size
        words = os.pread(self._log, _LAST_WORDS, max(0, size - _LAST_WORDS)).decode("utf-8", "replace").strip()
        last = f"; its last words:\n{words}" if words else ""
        return f"the agent, which starts the ranks, {how}{self._problem}{last}"


def _start(fd: int, log: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
    start = str(Path(nblaunch.__file__).parent / "_start.py")
    path = json.dumps([entry for entry in sys.path if os.path.isabs(entry) and entry != os.getcwd()])
    command = [sys.executable, *flags, "-P", start, "nblaunch.agent.server", str(fd), str(os.getpid()), path]
    own = {
        **environment,
        **_THREADS_WHILE_IMPORTING,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONHASHSEED": environment.get("PYTHONHASHSEED") or str(int.from_bytes(os.urandom(4), "little")),
    }
    return subprocess.Popen(
        command,
        env=own,
        pass_fds=(fd,),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _kill_groups(pids: list[int]) -> None:
    """The agent is gone and its ranks with it; what they had started may still be there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


_current: Agent | None = None
_all: weakref.WeakSet[Agent] = weakref.WeakSet()


def get(environment: Mapping[str, str]) -> Agent:
    """The agent for a launch with these variables: the present one if it was started with these, else a new one."""
    global _current
    if _current is not None and _current.usable:
        if _current.environment == agent_environment(environment):
            return _current
        _current.retire()
    _current = Agent(environment)
    _all.add(_current)
    return _current


def _after_fork_in_child() -> None:
    global _current
    _current = None
    for agent in list(_all):
        agent.forget()
    _all.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
