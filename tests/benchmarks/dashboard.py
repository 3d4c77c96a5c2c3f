"""What the dashboard costs the kernel: CPU and bytes a frame, by ranks and by logged steps; and a soak.

    python tests/benchmarks/dashboard.py            # the table, and ten minutes of messages played at once
    python tests/benchmarks/dashboard.py --quick    # without the runs of a million steps

A frame is measured whole: what the state says is worked out, the widget's message is made, serialised and signed as
ipykernel does it. A run has three metrics, two nested bars and a device sample a rank, 40 steps a second.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from array import array
from pathlib import Path

from comm import DummyComm
from jupyter_client.session import Session

sys.path.insert(0, str(Path(__file__).parents[2]))

from nblaunch.dashboard.widget import RunWidget
from nblaunch.wire.messages import Metrics
from tests.dashboard.scripted import RUN, ScriptedRun

NAMES = ["train/loss", "accuracy", "samples/s"]
FRAMES = 40
BATCH = 50


class Wire(DummyComm):
    """Serialises every message as ipykernel does, and counts the bytes."""

    session = Session(key=b"benchmark")
    bytes = 0

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        content = {"comm_id": self.comm_id, "data": data or {}}
        message = self.session.msg(msg_type, content, metadata=metadata)
        Wire.bytes += sum(map(len, self.session.serialize(message))) + sum(len(buffer) for buffer in buffers or [])


def batch(rank: int, steps: range) -> Metrics:
    """What a rank logs at these steps, all metrics at each."""
    count = len(steps) * len(NAMES)
    return Metrics(
        rank=rank,
        names=NAMES,
        which=array("i", list(range(len(NAMES))) * len(steps)).tobytes(),
        steps=array("q", [step for step in steps for _ in NAMES]).tobytes(),
        values=array("d", [random.random() for _ in range(count)]).tobytes(),
        times=array("d", [1.7e9 + steps[-1] / 40] * count).tobytes(),
        run=RUN,
    )


def fill(run: ScriptedRun, steps: int, ranks: int) -> None:
    """Log `steps` steps; beyond ten million values every k-th of them, up to the last."""
    every = max(1, steps * ranks * len(NAMES) // 10_000_000)
    logged = range(0, steps, every)
    for first in range(0, len(logged), BATCH):
        for rank in range(ranks):
            run.state.apply(batch(rank, logged[first : first + BATCH]))
    run.step = steps


def measure(ranks: int, steps: int) -> tuple[float, float]:
    """Milliseconds of CPU and kilobytes of a frame."""
    run = ScriptedRun(ranks).start()
    fill(run, steps, ranks)
    model = RunWidget(run.state, lambda: None)
    model.comm = Wire()
    model.push()
    Wire.bytes, spent = 0, 0.0
    for _ in range(FRAMES):
        run.advance(0.25)
        start = time.process_time()
        model.push()
        spent += time.process_time() - start
    return 1000 * spent / FRAMES, Wire.bytes / FRAMES / 1000


def megabytes() -> float:
    """Resident memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def soak(minutes: int) -> None:
    """Eight ranks that log 1,000 values a second each, for `minutes`, as fast as they can be taken in."""
    run = ScriptedRun(8).start()
    model = RunWidget(run.state, lambda: None)
    model.comm = Wire()
    step, start, before = 0, time.process_time(), 0.0
    for minute in range(1, minutes + 1):
        for tick in range(60 * 20):
            for rank in range(8):
                run.state.apply(batch(rank, range(step, step + BATCH // len(NAMES) + 1)))
            step += BATCH // len(NAMES) + 1
            run.now += 0.05
            if tick % 5 == 0:
                model.push()
        before = before or megabytes()
        print(f"  minute {minute:2}: {megabytes():6.1f} MB")
    share = (time.process_time() - start) / (60 * minutes)
    grown = megabytes() - before
    print(f"  grew by {grown:.1f} MB after the first minute; {share:.1%} of a core, with making the messages")


def main() -> None:
    """Print the table and the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    print(f"{'ranks':>5} {'steps':>10} {'CPU a frame':>12} {'bytes a frame':>14}")
    for ranks in (2, 8, 64):
        for steps in (1_000,) if quick else (1_000, 1_000_000):
            cpu, size = measure(ranks, steps)
            print(f"{ranks:5} {steps:10,} {cpu:9.2f} ms {size:11.2f} kB")
    messages = [batch(rank, range(16 * i, 16 * i + 16)) for i in range(200) for rank in range(8)]
    run = ScriptedRun(8).start()
    start = time.process_time()
    for message in messages:
        run.state.apply(message)
    each = (time.process_time() - start) / len(messages)
    print(f"a batch of 48 values: {1e6 * each:.0f} us, at 160 batches a second {160 * each:.2%} of a core")
    print("soak: 8 ranks, 1,000 values a second each")
    soak(2 if quick else 10)


if __name__ == "__main__":
    main()
