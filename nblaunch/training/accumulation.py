"""Windows of micro-steps whose gradients make one step, and what each backward of them is divided by."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from nblaunch.training import group
from nblaunch.training.gradients import GradientState
from nblaunch.training.strategies.base import Strategy


class Accumulation:
    """Counts micro-steps, and says when a window ends and how long it is.

    Args:
        state: Where loaders and optimizers learn whether gradients are exchanged.
    """

    def __init__(self, state: GradientState) -> None:
        self.state = state
        self.step = 0
        """Micro-steps since a loader ended last."""
        self.length = state.num_steps
        """Micro-steps of the present window: fewer than `num_steps` where the loader ends before."""
        self.models: Sequence[torch.nn.Module] = ()
        """The models of the present micro-step."""
        self._open = False
        self._weight: torch.Tensor | float | None = None
        self._plain = False

    def reset(self) -> None:
        """Begin anew, with a window of full length."""
        self.step = 0
        self.length = self.state.num_steps
        self.models = ()
        self._open = self._plain = False
        self._weight = None

    def advance(self, models: Sequence[torch.nn.Module]) -> None:
        """Begin a micro-step: sets `sync_gradients`."""
        state, plugin = self.state, self.state.plugin
        loader = state.active_dataloader if plugin.sync_with_dataloader else None
        if not self._open:
            self.length = self._length_of_window(loader)
        self.models = models
        ends = loader is not None and loader.end_of_dataloader
        self.step = 0 if ends else self.step + 1
        state.sync_gradients = ends or self.step % plugin.num_steps == 0
        self._open = not state.sync_gradients

    def _length_of_window(self, loader: Any | None) -> int:
        left = None if loader is None else loader.batches_left
        return self.state.num_steps if left is None else min(self.state.num_steps, left + 1)

    # ---- weighted losses

    def weigh(self, weight: torch.Tensor | float | None) -> None:
        """Note what this micro-step's loss weighs.

        Raises:
            ValueError: Some losses of one window are weighted and others aren't.
        """
        if (self._plain and weight is not None) or (weight is None and self._weight is not None):
            raise ValueError("either every backward of a window has a weight, or none has")
        if weight is None:
            self._plain = self._open
        else:
            self._weight = weight if self._weight is None else self._weight + weight

    def finish_weighted(self, gradients: list[torch.Tensor]) -> None:
        """At a weighted window's end: divide its gradients, averaged over the ranks, by the total weight instead."""
        device = gradients[0].device if gradients else torch.device("cpu")
        weight = torch.as_tensor(self._weight, dtype=torch.float32, device=device).detach()
        total = group.all_reduce(weight) if group.size() > 1 else weight
        self._weight = None
        if gradients:
            torch._foreach_mul_(gradients, group.size() / total)  # pyright: ignore[reportPrivateImportUsage]


class MicroStep:
    """The context of one micro-step: `with accelerator.accumulate(model):`.

    Args:
        accumulation: Counts it.
        strategy: Can leave out the exchange of gradients.
        models: Those that take part.
    """

    __slots__ = ("_accumulation", "_contexts", "_models", "_strategy")

    def __init__(self, accumulation: Accumulation, strategy: Strategy, models: Sequence[torch.nn.Module]) -> None:
        self._accumulation = accumulation
        self._strategy = strategy
        self._models = models
        self._contexts: list[Any] = []

    def __enter__(self) -> None:
        accumulation = self._accumulation
        accumulation.advance(self._models)
        state = accumulation.state
        if state.sync_gradients or state.plugin.sync_each_batch:
            return
        for model in self._models:
            without = self._strategy.no_sync(model)
            without.__enter__()
            self._contexts.append(without)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for without in reversed(self._contexts):
            without.__exit__(kind, error, trace)
        self._contexts.clear()
