"""Makes a rank's process look like the notebook now: variables, folders, `__main__`, streams, threads, seeds."""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import importlib
import io
import linecache
import logging
import os
import random
import re
import resource
import signal
import sys
import threading
import types
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from nblaunch.config import LaunchConfig
from nblaunch.rank import cells, context, display
from nblaunch.wire.lifelines import die_with_parent
from nblaunch.wire.messages import Begin, Launch

_LINE_BUFFERED = 1  # _IOLBF of <stdio.h>
_MORE_LIKELY_KILLED = "500"


def connect_streams(stdout_fd: int, stderr_fd: int) -> None:
    """Put the pipes on descriptors 1 and 2, for Python and for C, a line at a time; nothing can be read from 0."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(fd, target)
        if fd > 2:
            os.close(fd)
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0))
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = _NoInput()
    builtins.input = _no_input
    sys.breakpointhook = _no_breakpoint
    faulthandler.enable(sys.stderr, all_threads=False)


def prepare(message: Begin, config: LaunchConfig) -> None:
    """Everything that has to be so before the function is unpickled."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _limits()
    os.register_at_fork(before=_note_thread, after_in_child=_arm_child)
    launch = message.launch
    os.environ.clear()
    os.environ.update({**launch.environment, **(config.env or {}), **message.environment})
    _folder_and_path(launch)
    _warnings_and_logging(launch)
    _threads(message.threads)
    _seeds(message.seed)
    _precision(message, config)


def fresh_main(sources: Mapping[str, str], payload_fd: int) -> types.ModuleType:
    """A new `__main__` for the notebook's names, in place of this process's own."""
    main = types.ModuleType("__main__", "The notebook's names, as far as the function uses them.")
    main.__file__ = cells.__file__
    main.__builtins__ = builtins  # pyright: ignore[reportAttributeAccessIssue]
    # for the cells alone: libraries that look for it among the builtins find none, as in any plain process
    main.get_ipython = display.get_ipython  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["__main__"] = main
    os.environ[cells.PAYLOAD] = f"/proc/{os.getpid()}/fd/{payload_fd}"
    for name, text in sources.items():
        _remember_source(name, text)
    if sources:
        _remember_source(cells.__file__, "\n".join(sources.values()))
    return main


def _remember_source(name: str, text: str) -> None:
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _limits() -> None:
    """Offer this process to the OOM killer before the kernel, dump no core, allow many open files."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_MORE_LIKELY_KILLED)
    except OSError:
        logging.getLogger(__name__).debug("oom_score_adj can't be set")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_forks_in_main_thread = True


def _note_thread() -> None:
    global _forks_in_main_thread
    _forks_in_main_thread = threading.current_thread() is threading.main_thread()


def _arm_child() -> None:
    """A rank's own forked children (DataLoader workers) end with it.

    Not those that another thread forks: the parent-death signal would come as soon as that thread ends.
    """
    current = context.current()
    if current is not None:
        current.reporter.mute()
    if _forks_in_main_thread:
        die_with_parent(os.getppid())


def _folder_and_path(launch: Launch) -> None:
    try:
        os.chdir(launch.cwd)
    except OSError as error:
        warnings.warn(f"the working folder {launch.cwd} can't be entered here: {error}", stacklevel=2)
    sys.path[:] = launch.path
    sys.argv[:] = [""]
    importlib.invalidate_caches()


def _warnings_and_logging(launch: Launch) -> None:
    filters: list[Any] = []
    for action, message, category, module, lineno in launch.warnings:
        filters.append((action, _pattern(message), _category(category), _pattern(module), lineno))
    warnings.filters[:] = filters  # pyright: ignore[reportIndexIssue]
    warnings._filters_mutated()  # pyright: ignore[reportAttributeAccessIssue]
    if launch.log_format:
        logging.basicConfig(format=launch.log_format, stream=sys.stderr)
    logging.getLogger().setLevel(launch.log_level)


def _pattern(text: str) -> re.Pattern[str] | None:
    return re.compile(text, re.IGNORECASE) if text else None


def _category(name: str) -> type[Warning]:
    """A warning's class by its qualified name; one that can't be had here stands for all."""
    module, _, qualname = name.rpartition(".")
    try:
        category = getattr(importlib.import_module(module), qualname)
    except (ImportError, AttributeError, ValueError):
        return Warning
    return category if isinstance(category, type) and issubclass(category, Warning) else Warning


def _threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(count))
    if count > 1:  # what is loaded by now was loaded with one thread
        import threadpoolctl

        threadpoolctl.threadpool_limits(count)


def _seeds(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        seed_numpy(seed)


def seed_numpy(seed: int) -> None:
    """Start NumPy's global generator from the launch's seed and the rank; forks would share its state."""
    sys.modules["numpy"].random.seed(seed % 2**32)


def _precision(message: Begin, config: LaunchConfig) -> None:
    """What a function that knows nothing of nblaunch gets of the launch's precision.

    bf16: autocast is on for the function's thread. The cache of cast weights is off, since nothing would ever clear it.
    fp16: autocast's default type alone, since gradients need a scaler, which is in the function's hands.
    """
    import torch

    if config.matmul_precision is not None:
        torch.set_float32_matmul_precision(config.matmul_precision)
    kind = message.device.type
    if config.mixed_precision in ("bf16", "fp16"):
        torch.set_autocast_dtype(kind, getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[config.mixed_precision]))
    if config.mixed_precision == "bf16":
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_cache_enabled(False)


# ---- nothing can be typed in a rank


class _NoInput(io.TextIOBase):
    """A stdin that says why nothing comes."""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> str:
        return _no_input()

    def readline(self, size: int = -1, /) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _no_input()

    def fileno(self) -> int:
        return 0


def _no_input(prompt: object = "") -> NoReturn:
    raise RuntimeError(
        "input() can't be used in a rank: it runs apart from the notebook and nobody can type there; "
        "ask in the notebook and pass the answer as an argument"
    )


def _no_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "breakpoint() can't be used in a rank: it runs apart from the notebook and nobody can type there; "
        "print or log instead, or call the function in the notebook itself to debug it"
    )
