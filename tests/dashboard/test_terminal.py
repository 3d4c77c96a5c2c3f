"""The views that print: a few lines, only from the cell's thread, and the root cause at the end."""

import io
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from nblaunch.dashboard import terminal
from tests.dashboard.scripted import ScriptedRun


def test_lines_at_the_start_at_each_tenth_and_at_the_end(capsys):
    run = ScriptedRun(2, epochs=1, batches=100, speed=10, cpu=True)
    view = terminal.LinesView(run.state)
    view.start()
    view.tick()
    assert capsys.readouterr().out == ""
    run.start()
    for _ in range(50):
        run.advance(0.25)
        view.tick()
    run.finish()
    view.finish()
    view.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: running, 2 \u00d7 cpu · DDP · bf16 · gloo"
    assert [re.search(r"(\d+) %", line)[1] for line in lines[1:10]] == [str(10 * i) for i in range(1, 10)]
    assert lines[10].startswith("train: done, in ")
    assert len(lines) < 20


def test_the_end_of_a_failed_run_names_the_cause(capsys):
    run = ScriptedRun(2).start().advance(1).fail()
    view = terminal.LinesView(run.state)
    view.finish()
    printed = capsys.readouterr().out
    assert "Rank 1 raised ValueError:" in printed
    assert "raise ValueError" in printed


def test_a_terminal_is_drawn_and_left_clean(monkeypatch):
    import rich.console

    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    monkeypatch.setattr("rich.live.get_console", lambda: console)
    monkeypatch.setattr(sys, "stdout", screen)
    run = ScriptedRun(64, late=5).start().advance(20).talk()
    view = terminal.LiveView(run.state)
    view.start()
    view.tick()
    shown = screen.getvalue()
    assert "batch" in shown
    assert "64 ranks, 62 of them as usual" in shown
    run.finish()
    view.finish()
    view.finish()
    assert screen.getvalue().count("train: done") == 1


CELL = """
from tests.dashboard.scripted import ScriptedRun
from nblaunch.dashboard import open_view
run = ScriptedRun(2, epochs=1, batches=100, speed=10).start()
view = open_view(run.state, "auto", lambda: None)
view.start()
for _ in range(20):
    run.advance(0.25)
    view.tick()
"""


@pytest.mark.parametrize("finish", [True, False])
def test_a_captured_notebook_keeps_the_snapshot(monkeypatch, finish):
    from pathlib import Path

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code = CELL + ("run.finish()\nview.finish()" if finish else "")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook).execute()
    table, picture, *lines = notebook.cells[0].outputs
    assert ("Done" in table.data["text/html"]) == finish
    assert ("unfinished" in table.data["text/html"]) == (not finish), "it is never shown as live for ever"
    assert ("image/png" in picture.data) == finish
    assert "".join(line.text for line in lines).startswith("train: running")
