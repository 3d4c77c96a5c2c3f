"""How fast a launch is, as ratios measured in one run: `python tests/benchmarks/launch.py`."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

import nblaunch
from nblaunch import notebook_launcher

ROUNDS = 15


def reduce() -> float:
    """One gloo all_reduce."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item()


def build() -> None:
    """DDP and an optimizer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    torch.optim.AdamW(model.parameters())


def learn() -> None:
    """An import of scikit-learn."""
    import sklearn.ensemble
    import sklearn.linear_model  # noqa: F401


def chatter(seconds: float) -> None:
    """1,000 metrics a second."""
    end = time.time() + seconds
    i = 0
    while time.time() < end:
        for _ in range(10):
            nblaunch.log(loss=0.5, step=i)
            i += 1
        time.sleep(0.01)


def log_cost() -> float:
    """Seconds of one `log()` of a float."""
    began = time.perf_counter()
    for i in range(20_000):
        nblaunch.log(loss=0.5, step=i)
    return (time.perf_counter() - began) / 20_000


def seconds(call: Callable[[], object]) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def ours(function: Callable[..., object], *args: object, ranks: int = 2) -> object:
    """A launch without a view."""
    return notebook_launcher(function, args, ranks, dashboard="none")


def bare_fork() -> None:
    """Two bare forks of this process, which has torch loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids: list[int] = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            reduce()
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _spawned(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    reduce()


def spawn() -> None:
    """torch.multiprocessing's spawn."""
    import torch.multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_spawned, (port,), nprocs=2)


def fresh(code: str) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    return seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2]))


def cpu_of_agents_and_kernel() -> float:
    """CPU seconds so far of this process and of the agent, without the ranks."""
    me = psutil.Process()
    agents = [child for child in me.children() if "nblaunch.agent.server" in child.cmdline()]
    return sum(sum(process.cpu_times()[:2]) for process in (me, *agents))


def show(what: str, value: str, aim: str) -> None:
    """A row."""
    print(f"{what:<58} {value:<34} aim {aim}", flush=True)


def main() -> None:
    """Measure and print everything."""
    show("import nblaunch", f"{fresh('import nblaunch') - fresh('pass'):.3f} s", "0.15 s")
    torch_alone = statistics.median(fresh("import torch") for _ in range(3))
    first = "from nblaunch import notebook_launcher as l; l(int, num_processes=2, dashboard='none')"
    first_launch = statistics.median(fresh(first) for _ in range(3))
    show("first launch / import torch", f"{first_launch / torch_alone:.2f}", "1.2")

    ours(reduce)
    time.sleep(3)
    import torch.distributed  # noqa: F401

    rows = [(seconds(lambda: ours(reduce)), seconds(bare_fork)) for _ in range(ROUNDS)]
    warm, bare = (statistics.median(column) for column in zip(*rows, strict=True))
    spawned = statistics.median(seconds(spawn) for _ in range(3))
    found = f"{warm / bare:.2f} ({warm * 1e3:.0f} ms, {(warm - bare) * 1e3:+.0f} ms)"
    show("warm launch / bare fork", found, "1.5 or +60 ms")
    show("spawn / warm launch", f"{spawned / warm:.0f}", "at least 20")

    for what, function in (("DDP and an optimizer", build), ("scikit-learn", learn)):
        cold = seconds(lambda function=function: ours(function))
        time.sleep(4)
        again = statistics.median(seconds(lambda function=function: ours(function)) for _ in range(5))
        plain = statistics.median(seconds(lambda: ours(reduce)) for _ in range(5))
        found = f"{(again - plain) * 1e3:+.0f} ms (first {cold:.2f} s)"
        show(f"launch with {what}, from the second on", found, "+100 ms")

    run = ours(log_cost, ranks=1)
    show("log() of a float", f"{run.result * 1e6:.2f} us", "5 us")
    before, began = cpu_of_agents_and_kernel(), time.perf_counter()
    run = ours(chatter, 5.0, ranks=8)
    share = (cpu_of_agents_and_kernel() - before) / (time.perf_counter() - began)
    show("8 ranks x 1,000 log() a second: agent and kernel", f"{share:.1%} of a core", "5%")
    expected = 8 * max(run.metrics.step)
    show("  values kept", f"{len(run.metrics):,} of about {expected:,}, {run.metrics.thinned:,} thinned", "all")


if __name__ == "__main__":
    main()
