"""Where this process shows its output: a page with widgets, a captured notebook, a terminal, a file."""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

Kind = Literal["widget", "captured", "terminal", "lines", "none"]

_PYTHON_CLIENT = re.compile(r"_\d+_\d+$")
"""How message ids of jupyter_client end (process, counter); a page's are plain UUIDs."""


def choose(choice: str) -> Kind:
    """Which view fits.

    Args:
        choice: "auto", "widget", "text" or "none".

    Returns:
        "widget" for a notebook page, "captured" for a notebook that nbclient, nbmake or papermill executes or
        a console without widgets, "terminal" for a terminal, "lines" where the output goes to a file, "none".
    """
    if choice == "none":
        return "none"
    shell = _kernel_shell()
    if shell is not None:
        if choice == "widget" or (choice == "auto" and _has_page(shell) and _has_widgets()):
            return "widget"
        return "captured"
    if choice == "widget" and _has_widgets():
        return "widget"
    return "terminal" if sys.stdout is not None and sys.stdout.isatty() else "lines"


def _kernel_shell() -> Any:
    """IPython's shell if it lives in a Jupyter kernel; where IPython was not imported there is none."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def _has_page(shell: Any) -> bool:
    """Whether a person's page sent the cell that runs now.

    nbclient and those built on it forbid input (`allow_stdin` false), and every client in Python, also a
    console, sends through jupyter_client, whose message ids end in a process and a counter.
    """
    header = (shell.kernel.get_parent() or {}).get("header", {})
    if _PYTHON_CLIENT.search(header.get("msg_id", "")):
        return False
    return bool(getattr(shell.kernel, "_allow_stdin", True)) or "google.colab" in sys.modules


def _has_widgets() -> bool:
    try:
        import anywidget  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError:
        return False
    return True
