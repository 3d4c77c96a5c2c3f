"""The handlers of keyword arguments that were given, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from nblaunch.training.options import KwargsHandler

H = TypeVar("H", bound=KwargsHandler)


class Handlers:
    """At most one handler of each kind."""

    def __init__(self, given: dict[type, KwargsHandler]) -> None:
        self._given = given

    def get(self, kind: type[H]) -> H | None:
        """The handler of this kind, or None."""
        found: Any = self._given.get(kind)
        return found


def by_kind(handlers: Sequence[KwargsHandler]) -> Handlers:
    """The handlers by kind.

    Raises:
        TypeError: One is no handler.
        ValueError: There are two of one kind.
    """
    given: dict[type, KwargsHandler] = {}
    for handler in handlers:
        if not isinstance(handler, KwargsHandler):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"kwargs_handlers holds a {type(handler).__name__}, which is no KwargsHandler")
        if type(handler) in given:
            raise ValueError(f"kwargs_handlers holds two {type(handler).__name__}; pass one")
        given[type(handler)] = handler
    return Handlers(given)
