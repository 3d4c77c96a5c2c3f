"""The run's folder: what the agent keeps of a run, readable while it grows and after everything is gone.

launch.yaml  record.json  events.jsonl  metrics.bin  rank-0.log  rank-1.log ...
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from nblaunch.agent.output import LogFile
from nblaunch.record import LENGTH
from nblaunch.wire.messages import Failure, Launch, Message


class RunFolder:
    """Writes a run's files. A disk that refuses cuts the folder short, says so once, and never ends a run."""

    def __init__(self, launch: Launch, name: str, limit: int, ranks: list[int], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._limit = limit
        self._metrics_bytes = 0
        self._failed = False
        self.path = self._make(Path(launch.folder), name)
        self._events = (self.path / "events.jsonl").open("ab")
        fcntl.flock(self._events, fcntl.LOCK_EX)
        self._metrics = (self.path / "metrics.bin").open("ab")
        share = limit // (2 * max(1, len(ranks)))
        self._logs = {rank: LogFile(self.path / f"rank-{rank}.log", share) for rank in ranks}
        self._guarded(lambda: (self.path / "launch.yaml").write_text(launch.yaml, encoding="utf-8"))
        self.write_record(launch.record)

    def _make(self, wanted: Path, name: str) -> Path:
        try:
            return _new_folder(wanted, name)
        except OSError as error:
            elsewhere = Path(tempfile.gettempdir()) / f"nblaunch-{os.getuid()}" / "runs"
            self._warn(f"{wanted} can't be written ({error.strerror}); the run's folder is in {elsewhere}")
            return _new_folder(elsewhere, name)

    def write_record(self, record: dict[str, Any]) -> None:
        """Write `record.json`, whole or not at all."""

        def write() -> None:
            beside = self.path / "record.json.new"
            beside.write_text(json.dumps(record, indent=1, default=str), encoding="utf-8")
            beside.replace(self.path / "record.json")

        self._guarded(write)

    def event(self, message: Message) -> None:
        """Append a message to `events.jsonl`; an exception is kept as text, never as a pickle."""
        if isinstance(message, Failure):
            message = msgspec.structs.replace(message, pickled=b"")
        line = msgspec.json.encode(message) + b"\n"

        def write() -> None:
            self._events.write(line)
            self._events.flush()

        self._guarded(write)

    def metrics(self, body: bytes) -> None:
        """Append a batch of metrics as it came."""
        self._metrics_bytes += len(body) + LENGTH.size
        if self._metrics_bytes > self._limit // 2:
            self._once("the run's metrics outgrew run_limit; what follows is not kept")
            return

        def write() -> None:
            self._metrics.write(LENGTH.pack(len(body)) + body)
            self._metrics.flush()

        self._guarded(write)

    def log(self, rank: int, lines: bytes) -> None:
        """Append whole lines to a rank's log."""
        self._guarded(lambda: self._logs[rank].write(lines))

    def close(self) -> None:
        """End all files; the folder is as it will stay."""
        for log in self._logs.values():
            self._guarded(log.close)
        self._guarded(self._metrics.close)
        self._guarded(self._events.close)

    def _guarded(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            self._once(f"the run's folder {self.path} is cut short: {error.strerror or error}")

    def _once(self, text: str) -> None:
        if not self._failed:
            self._failed = True
            self._warn(text)


def _new_folder(runs: Path, name: str) -> Path:
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    ignore = runs.parent / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
    safe = re.sub(r"[^\w.-]+", "_", name).strip("._")[:60] or "run"
    stamp = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{safe}"
    for number in range(1, 10_000):
        path = runs / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(17, "too many runs of this name in one second", str(runs))


def prune(runs: Path, keep: int) -> None:
    """Remove the oldest runs beyond the newest `keep`; one that is still being written stays."""
    try:
        folders = sorted((path for path in runs.iterdir() if (path / "events.jsonl").exists()), key=_age)
    except OSError:
        return  # the folder went away meanwhile, and the old runs with it
    for path in folders[: max(0, len(folders) - keep)]:
        with (path / "events.jsonl").open("rb") as events:
            try:
                fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
        shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> tuple[float, str]:
    return path.stat().st_ctime, path.name
