"""The ranks see the notebook as it is now; the notebook's process stays as it was."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.acts.notebook import ROOT, saw


def test_variables_folder_and_path_changed_in_a_cell_are_seen(notebook):
    (notebook.folder / "elsewhere").mkdir()
    (notebook.folder / "elsewhere/near.py").write_text("here = 'near'")
    cell = notebook.run("""
os.environ["MY_CHOICE"] = "42"
os.environ.pop("LS_COLORS", None)
sys.path.insert(0, os.path.abspath("elsewhere"))
os.chdir("elsewhere")
import warnings, logging
warnings.filterwarnings("error", message="mine")
logging.getLogger().setLevel(logging.DEBUG)
def look():
    import near, warnings, logging
    try: warnings.warn("mine"); raised = False
    except UserWarning: raised = True
    return os.environ["MY_CHOICE"], os.path.basename(os.getcwd()), near.here, raised, logging.getLogger().level
seen = notebook_launcher(look, num_processes=2, env={"EXTRA": "1"}).results
os.chdir("..")
logging.getLogger().setLevel(logging.WARNING)
""")
    cell.ok()
    assert notebook.evaluate("seen") == [("42", "elsewhere", "near", True, 10)] * 2


def test_a_helper_module_edited_and_reloaded_runs_as_it_is_now(notebook):
    module = notebook.folder / "helper.py"
    module.write_text("def answer(): return 'old'")
    notebook.run(
        "sys.path.insert(0, os.getcwd())\nimport helper, importlib\ndef ask(): return helper.answer()\n"
        "before = notebook_launcher(ask, num_processes=2).results"
    ).ok()
    module.write_text("def answer(): return 'new, and longer'")
    notebook.run("importlib.reload(helper)\nafter = notebook_launcher(ask, num_processes=2).results").ok()
    assert notebook.evaluate("before + after") == ["old", "old", "new, and longer", "new, and longer"]


def test_a_select_py_in_the_working_folder_does_no_harm(fresh_notebook, tmp_path):
    notebook = fresh_notebook()
    (tmp_path / "select.py").write_text("raise SystemExit('the wrong select')")
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')")
    assert notebook.run("notebook_launcher(lambda: 3, num_processes=2).results").ok().result == "[3, 3]"


def test_two_runs_at_once_while_a_changed_variable_asks_for_a_new_agent(notebook):
    cell = notebook.run("""
def wait(n):
    time.sleep(1); return n, os.environ.get("MALLOC_ARENA_MAX")
a = notebook_launcher(wait, (1,), num_processes=2, block=False)
os.environ["MALLOC_ARENA_MAX"] = "2"
b = notebook_launcher(wait, (2,), num_processes=2, block=False)
b.wait(); a.wait()
del os.environ["MALLOC_ARENA_MAX"]
print(a.results, b.results)
""")
    assert "[(1, None), (1, None)] [(2, '2'), (2, '2')]" in cell.ok().stdout


def test_the_kernel_is_as_it_was(notebook):
    cell = notebook.run("""
import threading
def state():
    return (os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
            sys.path[:], sys.stdout, sys.stderr)
before = state()
notebook_launcher(lambda: 1, num_processes=2)
try: notebook_launcher(lambda: 1 / 0, num_processes=2)
except nblaunch.RankError: pass
print(before == state())
""")
    assert cell.ok().stdout.strip().splitlines()[-1] == "True"


def test_after_a_matmul_in_the_kernel_ranks_with_two_threads_finish(notebook):
    cell = notebook.run("""
import torch
torch.set_num_threads(2)
_ = torch.randn(500, 500) @ torch.randn(500, 500)
def multiply():
    x = torch.randn(500, 500)
    for _ in range(3): x = (x @ x).tanh()
    return torch.get_num_threads(), bool(x.isfinite().all())
notebook_launcher(multiply, num_processes=2, threads=2).results
""")
    assert cell.ok().result == "[(2, True), (2, True)]"


def test_with_something_listening_on_29500_the_defaults_work(notebook):
    cell = notebook.run("""
import socket
taken = socket.socket(); taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(("0.0.0.0", 29500)); taken.listen()
def ring():
    import torch, torch.distributed as dist
    dist.init_process_group()
    x = torch.ones(1); dist.all_reduce(x); return x.item()
results = notebook_launcher(ring, num_processes=2).results
taken.close()
""")
    cell.ok()
    assert notebook.evaluate("results") == [2.0, 2.0]


def test_rank_0_returns_first_while_the_others_make_a_new_group(notebook):
    cell = notebook.run("""
def early():
    import torch, torch.distributed as dist
    dist.init_process_group()
    rank = dist.get_rank()
    if rank == 0: return "first"
    time.sleep(0.5)
    pair = dist.new_group([1, 2], use_local_synchronization=True)
    x = torch.ones(1); dist.all_reduce(x, group=pair); return x.item()
notebook_launcher(early, num_processes=3).results
""")
    assert cell.ok().result == "['first', 2.0, 2.0]"


def test_exit_handlers_of_a_rank_run_once_each(notebook):
    cell = notebook.run("""
def tracked():
    import atexit, threading, tempfile, weakref
    name = f"exits-{os.environ['RANK']}"
    atexit.register(lambda: open(name, "a").write("atexit;"))
    threading.Thread(target=lambda: (time.sleep(0.3), open(name, "a").write("thread;"))).start()
    folder = tempfile.TemporaryDirectory()
    globals()["kept"] = folder
    return folder.name
folders = notebook_launcher(tracked, num_processes=2).results
print([open(f"exits-{r}").read() for r in range(2)], [os.path.exists(f) for f in folders])
""")
    assert "['thread;atexit;', 'thread;atexit;'] [False, False]" in cell.ok().stdout


def test_seeds_differ_by_rank_and_repeat_with_the_launch(notebook):
    cell = notebook.run("""
def draw():
    import random, numpy
    return random.random(), float(numpy.random.rand()), hash("x")
a = notebook_launcher(draw, num_processes=2, seed=7).results
b = notebook_launcher(draw, num_processes=2, seed=7).results
c = notebook_launcher(draw, num_processes=2).results
print(a == b, a[0] != a[1], a != c, a[0][2] == a[1][2], last_run().record["seed"] == last_run().config.seed)
""")
    assert cell.ok().stdout.strip().endswith("True True True True True")


ACCELERATE = """
def train():
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    seen = []
    accelerator.unwrap_model(model)[0].register_forward_hook(lambda m, i, o: seen.append(str(o.dtype)))
    loss = model(torch.ones(2, 4, device=accelerator.device)).sum(); accelerator.backward(loss)
    total = accelerator.reduce(torch.ones(1), "sum").item()
    return accelerator.num_processes, accelerator.mixed_precision, seen, total
"""
FABRIC = """
def train():
    import torch
    from lightning.fabric import Fabric
    fabric = Fabric(); fabric.launch()
    model = fabric.setup(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    seen = []
    model.module[0].register_forward_hook(lambda m, i, o: seen.append(str(o.dtype)))
    fabric.backward(model(torch.ones(2, 4)).sum())
    total = fabric.all_reduce(torch.ones(1), reduce_op="sum").item()
    return fabric.world_size, {"bf16-mixed": "bf16"}[fabric._precision.precision], seen, total
"""
RAW = """
def train():
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    out = model(torch.ones(2, 4)); out.float().sum().backward()
    total = torch.ones(1); dist.all_reduce(total)
    return dist.get_world_size(), os.environ["ACCELERATE_MIXED_PRECISION"], [str(out.dtype)], total.item()
"""


@pytest.mark.parametrize("library", ["accelerate", "lightning", "torch"])
def test_other_libraries_work_and_honour_bf16(notebook, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    notebook.run({"accelerate": ACCELERATE, "lightning": FABRIC, "torch": RAW}[library]).ok()
    cell = notebook.run("notebook_launcher(train, num_processes=2, mixed_precision='bf16').results", timeout=120)
    assert cell.ok().result == "[(2, 'bf16', ['torch.bfloat16'], 2.0), (2, 'bf16', ['torch.bfloat16'], 2.0)]"


def test_an_unguarded_script_works(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import sys
from nblaunch import notebook_launcher
print("once")
class Thing: pass
def train(): return Thing
run = notebook_launcher(train, num_processes=2, start_method=sys.argv[1])
print(run.results == [Thing, Thing])
""")
    for method in ("fork", "spawn"):
        done = subprocess.run(
            [sys.executable, script.name, method],
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("once") == 1 and "True" in done.stdout


def test_a_large_closure_is_shared_and_the_function_begins_soon(notebook):
    cell = notebook.run("""
import torch, psutil, threading
big = torch.ones(64 * 2**20)
notebook_launcher(lambda: 1, num_processes=4)
def used():
    shared = psutil.virtual_memory()
    return shared.total - shared.available
peak = [0]; going = [True]
def watch():
    while going[0]: peak[0] = max(peak[0], used()); time.sleep(0.01)
def train():
    began = time.time()
    total = float(big[:: 1024].sum())
    time.sleep(0.7)
    return began, total
before = used()
thread = threading.Thread(target=watch); thread.start()
asked = time.time()
results = notebook_launcher(train, num_processes=4).results
going[0] = False; thread.join()
extra = (peak[0] - before) / big.nbytes
late = max(r[0] for r in results) - asked
del big
""")
    cell.ok()
    late, extra = notebook.evaluate("(late, extra)")
    saw("until the function of 4 ranks with 256 MB began", late, 1)
    print(f"extra memory of all processes: {extra:.2f} x the tensor")
    assert extra < 1.8  # the aim is 1.3; other processes of this machine are in it
    assert notebook.evaluate("results[3][1]") == 65536.0
