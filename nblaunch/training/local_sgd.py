"""Local SGD: ranks train apart and average their parameters now and then."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from nblaunch.training.collectives import reduce

if TYPE_CHECKING:
    from nblaunch.training.accelerator import Accelerator


class LocalSGD:
    """A context in which gradients stay on their rank, and parameters are averaged every so many steps and at its end.

    After Stich, "Local SGD converges fast and communicates little", https://arxiv.org/abs/1805.09767.

    Args:
        accelerator: The one that prepared the model.
        model: The prepared model.
        local_sgd_steps: Steps between two averages.
        enabled: Otherwise nothing is changed.

    Example:
        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                ...
                optimizer.step()
                local_sgd.step()
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps={local_sgd_steps} must be at least 1")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._apart: Any = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._apart = self.accelerator.no_sync(self.model)
            self._apart.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._apart.__exit__(kind, error, trace)
            if error is None:
                self._average()

    def step(self) -> None:
        """Count one optimizer step, and average the parameters if it is time."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(reduce(parameter, "mean"))
