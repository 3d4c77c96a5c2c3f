"""Where a rank's main thread is, sampled from another thread."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading

_PATHS = sysconfig.get_paths()
_INSTALLED = tuple({_PATHS[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")})


def where_main_thread_is() -> str:
    """The innermost line of the user's own code that the main thread is in, as "name, file:line"; "" if in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_INSTALLED, "<")) and f"{os.sep}nblaunch{os.sep}" not in code.co_filename:
            return f"{code.co_name}, {code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
