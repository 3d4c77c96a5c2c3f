"""Processes that ranks are forked from: the template, clean and preloaded, and the proof that it is clean.

The agent itself stays small, so that it can watch the ranks while something is imported. It forks a template, which
imports torch and waits. Asked to, a template forks ranks (twice removed, so that they become the agent's children) or a
copy of itself that imports more and, if it stays clean, takes over for later launches.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable

import msgspec

from nblaunch.wire import channel as wire
from nblaunch.wire.channel import Channel
from nblaunch.wire.lifelines import await_parent, close_all_but, die_with_parent
from nblaunch.wire.messages import Fork, Forked, Import, Warm

NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""While a template imports: OpenBLAS, its like, and Arrow's allocator (pandas loads it) start threads when loaded."""
_CUDA_NOT_INITIALIZED = 3
_RANK_MAIN = "nblaunch.rank.main"
_FIRST = ["torch", _RANK_MAIN, "threadpoolctl", "psutil"]
_ENTRIES = {"rank": "begin", "stores": "keep_stores", "census": "take_census"}
"""What a forked process is to be, to the function of the rank's main that makes it so."""


def fork_template(path: list[str]) -> socket.socket:
    """Fork the first template from the agent; returns the agent's end of its channel."""
    agent = os.getpid()
    ours, theirs = wire.pair()
    if os.fork() == 0:

        def become_first() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            close_all_but({0, 1, 2, theirs.fileno()})
            die_with_parent(agent)
            sys.path.extend(entry for entry in path if entry not in sys.path)
            Template(Channel(theirs), agent, []).start(Import(_FIRST))

        _live(become_first)
    theirs.close()
    return ours


class Reborn(BaseException):
    """A freshly forked process leaves the template's loop to become something else, on a stack of its own."""

    def __init__(self, become: Callable[[], None]) -> None:
        self.become = become


def _live(become: Callable[[], None]) -> None:
    """Be something until the process ends; what went wrong goes to the agent's log or the rank's. Never returns."""
    try:
        while True:
            try:
                become()
                break
            except Reborn as reborn:
                become = reborn.become
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Template:
    """The process that ranks are forked from; it runs nothing but this loop."""

    def __init__(self, channel: Channel, agent: int, modules: list[str]) -> None:
        self._channel = channel
        self._agent = agent
        self._modules = modules

    def start(self, wanted: Import) -> None:
        """Import, say how it went, and serve until the agent closes the channel; never returns."""
        if wanted.environment is not None:
            os.environ.clear()
            os.environ.update({**wanted.environment, **NO_THREADS})
        if wanted.path is not None:
            sys.path[:] = wanted.path
        warm = Warm(os.getpid(), self._modules)
        for module in wanted.modules:
            self._import(module, warm)
            if warm.dirty:
                break
        gc.collect()
        gc.freeze()
        if not warm.dirty:
            _describe_accelerator(warm)
        self._say(warm)
        while not warm.dirty:
            self._serve()
        os._exit(0)

    def _import(self, module: str, warm: Warm) -> None:
        if module in sys.modules:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
        except BaseException as error:  # an import may raise anything, SystemExit too
            warm.rejected[module] = f"{type(error).__name__}: {error}"
            if module in _FIRST:
                warm.dirty = f"{module} can't be imported by {sys.executable}: {error}"
            return
        dirt = find_dirt()
        if dirt:
            warm.rejected[module] = warm.dirty = f"importing {module} {dirt}"
        warm.modules.append(module)

    def _serve(self) -> None:
        forks: list[tuple[Fork, tuple[int, ...]]] = []
        for frame in self._channel.wait():
            message = frame.open()
            if isinstance(message, Fork):
                forks.append((message, frame.fds))
            elif isinstance(message, Import):
                self._succeed(message, frame.fds[0])
        if forks:
            self._fork(forks)
        elif self._channel.closed:
            os._exit(0)

    def _succeed(self, wanted: Import, fd: int) -> None:
        """Fork a copy that imports more; it becomes the agent's child."""
        intermediate = os.fork()
        if intermediate == 0:
            between = os.getpid()
            if os.fork() == 0:
                raise Reborn(lambda: self._be_copy(wanted, fd, between))
            os._exit(0)
        os.waitpid(intermediate, 0)
        os.close(fd)

    def _be_copy(self, wanted: Import, fd: int, former: int) -> None:
        self._channel.disown()
        await_parent(self._agent, former)
        close_all_but({0, 1, 2, fd})
        die_with_parent(self._agent)
        Template(Channel(socket.socket(fileno=fd)), self._agent, list(self._modules)).start(wanted)

    def _fork(self, forks: list[tuple[Fork, tuple[int, ...]]]) -> None:
        dirt = find_dirt()
        pids = [0] * len(forks) if dirt else self._fork_all(forks)
        for (fork, fds), pid in zip(forks, pids, strict=True):
            for fd in fds:
                os.close(fd)
            reason = dirt or ("" if pid else "the system can't fork another process")
            self._say(Forked(fork.run, fork.role, fork.rank, pid, dirty=reason))

    def _fork_all(self, forks: list[tuple[Fork, tuple[int, ...]]]) -> list[int]:
        """Fork all through one process in between, whose end makes them the agent's children."""
        read, write = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            pids: list[int] = []
            between = os.getpid()
            try:
                for fork, fds in forks:
                    pid = os.fork()
                    if pid == 0:
                        raise Reborn(lambda fork=fork, fds=fds: self._be(fork, fds, between))
                    pids.append(pid)
            finally:
                if os.getpid() == between:
                    os.write(write, msgspec.msgpack.encode(pids))
                    os._exit(0)
        os.close(write)
        os.waitpid(intermediate, 0)
        pids = msgspec.msgpack.decode(os.read(read, 1 << 16), type=list[int])
        os.close(read)
        return pids + [0] * (len(forks) - len(pids))

    def _be(self, fork: Fork, fds: tuple[int, ...], former: int) -> None:
        """From here on this process is a rank, or what else was asked for; never returns."""
        self._channel.disown()
        await_parent(self._agent, former)
        close_all_but({0, 1, 2, *fds})
        die_with_parent(self._agent)
        getattr(sys.modules[_RANK_MAIN], _ENTRIES[fork.role])(*fds)

    def _say(self, message: Warm | Forked) -> None:
        self._channel.send(message)
        while self._channel.waiting:
            self._channel.flush()


def _describe_accelerator(warm: Warm) -> None:
    torch = sys.modules["torch"]
    built_for = torch.accelerator.current_accelerator()
    if built_for is not None:
        warm.accelerator = built_for.type
        warm.fork_safe = built_for.type == "cuda" and torch.version.hip is None


def find_dirt() -> str:
    """What makes this process unfit to fork ranks from: "started a thread", "opened a device"; "" if nothing does."""
    if len(os.listdir("/proc/self/task")) > 1:
        return "started a thread"
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            return f"started {kind}"
    return "started the CUDA driver" if _driver_started() else ""


def _driver_started() -> bool:
    """Whether somebody called cuInit in this process, seen or unseen by torch."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        if "libcuda.so" not in maps.read():
            return False
    count = ctypes.c_int()
    return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != _CUDA_NOT_INITIALIZED
