"""What the wrapper costs a step: nblaunch, Hugging Face Accelerate and Lightning Fabric over a bare PyTorch loop.

    python tests/benchmarks/steps.py [--precision bf16] [--accumulate 4] [--windows 30] [--steps 400]

One process, a tiny model, data in memory. The four take turns in short windows; each row is the median over windows of
the microseconds of CPU time a step (what other processes do meanwhile hardly counts), and what of it is over the bare
loop's, with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

Window = Callable[[int], None]
"""Runs so many steps."""


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
    return model, optimizer, scheduler, DataLoader(data, batch_size=4)


def bare(precision: str, accumulate: int) -> Window:
    """The loop written by hand."""
    model, optimizer, scheduler, loader = _parts()
    context = contextlib.nullcontext if precision == "no" else lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    batches = cycle_of(loader)

    def run(steps: int) -> None:
        for index, (x, y) in enumerate(islice(batches, steps), 1):
            with context():
                out = model(x)
            loss = nn.functional.cross_entropy(out.float(), y) / accumulate
            loss.backward()
            if index % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def cycle_of(loader: Any) -> Any:
    """Passes over a loader without end."""
    while True:
        yield from loader


def _with(accelerator: Any) -> Window:
    model, optimizer, scheduler, loader = accelerator.prepare(*_parts())
    batches = cycle_of(loader)

    def run(steps: int) -> None:
        for x, y in islice(batches, steps):
            with accelerator.accumulate(model):
                out = model(x)
                loss = nn.functional.cross_entropy(out, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def nblaunch(precision: str, accumulate: int) -> Window:
    """Ours."""
    from nblaunch import Accelerator

    return _with(Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate))


def accelerate(precision: str, accumulate: int) -> Window:
    """Hugging Face's."""
    from accelerate import Accelerator

    return _with(Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate))


def fabric(precision: str, accumulate: int) -> Window:
    """Lightning's; it has no schedulers and no windows, so these are by hand."""
    from lightning.fabric import Fabric

    runs = Fabric(accelerator="cpu", devices=1, precision={"no": "32-true", "bf16": "bf16-mixed"}[precision])
    model, optimizer, scheduler, loader = _parts()
    model, optimizer = runs.setup(model, optimizer)
    loader = runs.setup_dataloaders(loader)
    batches = cycle_of(loader)

    def run(steps: int) -> None:
        for index, (x, y) in enumerate(islice(batches, steps), 1):
            last = index % accumulate == 0
            with runs.no_backward_sync(model, enabled=not last):
                loss = nn.functional.cross_entropy(model(x), y) / accumulate
                runs.backward(loss)
            if last:
                runs.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def measure(windows: dict[str, Window], rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds a step, by name, one value a window; the names take turns."""
    times: dict[str, list[float]] = {name: [] for name in windows}
    for run in windows.values():
        run(steps)
    names = cycle(windows)
    for name in islice(names, rounds * len(windows)):
        started = time.process_time()
        windows[name](steps)
        times[name].append((time.process_time() - started) / steps * 1e6)
    return times


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()
    makers = {"bare": bare, "bare again": bare, "nblaunch": nblaunch, "accelerate": accelerate, "fabric": fabric}
    windows = {name: make(chosen.precision, chosen.accumulate) for name, make in makers.items()}
    times = measure(windows, chosen.windows, chosen.steps)
    overheads = {
        name: [mine - plain for mine, plain in zip(values, times["bare"], strict=True)]
        for name, values in times.items()
    }
    for name, values in times.items():
        low, middle, high = statistics.quantiles(overheads[name], n=4) if name != "bare" else (0.0, 0.0, 0.0)
        print(
            f"{name:12} {statistics.median(values):8.1f} us a step, over bare {middle:6.1f} ({low:.1f} to {high:.1f})"
        )
    ratio = statistics.median(overheads["nblaunch"]) / statistics.median(overheads["accelerate"])
    print(f"nblaunch's overhead is {ratio:.2f} of accelerate's")


if __name__ == "__main__":
    main()
