"""One run on this machine: its ranks from start to end, and what their ends mean."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import nblaunch
from nblaunch.agent import launching, policy
from nblaunch.agent.collectives import CollectiveCheck
from nblaunch.agent.folder import RunFolder, prune
from nblaunch.agent.loop import Loop, Timer
from nblaunch.agent.process import RankProcess
from nblaunch.config import from_mapping
from nblaunch.wire.channel import METRICS, PROGRESS, Frame
from nblaunch.wire.messages import (
    Begin,
    Collective,
    Dismiss,
    Display,
    Failure,
    Finished,
    Fork,
    Imported,
    Launch,
    Message,
    Notice,
    Output,
    RankUpdate,
    Result,
    Started,
    State,
)

STOP_WAITS = {"asked": (1.0, 0.5), "failed": (0.3, 0.2)}
"""Why ranks are stopped, to the seconds after SIGINT before SIGTERM, and after that before SIGKILL."""
TELL_SECONDS = 0.05
"""How long lines wait for more of their kind before they go to the kernel."""


class Surroundings(Protocol):
    """What a run needs of the agent's server."""

    loop: Loop

    def tell(self, message: Message) -> None:
        """Send a message to the kernel."""
        ...

    def forward(self, frame: Frame, run: str, rank: int) -> None:
        """Pass a frame on to the kernel as it came."""
        ...

    def open_store(self, run: str, listening: int) -> None:
        """Have the run's store served on this socket."""
        ...

    def close_store(self, run: str) -> None:
        """The run needs its store no more."""
        ...

    def fork(self, requests: list[tuple[Fork, list[int]]], launch: Launch) -> None:
        """Ask a template to fork processes."""
        ...

    def imported(self, modules: list[str], launch: Launch) -> None:
        """A rank imported these."""
        ...

    def ended(self, run: AgentRun) -> None:
        """The run is over."""
        ...


class AgentRun:
    """The ranks of one launch on this machine."""

    def __init__(self, server: Surroundings, launch: Launch, payload: int, plan: launching.Plan, method: str) -> None:
        self.launch = launch
        self.config = from_mapping(launch.config)
        self._server = server
        self._loop = server.loop
        self._payload = payload
        self._plan = plan
        self._method = method
        self._attempt = 0
        self._timers: list[Timer] = []
        self._stop_asked = False
        name = self.config.name or "run"
        self._folder = RunFolder(launch, name, self.config.run_limit_bytes, plan.ranks, self._warn)
        self._memory = policy.MemoryKills()
        self._flush_timer: Timer | None = None
        self._ranks: dict[int, RankProcess] = {}

    # ---- start

    def start(self) -> None:
        """Start all ranks.

        Raises:
            ConfigError: The port that was asked for is taken.
        """
        listening = launching.listen(self.config)
        self._port = listening.getsockname()[1] if listening is not None else self.config.use_port or 29500
        if listening is not None:
            self._server.open_store(self.launch.run, listening.detach())
        self._checks = CollectiveCheck(self._plan.ranks)
        self._failures: list[Failure] = []
        self._stopping = ""
        self._finished = False
        self._begun = time.time()
        self._ranks = {rank: RankProcess(rank, self._loop, self._told, self._wrote) for rank in self._plan.ranks}
        requests: list[tuple[Fork, list[int]]] = []
        for local_rank, process in enumerate(self._ranks.values()):
            process.watch(lambda f, p=process: self._on_frame(p, f), lambda p=process: self._on_death(p))
            environment = self._environment(local_rank)
            process.say(self._begin(process.rank, local_rank, environment))
            if self._method == "fork":
                requests.append((Fork(self.launch.run, "rank", process.rank), process.rank_fds(self._payload)))
            else:
                self._exec(process, environment)
        self._server.fork(requests, self.launch)

    def _begin(self, rank: int, local_rank: int, environment: dict[str, str]) -> Begin:
        return Begin(
            self.launch,
            rank,
            local_rank,
            environment,
            self._plan.threads,
            (self.config.seed or 0) + rank,
            self._plan.devices[local_rank],
            os.getpid(),
        )

    def _environment(self, local_rank: int) -> dict[str, str]:
        return launching.rank_environment(
            self.launch, self.config, self._plan, local_rank, port=self._port, attempt=self._attempt
        )

    def _exec(self, process: RankProcess, environment: dict[str, str]) -> None:
        """Start a rank in a fresh interpreter."""
        fds = process.rank_fds(self._payload)
        start = Path(nblaunch.__file__).parent / "_start.py"
        flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
        command = [
            sys.executable,
            *flags,
            "-P",
            str(start),
            "nblaunch.rank.main",
            str(os.getpid()),
            *map(str, fds),
        ]
        own = launching.exec_environment(self.launch, environment, self._plan.threads)
        child = subprocess.Popen(command, env=own, pass_fds=fds, stdin=subprocess.DEVNULL)
        child.returncode = 0  # the agent waits for it itself
        for fd in fds:
            os.close(fd)
        self.forked(process.rank, child.pid, "")

    def forked(self, rank: int, pid: int, dirty: str) -> None:
        """A process of this run exists, or could not be forked."""
        if pid:
            process = self._ranks[rank]
            process.born(pid)
            if self._stopping:
                self._escalate(process, signal.SIGKILL)
        else:
            self._warn(f"rank {rank} is started in a fresh interpreter, which takes seconds: {dirty}")
            self._exec(self._ranks[rank], self._environment(self._plan.ranks.index(rank)))
        if self._ranks and all(process.pid for process in self._ranks.values()):
            self._tell_started()

    def _tell_started(self) -> None:
        message = Started(
            self.launch.run,
            str(self._folder.path),
            self._plan.world_size,
            self._plan.ranks,
            [process.pid for process in self._ranks.values()],
            self._plan.devices,
            self._plan.backend,
            self._method,
            self._begun,
        )
        self._folder.event(message)
        self._server.tell(message)

    # ---- what ranks say

    def _on_frame(self, process: RankProcess, frame: Frame) -> None:
        if frame.lane == METRICS:
            self._folder.metrics(frame.body)
            self._server.forward(frame, self.launch.run, process.rank)
        elif frame.lane == PROGRESS:
            self._server.forward(frame, self.launch.run, process.rank)
        else:
            self._handle(process, frame.open(), frame)

    def _handle(self, process: RankProcess, message: Message, frame: Frame) -> None:
        match message:
            case State():
                self._set_state(process, message.state, message.time)
                if message.state == "returned":
                    self._returned(process)
            case Result():
                self._server.forward(frame, self.launch.run, process.rank)
            case Failure():
                message.symptom = policy.is_symptom(message)
                message.output = process.last_lines()
                self._failed(process, message)
            case Collective():
                mismatch = self._checks.arrived(message)
                if mismatch is not None:
                    self._failed(process, mismatch)
            case Imported():
                self._server.imported(message.modules, self.launch)
            case Display() | Notice():
                self._folder.event(message)
                self._server.forward(frame, self.launch.run, process.rank)
            case _:
                self._warn(f"rank {process.rank} sent a {type(message).__name__}, which is not for the agent")

    def _returned(self, process: RankProcess) -> None:
        missing = self._checks.ended(process.rank)
        if missing is not None:
            self._failed(process, missing)
        elif all(other.state == "returned" for other in self._ranks.values()):
            for other in self._ranks.values():
                other.say(Dismiss())
            self._timers.append(self._loop.later(self.config.exit_timeout, self._end_late))

    def _end_late(self) -> None:
        for process in self._ranks.values():
            if process.alive:
                self._warn(
                    f"rank {process.rank} did not end within {self.config.exit_timeout:g} s of the last return "
                    "(its exit handlers or threads still ran) and was stopped; its result is here"
                )
                process.signal(signal.SIGKILL)

    # ---- what deaths mean

    def _on_death(self, process: RankProcess) -> None:
        pid = process.pid
        status = process.reap()
        self._flush_rank(process)
        if process.state == "returned":
            if os.WIFSIGNALED(status) and not self._stopping and os.WTERMSIG(status) != signal.SIGKILL:
                name = policy.signal_name(os.WTERMSIG(status))
                self._warn(f"rank {process.rank} (pid {pid}) was killed by {name} as it ended; its result is here")
        elif process.failure is None:
            self._failed(process, self._meaning_of(process, status))
        if process.state == "returned":
            self._set_state(process, "ended", time.time())
        if not any(other.alive for other in self._ranks.values()):
            self._finish()

    def _meaning_of(self, process: RankProcess, status: int) -> Failure:
        if process.told_to_stop_at is not None:
            return Failure(process.rank, "stopped", time.time(), message="was stopped")
        failure = policy.death(process.rank, status, out_of_memory=self._memory.happened())
        failure.output = process.last_lines()
        return failure

    def _failed(self, process: RankProcess, failure: Failure) -> None:
        """Something went wrong in a rank: note it, and stop the others once the cause is known."""
        if failure.kind == "result":
            self._failures.append(failure)
            self._folder.event(failure)
            return  # the rank goes on as one that has returned
        failure.host = failure.host or socket.gethostname()
        failure.run = self.launch.run
        process.failure = process.failure or failure
        if failure.kind == "stopped" and process.told_to_stop_at is None:
            failure.kind = "exception"  # a KeyboardInterrupt that nobody asked for
        self._failures.append(failure)
        self._folder.event(failure)
        stopped = failure.kind == "stopped"
        self._set_state(process, "stopped" if stopped else "failed", failure.time, failure.message)
        if failure.symptom:
            self._timers.append(self._loop.later(policy.SYMPTOM_PATIENCE, lambda: self.stop_ranks("failed")))
        elif not stopped:
            self.stop_ranks("failed")

    # ---- stop

    def stop(self, now: bool) -> None:
        """The notebook asked for the end of the run."""
        self._stop_asked = True
        if now:
            self.kill()
        else:
            self.stop_ranks("asked")

    def kill(self) -> None:
        """End every process of the run at once."""
        self._stopping = self._stopping or "asked"
        for process in self._ranks.values():
            self._escalate(process, signal.SIGKILL)
        if not any(process.alive for process in self._ranks.values()) and not self._expects_births():
            self._finish()

    def abandon(self) -> None:
        """The notebook is gone: kill everything and leave the folder in order; nobody is told."""
        for process in self._ranks.values():
            if process.alive:
                process.signal(signal.SIGKILL)
        for process in self._ranks.values():
            for stream in process.streams:
                stream.drain()
        notice = Notice("the notebook's kernel ended, and the run with it", "warning", run=self.launch.run)
        self._folder.event(notice)
        self._folder.event(Finished(self.launch.run, "stopped", time.time()))
        self._folder.close()

    @property
    def pids(self) -> list[int]:
        """The processes whose status this run takes itself."""
        return [process.pid for process in self._ranks.values() if process.alive]

    def stop_ranks(self, why: str) -> None:
        """SIGINT, SIGTERM, SIGKILL, each wait bounded; a rank that has failed gets time to end by itself."""
        if self._stopping:
            return
        self._stopping = why
        first, second = STOP_WAITS[why]
        for process in self._ranks.values():
            if process.failure is None:
                self._escalate(process, signal.SIGINT)
        for wait, number in ((first, signal.SIGTERM), (first + second, signal.SIGKILL)):
            self._timers.append(self._loop.later(wait, lambda number=number: self._escalate_all(number)))

    def _escalate_all(self, number: signal.Signals) -> None:
        for process in self._ranks.values():
            self._escalate(process, number)

    def _escalate(self, process: RankProcess, number: signal.Signals) -> None:
        if process.alive:
            process.told_to_stop_at = process.told_to_stop_at or time.time()
            process.signal(number)

    def _expects_births(self) -> bool:
        return any(not process.pid for process in self._ranks.values())

    # ---- end

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._end_attempt()
        cause = self._cause()
        restarts_left = self.config.max_restarts - self._attempt
        if cause is not None and cause.kind != "result" and not self._stop_asked and restarts_left > 0:
            self._attempt += 1
            self._warn(
                f"rank {cause.rank} failed ({cause.type or cause.kind}: {cause.message}); all ranks start again, "
                f"restart {self._attempt} of {self.config.max_restarts}"
            )
            self.start()
            return
        returned = all(process.state == "ended" for process in self._ranks.values())
        status = "done" if returned and not self._failures else "stopped" if self._stop_asked else "failed"
        others = [failure for failure in self._failures if failure is not cause]
        finished = Finished(
            self.launch.run, status, time.time(), None if status != "failed" else cause, _folded(others)
        )
        self._folder.event(finished)
        self._folder.close()
        os.close(self._payload)
        self._server.tell(finished)
        self._server.ended(self)
        prune(self._folder.path.parent, self.config.keep_runs)

    def _cause(self) -> Failure | None:
        stopped = {p.rank: p.told_to_stop_at for p in self._ranks.values() if p.told_to_stop_at is not None}
        return policy.root_cause(self._failures, stopped)

    def _end_attempt(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._server.close_store(self.launch.run)
        for process in self._ranks.values():
            process.close()

    # ---- to the kernel

    def _set_state(self, process: RankProcess, state: str, when: float, detail: str = "") -> None:
        process.state = state
        message = RankUpdate(self.launch.run, process.rank, state, when, detail)
        self._folder.event(message)
        self._server.tell(message)

    def _warn(self, text: str) -> None:
        notice = Notice(text, "warning", run=self.launch.run)
        self._server.tell(notice)
        if hasattr(self, "_folder"):
            self._folder.event(notice)

    def _told(self, rank: int, stream: str, lines: list[str], skipped: int) -> None:
        self._server.tell(Output(self.launch.run, rank, stream, lines, skipped))

    def _wrote(self, rank: int, lines: bytes) -> None:
        self._folder.log(rank, lines)
        if self._flush_timer is None:
            self._flush_timer = self._loop.later(TELL_SECONDS, self._flush_output)

    def _flush_output(self) -> None:
        """Pass on what the ranks wrote; what the rate does not allow yet waits for the next time."""
        self._flush_timer = None
        streams = [stream for process in self._ranks.values() for stream in process.streams]
        if not all([stream.teller.flush() for stream in streams]):
            self._flush_timer = self._loop.later(TELL_SECONDS, self._flush_output)

    def _flush_rank(self, process: RankProcess) -> None:
        for stream in process.streams:
            stream.teller.flush(at_once=True)


def _folded(failures: list[Failure]) -> list[Failure]:
    """What only followed is shown as one line each: without its pickle and its output."""
    for failure in failures:
        failure.pickled, failure.output = b"", []
    return failures
