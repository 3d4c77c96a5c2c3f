"""The stop button: the cell ends soon, as KeyboardInterrupt, no rank is left, and the next launch works."""

from __future__ import annotations

import time

import pytest

from tests.acts.notebook import gone, saw

BUSY = """
def loop():
    print("ready", flush=True)
    while True: time.sleep(0.01)
def collective():
    import torch, torch.distributed as dist
    dist.init_process_group()
    print("ready", flush=True)
    if dist.get_rank() == 0: dist.all_reduce(torch.ones(1))
    time.sleep(600)
def stubborn():
    signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
def short():
    import torch, torch.distributed as dist
    dist.init_process_group()
    for i in range(20):
        log(loss=1 / (i + 1)); time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
    return 1
"""


@pytest.fixture(scope="module", autouse=True)
def functions(notebook):
    notebook.run(BUSY).ok()
    notebook.run("notebook_launcher(short, num_processes=2).results").ok()


def works_again(notebook):
    assert notebook.run("notebook_launcher(short, num_processes=2).results").ok().result == "[1, 1]"


@pytest.mark.parametrize("function", ["loop", "collective", "stubborn"])
@pytest.mark.parametrize("presses", [1, 3])
def test_interrupt(notebook, function, presses):
    cell = notebook.start(f"notebook_launcher({function}, num_processes=2)")
    notebook.until(cell, "ready")
    pressed = time.monotonic()
    for _ in range(presses):
        notebook.interrupt()
        time.sleep(0.15)
    ended = notebook.finish(cell)
    saw("from the interrupt to the cell's end", time.monotonic() - pressed, 3)
    assert ended.error == "KeyboardInterrupt"
    assert not gone(notebook.ranks(), within=10)
    assert notebook.evaluate("last_run().status") == "stopped"
    works_again(notebook)


@pytest.mark.parametrize("function", ["loop", "collective"])
def test_interrupt_of_a_cell_that_awaits(notebook, function):
    cell = notebook.start(f"run = notebook_launcher({function}, num_processes=2, block=False)\nawait run")
    notebook.until(cell, "ready")
    pressed = time.monotonic()
    notebook.interrupt()
    ended = notebook.finish(cell)
    saw("from the interrupt to the end of the awaiting cell", time.monotonic() - pressed, 3)
    assert ended.error == "KeyboardInterrupt"
    assert not gone(notebook.ranks(), within=10)
    works_again(notebook)


def test_interrupts_at_fifty_moments_of_a_launch(notebook):
    """Spread over the whole of a launch, from before the payload is pickled to after the last rank has ended."""
    outcomes = []
    for moment in range(50):
        cell = notebook.start("r = notebook_launcher(short, num_processes=2); print('whole', r.results)")
        time.sleep(moment * 0.01)
        notebook.interrupt()
        ended = notebook.finish(cell, timeout=20)
        outcomes.append(ended.error or "whole")
        assert ended.error in ("", "KeyboardInterrupt"), ended.traceback
        if not ended.error:
            assert "whole [1, 1]" in ended.stdout
    assert "KeyboardInterrupt" in outcomes
    pids = [p.pid for p in notebook.descendants() if "nblaunch" not in " ".join(p.cmdline())]
    assert not gone(pids, within=5)
    works_again(notebook)


def test_an_interrupt_while_the_first_agent_starts(fresh_notebook):
    notebook = fresh_notebook()
    for wait in (0.05, 0.3, 1.0):
        cell = notebook.start("def one(): return 1\nnotebook_launcher(one, num_processes=2)")
        time.sleep(wait)
        notebook.interrupt()
        assert notebook.finish(cell, timeout=20).error in ("", "KeyboardInterrupt")
    assert notebook.run("notebook_launcher(one, num_processes=2).results").ok().result == "[1, 1]"


def test_stop_and_timeout(notebook):
    notebook.run("run = notebook_launcher(loop, num_processes=2, block=False)").ok()
    assert notebook.run("run.wait(timeout=0.5)").error == "TimeoutError"
    assert notebook.evaluate("run.status") == "running"
    notebook.run("run.stop()").ok()
    assert notebook.evaluate("run.status") == "stopped"
    assert "was stopped" in notebook.run("run.results").traceback
    assert not gone(notebook.ranks(), within=2)


def test_a_run_in_the_background_can_be_awaited_and_two_go_on_at_once(notebook):
    notebook.run("a = notebook_launcher(short, num_processes=2, block=False)").ok()
    cell = notebook.run("b = notebook_launcher(short, num_processes=2)\nawait a\nprint(a.results, b.results)")
    assert "[1, 1] [1, 1]" in cell.ok().stdout
