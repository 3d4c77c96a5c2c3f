"""What a strategy does with models; a single process's is the simplest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module


class Strategy:
    """A single process: models stay as they are."""

    name = "single"

    def wrap(self, model: Module, device: torch.device) -> Module:
        """The model as it is to be trained; the strategy may return another module around it."""
        return model

    def unwrap(self, model: Module) -> Module:
        """The user's module inside what `wrap` returned."""
        return model

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        """Backward passes inside leave gradients on their rank."""
        return nullcontext()

    def sync_in_backward(self, model: Module) -> AbstractContextManager[Any]:
        """The next backward exchanges gradients although its forward ran in `no_sync`."""
        return nullcontext()

    def join(self, models: Sequence[Module]) -> AbstractContextManager[Any]:
        """Ranks may leave the context after different numbers of steps."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients in place so that their norm over the whole model is at most `max_norm`; returns it before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp each gradient's elements in place."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def state_dict(self, model: Module) -> dict[str, Any]:
        """The user's module's whole state; needed on rank 0, on the others it may be empty."""
        return self.unwrap(model).state_dict()
