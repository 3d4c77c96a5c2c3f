"""tqdm's bars, of every flavour, as bars of the rank: nothing is printed, the reporter shows them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from nblaunch.wire.messages import Bar

if TYPE_CHECKING:
    from nblaunch.rank.reporter import Reporter

_FANCY = {"tqdm.notebook": ("tqdm_notebook", "tnrange"), "tqdm.rich": ("tqdm_rich", "trrange")}
"""Modules whose bars draw on what a rank has not, with their own names for `tqdm` and `trange`."""


def change_tqdm(module: types.ModuleType, reporter: Reporter) -> None:
    """Let the class that all of tqdm's bars inherit from report instead of print."""
    tqdm = module.tqdm
    draw, clear, close = tqdm.display, tqdm.clear, tqdm.close

    def goes_to_a_file(bar: Any) -> bool:
        stream = getattr(bar.fp, "_wrapped", bar.fp)
        return stream not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)

    def display(self: Any, msg: str | None = None, pos: int | None = None) -> bool:
        if goes_to_a_file(self):
            return draw(self, msg, pos)
        _show(self, reporter)
        return True

    def keep(self: Any, nolock: bool = False) -> None:
        if goes_to_a_file(self):
            clear(self, nolock)

    def end(self: Any) -> None:
        if self.disable or goes_to_a_file(self):
            close(self)
            return
        _show(self, reporter)
        self._nblaunch_bar.closed = True
        self.disable = True
        self._decr_instances(self)

    tqdm.display, tqdm.clear, tqdm.close = display, keep, end


def _show(bar: Any, reporter: Reporter) -> None:
    shown = getattr(bar, "_nblaunch_bar", None)
    if shown is None:
        shown = bar._nblaunch_bar = _TqdmBar(reporter.new_bar_number(), abs(bar.pos))
        reporter.show_bar(shown.number, shown)
    shown.note(bar)


class _TqdmBar:
    """What the reporter looks at: a copy of the bar's figures, so that it keeps none of the user's objects alive."""

    def __init__(self, number: int, depth: int) -> None:
        self.number = number
        self.closed = False
        self._bar = Bar(number, depth=depth)

    def note(self, bar: Any) -> None:
        """Take over the figures of a tqdm bar."""
        figures = bar.format_dict
        shown = self._bar
        shown.description = (figures["prefix"] or "").removesuffix(": ")
        shown.n, shown.total, shown.unit = figures["n"], figures["total"], figures["unit"]
        shown.rate = figures["rate"] or (figures["n"] / figures["elapsed"] if figures["elapsed"] else None)
        shown.postfix = figures["postfix"] or ""

    def look(self) -> Bar:
        """The bar as it stands."""
        bar = self._bar
        return Bar(bar.id, bar.description, bar.n, bar.total, bar.rate, bar.unit, bar.depth, self.closed, bar.postfix)


def replace_fancy_bars() -> None:
    """Put modules with the plain bar in place of tqdm's widget and rich bars, where tqdm is installed."""
    if importlib.util.find_spec("tqdm") is None:
        return
    for name, (bar, counter) in _FANCY.items():
        sys.modules[name] = _Plain(name, bar, counter)


class _Plain(types.ModuleType):
    """A module that offers the plain bar under a fancy bar's names; tqdm is imported when one is used."""

    def __init__(self, name: str, bar: str, counter: str) -> None:
        super().__init__(name, "The rank's bars, under the names of tqdm's own.")
        self._names = {"tqdm": "tqdm", bar: "tqdm", "trange": "trange", counter: "trange"}
        self.__all__ = list(self._names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} in a rank")
        return getattr(importlib.import_module("tqdm.std"), self._names[name])
