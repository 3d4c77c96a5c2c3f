"""How figures are written, alike on every view: durations, numbers, sizes, rates, lists of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def duration(seconds: float) -> str:
    """A time span for people.

    Example:
        >>> duration(4.21), duration(134), duration(7500)
        ('4.2 s', '2m 14s', '2h 05m')
    """
    seconds = max(0.0, seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def roughly(seconds: float) -> str:
    """A time span that is only an estimate.

    Example:
        >>> roughly(7.4), roughly(200), roughly(6000)
        ('7 s', '3 min', '1.7 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def number(value: float) -> str:
    """A metric's value, with about four figures that count and decimals that line up.

    Example:
        >>> number(0.21307), number(93.8), number(12345), number(0.0099), number(0.00001234), number(float("nan"))
        ('0.2131', '93.80', '12,345', '0.009900', '1.23e-05', 'nan')
    """
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    bounds = (100, 10, 1, 0.1, 0.01)
    decimals = next((i for i, bound in enumerate(bounds, 1) if size >= bound), 6)
    return f"{value:.{decimals}f}" if size else "0"


def count(value: float) -> str:
    """A number of iterations or steps: whole where it is whole.

    Example:
        >>> count(1224.0), count(2.5)
        ('1,224', '2.5')
    """
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def rate(value: float) -> str:
    """Something a second, short.

    Example:
        >>> rate(41.23), rate(10523), rate(0.042)
        ('41.2', '10.5k', '0.042')
    """
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    if value >= 1e4:
        return f"{value / 1e3:.1f}k"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def size(value: float) -> str:
    """Bytes, in powers of 1,000 as devices are sold.

    Example:
        >>> size(412e6), size(41.23e9)
        ('412 MB', '41.2 GB')
    """
    if value >= 1e9:
        return f"{value / 1e9:.1f} GB"
    return f"{value / 1e6:.0f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks as people write them, runs folded.

    Example:
        >>> rank_list([0]), rank_list([0, 1]), rank_list([0, 1, 2, 3, 6])
        ('rank 0', 'ranks 0, 1', 'ranks 0-3, 6')
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [str(rank) for rank in run] if len(run) < 3 else [f"{run[0]}-{run[-1]}"]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(parts)


def plain(text: str) -> str:
    """`text` without terminal escapes and other control characters.

    Example:
        >>> plain("\\x1b[31mred\\x1b[0m")
        'red'
    """
    return "".join(c for c in _ANSI.sub("", text) if c >= " " or c in "\t\n")
