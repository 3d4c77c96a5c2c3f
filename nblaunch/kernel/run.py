"""`Run`: what a launch gives back, and all that comes home from its ranks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nblaunch import record
from nblaunch.config import LaunchConfig
from nblaunch.dashboard import View, open_view
from nblaunch.dashboard.state import RunState
from nblaunch.errors import AgentError, ConfigError, NblaunchError, RankError, ResultError
from nblaunch.kernel.metrics import MetricsTable
from nblaunch.kernel.output import CellOutput
from nblaunch.wire import payload
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
        self._home = home or {}
        self._owner = os.getpid()
        self._agent: Agent | None = None
        self._results: dict[int, Any] = {}
        self._error: NblaunchError | None = None
        self._over = False
        self._happened = threading.Lock()
        self._happened.acquire()
        self._output = CellOutput(config.prefix, config.node_rank * (config.num_processes or 0))
        self._view: View | None = None
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
        missing = [rank for rank in self.state.ranks if rank not in self._results]
        if missing or not self._results:
            why = "is not done" if not self._over and self._id else "was stopped or comes from its folder"
            raise ResultError(f"there are no results: run {self.name!r} {why} (status {self.status})")
        return [self._result_of(rank) for rank in sorted(self._results)]

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
                self._happened.acquire(timeout=left)
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
            if _is_the_cell(asyncio.current_task()):
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

    def show(self) -> None:
        """Open the view in this cell."""
        self._cell = _present_cell()
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
                self._results[message.rank] = fds[0]
                return
            case Refused():
                kind = {"config": ConfigError, "stopped": NblaunchError}.get(message.kind, AgentError)
                self._end(None if message.kind == "stopped" else kind(message.reason), message.kind)
                return
            case Output() | Display():
                self._output.add(message)
            case Started():
                self.state.apply(message)
                self._notify()
                return
            case _:
                pass
        self.state.apply(message)
        if isinstance(message, Finished):
            cause = message.cause
            self._end(None if cause is None else self._error_of(cause, message.others), message.status)
        elif isinstance(message, Output | Display):
            self._notify()

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
        self._notify()
        if not self._waiting and self._view is not None:
            self._view.finish()

    def _error_of(self, cause: Failure, others: list[Failure]) -> NblaunchError:
        if cause.kind == "result":
            return ResultError(f"rank {cause.rank}: {cause.message}")
        error = RankError(cause, others, self.state.folder)
        error.__cause__ = self._rebuild(cause)
        return error

    def _rebuild(self, cause: Failure) -> BaseException | None:
        """The rank's own exception, if it can be made here; its text is known in any case."""
        if not cause.pickled:
            return None
        try:
            exception = payload.load_home(cause.pickled, self._home)
        except Exception:
            return None
        return exception if isinstance(exception, BaseException) else None

    def _notify(self) -> None:
        try:
            self._happened.release()
        except RuntimeError:
            return  # whoever waits has not looked yet

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
                self._happened.acquire(timeout=_TICK)
            except KeyboardInterrupt:
                presses += 1
        _uninterrupted(self._conclude)

    def _interrupted(self) -> KeyboardInterrupt:
        """An interrupt that IPython shows at once: another press while it renders a traceback would lose this one."""
        error = KeyboardInterrupt(f"run {self.name!r} was stopped")
        lines = [f"KeyboardInterrupt: run {self.name!r} was stopped after {self.state.elapsed:.1f} s"]
        error._render_traceback_ = lambda: lines  # pyright: ignore[reportAttributeAccessIssue]
        return error

    def _result_of(self, rank: int) -> Any:
        value = self._results[rank]
        if isinstance(value, _Rebuilt):
            return value.value
        try:
            rebuilt = payload.load_home(value, self._home)
        except Exception as error:
            text = f"what rank {rank} returned can't be rebuilt here: {type(error).__name__}: {error}"
            self._error = ResultError(text)
            raise self._error from error
        self._results[rank] = _Rebuilt(rebuilt)
        return rebuilt

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _only_here(self) -> None:
        if os.getpid() != self._owner:
            raise NblaunchError("this Run belongs to another process: it can be waited for and stopped only there")

    def __del__(self) -> None:
        if os.getpid() == self._owner:
            for value in self._results.values():
                if isinstance(value, int):
                    os.close(value)

    # ---- how it looks

    def __repr__(self) -> str:
        ranks = len(self.state.ranks)
        text = f"Run {self.name!r}: {self.status}, {ranks} rank{'s' * (ranks != 1)}, {self.state.elapsed:.1f} s"
        return f"<{text}, in {self.state.folder}>" if self.state.folder else f"<{text}>"

    def _repr_html_(self) -> str:
        from html import escape

        from nblaunch.dashboard import snapshot

        if self._view is not None and self._cell == _present_cell():
            return f"<code>{escape(repr(self))}</code>"
        return snapshot.html(self.state)

    def __reduce__(self) -> Any:
        raise TypeError("a Run can't be pickled; pass run.results, run.metrics, or the path of its folder")


class _Rebuilt:
    def __init__(self, value: Any) -> None:
        self.value = value


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


def _uninterrupted(call: Callable[[], None]) -> None:
    """Make a short call whatever the user presses meanwhile; what it has done already, it does not do again."""
    for _ in range(5):
        try:
            call()
        except KeyboardInterrupt:
            continue
        return


def _is_the_cell(task: asyncio.Task[Any] | None) -> bool:
    """Whether this task is IPython's own, which runs the cell: then it was interrupted, not cancelled by code."""
    coroutine = task.get_coro() if task is not None else None
    return getattr(coroutine, "__qualname__", "").endswith("run_cell_async")


def _present_cell() -> Any:
    """What tells one execution of a cell from another; None outside IPython."""
    import sys

    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return None if shell is None else shell.execution_count
