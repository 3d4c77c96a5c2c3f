"""A notebook without a page: a real ipykernel that runs cells, as JupyterLab would have it do."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[2]
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """What a cell left."""

    stdout: str = ""
    stderr: str = ""
    result: str = ""
    error: str = ""
    """The exception's class, or ""."""
    traceback: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0

    def ok(self) -> Cell:
        """The cell, if it ended without an error."""
        assert not self.error, self.traceback
        return self


class Notebook:
    """Starts a kernel in a folder; `run` a cell, or `start` one and `finish` it later."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.manager = KernelManager()
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment}
        self.manager.start_kernel(cwd=str(folder), env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self._began: dict[str, float] = {}

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return self.manager.provisioner.pid

    def start(self, code: str) -> str:
        """Send a cell; returns what `finish` needs."""
        message = self.client.execute(code, allow_stdin=False)
        self._began[message] = time.monotonic()
        return message

    def finish(self, message: str, timeout: float = 60) -> Cell:
        """Wait for a cell's end."""
        cell = Cell()
        deadline = time.monotonic() + timeout
        while True:
            try:
                got = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell did not end within {timeout} s: {cell}") from None
            if got["parent_header"].get("msg_id") != message:
                continue
            if got["msg_type"] == "status" and got["content"]["execution_state"] == "idle":
                cell.seconds = time.monotonic() - self._began[message]
                return cell
            self._add(cell, got)

    def run(self, code: str, timeout: float = 60) -> Cell:
        """Run a cell to its end."""
        return self.finish(self.start(code), timeout)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of plain data."""
        cell = self.run(f"print(repr({expression}))").ok()
        return eval(cell.stdout.splitlines()[-1])

    def interrupt(self) -> None:
        """What the page's stop button does: SIGINT to the kernel's process group."""
        self.manager.interrupt_kernel()

    def until(self, message: str, text: str, timeout: float = 30) -> str:
        """Read a running cell's output until `text` is in it."""
        seen = ""
        deadline = time.monotonic() + timeout
        while text not in seen:
            got = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            if got["parent_header"].get("msg_id") == message and got["msg_type"] == "stream":
                seen += got["content"]["text"]
        return seen

    def descendants(self) -> list[psutil.Process]:
        """Every living process below the kernel: agents, templates, ranks, and what they started."""
        if not psutil.pid_exists(self.pid):
            return []
        return [p for p in psutil.Process(self.pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]

    def ranks(self) -> list[int]:
        """Process ids of the last run's ranks."""
        return self.evaluate("[r.pid for r in nblaunch.last_run().state.ranks.values()]")

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def _add(self, cell: Cell, got: dict[str, Any]) -> None:
        content = got["content"]
        match got["msg_type"]:
            case "stream" if content["name"] == "stdout":
                cell.stdout += content["text"]
            case "stream":
                cell.stderr += content["text"]
            case "execute_result":
                cell.result = content["data"].get("text/plain", "")
            case "display_data" | "update_display_data":
                cell.displays.append(content["data"])
            case "error":
                cell.error = content["ename"]
                cell.traceback = _COLOUR.sub("", "\n".join(content["traceback"]))
            case _:
                pass


def gone(pids: list[int], within: float) -> list[int]:
    """Those of `pids` that still live after at most `within` seconds."""
    deadline = time.monotonic() + within
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def saw(what: str, seconds: float, aim: float) -> None:
    """Print what was measured and hold it to five times the aim: the machine may be busy."""
    print(f"{what}: {seconds:.2f} s (aim {aim:g} s)")
    assert seconds < 5 * aim, f"{what} took {seconds:.2f} s, aim {aim:g} s"
