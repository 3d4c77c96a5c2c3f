"""One run on this machine: its ranks from start to end, and what their ends mean."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Protocol

import msgspec

from nblaunch.agent import launching, policy
from nblaunch.agent.collectives import CollectiveCheck
from nblaunch.agent.folder import prune
from nblaunch.agent.loop import Loop, Timer
from nblaunch.agent.process import RankProcess
from nblaunch.agent.starting import Starter
from nblaunch.agent.stopping import Stopping
from nblaunch.agent.telling import Telling
from nblaunch.config import from_mapping
from nblaunch.wire.channel import METRICS, PROGRESS, Frame
from nblaunch.wire.messages import (
    Collective,
    Dismiss,
    Display,
    Failure,
    Fork,
    Imported,
    Launch,
    Message,
    Notice,
    Result,
    Started,
    State,
)


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
    """The ranks of one launch on this machine.

    Raises:
        ConfigError: The port that was asked for is taken.
        OSError: Its folder can't be made anywhere.
    """

    def __init__(self, server: Surroundings, launch: Launch, payload: int, plan: launching.Plan, method: str) -> None:
        self.launch = launch
        self.config = from_mapping(launch.config)
        self._server = server
        self._loop = server.loop
        self._plan = plan
        self._method = method
        self._attempt = 0
        self._timers: list[Timer] = []
        self._stop_asked = False
        self._ranks: dict[int, RankProcess] = {}
        self._starter = Starter(launch, self.config, plan, payload)
        try:
            self._telling = Telling(launch, self.config, plan.ranks, self._loop, server.tell)
        except OSError:
            self._starter.free_port()
            raise
        self._memory = policy.MemoryKills()

    # ---- start

    def start(self) -> None:
        """Start all ranks, for the first time or again."""
        store = self._starter.store_socket()
        if store is not None:
            self._server.open_store(self.launch.run, store)
        self._checks = CollectiveCheck(self._plan.ranks)
        self._failures: list[Failure] = []
        self._finished = False
        self._begun = time.time()
        self._ranks = {rank: self._prepared(rank) for rank in self._plan.ranks}
        self._stopping = Stopping(self._loop, self._ranks.values())
        self._telling.tellers = lambda: [s.teller for process in self._ranks.values() for s in process.streams]
        if self._method == "fork":
            run, payload = self.launch.run, self._starter.payload
            requests = [(Fork(run, "rank", p.rank), p.rank_fds(payload())) for p in self._ranks.values()]
            self._server.fork(requests, self.launch)
        else:
            for process in self._ranks.values():
                self._exec(process)

    def _prepared(self, rank: int) -> RankProcess:
        """A rank's channel and pipes, with what it will be told on its way already."""
        process = RankProcess(rank, self._loop, self._telling.lines, self._telling.wrote)
        process.watch(lambda frame: self._on_frame(process, frame), lambda: self._on_death(process))
        process.say(self._starter.begin(rank, self._attempt))
        return process

    def _exec(self, process: RankProcess) -> None:
        fds = process.rank_fds(self._starter.payload())
        self.forked(process.rank, self._starter.exec(process.rank, self._attempt, fds), "")

    def forked(self, rank: int, pid: int, dirty: str) -> None:
        """A process of this run exists, or could not be forked."""
        process = self._ranks[rank]
        if pid:
            process.born(pid)
            self._stopping.born(process)
        elif self._stopping.why:
            process.unborn = True
            self._finish_if_over()
        else:
            self._telling.warn(f"rank {rank} is started in a fresh interpreter, which takes seconds: {dirty}")
            process.close()
            self._ranks[rank] = self._prepared(rank)
            self._stopping.replace(process, self._ranks[rank])
            self._exec(self._ranks[rank])
        if pid and all(other.pid for other in self._ranks.values()):
            self._tell_started()

    def _tell_started(self) -> None:
        message = Started(
            self.launch.run,
            str(self._telling.folder.path),
            self._plan.world_size,
            self._plan.ranks,
            [process.pid for process in self._ranks.values()],
            self._plan.devices,
            self._plan.backend,
            self._method,
            self._begun,
        )
        self._telling.event(message)

    # ---- what ranks say

    def _on_frame(self, process: RankProcess, frame: Frame) -> None:
        if frame.lane == METRICS:
            self._telling.folder.metrics(frame.body)
            self._server.forward(frame, self.launch.run, process.rank)
        elif frame.lane == PROGRESS:
            self._server.forward(frame, self.launch.run, process.rank)
        else:
            try:
                message = frame.open()
            except msgspec.DecodeError as error:
                text = f"what this rank sent can't be read: {error}"
                self._failed(process, Failure(process.rank, "exception", time.time(), type="DecodeError", message=text))
            else:
                self._handle(process, message, frame)

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
                self._telling.folder.event(message)
                self._server.forward(frame, self.launch.run, process.rank)
            case _:
                self._telling.warn(f"rank {process.rank} sent a {type(message).__name__}, which is not for the agent")

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
                self._telling.warn(
                    f"rank {process.rank} did not end within {self.config.exit_timeout:g} s of the last return "
                    "(its exit handlers or threads still ran) and was stopped; its result is here"
                )
                process.signal(signal.SIGKILL)

    # ---- what deaths mean

    def _on_death(self, process: RankProcess) -> None:
        pid = process.pid
        status = process.reap()
        process.flush()
        if process.state == "returned":
            if os.WIFSIGNALED(status) and not self._stopping.why and os.WTERMSIG(status) != signal.SIGKILL:
                name = policy.signal_name(os.WTERMSIG(status))
                self._telling.warn(
                    f"rank {process.rank} (pid {pid}) was killed by {name} as it ended; its result is here"
                )
        elif process.failure is None:
            self._failed(process, self._meaning_of(process, status))
        if process.state == "returned":
            self._set_state(process, "ended", time.time())
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        """The attempt is over once no process lives and none is still to be born."""
        if not any(process.alive or process.expected for process in self._ranks.values()):
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
            self._telling.folder.event(failure)
            return  # the rank goes on as one that has returned
        failure.host = failure.host or socket.gethostname()
        failure.run = self.launch.run
        process.failure = process.failure or failure
        if failure.kind == "stopped" and process.told_to_stop_at is None:
            failure.kind = "exception"  # a KeyboardInterrupt that nobody asked for
        self._failures.append(failure)
        self._telling.folder.event(failure)
        stopped = failure.kind == "stopped"
        self._set_state(process, "stopped" if stopped else "failed", failure.time, failure.message)
        if failure.symptom:
            self._timers.append(self._loop.later(policy.SYMPTOM_PATIENCE, lambda: self._stopping.begin("failed")))
        elif not stopped:
            self._stopping.begin("failed")

    # ---- stop

    def stop(self, now: bool) -> None:
        """The notebook asked for the end of the run."""
        self._stop_asked = True
        if now:
            self.kill()
        else:
            self._stopping.begin("asked")

    def kill(self) -> None:
        """End every process of the run at once."""
        self._stopping.kill()
        self._finish_if_over()

    def abandon(self) -> None:
        """The notebook is gone: kill everything and leave the folder in order; nobody is told."""
        for process in self._ranks.values():
            if process.alive:
                process.signal(signal.SIGKILL)
        for process in self._ranks.values():
            for stream in process.streams:
                stream.drain()
        self._telling.abandoned()

    @property
    def pids(self) -> list[int]:
        """The processes whose status this run takes itself."""
        return [process.pid for process in self._ranks.values() if process.alive]

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
            self._telling.warn(
                f"rank {cause.rank} failed ({cause.type or cause.kind}: {cause.message}); all ranks start again, "
                f"restart {self._attempt} of {self.config.max_restarts}"
            )
            self.start()
            return
        returned = all(process.state == "ended" for process in self._ranks.values())
        status = "done" if returned and not self._failures else "stopped" if self._stop_asked else "failed"
        others = [failure for failure in self._failures if failure is not cause]
        self._starter.close()
        self._telling.finished(status, cause if status == "failed" else None, _folded(others))
        self._server.ended(self)
        prune(self._telling.folder.path.parent, self.config.keep_runs)

    def _cause(self) -> Failure | None:
        stopped = {p.rank: p.told_to_stop_at for p in self._ranks.values() if p.told_to_stop_at is not None}
        return policy.root_cause(self._failures, stopped)

    def _end_attempt(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._stopping.end()
        self._server.close_store(self.launch.run)
        for process in self._ranks.values():
            process.close()

    # ---- told

    def _set_state(self, process: RankProcess, state: str, when: float, detail: str = "") -> None:
        process.state = state
        self._telling.state(process.rank, state, when, detail)


def _folded(failures: list[Failure]) -> list[Failure]:
    """What only followed is shown as one line each: without its pickle and its output."""
    for failure in failures:
        failure.pickled, failure.output = b"", []
    return failures
