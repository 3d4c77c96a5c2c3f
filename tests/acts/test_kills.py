"""kill -9 of the kernel, of the agent, a restart: whatever the ranks do, nothing is left."""

from __future__ import annotations

import json
import time

import pytest

from tests.acts.notebook import gone, kill, saw

SITUATIONS = {
    "python": "while True: time.sleep(0.01)",
    "collective": """
    import torch, torch.distributed as dist
    dist.init_process_group()
    if dist.get_rank() == 0: dist.all_reduce(torch.ones(1))
    time.sleep(600)""",
    "workers": """
    import torch
    from torch.utils.data import DataLoader
    for method in ("fork", "spawn"):
        loader = DataLoader(list(range(1000)), 1, num_workers=1, multiprocessing_context=method)
        globals()[method] = iter(loader); next(globals()[method])
    print("workers", flush=True)
    time.sleep(600)""",
}


def start(notebook, situation: str, more: str = ""):
    """A run in the given situation, in a cell that blocks; gives every process below the kernel."""
    body = SITUATIONS[situation]
    notebook.run(f"{more}\ndef train():\n    print('ready', flush=True)\n    {body}").ok()
    cell = notebook.start("notebook_launcher(train, num_processes=2)")
    notebook.until(cell, "workers" if situation == "workers" else "ready", timeout=60)
    time.sleep(0.3)
    return cell, [process.pid for process in notebook.descendants()]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_kill_of_the_kernel(fresh_notebook, situation, tmp_path):
    notebook = fresh_notebook()
    _, pids = start(notebook, situation)
    assert len(pids) >= 4
    notebook.manager.provisioner.process.kill()
    began = time.monotonic()
    assert not gone(pids, within=10)
    saw(f"until all processes were gone ({situation})", time.monotonic() - began, 2)
    (folder,) = (tmp_path / ".nblaunch/runs").iterdir()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[-1]["_"] == "Finished" and events[-1]["status"] == "stopped"
    assert "ready" in (folder / "rank-1.log").read_text()


def test_kill_of_the_kernel_while_a_forked_child_of_it_lives(fresh_notebook):
    notebook = fresh_notebook()
    more = "child = os.fork()\nif child == 0:\n    time.sleep(60); os._exit(0)"
    _, pids = start(notebook, "python", "")
    notebook.manager.provisioner.process.kill()
    assert not gone(pids, within=10)
    notebook = fresh_notebook()
    notebook.run("import nblaunch.kernel.agents as a; a.get(dict(os.environ))").ok()
    _, pids = start(notebook, "python", more)
    child = notebook_child(pids, notebook)
    notebook.manager.provisioner.process.kill()
    began = time.monotonic()
    assert not gone([pid for pid in pids if pid != child], within=10)
    saw("until all were gone but the kernel's own child", time.monotonic() - began, 2)
    kill(child)


def notebook_child(pids, notebook):
    """The kernel's own forked child: it has the kernel's command line."""
    import psutil

    line = psutil.Process(notebook.pid).cmdline()
    return next(pid for pid in pids if psutil.Process(pid).cmdline() == line)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_kill_of_the_agent(fresh_notebook, situation):
    notebook = fresh_notebook()
    cell, pids = start(notebook, situation)
    agent = min(pids)
    kill(agent)
    ended = notebook.finish(cell, timeout=20)
    assert ended.error == "AgentError" and "SIGKILL" in ended.traceback
    assert not gone(pids, within=10)
    assert notebook.run("notebook_launcher(lambda: 1, num_processes=2).results").ok().result == "[1, 1]"


def test_restart_of_the_kernel(fresh_notebook):
    notebook = fresh_notebook()
    _, pids = start(notebook, "collective")
    notebook.manager.restart_kernel(now=False)
    assert not gone(pids, within=10)
    notebook.client.wait_for_ready(timeout=60)
    notebook.run("import nblaunch\nfrom nblaunch import notebook_launcher").ok()
    assert notebook.run("notebook_launcher(lambda: 1, num_processes=2).results").ok().result == "[1, 1]"


def test_a_forked_child_of_the_kernel_leaves_the_run_alone(notebook):
    cell = notebook.run("""
run = notebook_launcher(lambda: time.sleep(1) or 5, num_processes=2, block=False)
pid = os.fork()
if pid == 0:
    try: run.wait()
    except nblaunch.NblaunchError as error: open("child", "w").write(str(error))
    os._exit(0)
os.waitpid(pid, 0)
print(open("child").read(), run.wait().results)
""")
    assert "another process" in cell.ok().stdout and "[5, 5]" in cell.stdout
