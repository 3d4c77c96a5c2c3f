"""`Run`: what a launch gives back, and all that comes home from its ranks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nblaunch import record
from nblaunch.config import LaunchConfig
from nblaunch.dashboard import View, open_view
from nblaunch.dashboard.state import RunState
from nblaunch.errors import AgentError, ConfigError, NblaunchError, RankError, ResultError
from nblaunch.kernel.metrics import MetricsTable
from nblaunch.kernel.output import CellOutput
from nblaunch.kernel.results import Results
from nblaunch.kernel.waiting import Bell, is_the_cell, present_cell, uninterrupted
from nblaunch.wire.messages import Display, Failure, Finished, Message, Output, Refused, Result, Started

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nblaunch.kernel.agents import Agent

_TICK = 0.1
"""Seconds between looks around while a cell waits."""
_STOP_PATIENCE = 10.0
"""Seconds that a stopped run may take before the notebook no longer waits for it; the agent bounds it far below."""


class Run:
    """One launch: what its ranks returned, logged and wrote, while it goes on and afterwards.

    Made by `notebook_launcher` and `load_run`.
    """

    def __init__(
        self, name: str, config: LaunchConfig, run_id: str = "", home: Mapping[int, Any] | None = None
    ) -> None:
        self.name = name
        self.config = config
        self.state = RunState(name, config)
        """What the dashboard shows, as plain data."""
        self._id = run_id
        self._owner = os.getpid()
        self._agent: Agent | None = None
        self._results = Results(home or {})
        self._error: NblaunchError | None = None
        self._over = False
        self._happened = Bell()
        self._output = CellOutput(config.prefix, config.node_rank * (config.num_processes or 0))
        self._view: View | None = None
        self._other_views: list[View] = []
        self._waiting = False
        self._cell: Any = None

    # ---- what a user asks

    @property
    def status(self) -> str:
        """ "starting", "running", "stopping", "done", "failed" or "stopped"."""
        return self.state.status

    @property
    def path(self) -> Path:
        """The run's folder.

        Raises:
            NblaunchError: The ranks have not been started yet.
        """
        if not self.state.folder:
            raise NblaunchError("the run has no folder yet: its ranks have not been started")
        return Path(self.state.folder)

    @property
    def results(self) -> list[Any]:
        """What the function returned, a value a rank in the order of ranks.

        Raises:
            RankError: A rank failed.
            ResultError: A value could not be rebuilt here, or the run was loaded from its folder or is not done.
        """
        self._raise_if_failed()
        if not self._results.ranks or set(self.state.ranks) - set(self._results.ranks):
            why = "is not done" if not self._over and self._id else "was stopped or comes from its folder"
            raise ResultError(f"there are no results: run {self.name!r} {why} (status {self.status})")
        return [self._results.of(rank) for rank in self._results.ranks]

    @property
    def result(self) -> Any:
        """What rank 0 (on another machine, the first rank there) returned."""
        return self.results[0]

    @property
    def metrics(self) -> MetricsTable:
        """What the ranks logged, as far as it has arrived in the run's folder."""
        return MetricsTable(record.read_metrics(self.path))

    @property
    def record(self) -> dict[str, Any]:
        """What ran: versions, machine, devices, source, seed, and the choices of the launch."""
        devices = [rank.device.name or rank.device.type for rank in self.state.ranks.values() if rank.device]
        return {**record.read_record(self.path), "devices": devices, "config": self.config.to_dict()}

    def logs(self, rank: int = 0) -> str:
        """All that a rank wrote to stdout and stderr.

        Raises:
            NblaunchError: There is no such rank.
        """
        if self.state.ranks and rank not in self.state.ranks:
            raise NblaunchError(f"there is no rank {rank}; this run has ranks {sorted(self.state.ranks)}")
        return record.read_log(self.path / f"rank-{rank}.log")

    def plot(self, *metrics: str) -> Figure:
        """Mean over ranks, and the band from least to most, of these metrics, or of all."""
        from nblaunch.dashboard import snapshot

        return snapshot.figure(self.state, *metrics)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end of the run and show it here; an interrupt stops it.

        Args:
            timeout: Seconds; afterwards the run goes on.

        Raises:
            RankError: A rank failed.
            ResultError: A return value can't be sent home.
            AgentError: The agent ended.
            TimeoutError: The run has not ended in time.
        """
        self._only_here()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._waiting = True
            while not self._over:
                left = _TICK if deadline is None else min(_TICK, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"run {self.name!r} has not ended within {timeout} s; it goes on")
                self._happened.wait(left)
                self._tick()
        except KeyboardInterrupt:
            self._stop_here()
            raise self._interrupted() from None
        finally:
            self._waiting = False
        self._conclude()
        self._raise_if_failed()
        return self

    def __await__(self) -> Generator[Any, None, Run]:
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> Run:
        self._only_here()
        try:
            self._waiting = True
            while not self._over:
                await asyncio.sleep(_TICK / 2)
                self._tick()
        except KeyboardInterrupt:
            self._stop_here()
            raise self._interrupted() from None
        except asyncio.CancelledError:
            self._stop_here()
            if is_the_cell(asyncio.current_task()):
                raise self._interrupted() from None  # ipykernel makes a cancellation of an interrupt
            raise
        finally:
            self._waiting = False
        self._conclude()
        self._raise_if_failed()
        return self

    def stop(self) -> None:
        """End the run: its ranks are interrupted, and killed if that does not end them; returns once they are gone."""
        self._only_here()
        self._stop_here()

    def request_stop(self) -> None:
        """Ask for the end of the run and return at once."""
        if self._agent is not None and not self._over:
            self.state.stopping()
            self._agent.stop(self._id)

    # ---- what the launcher does

    def begin(self, agent: Agent) -> None:
        """The launch is on its way to this agent."""
        self._agent = agent

    def show(self, *, waited_for: bool) -> None:
        """Open the view in this cell, whose thread will close it if the cell waits for the run."""
        self._waiting = waited_for
        self._cell = present_cell()
        self._view = open_view(self.state, self.config.dashboard, self.request_stop)
        self._view.start()

    def abandon(self) -> KeyboardInterrupt:
        """The launch was interrupted in this cell: end what has begun; gives what to raise."""
        if not self._over:
            self._stop_here()
        return self._interrupted()

    # ---- what the connection's thread brings

    def receive(self, message: Message, fds: tuple[int, ...]) -> None:
        """Take in one message of this run."""
        match message:
            case Result():
                self._results.add(message.rank, fds[0])
                return
            case Refused():
                kind = {"config": ConfigError, "stopped": NblaunchError}.get(message.kind, AgentError)
                self._end(None if message.kind == "stopped" else kind(message.reason), message.kind)
                return
            case Output() | Display():
                self._output.add(message)
            case Started():
                self.state.apply(message)
                self._happened.ring()
                return
            case Finished():
                self.state.result = self._results.in_short(min(self.state.ranks, default=0))
            case _:
                pass
        self.state.apply(message)
        if isinstance(message, Finished):
            cause = message.cause
            self._end(None if cause is None else self._error_of(cause, message.others), message.status)
        elif isinstance(message, Output | Display):
            self._happened.ring()

    def agent_lost(self, error: AgentError) -> None:
        """The agent ended before the run did."""
        now = time.time()
        failure = Failure(-1, "exit", now, message=str(error), run=self._id)
        self.state.apply(Finished(self._id, "failed", now, failure))
        self._end(error, "failed")

    def _end(self, error: NblaunchError | None, status: str) -> None:
        self._error = error
        if not self.state.over:
            self.state.apply(Finished(self._id, "failed" if error else "stopped", time.time()))
        if self._agent is not None:
            self._agent.finished(self._id)
        self._over = True
        self._happened.ring()
        for view in self._other_views:
            view.finish()
        if not self._waiting and self._view is not None:
            self._view.finish()

    def _error_of(self, cause: Failure, others: list[Failure]) -> NblaunchError:
        if cause.kind == "result":
            return ResultError(f"rank {cause.rank}: {cause.message}")
        error = RankError(cause, others, self.state.folder)
        error.__cause__ = self._results.exception(cause)
        return error

    # ---- in the cell's thread

    def _tick(self) -> None:
        self._output.show()
        if self._view is not None:
            self._view.tick()

    def _conclude(self) -> None:
        """Show what is left, and leave the snapshot."""
        self._output.show(everything=True)
        if self._view is not None:
            self._view.finish()

    def _stop_here(self) -> None:
        """Stop and wait for the end, however often the user presses again; each press makes it more urgent."""
        if self._agent is None:
            return
        deadline = time.monotonic() + _STOP_PATIENCE
        presses, told = 0, -1
        while not self._over and time.monotonic() < deadline:
            try:
                if told < presses:
                    self._agent.stop(self._id, now=presses > 0)
                    told = presses
                    self.state.stopping()
                self._happened.wait(_TICK)
            except KeyboardInterrupt:
                presses += 1
        uninterrupted(self._conclude)

    def _interrupted(self) -> KeyboardInterrupt:
        """An interrupt that IPython shows at once: another press while it renders a traceback would lose this one."""
        error = KeyboardInterrupt(f"run {self.name!r} was stopped")
        lines = [f"KeyboardInterrupt: run {self.name!r} was stopped after {self.state.elapsed:.1f} s"]
        error._render_traceback_ = lambda: lines  # pyright: ignore[reportAttributeAccessIssue]
        return error

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _only_here(self) -> None:
        if os.getpid() != self._owner:
            raise NblaunchError("this Run belongs to another process: it can be waited for and stopped only there")

    # ---- how it looks

    def __repr__(self) -> str:
        ranks = len(self.state.ranks)
        text = f"Run {self.name!r}: {self.status}, {ranks} rank{'s' * (ranks != 1)}, {self.state.elapsed:.1f} s"
        return f"<{text}, in {self.state.folder}>" if self.state.folder else f"<{text}>"

    def _repr_html_(self) -> str:
        """The run as it stands; one line where its display stands in the same cell."""
        from nblaunch.dashboard import snapshot

        return f"<code>{escape(repr(self))}</code>" if self._is_shown_here() else snapshot.html(self.state)

    def _ipython_display_(self) -> None:
        """What `display(run)` shows of a run that goes on: a live view here too; IPython takes `_repr_html_` else."""
        if self._over or self._is_shown_here():
            raise NotImplementedError
        view = open_view(self.state, self.config.dashboard, self.request_stop)
        self._other_views.append(view)
        view.start()

    def _is_shown_here(self) -> bool:
        return self._view is not None and self._cell == present_cell()

    def __reduce__(self) -> Any:
        raise TypeError("a Run can't be pickled; pass run.results, run.metrics, or the path of its folder")


def load_run(path: str | Path) -> Run:
    """A run from its folder, while it goes on or afterwards: metrics, logs, record, state; no results.

    Raises:
        ConfigError: There is no run in this folder.
    """
    path = Path(path)
    if not (path / "launch.yaml").exists():
        raise ConfigError(f"{path} holds no run: it has no launch.yaml; runs are in .nblaunch/runs/<time>-<function>")
    config = LaunchConfig.load(path / "launch.yaml")
    run = Run(config.name or path.name, config)
    for event in record.read_events(path):
        run.state.apply(event)
        if isinstance(event, Finished):
            run._over = True
            if event.cause is not None:
                run._error = run._error_of(event.cause, event.others)
    for batch in record.read_metrics(path):
        run.state.apply(batch)
    run.state.folder = str(path.resolve())
    return run
