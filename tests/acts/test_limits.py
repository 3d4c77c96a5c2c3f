"""Many launches leave nothing behind; a folder or a disk that refuses ends no run; memory that runs out is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.acts.notebook import gone

GROWTH = """
def count():
    import psutil, glob, threading
    me = psutil.Process()
    below = me.children(recursive=True)
    agents = [p for p in below if "nblaunch" in " ".join(p.cmdline())]
    return (me.num_fds(), sum(p.num_fds() for p in agents), threading.active_count(), len(below),
            len(glob.glob("/dev/shm/*")))
def reduce():
    import torch, torch.distributed as dist
    dist.init_process_group()
    x = torch.ones(1); dist.all_reduce(x); return x.item()
"""


def test_fifty_launches_leave_nothing_behind(notebook):
    notebook.run(GROWTH).ok()
    # the agent settles: it preloads what the first ranks imported, between launches
    warm_up = "for _ in range(3): notebook_launcher(reduce, num_processes=2, dashboard='none')\ntime.sleep(2)\n"
    notebook.run(warm_up + warm_up + "import gc; gc.collect(); before = count()").ok()
    notebook.run(
        "for i in range(50):\n"
        "    assert notebook_launcher(reduce, num_processes=2, dashboard='none').results == [2.0, 2.0]\n"
        "gc.collect(); time.sleep(1.5); after = count()",
        timeout=120,
    ).ok()
    before, after = notebook.evaluate("before"), notebook.evaluate("after")
    assert all(now <= then + 1 for then, now in zip(before, after, strict=True)), (before, after)


def test_two_runs_at_once_are_both_right(notebook):
    notebook.run(GROWTH).ok()
    cell = notebook.run("""
runs = [notebook_launcher(reduce, num_processes=n, block=False) for n in (2, 3)]
print([run.wait().results for run in runs])
""")
    assert "[[2.0, 2.0], [3.0, 3.0, 3.0]]" in cell.ok().stdout


def test_old_runs_are_pruned(notebook):
    cell = notebook.run("""
for _ in range(6): notebook_launcher(lambda: 1, num_processes=1, dashboard="none", keep_runs=3)
notebook_launcher(lambda: 1, num_processes=1, keep_runs=3)
folders = sorted(os.listdir(last_run().path.parent))
print(len(folders), last_run().path.name in folders, oct(last_run().path.stat().st_mode))
""")
    assert "True 0o40700" in cell.ok().stdout
    assert int(cell.stdout.splitlines()[-1].split()[0]) <= 4


def test_a_log_keeps_its_first_and_last_part(notebook):
    notebook.run("""
def much():
    for i in range(30_000): print("line", i, "x" * 100)
run = notebook_launcher(much, num_processes=1, run_limit="1MB")
text = run.logs(0); size = sum(f.stat().st_size for f in run.path.iterdir())
""").ok()
    assert notebook.evaluate("text.startswith('line 0 x') and 'line 29999 ' in text and 'left out' in text")
    assert notebook.evaluate("size") < 1_200_000


def test_a_working_folder_that_cannot_be_written(notebook):
    cell = notebook.run(f"""
os.chdir("/proc")
run = notebook_launcher(lambda: 5, num_processes=2)
os.chdir({str(notebook.folder)!r})
print(run.results, run.path.parts[1])
""")
    assert "[5, 5] tmp" in cell.ok().stdout
    notices = notebook.evaluate("[n.text for n in run.state.notices]")
    assert any("can't be written" in text and "/tmp" in text for text in notices)


def test_a_full_disk_cuts_the_folder_short_and_says_so(notebook, tmp_path):
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=False).returncode
    ):
        pytest.skip("mounting a small tmpfs needs root")
    try:
        notebook.run(f"""
os.chdir({str(tmp_path)!r})
def much():
    for i in range(20_000): print("line", i); log(loss=i)
    return 5
run = notebook_launcher(much, num_processes=2)
os.chdir({str(notebook.folder)!r})
""").ok()
        assert notebook.evaluate("run.results") == [5, 5]
        assert any("cut short" in text for text in notebook.evaluate("[n.text for n in run.state.notices]"))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def _memory_cgroup() -> Path | None:
    """A new memory cgroup, version 1 or 2, with 1.5 GB; None where there can't be one."""
    for base, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = base / f"nblaunch-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(1500 * 10**6))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return group
    return None


def test_a_rank_killed_for_memory_says_so(fresh_notebook):
    group = _memory_cgroup()
    if group is None:
        pytest.skip("making a memory cgroup needs root")
    try:
        notebook = fresh_notebook()
        (group / "cgroup.procs").write_text(str(notebook.pid))
        cell = notebook.run("""
def hungry():
    if os.environ["RANK"] == "1":
        kept = []
        while True: kept.append(bytearray(os.urandom(1)) * 50_000_000)
    time.sleep(30)
notebook_launcher(hungry, num_processes=2)
""")
        assert cell.error == "RankError", cell
        assert "rank 1" in cell.traceback and "out of memory" in cell.traceback
        assert notebook.run("notebook_launcher(lambda: 1, num_processes=2).results").ok().result == "[1, 1]"
        pids = [notebook.pid, *(process.pid for process in notebook.descendants())]
        notebook.close()
        assert not gone(pids, within=10)
    finally:
        group.rmdir()
