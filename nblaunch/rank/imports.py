"""What a rank changes in libraries, now if they are loaded, else as soon as something imports them.

tqdm's bars become the rank's bars, IPython's and matplotlib's display goes to the notebook, NumPy starts from the seed.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nblaunch.rank import bars, display, surroundings
from nblaunch.wire.messages import Begin

if TYPE_CHECKING:
    from nblaunch.rank.reporter import Reporter

Hook = Callable[[types.ModuleType], None]


def install_hooks(reporter: Reporter, message: Begin) -> None:
    """Change what is loaded, and watch for what is not."""
    displayer = display.Displayer(reporter, message.launch.run)
    builtins.display = displayer.display  # pyright: ignore[reportAttributeAccessIssue]
    display.use_backend(displayer)
    hooks: dict[str, Hook] = {
        "tqdm.std": lambda module: bars.change_tqdm(module, reporter),
        "IPython.core.display_functions": displayer.change_ipython,
        "numpy": lambda module: surroundings.seed_numpy(message.seed),
    }
    bars.replace_fancy_bars()
    for name in [name for name in hooks if name in sys.modules and name != "numpy"]:
        hooks.pop(name)(sys.modules[name])
    if "numpy" in sys.modules:
        del hooks["numpy"]
    sys.meta_path.insert(0, _Watcher(hooks))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself; lets a module's hook run once the module has been executed."""

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None, /
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.pop(fullname, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, hook)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook(module)


_PATHS = sysconfig.get_paths()
_INSTALLED = tuple({_PATHS[key] + os.sep for key in ("purelib", "platlib")})


def installed_modules(before: frozenset[str]) -> list[str]:
    """Modules of installed packages that were loaded since `before`, in the order of their import."""
    names: list[str] = []
    for name, module in list(sys.modules.items()):
        if name in before or name.startswith("nblaunch") or "__main__" in name:
            continue
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if isinstance(origin, str) and origin.startswith(_INSTALLED):
            names.append(name)
    return names
