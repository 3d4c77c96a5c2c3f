"""Bringing batches to the device, beside the computation where the device can."""

from __future__ import annotations

from typing import Any

import torch

from nblaunch.training.structures import send_to_device, tensors


class DeviceCopies:
    """Brings batches to a device; on a GPU by a stream of their own, while it computes on the batch before.

    Args:
        device: Where to; None leaves batches where they are.
        non_blocking: Whether copies from pinned memory return at once.
    """

    def __init__(self, device: torch.device | None, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking
        self.overlap = device is not None and device.type in ("cuda", "xpu")
        self._stream: Any = None

    def send(self, batch: Any) -> Any:
        """The batch on the device, perhaps still on its way."""
        if self.device is None:
            return batch
        if not self.overlap:
            return send_to_device(batch, self.device, self.non_blocking)
        module = torch.get_device_module(self.device)
        self._stream = self._stream or module.Stream(self.device)
        with module.stream(self._stream):
            return send_to_device(batch, self.device, self.non_blocking)

    def arrived(self, batch: Any) -> Any:
        """The same batch, safe to use on the current stream."""
        if self.overlap:
            current = torch.get_device_module(self.device).current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in tensors(batch):
                if tensor.device == self.device:
                    tensor.record_stream(current)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Without the stream, which belongs to this process."""
        return {**self.__dict__, "_stream": None}
