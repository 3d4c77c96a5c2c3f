"""nblaunch: train on several devices from a Jupyter notebook.

    from nblaunch import notebook_launcher

    run = notebook_launcher(train, num_processes=2)

Importing this package imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "notebook_launcher": "nblaunch.kernel.launcher",
    "debug_launcher": "nblaunch.kernel.launcher",
    "last_run": "nblaunch.kernel.launcher",
    "load_run": "nblaunch.kernel.run",
    "Run": "nblaunch.kernel.run",
    "LaunchConfig": "nblaunch.config",
    "log": "nblaunch.rank.metrics",
    "progress": "nblaunch.rank.bars",
    "NblaunchError": "nblaunch.errors",
    "ConfigError": "nblaunch.errors",
    "PayloadError": "nblaunch.errors",
    "ResultError": "nblaunch.errors",
    "AgentError": "nblaunch.errors",
    "RankError": "nblaunch.errors",
}
"""Public name to the module that defines it."""

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nblaunch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nblaunch`: starts the agent in the background, so that the first launch is warm."""
    from nblaunch.kernel.magics import start_agent

    start_agent(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
