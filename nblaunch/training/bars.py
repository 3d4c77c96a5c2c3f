"""A progress bar on the main process only."""

from __future__ import annotations

from typing import Any

from nblaunch.training.processes import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown once per machine.

    Args:
        *args: Of tqdm; the iterable first.
        main_process_only: Otherwise every process shows its own.
        **kwargs: Of tqdm.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise ImportError("nblaunch.tqdm needs tqdm, which is not installed; pip install tqdm") from None
    if main_process_only and not kwargs.get("disable", False):
        kwargs["disable"] = not PartialState().is_local_main_process
    return bar(*args, **kwargs)
