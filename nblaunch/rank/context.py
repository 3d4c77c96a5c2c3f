"""The rank's own context: what this process is in a launch. The only global state of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nblaunch.config import LaunchConfig
    from nblaunch.rank.reporter import Reporter


@dataclass(frozen=True)
class RankContext:
    """What a rank knows of itself and of its launch."""

    config: LaunchConfig
    """The choices of this launch."""
    rank: int
    local_rank: int
    world_size: int
    reporter: Reporter
    """Sends what the rank says to the agent; never waits for anyone."""


_current: RankContext | None = None


def current() -> RankContext | None:
    """This process's context, or None outside a launch (a notebook kernel, a script, torchrun)."""
    return _current


def enter(context: RankContext) -> None:
    """Make `context` this process's; called once, by the rank's main."""
    global _current
    _current = context


def leave() -> None:
    """This process is no rank any more: a forked child of one."""
    global _current
    _current = None
