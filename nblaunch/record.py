"""What ran: collected at the launch, kept in the run's folder, and read back from there.

launch.yaml    the choices (config.py)
record.json    versions, machine, devices, source, seed
events.jsonl   what happened, a message a line
metrics.bin    batches of metrics, each behind its length
rank-N.log     what rank N wrote
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nblaunch import __version__
from nblaunch.wire import messages
from nblaunch.wire.messages import Message, Metrics

LENGTH = struct.Struct("<I")
"""What stands before each batch in `metrics.bin`."""

_PACKAGES = [
    "torch",
    "numpy",
    "cloudpickle",
    "ipykernel",
    "ipython",
    "jupyterlab",
    "accelerate",
    "lightning",
    "transformers",
    "datasets",
    "deepspeed",
    "torchvision",
    "scikit-learn",
    "pandas",
    "tqdm",
]
_COUNTING = (
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "TORCH",
    "PYTORCH_",
    "PYTHON",
    "ACCELERATE_",
    "HF_",
    "SLURM_",
)

_metrics_decoder = msgspec.msgpack.Decoder(Metrics)
_event_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    messages.Started | messages.RankUpdate | messages.Notice | messages.Failure | messages.Display | messages.Finished
)


def collect(function: Any, sources: Mapping[str, str], seed: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """The record of a launch, as far as the notebook knows it; the agent adds the devices."""
    return {
        "nblaunch": __version__,
        "time": time.time(),
        "function": f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}",
        "seed": seed,
        "python": sys.version,
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "cwd": os.getcwd(),
        "argv": list(sys.argv),
        "packages": dict(_versions()),
        "environment": {k: v for k, v in sorted(environment.items()) if k.startswith(_COUNTING) and _harmless(k)},
        "sources": dict(sources),
    }


@functools.cache
def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _harmless(variable: str) -> bool:
    return not any(word in variable for word in ("TOKEN", "SECRET", "PASSW", "KEY", "JWT", "AUTH", "CREDENTIAL"))


def read_record(path: Path) -> dict[str, Any]:
    """A run's `record.json`; empty where there is none."""
    try:
        return json.loads((path / "record.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def read_events(path: Path) -> Iterator[Message]:
    """The messages in a run's `events.jsonl`, oldest first; a torn or unknown line is left out."""
    try:
        lines = (path / "events.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield _event_decoder.decode(line)
        except msgspec.DecodeError:
            continue


def read_metrics(path: Path) -> Iterator[Metrics]:
    """The batches in a run's `metrics.bin`, oldest first; a torn last one is left out."""
    try:
        data = memoryview((path / "metrics.bin").read_bytes())
    except FileNotFoundError:
        return
    start = 0
    while start + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, start)
        start += LENGTH.size
        if start + length > len(data):
            return
        try:
            yield _metrics_decoder.decode(data[start : start + length])
        except msgspec.DecodeError:
            return  # torn in the middle, by a disk that was full: what follows has no known beginning
        start += length


def read_log(path: Path) -> str:
    """A rank's log as text, also while it is being written."""
    text = b""
    for part in (path, *reversed(tails_of(path))):
        try:
            text += part.read_bytes()
        except FileNotFoundError:
            continue  # there is no such part, or not any more
    return text.decode("utf-8", "replace")


def tails_of(path: Path) -> tuple[Path, Path]:
    """Where the newest part of a log stands while it is written beyond its limit, and the part before that."""
    return path.with_suffix(".tail"), path.with_suffix(".tail-before")
