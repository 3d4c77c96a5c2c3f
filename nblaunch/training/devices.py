"""Every decision about devices: which there are, which one a rank takes, which backend serves it.

Used in the agent's device census (a process that ends at once) and in ranks, never in the notebook kernel.
"""

from __future__ import annotations

import os

import torch

from nblaunch.wire.messages import Device


def accelerator_type() -> str | None:
    """The kind of accelerator that torch was built for and that has a device here ("cuda", "xpu", "mps"), or None."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true", "yes"}:
        return None
    if torch.accelerator.current_accelerator() is None or torch.accelerator.device_count() == 0:
        return None
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else None


def visible() -> list[Device]:
    """The accelerators that this process may use, in the order of their indices; empty on a CPU machine.

    Asking may start the driver in this process, so the agent asks in a child that ends at once.
    """
    kind = accelerator_type()
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    found: list[Device] = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        found.append(
            Device(
                type=kind,
                index=index,
                name=str(getattr(properties, "name", kind)),
                uuid=_uuid(properties),
                memory=int(getattr(properties, "total_memory", 0)),
            )
        )
    return found


def device_for(local_rank: int, *, cpu: bool = False) -> torch.device:
    """The device of the rank with this number on its machine: `cuda:<local_rank>` or the like, else the CPU."""
    kind = None if cpu else accelerator_type()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, local_rank % torch.accelerator.device_count())


def bind(local_rank: int, *, cpu: bool = False) -> torch.device:
    """Make `device_for(local_rank)` this process's current device, before any code of the user runs."""
    device = device_for(local_rank, cpu=cpu)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return device


def backend_for(device: torch.device) -> str:
    """The process group backend that serves `device`: "nccl" for CUDA, "gloo" for the CPU, else what torch names."""
    return torch.distributed.get_default_backend_for_device(device)


def _uuid(properties: object) -> str:
    """The device's UUID as NVML spells it ("GPU-..."), or "" where torch tells none."""
    uuid = str(getattr(properties, "uuid", "") or "")
    return f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid
