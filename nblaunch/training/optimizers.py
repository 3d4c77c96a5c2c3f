"""Optimizers and learning rate schedulers that act only where gradients were exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nblaunch.training.gradients import GradientState
from nblaunch.training.scaling import Scaling
from nblaunch.training.structures import send_to_device


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, acting only on the micro-steps that exchange gradients, and through the fp16 scaler.

    Everything that it doesn't define itself is the user's optimizer's, which is `optimizer`.

    Args:
        optimizer: The user's optimizer.
        gradient_state: Says which micro-steps exchange gradients.
        scaling: The fp16 loss scaling, or None.
        before_first_step: Called once, before the first step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_state: GradientState,
        scaling: Scaling | None = None,
        before_first_step: Callable[[PreparedOptimizer], None] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.gradient_state = gradient_state
        self.scaling = scaling
        self._before_first_step = before_first_step

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Any:  # pyright: ignore
        """The optimizer's state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The parameters and their options."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The options of groups that name none."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Update the parameters, on a micro-step that exchanges gradients; elsewhere do nothing.

        With fp16 an update whose gradients overflowed is left out; `step_was_skipped` tells.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if self._before_first_step is not None:
            self._before_first_step(self)
            self._before_first_step = None
        if self.scaling is not None:
            return self.scaling.step(self.optimizer, closure)
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, on a micro-step that exchanges them; elsewhere do nothing."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because gradients overflowed in fp16."""
        return self.scaling is not None and self.scaling.skipped(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of the user's optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As of the user's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For optimizers that have modes, such as schedule-free ones."""
        _call(self.optimizer, "train")

    def eval(self) -> None:
        """For optimizers that have modes, such as schedule-free ones."""
        _call(self.optimizer, "eval")

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before_first_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def _call(optimizer: Any, method: str) -> None:
    function = getattr(optimizer, method, None)
    if callable(function):
        function()


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Bring the state of an optimizer that has stepped before to `device`; counters on the CPU stay there."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = send_to_device(value, device)


class PreparedScheduler:
    """The user's learning rate scheduler, advancing with the optimizers' real steps.

    Schedulers are written for one process's step count. Where each of N processes has batches of its own, one
    optimizer step does the work of N such steps, so the schedule advances by N.

    Args:
        scheduler: The user's scheduler.
        optimizers: Those that it steps with.
        gradient_state: Says which micro-steps exchange gradients.
        num_processes: N.
        step_with_optimizer: Otherwise each call is one step, whatever the optimizers do.
        split_batches: The global batch is that of one process, so the schedule advances by 1.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        gradient_state: GradientState,
        num_processes: int,
        *,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self.gradient_state = gradient_state
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._steps = 1 if split_batches else num_processes

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers stepped."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients or any(one.step_was_skipped for one in self.optimizers):
            return
        for _ in range(self._steps):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler.last_epoch < total - 1:  # OneCycleLR raises beyond its end
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """As of the user's scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of the user's scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:
        """The present learning rate of each group."""
        return self.scheduler.get_last_lr()
