"""A failure as a person reads it: who, what, and the line of the cell where it happened."""

from __future__ import annotations

import os
import sys
import unicodedata
from typing import Any

from nblaunch.dashboard import formats
from nblaunch.wire.messages import Failure, Frame
from nblaunch.wire.signals import signal_name

_MOST_FRAMES = 4
_LIBRARY = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", f"{os.sep}lib{os.sep}python")


def title(failure: Failure) -> str:
    """Who failed and how, in a few words.

    Example:
        >>> title(Failure(rank=1, kind="exception", time=0.0, type="torch.OutOfMemoryError"))
        'Rank 1 raised OutOfMemoryError'
    """
    who = f"Rank {failure.rank}" if failure.rank >= 0 else "The run"
    return f"{who} {how(failure)}"


def how(failure: Failure) -> str:
    """What happened to the rank, as in `raised ValueError` or `was killed by SIGKILL`."""
    if failure.kind == "exception":
        return f"raised {failure.type.rpartition('.')[2] or 'an exception'}"
    if failure.kind == "signal":
        return f"was killed by {signal_name(abs(failure.code))}"
    return {
        "exit": f"exited with code {failure.code}",
        "memory": "was killed for lack of memory",
        "stopped": "was stopped",
        "collective": "and its peers called different collectives",
        "result": "returned what can't be sent home",
    }.get(failure.kind, "failed")


def excerpt(failure: Failure) -> str:
    """The user's own innermost frames with their source lines and carets, and the error's message."""
    lines: list[str] = []
    for frame in (own_frames(failure) or failure.frames)[-_MOST_FRAMES:]:
        lines.append(f"{place(frame.filename)}, line {frame.lineno}, in {frame.name}")
        if frame.line:
            lines += _source(frame)
    message = failure.message.strip()
    if failure.kind == "exception":
        lines.append(f"{failure.type}: {message}" if message else failure.type)
    elif message:
        lines.append(message)
    return formats.plain("\n".join(lines))


def own_frames(failure: Failure) -> list[Frame]:
    """The frames of the user's own code, outermost first."""
    return [frame for frame in failure.frames if not _in_library(frame)]


def place(filename: str) -> str:
    """A file as a person knows it: `Cell In[7]` for a cell of this notebook, else its name.

    Example:
        >>> place("/home/me/project/train.py")
        'train.py'
    """
    module = sys.modules.get("IPython")
    shell: Any = module.get_ipython() if module is not None else None
    named = shell.compile.format_code_name(filename) if hasattr(shell, "compile") else None
    return f"{named[0]} {named[1]}" if named else os.path.basename(filename) or filename


def _in_library(frame: Frame) -> bool:
    return any(part in frame.filename for part in _LIBRARY) or frame.filename.startswith("<frozen")


def _source(frame: Frame) -> list[str]:
    code = frame.line.rstrip("\n").replace("\t", " ")
    indent = len(code) - len(code.lstrip())
    lead = f"---> {frame.lineno} "
    lines = [f"{lead}    {code.strip()}"]
    start, end = frame.colno - indent, frame.end_colno - indent
    if 0 <= start < end and end - start < len(code.strip()):
        before, marked = code.strip()[:start], code.strip()[start:end]
        lines.append(" " * (len(lead) + 4 + _columns(before)) + "^" * _columns(marked))
    return lines


def _columns(text: str) -> int:
    """How wide a terminal shows a text: East Asian characters take two columns, combining ones none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
