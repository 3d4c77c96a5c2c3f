"""A dozen acts with `start_method="spawn"`: fresh interpreters instead of forks, the same behaviour."""

from __future__ import annotations

import time

import pytest

from tests.acts.conftest import SETUP
from tests.acts.notebook import Notebook, gone


@pytest.fixture(scope="module")
def spawning(tmp_path_factory):
    """A kernel whose launches all spawn."""
    notebook = Notebook(tmp_path_factory.mktemp("spawn"))
    notebook.run(SETUP + "import functools\nlaunch = functools.partial(notebook_launcher, start_method='spawn')").ok()
    yield notebook
    notebook.close()


def test_another_cells_class_comes_home_as_the_notebooks_own(spawning):
    spawning.run("class Point:\n    def __init__(self, x): self.x = x").ok()
    spawning.run("run = launch(lambda: Point(int(os.environ['RANK'])), num_processes=2)").ok()
    assert spawning.evaluate("[(type(p) is Point, p.x) for p in run.results]") == [(True, 0), (True, 1)]
    assert spawning.evaluate("run.state.start_method") == "spawn"


def test_large_return_metrics_output_and_display(spawning):
    cell = spawning.run("""
def train():
    import torch
    print("from rank", os.environ["RANK"])
    log(loss=0.5)
    display("shown")
    return torch.ones(1_000_000)
run = launch(train, num_processes=2)
""")
    assert "from rank 0" in cell.ok().stdout
    assert any("shown" in data.get("text/plain", "") for data in cell.displays)
    assert spawning.evaluate("[r.sum().item() for r in run.results]") == [1e6, 1e6]
    assert spawning.evaluate("(run.metrics.values('loss'), run.logs(1))") == ([0.5, 0.5], "from rank 1\n")


def test_a_lock_cannot_come_home(spawning):
    cell = spawning.run("import threading\nlaunch(lambda: threading.Lock(), num_processes=2)")
    assert cell.error == "ResultError"


DIE = """
def die(how):
    import torch, torch.distributed as dist
    dist.init_process_group()
    if dist.get_rank() == 1:
        time.sleep(0.1)
        exec(how)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise ValueError('wrong')", "rank 1 raised ValueError: wrong"),
        ("import os; os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
        ("import os; os._exit(3)", "rank 1 exited with code 3"),
        ("import ctypes; ctypes.string_at(0)", "rank 1 was killed by SIGSEGV"),
    ],
)
def test_deaths(spawning, how, says):
    spawning.run(DIE).ok()
    cell = spawning.run(f"launch(die, ({how!r},), num_processes=2)")
    assert cell.error == "RankError" and says in cell.traceback


def test_variables_and_seeds(spawning):
    cell = spawning.run("""
os.environ["MINE"] = "1"
def look():
    import numpy, random
    return os.environ["MINE"], random.random(), float(numpy.random.rand())
print(launch(look, num_processes=2, seed=3).results == launch(look, num_processes=2, seed=3).results)
""")
    assert cell.ok().stdout.strip().endswith("True")


def test_same_seed_same_draws_as_forked(spawning):
    spawned, forked = (
        spawning.evaluate(f"{launch}(look, num_processes=1, seed=3).results")
        for launch in ("launch", "notebook_launcher")
    )
    assert spawned == forked


def test_interrupt(spawning):
    spawning.run("def loop():\n    print('ready', flush=True)\n    while True: time.sleep(0.01)").ok()
    cell = spawning.start("launch(loop, num_processes=2)")
    spawning.until(cell, "ready")
    spawning.interrupt()
    assert spawning.finish(cell).error == "KeyboardInterrupt"
    assert not gone(spawning.ranks(), within=10)


def test_interrupt_while_the_interpreters_start(spawning):
    cell = spawning.start("launch(loop, num_processes=2)")
    time.sleep(0.7)
    spawning.interrupt()
    assert spawning.finish(cell).error == "KeyboardInterrupt"
    assert spawning.run("launch(lambda: 1, num_processes=2).results").ok().result == "[1, 1]"


def test_kill_of_the_kernel(fresh_notebook):
    notebook = fresh_notebook()
    notebook.run("def loop():\n    print('ready', flush=True)\n    while True: time.sleep(0.01)").ok()
    cell = notebook.start("notebook_launcher(loop, num_processes=2, start_method='spawn')")
    notebook.until(cell, "ready")
    pids = [process.pid for process in notebook.descendants()]
    notebook.manager.provisioner.process.kill()
    assert not gone(pids, within=10)
