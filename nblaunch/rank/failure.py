"""An exception of the user's function, as a message that the notebook can show and raise."""

from __future__ import annotations

import linecache
import os
import socket
import time
import traceback
import types
from collections.abc import Mapping
from pathlib import Path

from nblaunch.wire import payload
from nblaunch.wire.culprit import find_part
from nblaunch.wire.messages import Failure, Frame

_OURS = str(Path(__file__).parent) + os.sep
_LARGEST_PICKLE = 1 << 24


def unsendable(value: object, error: Exception, rank: int, run: str) -> Failure:
    """The return value can't be pickled: names the part of it that can't."""
    text = find_part("the return value", value, error)
    return Failure(rank, "result", time.time(), host=socket.gethostname(), message=text, run=run)


def describe(error: BaseException, rank: int, run: str, labels: Mapping[int, int]) -> Failure:
    """All that the notebook needs to show `error` and to raise it again."""
    error = error.with_traceback(_without_ours(error.__traceback__))
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return Failure(
        rank,
        _kind_of(error),
        time.time(),
        host=socket.gethostname(),
        type=name,
        message=_text(error),
        text="".join(traceback.format_exception(error)),
        frames=_frames(error.__traceback__),
        pickled=_pickle(error, labels),
        code=error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 0,
        run=run,
    )


def _kind_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped"
    return "exit" if isinstance(error, SystemExit) else "exception"


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called before it returned"
    try:
        return str(error)
    except Exception as problem:
        return f"<its text can't be had: {type(problem).__name__} in __str__>"


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def _frames(trace: types.TracebackType | None) -> list[Frame]:
    frames: list[Frame] = []
    for entry in traceback.extract_tb(trace):
        if entry.filename.startswith(_OURS):
            continue
        line = linecache.getline(entry.filename, entry.lineno or 0).rstrip("\n")
        frame = Frame(entry.filename, entry.lineno or 0, entry.name, line)
        if entry.colno is not None and entry.end_colno is not None and entry.lineno == entry.end_lineno:
            frame.colno, frame.end_colno = _characters(line, entry.colno), _characters(line, entry.end_colno)
        frames.append(frame)
    return frames


def _characters(line: str, offset: int) -> int:
    """Code positions count bytes of UTF-8."""
    return len(line.encode()[:offset].decode("utf-8", "replace"))


def _pickle(error: BaseException, labels: Mapping[int, int]) -> bytes:
    try:
        pickled = payload.dump_home_bytes(error, labels)
    except Exception:
        return b""  # its text and its frames go home all the same
    return pickled if len(pickled) <= _LARGEST_PICKLE else b""
