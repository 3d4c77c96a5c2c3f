"""The steps of a training: backward, accumulation, clipping, autocast; a part of `Accelerator`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from nblaunch.training import data
from nblaunch.training.accumulation import Accumulation, MicroStep
from nblaunch.training.gradients import GradientState
from nblaunch.training.optimizers import PreparedOptimizer
from nblaunch.training.options import AutocastKwargs
from nblaunch.training.precision import Precision
from nblaunch.training.preparing import Prepared
from nblaunch.training.processes import PartialState
from nblaunch.training.scaling import Scaling
from nblaunch.training.strategies.base import Strategy


class Stepping(PartialState):
    """What an `Accelerator` does in each step."""

    precision: Precision
    strategy: Strategy
    gradient_state: GradientState
    _accumulation: Accumulation
    _scaling: Scaling | None
    _prepared: Prepared

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None, **kwargs: Any) -> None:
        """Compute gradients of a loss, divided by the micro-steps of this window.

        Args:
            loss: A scalar of this process's batch: a mean; or with `weight` a sum.
            weight: How much the sum is over, such as its number of tokens: the window's gradients are divided by the
                total weight of its micro-steps on all ranks, which is exact however the tokens are spread.
            **kwargs: Of `Tensor.backward`.

        Raises:
            ValueError: The loss is no scalar, or depends on no parameter.
        """
        if loss.numel() != 1 and "gradient" not in kwargs:
            raise ValueError(f"backward takes a scalar loss, found shape {tuple(loss.shape)}; take its mean() first")
        if not loss.requires_grad:
            raise ValueError(
                "this loss depends on no trainable parameter, so there is nothing to compute; a gathered or reduced "
                "tensor carries no gradient: call backward on this process's own loss"
            )
        accumulation = self._accumulation
        accumulation.weigh(weight)
        if weight is None and accumulation.length != 1:
            loss = loss / accumulation.length
        if self._scaling is not None:
            loss = self._scaling.scale(loss)
        loss.backward(**kwargs)
        if weight is not None and self.gradient_state.sync_gradients:
            accumulation.finish_weighted(self._gradients(accumulation.models or self._prepared.models))

    def _gradients(self, models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
        return [one.grad for model in models for one in model.parameters() if one.grad is not None]

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """A micro-step: gradients are exchanged, and prepared optimizers act, only in the last of each window.

        Args:
            *models: The prepared models that are trained in it.

        Raises:
            UnpreparedError: One was not prepared.
        """
        self._prepared.require_prepared(models)
        return MicroStep(self._accumulation, self.strategy, models)

    @property
    def step(self) -> int:
        """Micro-steps since a loader ended last."""
        return self._accumulation.step

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-step exchanges gradients."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps in a window; may be set between two windows."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin.num_steps = value
        self._accumulation.length = value

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward leaves this model's gradients on their rank."""
        return self.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward exchanges gradients although the forward ran in `no_sync`."""
        return self.strategy.sync_in_backward(model)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[torch.nn.Module], even_batches: bool | None = None
    ) -> Generator[None]:
        """A context in which ranks may take different numbers of steps: those that are done shadow the others.

        Args:
            joinables: The prepared models that are trained in it.
            even_batches: What prepared map-style loaders do inside, instead of what they were prepared for.
        """
        with data.even_batches(self._prepared.loaders, even_batches), self.strategy.join(joinables):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the fp16 scale, once a step.

        Args:
            optimizer: One prepared optimizer or several; None is all.
        """
        if self._scaling is None:
            return
        chosen = self._prepared.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            self._scaling.unscale(getattr(one, "optimizer", one))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Limit the gradients' norm, on a micro-step that exchanges them.

        Args:
            parameters: Whose gradients.
            max_norm: The largest norm they may have.
            norm_type: Of the p-norm.

        Returns:
            The norm before, 0-d, over the whole model; between exchanges that of this rank so far, nothing clipped.
        """
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.sync_gradients:
            gradients = [one.grad for one in held if one.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients, norm_type)
            return norm if self._scaling is None else norm / self._scaling.scaler.get_scale()
        self.unscale_gradients(self._optimizers_of(held))
        return self.strategy.clip_grad_norm(held, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Limit each gradient's elements to [-clip_value, clip_value], on a micro-step that exchanges them."""
        if self.sync_gradients:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self.unscale_gradients(self._optimizers_of(held))
            self.strategy.clip_grad_value(held, clip_value)

    def _optimizers_of(self, parameters: Iterable[torch.Tensor]) -> list[PreparedOptimizer]:
        if self._scaling is None:
            return []
        ids = {id(parameter) for parameter in parameters}
        return [one for one in self._prepared.optimizers if not ids.isdisjoint(map(id, one.parameters()))]

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context in the launch's precision, for work outside a prepared model's forward."""
        return self.precision.autocast(autocast_handler)
