"""`gather_for_metrics` of 1 MB from each of two ranks, and a bare all_gather of the same.

    python tests/benchmarks/gather.py [--windows 30] [--calls 20]

The two take turns in short windows; printed are the medians over windows, and the bare one against itself.
"""

from __future__ import annotations

import argparse
import statistics
import time

FLOATS = 2**18  # 1 MiB


def measure(windows: int, calls: int) -> dict[str, list[float]]:
    """Milliseconds a call, by name, one value a window, on this rank."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from nblaunch import Accelerator

    accelerator = Accelerator()
    values = torch.randn(FLOATS // 4, 4)
    loader = accelerator.prepare(DataLoader(torch.zeros(2 * len(values) - 1, 1), batch_size=len(values)))
    for _ in loader:
        pass  # the values are of this pass, whose last sample was repeated once

    def bare() -> torch.Tensor:
        parts = [torch.empty_like(values) for _ in range(accelerator.num_processes)]
        dist.all_gather(parts, values)
        return torch.cat(parts)[:-1]

    def ours() -> torch.Tensor:
        return accelerator.gather_for_metrics(values)

    assert torch.equal(bare(), ours())
    names = {"bare": bare, "bare again": bare, "gather_for_metrics": ours}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(windows):
        for name, call in names.items():
            accelerator.wait_for_everyone()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - started) / calls * 1e3)
    return times


def main() -> None:
    """Measure and print the table."""
    from nblaunch import notebook_launcher

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--calls", type=int, default=20)
    chosen = parser.parse_args()
    run = notebook_launcher(
        measure, (chosen.windows, chosen.calls), num_processes=2, devices="cpu", dashboard="none", threads=1
    )
    times = run.result
    for name, values in times.items():
        ratios = [mine / plain for mine, plain in zip(values, times["bare"], strict=True)]
        print(f"{name:20} {statistics.median(values):7.3f} ms a call, {statistics.median(ratios):.2f} of bare")


if __name__ == "__main__":
    main()
