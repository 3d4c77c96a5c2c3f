"""Logging from several processes without saying everything as often: `get_logger`."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from nblaunch.training.processes import PartialState


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages come from the main process only, unless told otherwise.

    Each logging method takes `main_process_only=True`, and `in_order=False`: with `in_order=True` all processes log,
    one after the other, so all must call it.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[Any] = set()

    def log(
        self,
        level: int,
        msg: object,
        *args: Any,
        main_process_only: bool = True,
        in_order: bool = False,
        **kwargs: Any,
    ) -> None:
        """Log a message, on the main process or on all."""
        state = PartialState()
        if in_order:
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self._say(level, msg, args, kwargs)
                state.wait_for_everyone()
        elif state.is_main_process or not main_process_only:
            self._say(level, msg, args, kwargs)

    def _say(self, level: int, msg: object, args: Any, kwargs: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2  # past this and `log`
            text, options = self.process(msg, kwargs)
            self.logger.log(level, text, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message with the rank before it, where there are several."""
        state = PartialState()
        return (f"[RANK {state.process_index}] {msg}" if state.use_distributed else msg), kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """A warning that is logged only the first time."""
        if (msg, args) not in self._said:
            self._said.add((msg, args))
            self.warning(msg, *args, stacklevel=2, **kwargs)


_adapters: dict[str, MultiProcessAdapter] = {}


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for several processes.

    Args:
        name: Such as `__name__`.
        log_level: Such as "INFO", set on this logger; None leaves it, unless `ACCELERATE_LOG_LEVEL` says one.

    Example:
        >>> get_logger(__name__).info("said once", main_process_only=True)
    """
    adapter = _adapters.setdefault(name, MultiProcessAdapter(logging.getLogger(name)))
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        adapter.setLevel(level.upper())
    return adapter
