"""Random number generators: seeding them, making them equal on all ranks, and their states in a checkpoint."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from nblaunch.training import group
from nblaunch.training.kinds import RNGType
from nblaunch.training.processes import PartialState


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators, on the CPU and all devices.

    Args:
        seed: From 0 to 2**32 - 1.
        device_specific: Add this process's rank, so that ranks draw differently.
        deterministic: Also have torch use deterministic algorithms only, see `torch.use_deterministic_algorithms`.
    """
    if device_specific:
        seed += PartialState().process_index
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank rank 0's state of one generator.

    Args:
        rng_type: "torch" (the CPU's default generator), "cuda" or "xpu" (the current device's), or "generator".
        generator: The one that "generator" means; without it nothing happens.

    Raises:
        ValueError: The type is unknown.
    """
    if str(rng_type) not in RNGType.list():
        raise ValueError(f"rng_type={rng_type!r} is unknown; there are: {', '.join(RNGType.list())}")
    kind = RNGType(str(rng_type))
    if group.size() == 1 or (kind == RNGType.GENERATOR and generator is None):
        return
    if kind == RNGType.GENERATOR and generator is not None:
        generator.set_state(group.broadcast(generator.get_state()))
    elif kind == RNGType.TORCH:
        torch.set_rng_state(group.broadcast(torch.get_rng_state()))
    else:
        module = torch.get_device_module(str(kind))
        module.set_rng_state(group.broadcast(module.get_rng_state()))


def synchronize_rng_states(rng_types: Sequence[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Give every rank rank 0's state of several generators, see `synchronize_rng_state`."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def states(device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """This rank's generators: what JSON can hold, and tensors by name."""
    version, words, gauss = random.getstate()
    plain: dict[str, Any] = {"python": [version, list(words), gauss]}
    tensors = {"torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        plain["numpy"] = [str(name), keys.tolist(), int(position), int(has_gauss), float(cached)]
    if device.type != "cpu":
        tensors[device.type] = torch.get_device_module(device.type).get_rng_state()
    return plain, tensors


def restore(plain: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device) -> list[str]:
    """Put this rank's generators back.

    Returns:
        What could not be restored, in words.
    """
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(tensors["torch"])
    missing: list[str] = []
    if "numpy" in plain:
        import numpy

        name, keys, position, has_gauss, cached = plain["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    elif "numpy" in sys.modules:
        missing.append("NumPy's generator was not saved")
    if device.type in tensors:
        torch.get_device_module(device.type).set_rng_state(tensors[device.type])
    elif device.type != "cpu":
        missing.append(f"the {device.type} generator was not saved (saved: {', '.join(tensors)})")
    return missing
