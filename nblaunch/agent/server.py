"""The agent: one per machine, started by the kernel, ends with it.

kernel == channel ==> Server -- Templates --> ranks (AgentRun)
                             ^                  |
                             +---- frames ------+
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from nblaunch.agent import launching
from nblaunch.agent.loop import Loop
from nblaunch.agent.run import AgentRun
from nblaunch.agent.templates import TemplateOwner, Templates
from nblaunch.config import from_mapping
from nblaunch.errors import ConfigError
from nblaunch.wire import channel as wire
from nblaunch.wire.channel import PROGRESS, Channel, Frame
from nblaunch.wire.lifelines import adopt_grandchildren
from nblaunch.wire.messages import (
    Census,
    CloseStore,
    Fork,
    Forked,
    Goodbye,
    Launch,
    Message,
    Notice,
    OpenStore,
    Output,
    Ready,
    Refused,
    Stop,
    Warm,
)

_SLOW = 1 << 20
"""Bytes waiting for the kernel beyond which only the latest progress is kept."""
_STUCK = 1 << 24
"""Bytes beyond which metrics and output are left to the run's folder."""


class Server(TemplateOwner):
    """Serves one kernel."""

    def __init__(self, connection: socket.socket, kernel: int, path: list[str]) -> None:
        self.loop = Loop()
        self._kernel = Channel(connection)
        self._runs: dict[str, AgentRun] = {}
        self._waiting: list[tuple[Launch, int]] = []
        self._latest: dict[tuple[str, int], Frame] = {}
        self._left_out: dict[tuple[str, int, str], int] = {}
        """Lines of a stream that a kernel which does not keep up was not sent."""
        self._census: Census | None = None
        self._stores: Channel | None = None
        self._leaving = False
        adopt_grandchildren()
        self.loop.watch(self._kernel.fileno(), self._read_kernel)
        self._watch_kernel_process(kernel)
        self._templates = Templates(self.loop, path, self)
        self._watch_children()
        self.tell(Ready(os.getpid(), socket.gethostname()))

    def _watch_kernel_process(self, kernel: int) -> None:
        """A forked child of the kernel may hold the socket open; the kernel's own end must be seen all the same."""
        pidfd = os.pidfd_open(kernel)
        self.loop.watch(pidfd, self._kernel_ended)
        if os.getppid() != kernel:
            self._kernel_ended()

    def _watch_children(self) -> None:
        """Orphans of ranks and retired templates come here when they end; their status wants to be taken."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def reap() -> None:
            os.read(read, 1 << 12)
            self._reap_adopted()

        self.loop.watch(read, reap)

    # ---- the kernel

    def _read_kernel(self) -> None:
        for frame in self._kernel.take():
            self._handle(frame)
        if self._kernel.closed:
            self._kernel_ended()

    def _handle(self, frame: Frame) -> None:
        match frame.open():
            case Launch() as launch:
                self._waiting.append((launch, frame.fds[0]))
                self._serve_waiting()
            case Stop() as stop:
                self._stop(stop)
            case Goodbye():
                self._leaving = True
                self._leave_if_idle()
            case other:
                self.tell(Notice(f"the agent does not know what to do with {type(other).__name__}", "warning"))

    def _stop(self, stop: Stop) -> None:
        run = self._runs.get(stop.run)
        if run is not None:
            run.stop(stop.now)
            return
        for waiting in [entry for entry in self._waiting if entry[0].run == stop.run]:
            self._waiting.remove(waiting)
            self._refuse(*waiting, "stopped before it began", "stopped")

    def tell(self, message: Message) -> None:
        """Send a message to the kernel."""
        if isinstance(message, Output):
            key = message.run, message.rank, message.stream
            message.skipped += self._left_out.pop(key, 0)
            if self._kernel.waiting > _STUCK:
                self._left_out[key] = message.skipped + len(message.lines)
                return
        self._kernel.send(message)
        self._write_later()

    def forward(self, frame: Frame, run: str, rank: int) -> None:
        """Pass a frame on; a kernel that does not keep up gets the latest progress and reads the rest from disk."""
        if frame.lane == PROGRESS and self._kernel.waiting > _SLOW:
            self._latest[run, rank] = frame
        elif frame.lane == wire.METRICS and self._kernel.waiting > _STUCK:
            return
        else:
            self._kernel.forward(frame)
            self._write_later()

    def _write_later(self) -> None:
        if self._kernel.waiting:
            self.loop.want_write(self._kernel.fileno(), self._write_kernel)

    def _write_kernel(self) -> None:
        self._kernel.flush()
        if self._kernel.waiting <= _SLOW:
            latest, self._latest = self._latest, {}
            for frame in latest.values():
                self._kernel.forward(frame)
        if not self._kernel.waiting:
            self.loop.want_write(self._kernel.fileno(), None)

    def _kernel_ended(self) -> None:
        """The notebook is gone: so are its ranks, at once."""
        for run in list(self._runs.values()):
            run.abandon()
        os._exit(0)

    # ---- launches

    def _serve_waiting(self) -> None:
        if self._templates.warm is None or self._census is None:
            return
        waiting, self._waiting = self._waiting, []
        for launch, payload in waiting:
            try:
                self._start(launch, payload)
            except ConfigError as error:
                self._refuse(launch, payload, str(error), "config")
            except OSError as error:
                text = f"the run can't be started on this machine: {error}"
                started = self._runs.get(launch.run)
                if started is None:
                    self._refuse(launch, payload, text, "agent")
                else:
                    self.tell(Refused(launch.run, text, "agent"))
                    started.kill()

    def _start(self, launch: Launch, payload: int) -> None:
        assert self._census is not None and self._templates.warm is not None
        config = from_mapping(launch.config)
        plan = launching.plan(config, launch.environment, self._census)
        method = config.start_method
        if method == "auto":
            method = "fork" if self._templates.warm.fork_safe or not self._census.devices else "spawn"
        run = self._runs[launch.run] = AgentRun(self, launch, payload, plan, method)
        run.start()

    def _refuse(self, launch: Launch, payload: int, reason: str, kind: str) -> None:
        os.close(payload)
        self.tell(Refused(launch.run, reason, kind))

    def ended(self, run: AgentRun) -> None:
        """A run is over."""
        self._runs.pop(run.launch.run, None)
        self._reap_adopted()
        self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._leaving and not self._runs and not self._waiting:
            while self._kernel.waiting:
                self._kernel.flush()
            os._exit(0)

    def _reap_adopted(self) -> None:
        """Take the status of orphans that came here; a rank's own is left to its run, or will be."""
        if self._templates.expecting:
            return
        ours = {pid for run in self._runs.values() for pid in run.pids}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in ours:
                return
            os.waitpid(found.si_pid, 0)

    # ---- templates

    def fork(self, requests: list[tuple[Fork, list[int]]], launch: Launch) -> None:
        """Ask the template that fits the launch for processes."""
        self._templates.fork(requests, launch)

    def imported(self, modules: list[str], launch: Launch) -> None:
        """A rank imported these: have them ready for the next launch like this one."""
        self._templates.preload(modules, launch)

    def forked(self, message: Forked) -> None:
        """A process exists, or could not be forked."""
        run = self._runs.get(message.run)
        if run is not None:
            run.forked(message.rank, message.pid, message.dirty)
        elif message.pid and message.role == "rank":
            os.kill(message.pid, signal.SIGKILL)

    def template_ready(self, warm: Warm) -> None:
        """The base template has torch, or says why not; the machine's devices come next."""
        if warm.dirty and not warm.modules:
            self._give_up(warm.dirty)
        elif warm.accelerator:
            self._take_census()
        else:
            self._census = Census([], "gloo")
            self._serve_waiting()

    def _take_census(self) -> None:
        ours, theirs = wire.pair()
        channel = Channel(ours)
        self._templates.fork([(Fork("", "census"), [theirs.detach()])], None)

        def read() -> None:
            for frame in channel.receive():
                message = frame.open()
                if isinstance(message, Census):
                    self._census = message
            if self._census is None and channel.closed:
                self.tell(Notice("asking for the accelerators failed; this agent uses the CPU", "warning"))
                self._census = Census([], "gloo")
            if self._census is not None:
                self.loop.forget(channel.fileno())
                channel.close()
                self._serve_waiting()

        self.loop.watch(channel.fileno(), read)

    def open_store(self, run: str, listening: int) -> None:
        """Have the store of a run's process group served, by a process that is forked for the first one."""
        if self._stores is None or self._stores.receive() or self._stores.closed:
            ours, theirs = wire.pair()
            self._stores = Channel(ours)
            self._templates.fork([(Fork("", "stores"), [theirs.detach()])], None)
        self._stores.send(OpenStore(run), (listening,))

    def close_store(self, run: str) -> None:
        """A run is over."""
        if self._stores is not None:
            self._stores.send(CloseStore(run))

    def template_ended(self, warm: Warm | None) -> None:
        """Without the base template nothing can be launched any more."""
        self._give_up("the process that imports torch ended unexpectedly" if warm is None else "its template ended")

    def _give_up(self, reason: str) -> None:
        for launch, payload in self._waiting:
            self._refuse(launch, payload, reason, "agent")
        self._waiting = []
        self._leaving = True
        self._leave_if_idle()


def main() -> None:
    """Be the agent: `<descriptor of the kernel's channel> <kernel's pid> <kernel's sys.path as JSON>`."""
    fd, kernel, path = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    server = Server(connection, kernel, path)
    signal.signal(signal.SIGTERM, lambda *_: server._kernel_ended())
    server.loop.run()
