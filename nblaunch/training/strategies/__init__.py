"""How the ranks share one training: one class for each strategy."""

from __future__ import annotations

from nblaunch.errors import ConfigError
from nblaunch.training.options import DistributedDataParallelKwargs
from nblaunch.training.strategies.base import Strategy
from nblaunch.training.strategies.ddp import DataParallel


def make(name: str, num_processes: int, options: DistributedDataParallelKwargs | None) -> Strategy:
    """The strategy of this name ("auto", "ddp") for so many processes.

    Raises:
        ConfigError: The strategy is not there.
    """
    if name not in ("auto", "ddp"):
        raise ConfigError(f'strategy={name!r} is not available in this version; there are: "auto", "ddp"')
    return Strategy() if num_processes == 1 else DataParallel(options or DistributedDataParallelKwargs())
