"""Every decision about devices: which there are, which one a rank takes, which backend serves it.

Used in the agent's device census (a process that ends at once) and in ranks, never in the notebook kernel.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from nblaunch.wire.messages import Device, Sample


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


def group_options(device: torch.device, backend: str) -> dict[str, Any]:
    """What `init_process_group` is told of the device: with NCCL and its like the group is bound to it at once.

    Source: https://docs.pytorch.org/docs/stable/distributed.html, `init_process_group(device_id=...)`.
    """
    bound = device.type != "cpu" and backend == backend_for(device)
    return {"device_id": device} if bound else {}


def _uuid(properties: object) -> str:
    """The device's UUID as NVML spells it ("GPU-..."), or "" where torch tells none."""
    uuid = str(getattr(properties, "uuid", "") or "")
    return f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid


def defer(tensor: torch.Tensor) -> Deferred | None:
    """A number on a device to be read later, without waiting; None while a CUDA graph is captured."""
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return Deferred(tensor)


class Deferred:
    """One number on a device, on its way to the host; nobody waits for it.

    On CUDA the copy goes into pinned memory on the current stream, with an event behind it. Elsewhere the tensor is
    kept and read by whoever asks for the value.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        """Whether `value` would not wait."""
        return self._event is None or self._event.query()

    def value(self) -> float:
        """The number."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)


class Sampler:
    """Looks at what a device and this process use; never starts a driver in a process that has none."""

    def __init__(self, device: Device) -> None:
        import psutil

        self._device = device
        self._process = psutil.Process()
        self._handle: Any = _nvml_handle(device.uuid) if device.type == "cuda" else None

    def sample(self) -> Sample:
        """What is in use now."""
        sample = Sample(host_memory=self._process.memory_info().rss)
        if self._device.type == "cpu":
            return sample
        sample.memory_total = self._device.memory
        module = torch.get_device_module(self._device.type)
        if getattr(module, "is_initialized", bool)():
            sample.memory_used = module.memory_allocated()
            sample.memory_peak = module.max_memory_allocated()
        if self._handle is not None:
            _add_nvml(sample, self._handle)
        return sample


def _nvml_handle(uuid: str) -> Any:
    """NVML's handle of the device, full or MIG; None where the driver library can't be had."""
    import pynvml

    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    for prefix in ("GPU-", "MIG-"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(prefix + bare)
        except pynvml.NVMLError:
            continue
    return None


def _add_nvml(sample: Sample, handle: Any) -> None:
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        sample.memory_used, sample.memory_total = int(memory.used), int(memory.total)
        sample.utilization = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:
        return  # a MIG slice tells no utilisation
