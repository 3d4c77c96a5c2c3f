"""Whole training: steps a second through nblaunch, its dashboard on, and of the same loop by hand under torchrun.

    python tests/benchmarks/training.py [--windows 10] [--steps 200] [--milliseconds 5]

Two ranks on the CPU, a step of about so many milliseconds. Runs take turns: by hand, through nblaunch, by hand again;
each is one window, timed inside rank 0 after a warm-up. Printed are the medians, and ratios to the first run by hand
of the same turn, with the second one's as the spread of by-hand against itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

WARM_UP = 20


def _parts(width: int) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 8, (4096,)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(data, batch_size=64)


def _timed(step: Any, batches: Any, steps: int) -> float:
    for _ in range(WARM_UP):
        step(*next(batches))
    started = time.perf_counter()
    for _ in range(steps):
        step(*next(batches))
    return steps / (time.perf_counter() - started)


def _passes(loader: Any) -> Any:
    while True:
        yield from loader


def by_hand(width: int, steps: int) -> float:
    """Steps a second of a loop in plain PyTorch; run by torchrun."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer, loader = _parts(width)
    model = DistributedDataParallel(model)
    loader = DataLoader(loader.dataset, batch_size=64, sampler=DistributedSampler(loader.dataset, shuffle=False))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    rate = _timed(step, _passes(loader), steps)
    dist.barrier()
    dist.destroy_process_group()
    return rate


def through_nblaunch(width: int, steps: int) -> float:
    """Steps a second with `Accelerator`, every loss on the dashboard."""
    import torch

    from nblaunch import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(*_parts(width))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.detach()})

    return _timed(step, _passes(loader), steps)


def _torchrun(width: int, steps: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    result = subprocess.run(
        [*command, "--by-hand", str(width), "--steps", str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"torchrun failed:\n{result.stderr}")
    return float(result.stdout.split("rate ")[1].split()[0])


def _launched(width: int, steps: int) -> float:
    from nblaunch import notebook_launcher

    run = notebook_launcher(
        through_nblaunch, (width, steps), num_processes=2, devices="cpu", dashboard="text", threads=1
    )
    return run.result


def _width_for(milliseconds: float) -> int:
    """How wide the model must be for a step of this length."""
    width = 128
    while width < 4096 and 1000 / _torchrun(width, 40) < milliseconds:
        width = int(width * 1.4)
    return width


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--milliseconds", type=float, default=5)
    parser.add_argument("--by-hand", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.by_hand:
        rate = by_hand(chosen.by_hand, chosen.steps)
        if os.environ["RANK"] == "0":
            print(f"rate {rate}")
        return
    width = _width_for(chosen.milliseconds)
    kinds = {"by hand": _torchrun, "nblaunch": _launched, "by hand again": _torchrun}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(chosen.windows):
        for name, measure in kinds.items():
            rates[name].append(measure(width, chosen.steps))
    for name, values in rates.items():
        ratios = sorted(mine / plain for mine, plain in zip(values, rates["by hand"], strict=True))
        print(
            f"{name:14} {statistics.median(values):7.1f} steps a second, {statistics.median(ratios):.3f} of by hand "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
