"""A made-up run: the messages that one would send, on a clock that the test turns."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Iterator

from nblaunch.config import LaunchConfig
from nblaunch.dashboard.state import RunState
from nblaunch.wire.messages import (
    Bar,
    Device,
    Failure,
    Finished,
    Frame,
    Message,
    Metrics,
    Output,
    Progress,
    RankUpdate,
    Sample,
    Started,
)

RUN = "scripted"


def metrics(rank: int, values: dict[str, list[float]], first_step: int, at: float, every: int = 1) -> Metrics:
    """One batch: for each name, values of consecutive steps."""
    names = list(values)
    which = [i for i, name in enumerate(names) for _ in values[name]]
    steps = [first_step + k * every for name in names for k in range(len(values[name]))]
    flat = [value for name in names for value in values[name]]
    return Metrics(
        rank=rank,
        names=names,
        which=array("i", which).tobytes(),
        steps=array("q", steps).tobytes(),
        values=array("d", flat).tobytes(),
        times=array("d", [at] * len(flat)).tobytes(),
        run=RUN,
    )


class ScriptedRun:
    """A training of `epochs` x `batches` on `ranks` devices, `speed` batches a second; `advance` plays it."""

    def __init__(
        self,
        ranks: int,
        *,
        epochs: int = 5,
        batches: int = 938,
        speed: float = 41.2,
        late: int = -1,
        cpu: bool = False,
    ) -> None:
        self.now = 1_700_000_000.0
        self.ranks, self.epochs, self.batches, self.speed, self.late, self.cpu = (
            ranks,
            epochs,
            batches,
            speed,
            late,
            cpu,
        )
        self.state = RunState(
            "train",
            LaunchConfig(num_processes=ranks, mixed_precision="bf16", strategy="ddp"),
            clock=lambda: self.now,
        )
        self.step = 0
        self.random = random.Random(7)

    def apply(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.state.apply(message)

    def start(self) -> ScriptedRun:
        self.apply(self._start())
        return self

    def _start(self) -> Iterator[Message]:
        devices = [
            Device(type="cpu", name="cpu")
            if self.cpu
            else Device(type="cuda", index=r % 8, name="NVIDIA H100 80GB HBM3", memory=80 * 10**9)
            for r in range(self.ranks)
        ]
        yield Started(
            run=RUN, folder="/tmp/run", world_size=self.ranks, ranks=list(range(self.ranks)),
            pids=list(range(100, 100 + self.ranks)), devices=devices, backend="gloo" if self.cpu else "nccl",
            start_method="fork", time=self.now,
        )  # fmt: skip
        for rank in range(self.ranks):
            yield RankUpdate(run=RUN, rank=rank, state="running", time=self.now)

    def advance(self, seconds: float, tick: float = 0.25) -> ScriptedRun:
        """Play `seconds` more, a message of each kind a rank and tick."""
        for _ in range(round(seconds / tick)):
            self.now += tick
            steps = max(1, round(self.speed * tick))
            for rank in range(self.ranks):
                self.apply(self._tick(rank, steps))
            self.step += steps
        return self

    def _tick(self, rank: int, steps: int) -> Iterator[Message]:
        at = range(self.step, self.step + steps)
        values = {
            "train/loss": [self._loss(step, rank) for step in at],
            "accuracy": [94 - 70 * math.exp(-step / 700) + self.random.gauss(0, 0.8) for step in at],
            "samples/s": [1310 + self.random.gauss(0, 25) for _ in at],
        }
        yield metrics(rank, values, self.step, self.now)
        yield metrics(rank, {"data_wait": [0.31 if rank == self.late else 0.02]}, self.step, self.now)
        if rank == 0 and self.step % (self.batches // 3) < steps:
            yield metrics(0, {"val/loss": [self._loss(self.step, 0) * 1.05 + 0.12]}, self.step, self.now)
        yield self._progress(rank)

    def _loss(self, step: int, rank: int) -> float:
        return (
            0.2 + 1.9 * math.exp(-step / 600) + 0.05 * math.exp(-step / 2000) * self.random.gauss(0, 1) + 0.001 * rank
        )

    def _progress(self, rank: int) -> Progress:
        done = self.step if rank != self.late else int(self.step * 0.93)
        epoch, batch = divmod(done, self.batches)
        rate = self.speed * (0.93 if rank == self.late else 1)
        sample = Sample(host_memory=(310 + 3 * rank) * 10**6)
        if not self.cpu:
            sample.memory_used = int((41 + rank % 8 / 10) * 10**9)
            sample.memory_peak = sample.memory_used + 2 * 10**9
            sample.memory_total = 80 * 10**9
            sample.utilization = 61 if rank == self.late else 97
        bars = [
            Bar(id=1, description="epoch", n=epoch, total=self.epochs, rate=rate / self.batches),
            Bar(id=2, description="batch", n=batch, total=self.batches, rate=rate, depth=1),
        ]
        where = "all_reduce · Cell In[3], line 21" if rank != self.late else "Cell In[3], line 17"
        return Progress(rank=rank, time=self.now, bars=bars, sample=sample, where=where, run=RUN)

    def write(self, rank: int, *lines: str, stream: str = "stdout") -> ScriptedRun:
        self.state.apply(Output(run=RUN, rank=rank, stream=stream, lines=list(lines)))
        return self

    def talk(self) -> ScriptedRun:
        """What a training prints."""
        self.write(0, "epoch 1  val accuracy 88.1 %", "epoch 2  val accuracy \x1b[1;32m93.8 %\x1b[0m")
        for rank in range(min(self.ranks, 2)):
            self.write(rank, "UserWarning: lr_scheduler.step() was called before optimizer.step()", stream="stderr")
        return self.write(0, "saved checkpoints/checkpoint_2 (all ranks, 1.2 GB, 0.8 s)")

    def finish(self) -> ScriptedRun:
        for rank in range(self.ranks):
            bars = [Bar(id=1, description="epoch", n=self.epochs, total=self.epochs, closed=True)]
            self.state.apply(Progress(rank=rank, time=self.now, bars=bars, run=RUN))
            self.state.apply(RankUpdate(run=RUN, rank=rank, state="returned", time=self.now))
        self.state.result = "{'accuracy': 0.9412}"
        self.state.apply(Finished(run=RUN, status="done", time=self.now))
        return self

    def failure(self, rank: int = 1) -> Failure:
        line = '        raise ValueError(f"label {int(y.max())} is out of range")'
        frames = [
            Frame("Cell In[7]", 31, "train", "        step(batch)", 8, 19),
            Frame("Cell In[7]", 18, "step", line, 8, len(line)),
        ]
        text = (
            'Traceback (most recent call last):\n  File "Cell In[7]", line 31, in train\n    step(batch)\n'
            f'  File "Cell In[7]", line 18, in step\n{line[4:]}\nValueError: label 11 is out of range\n'
        )
        return Failure(
            rank=rank, kind="exception", time=self.now, type="ValueError", message="label 11 is out of range",
            text=text, frames=frames, run=RUN,
        )  # fmt: skip

    def fail(self, rank: int = 1) -> ScriptedRun:
        cause = self.failure(rank)
        others = [
            Failure(rank=r, kind="stopped", time=self.now, symptom=True, run=RUN)
            for r in range(self.ranks)
            if r != rank
        ]
        self.write(rank, "loading shard 3 of 8", "found 1 batch with labels outside 0..9")
        self.write(rank, "ValueError: label 11 is out of range", stream="stderr")
        self.apply([cause, *others, Finished(run=RUN, status="failed", time=self.now, cause=cause, others=others)])
        return self
