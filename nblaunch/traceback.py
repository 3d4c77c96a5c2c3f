"""How a `RankError` is shown: the root cause first, the cell's own line with its caret, the rest folded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nblaunch.dashboard import failures

if TYPE_CHECKING:
    from nblaunch.errors import RankError
    from nblaunch.wire.messages import Failure

_MOST_LINES = 40
_MOST_OTHERS = 8
_LONGEST_LINE = 1000
_BOLD_RED, _RED, _GREEN, _DIM, _PLAIN = "\x1b[1;31m", "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"
_CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of|During handling of the above exception, another)"
)


def plain_lines(error: RankError) -> list[str]:
    """The text of the error, for a traceback of Python's own."""
    lines = [error.headline, *_body(error.failure), *_others(error.others)]
    return _within(lines, [f"(log: {error.log})"] if error.log else [])


def notebook_lines(error: RankError) -> list[str]:
    """The same with colours, for IPython."""
    body = [_coloured(line) for line in _body(error.failure)]
    others = [f"{_DIM}{line}{_PLAIN}" for line in _others(error.others)]
    log = [f"{_DIM}log: {error.log}{_PLAIN}"] if error.log else []
    return _within([f"{_BOLD_RED}RankError{_PLAIN}: {error.headline}", *body, *others], log)


def _body(failure: Failure) -> list[str]:
    lines = [""]
    if failure.frames:
        lines += failures.excerpt(failure).splitlines()
        origin = _origin(failure.text)
        if origin:
            lines.append(f"which came from {origin}")
    if failure.output and (failure.kind != "exception" or not failure.frames):
        lines += ["its last lines:", *(f"  {line}" for line in failure.output)]
    return lines if len(lines) > 1 else []


def _origin(text: str) -> str:
    """The last line of the exception that a chain began with, or ""."""
    first, *rest = _CHAINED.split(text)
    lines = first.strip().splitlines()
    return lines[-1] if rest and lines else ""


def _others(others: list[Failure]) -> list[str]:
    if not others:
        return []
    rows = [f"rank {failure.rank} {_consequence(failure)}" for failure in sorted(others, key=lambda f: f.rank)]
    more = [f"... and {len(rows) - _MOST_OTHERS} more"] if len(rows) > _MOST_OTHERS else []
    return ["", *rows[:_MOST_OTHERS], *more]


def _consequence(failure: Failure) -> str:
    if failure.kind == "stopped":
        return f"was stopped{_where(failure)}"
    if failure.symptom:
        return f"lost its peers{_where(failure)}"
    first_line = failure.message.strip().partition("\n")[0]
    return f"{failures.how(failure)}{_where(failure)}: {first_line}"[:160]


def _where(failure: Failure) -> str:
    """The line of the user's own code that a rank was in."""
    own = failures.own_frames(failure)
    return f" in {own[-1].name}, line {own[-1].lineno}: {own[-1].line.strip()}"[:120] if own else ""


def _coloured(line: str) -> str:
    if line.startswith("---> "):
        return f"{_GREEN}{line}{_PLAIN}"
    return f"{_RED}{line}{_PLAIN}" if set(line.strip()) == {"^"} else line


def _within(lines: list[str], end: list[str]) -> list[str]:
    lines = [_shortened(part) for line in lines for part in line.split("\n")]
    room = _MOST_LINES - len(end)
    if len(lines) > room:
        half = room // 2
        lines = [
            *lines[:half],
            f"... {len(lines) - room + 1} lines left out, see the log ...",
            *lines[half - room + 1 :],
        ]
    return lines + end


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}... ({len(line):,} characters)"
