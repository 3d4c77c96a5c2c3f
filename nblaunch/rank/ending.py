"""How a rank ends: in order, with its own exit handlers and without those that it inherited."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nblaunch.rank.reporter import Reporter


def clear_inherited() -> None:
    """Forget the exit handlers of the process that this one was forked from; keep what the libraries need of theirs."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # pyright: ignore[reportAttributeAccessIssue]
        finalizer.atexit = False
    multiprocessing.util._finalizer_registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    multiprocessing.util._run_after_forkers()  # pyright: ignore[reportAttributeAccessIssue]
    # these three were registered when their modules were imported, before the fork; last registered, first run
    atexit.register(logging.shutdown)
    atexit.register(weakref.finalize._exitfunc)  # pyright: ignore[reportAttributeAccessIssue]
    atexit.register(multiprocessing.util._exit_function)  # pyright: ignore[reportAttributeAccessIssue]


def end(reporter: Reporter, code: int) -> None:
    """Join threads, run exit handlers, leave the process group, flush, exit; never returns.

    The agent bounds the time that this may take.
    """
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        _leave_process_group()
    except KeyboardInterrupt:
        reporter.stop()  # what remained to be done was cut short by whoever stops this rank
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        reporter.stop()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # closed by the function, or nobody reads any more
        os._exit(code)


def _leave_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
