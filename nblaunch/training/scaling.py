"""fp16 loss scaling: one scale for several optimizers, which steps were skipped, and the run's metrics of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nblaunch.rank import context

REPORT_EVERY = 100
"""Steps between two reports of the scale, beside one at every overflow: reading it waits for the device."""


class Scaling:
    """A `GradScaler` shared by several optimizers.

    The scale is adapted before the next loss is scaled, not after each optimizer's step: optimizers that step after
    one backward must all divide by the scale which that backward multiplied with.

    Args:
        scaler: Scales the losses.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self.steps = 0
        self.overflows = 0
        """Steps skipped in all."""
        self.overflows_in_a_row = 0
        self._unscaled: set[int] = set()
        """Optimizers, by id, whose gradients are unscaled already."""
        self._stepped: dict[int, torch.optim.Optimizer] = {}
        """Those that stepped since the scale was adapted."""
        self._found: dict[int, torch.Tensor | bool] = {}
        """Whether an optimizer's last step was skipped; a tensor where only the device knows as yet."""

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler, its scale adapted to all steps so far."""
        self._adapt()
        return self._scaler

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        self._adapt()
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale; once a step, however often it is called."""
        if id(optimizer) not in self._unscaled:
            self._scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step the optimizer unless its gradients overflowed.

        Raises:
            ValueError: With a closure, whose losses can't be scaled.
        """
        if closure is not None:
            raise ValueError("an optimizer step with a closure can't be scaled; use bf16, or a step without one")
        if id(optimizer) in self._stepped:
            self._adapt()
        self._found[id(optimizer)] = True
        handle = optimizer.register_step_pre_hook(self._stepping)
        try:
            result = self._scaler.step(optimizer)
        finally:
            handle.remove()
        self._stepped[id(optimizer)] = optimizer
        return result

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        """The optimizer steps after all; a fused one decides on the device, by its `found_inf`."""
        found = getattr(optimizer, "found_inf", None)
        self._found[id(optimizer)] = False if found is None else found.clone()

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's last step was left out; may wait for the device."""
        found = self._found.get(id(optimizer), False)
        if isinstance(found, torch.Tensor):
            found = self._found[id(optimizer)] = bool(found.item())
        return found

    def _adapt(self) -> None:
        """Adapt the scale to the steps since it was adapted last."""
        if not self._stepped:
            return
        overflowed = any(self.skipped(optimizer) for optimizer in self._stepped.values())
        self._scaler.update()
        self._stepped.clear()
        self._unscaled.clear()
        self.steps += 1
        self.overflows += overflowed
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if overflowed else 0
        here = context.current()
        if here is not None and (overflowed or self.steps % REPORT_EVERY == 1):
            metrics = {
                "scaler/scale": self._scaler.get_scale(),
                "scaler/overflows": self.overflows,
                "scaler/overflows_in_a_row": self.overflows_in_a_row,
            }
            here.reporter.log(metrics, None)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state and the counters."""
        return {
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "overflows": self.overflows,
            "overflows_in_a_row": self.overflows_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; a bare scaler's state will do."""
        self.scaler.load_state_dict(state.get("scaler", state))
        self.steps = state.get("steps", 0)
        self.overflows = state.get("overflows", 0)
        self.overflows_in_a_row = state.get("overflows_in_a_row", 0)
