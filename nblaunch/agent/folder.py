"""The run's folder: what the agent keeps of a run, readable while it grows and after everything is gone.

launch.yaml  record.json  events.jsonl  metrics.bin  rank-0.log  rank-1.log ...
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from nblaunch.agent.appending import Appended
from nblaunch.agent.output import LogFile
from nblaunch.record import LENGTH
from nblaunch.wire.messages import Display, Failure, Launch, Message


class RunFolder:
    """Writes a run's files. A disk that refuses cuts the folder short, says so once, and never ends a run."""

    def __init__(self, launch: Launch, name: str, limit: int, ranks: list[int], warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._said: set[str] = set()
        self._closed = False
        self._quarter = limit // 4
        self._shown_bytes = 0
        self._open(Path(launch.folder), name, limit // (2 * max(1, len(ranks))), ranks)
        self._guarded(lambda: (self.path / "launch.yaml").write_text(launch.yaml, encoding="utf-8"))
        self.write_record(launch.record)

    def _open(self, wanted: Path, name: str, share: int, ranks: list[int]) -> None:
        """Make the files in a new folder where they are wanted, or in the system's for temporary files."""
        try:
            self._open_in(_new_folder(wanted, name), share, ranks)
        except OSError as error:
            elsewhere = _own_temporary_folder() / "runs"
            self._warn(f"{wanted} can't be written ({error.strerror}); the run's folder is in {elsewhere}")
            self._open_in(_new_folder(elsewhere, name), share, ranks)

    def _open_in(self, path: Path, share: int, ranks: list[int]) -> None:
        with contextlib.ExitStack() as opened:
            events = opened.enter_context(contextlib.closing(Appended(path / "events.jsonl")))
            metrics = opened.enter_context(contextlib.closing(Appended(path / "metrics.bin")))
            logs = {
                rank: opened.enter_context(contextlib.closing(LogFile(path / f"rank-{rank}.log", share)))
                for rank in ranks
            }
            opened.pop_all()
        with contextlib.suppress(OSError):  # a file system without locks: only then may a run be pruned as it goes on
            fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path, self._events, self._metrics, self._logs = path, events, metrics, logs

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
        if isinstance(message, Display):
            self._shown_bytes += len(line)
            if self._shown_bytes > self._quarter:
                self._once("what the run displayed outgrew run_limit; what follows is not kept in its folder")
                return
        self._guarded(lambda: self._events.append(line))

    def metrics(self, body: bytes) -> None:
        """Append a batch of metrics as it came."""
        batch = LENGTH.pack(len(body)) + body
        if self._metrics.size + len(batch) > self._quarter:
            self._once("the run's metrics outgrew run_limit; what follows is not kept in its folder")
            return
        self._guarded(lambda: self._metrics.append(batch))

    def log(self, rank: int, lines: bytes) -> None:
        """Append whole lines to a rank's log."""
        self._guarded(lambda: self._logs[rank].write(lines))

    def close(self) -> None:
        """End all files; the folder is as it will stay, whatever is still said of the run."""
        if self._closed:
            return
        for log in self._logs.values():
            self._guarded(log.close)
        self._closed = True
        self._metrics.close()
        self._events.close()

    def _guarded(self, write: Callable[[], Any]) -> None:
        if self._closed:
            return
        try:
            write()
        except OSError as error:
            self._once(f"the run's folder {self.path} is cut short: {error.strerror or error}")

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._warn(text)


def _own_temporary_folder() -> Path:
    """A folder for temporary files that nobody else can have put there, or can write to."""
    path = Path(tempfile.gettempdir()) / f"nblaunch-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return path
    return Path(tempfile.mkdtemp(prefix="nblaunch-"))


def _new_folder(runs: Path, name: str) -> Path:
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    ignore = runs.parent / ".gitignore"
    if not ignore.exists() or ignore.stat().st_size == 0:  # empty: the disk was full
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
        if not _goes_on(path):
            shutil.rmtree(path, ignore_errors=True)


def _goes_on(path: Path) -> bool:
    """Whether a run's folder is still written to; so too where that can't be told."""
    try:
        with (path / "events.jsonl").open("rb") as events:
            fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _age(path: Path) -> tuple[float, str]:
    return path.stat().st_ctime, path.name
