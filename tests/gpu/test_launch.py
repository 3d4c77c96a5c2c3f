"""What only a machine with a CUDA device can show: `python -m pytest -m gpu tests/gpu`, under 3 minutes on one GPU."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch

from tests.acts.conftest import SETUP
from tests.acts.notebook import Notebook, gone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

TRAIN = """
def train(seconds=0.0):
    import torch, torch.distributed as dist
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    assert torch.cuda.current_device() == device.index
    dist.init_process_group(device_id=device)
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    kept = torch.empty(2**28, device=device)
    print("ready", flush=True)
    end = time.time() + seconds
    while time.time() < end:
        y = (x * 2).sum(); log(total=y); time.sleep(0.01)
    dist.barrier()
    return x, dist.get_backend()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    kernel = Notebook(tmp_path_factory.mktemp("gpu"))
    kernel.run(SETUP + "import torch\ninitialised = torch.zeros(1, device='cuda')\n" + TRAIN).ok()
    yield kernel
    kernel.close()


def free_memory() -> int:
    return torch.cuda.mem_get_info(0)[0]


def test_launch_after_cuda_was_used_in_the_kernel(notebook):
    notebook.run("run = notebook_launcher(train, num_processes=1)", timeout=120).ok()
    assert notebook.evaluate("[(x.device.type, x[0].item(), backend) for x, backend in run.results]") == [
        ("cpu", 1.0, "nccl")
    ]
    assert notebook.evaluate("(run.state.backend, run.state.ranks[0].device.type)") == ("nccl", "cuda")


def test_the_agent_and_its_templates_stay_clean(notebook):
    notebook.run("notebook_launcher(train, num_processes=1)", timeout=120).ok()
    for process in notebook.descendants():
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        files = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert "/dev/nvidia" not in maps and not any("/dev/nvidia" in file for file in files)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) in (0, 3)  # the call that the agent's proof relies on


def test_memory_is_freed_after_a_run_and_after_an_interrupt(notebook):
    torch.zeros(1, device="cuda")
    before = free_memory()
    notebook.run("notebook_launcher(train, num_processes=1)", timeout=120).ok()
    assert free_memory() > before - 2**26
    cell = notebook.start("notebook_launcher(train, (60.0,), num_processes=1)")
    notebook.until(cell, "ready", timeout=60)
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"
    assert not gone(notebook.ranks(), within=10)
    time.sleep(0.5)
    assert free_memory() > before - 2**26


def test_device_samples_and_metrics_that_never_wait(notebook):
    notebook.run("run = notebook_launcher(train, (3.0,), num_processes=1)", timeout=120).ok()
    sample = notebook.evaluate("(lambda s: (s.memory_used, s.memory_total, s.utilization))(run.state.ranks[0].sample)")
    assert sample[0] > 2**30 and sample[1] > sample[0] and sample[2] >= 0
    assert notebook.evaluate("set(run.metrics.values('total'))") == {2000.0}


def test_a_cuda_tensor_in_a_closure_is_named(notebook):
    cell = notebook.run("def uses():\n    return initialised + 1\nnotebook_launcher(uses, num_processes=1)")
    assert cell.error == "PayloadError"
    assert "uses -> global 'initialised'" in cell.traceback and "cuda:0" in cell.traceback


def test_more_processes_than_devices_is_refused(notebook):
    cell = notebook.run(f"notebook_launcher(train, num_processes={torch.cuda.device_count() + 1})")
    assert cell.error == "ConfigError" and "visible" in cell.traceback


def test_spawn_works_too(notebook):
    cell = notebook.run("notebook_launcher(train, num_processes=1, start_method='spawn').result[1]", timeout=120)
    assert cell.ok().result == "'nccl'"


def test_devices_by_uuid(notebook):
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    cell = notebook.run(f"notebook_launcher(train, num_processes=1, devices=[{uuid!r}]).result[1]", timeout=120)
    assert cell.ok().result == "'nccl'"
