"""`display(...)` and `plt.show()` in a rank: the mime bundle goes home and is shown in the notebook."""

from __future__ import annotations

import os
import sys
import time
import types
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

from nblaunch.wire.messages import Display

if TYPE_CHECKING:
    from nblaunch.rank.reporter import Reporter

_LARGEST = 5_000_000
"""Bytes of one display; of more the text alone is sent."""
_INLINE_BACKENDS = (
    "inline",
    "module://matplotlib_inline.backend_inline",
    "module://ipykernel.pylab.backend_inline",
)

current: Displayer | None = None
"""The displayer of this process, for the matplotlib backend, which matplotlib loads by its name alone."""


class Displayer:
    """Sends what a rank displays."""

    def __init__(self, reporter: Reporter, run: str) -> None:
        self._reporter = reporter
        self._run = run
        self._rank = reporter.rank
        self._formatter: Any = None

    def display(self, *objects: Any, display_id: Any = None, metadata: Any = None, **options: Any) -> Any:
        """Show objects in the notebook, as IPython's `display` does there."""
        identity = uuid.uuid4().hex if display_id is True else display_id
        for thing in objects:
            data, found = (thing, {}) if options.get("raw") else self._format(thing)
            self.publish(data, {**found, **(metadata or {})}, display_id=identity, update=options.get("update", False))
        return _Handle(self, identity) if identity else None

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: Any, update: bool) -> None:
        """Send a mime bundle; of one that is too large the text alone."""
        size = sum(len(value) for value in data.values() if isinstance(value, str | bytes))
        if size > _LARGEST:
            text = data.get("text/plain", "")
            data = {"text/plain": f"{text[:2000]}\n({size:,} bytes were left out by nblaunch)"}
        message = Display(self._rank, data, metadata, display_id or "", update, self._run, time.time())
        self._reporter.send(message)

    def _format(self, thing: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._formatter is None:
            from IPython.core.formatters import DisplayFormatter

            self._formatter = DisplayFormatter()
        data, metadata = self._formatter.format(thing)
        return {kind: _text(value) for kind, value in data.items()}, metadata

    def change_ipython(self, module: types.ModuleType) -> None:
        """Let IPython's own functions, for those who import them, come here too."""

        def publish_display_data(data: Any, metadata: Any = None, *, transient: Any = None, **options: Any) -> None:
            identity = (transient or {}).get("display_id")
            bundle = {kind: _text(value) for kind, value in data.items()}
            self.publish(bundle, metadata or {}, display_id=identity, update=options.get("update", False))

        def update_display(obj: Any, *, display_id: str, **options: Any) -> None:
            self.display(obj, display_id=display_id, **{**options, "update": True})

        def clear_output(wait: bool = False) -> None:
            return None

        replaced = {
            "display": self.display,
            "publish_display_data": publish_display_data,
            "update_display": update_display,
            "clear_output": clear_output,
        }
        for holder in (module, sys.modules.get("IPython.display"), sys.modules.get("IPython")):
            for name, function in replaced.items():
                if holder is not None and hasattr(holder, name):
                    setattr(holder, name, function)


class _Handle:
    """What `display(..., display_id=True)` returns."""

    def __init__(self, displayer: Displayer, display_id: str) -> None:
        self._displayer = displayer
        self.display_id = display_id

    def display(self, obj: Any, **options: Any) -> None:
        """Show it again, in a new place."""
        self._displayer.display(obj, display_id=self.display_id, **options)

    def update(self, obj: Any, **options: Any) -> None:
        """Show something else in its place."""
        self._displayer.display(obj, display_id=self.display_id, update=True, **options)


def _text(value: Any) -> Any:
    """Bytes as base64, as the notebook's protocol has them."""
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode("ascii")
    return value


# ---- matplotlib


def use_backend(displayer: Displayer) -> None:
    """Have matplotlib show figures in the notebook, unless another backend than the notebook's own was chosen."""
    global current
    current = displayer
    if os.environ.get("MPLBACKEND", "inline") in _INLINE_BACKENDS:
        os.environ["MPLBACKEND"] = "module://nblaunch.rank.figures"
        pyplot_settings = sys.modules.get("matplotlib")
        if pyplot_settings is not None:
            pyplot_settings.rcParams["backend"] = "module://nblaunch.rank.figures"


# ---- magics


class RankShell:
    """What `get_ipython()` gives a cell's function in a rank: nothing works, and everything says why."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(  # so that libraries which ask whether there is a kernel are told no
            f"IPython's magics and shell commands (get_ipython().{name}) can't be used in a rank: it runs apart from "
            "the notebook; use them in a cell of their own, or subprocess.run(...) in the function"
        )


def get_ipython() -> RankShell:
    """IPython's `get_ipython`, as a rank has it."""
    return RankShell()
