"""Which view fits: decided in one place, from what the kernel knows of whoever sent the cell."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nblaunch.dashboard import detect, open_view, terminal
from nblaunch.dashboard.detect import choose

PAGE = "0e5a1b6f-6cf0-4f3a-8d83-2f0d6d6f0b1c"
CLIENT = "5f2c8f0c-51e6d3d0a1c6b2f6e0d8c4aa_4242_7"


def shell(message_id: str, allow_stdin: bool = True) -> SimpleNamespace:
    kernel = SimpleNamespace(get_parent=lambda: {"header": {"msg_id": message_id}}, _allow_stdin=allow_stdin)
    return SimpleNamespace(kernel=kernel)


@pytest.mark.parametrize(
    ("message_id", "allow_stdin", "kind"),
    [
        (PAGE, True, "widget"),
        (CLIENT, False, "captured"),  # nbclient, nbmake, papermill, nbconvert --execute
        (CLIENT, True, "captured"),  # a console: no widgets
        (PAGE, False, "captured"),
    ],
)
def test_a_kernel_knows_a_page_from_a_program(monkeypatch, message_id, allow_stdin, kind):
    monkeypatch.setattr(detect, "_kernel_shell", lambda: shell(message_id, allow_stdin))
    assert choose("auto") == kind
    assert choose("widget") == "widget"
    assert choose("text") == "captured"
    assert choose("none") == "none"


def test_a_terminal_and_a_file(monkeypatch):
    monkeypatch.setattr(detect, "_kernel_shell", lambda: None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert choose("auto") == "lines"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert choose("auto") == "terminal"
    monkeypatch.setattr(sys, "stdout", None)
    assert choose("auto") == "lines"


def test_without_ipython_nothing_is_imported_to_find_out():
    code = "import sys; from nblaunch.dashboard import choose; print(choose('auto'), 'IPython' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["lines", "False"]


def test_in_a_notebook_that_nbclient_executes():
    import nbformat
    from nbclient import NotebookClient

    cell = nbformat.v4.new_code_cell("from nblaunch.dashboard.detect import choose\nprint(choose('auto'))")
    notebook = NotebookClient(nbformat.v4.new_notebook(cells=[cell])).execute()
    assert notebook.cells[0].outputs[0].text == "captured\n"


@pytest.mark.parametrize(
    ("kind", "view"),
    [("terminal", terminal.LiveView), ("captured", terminal.CapturedView), ("lines", terminal.LinesView)],
)
def test_open_view_gives_the_view_of_its_kind(monkeypatch, kind, view):
    from tests.dashboard.scripted import ScriptedRun

    monkeypatch.setattr("nblaunch.dashboard.choose", lambda choice: kind)
    opened = open_view(ScriptedRun(1).state, "auto", lambda: None)
    assert type(opened) is view
    assert json.dumps(opened.shows_output) == "false"
