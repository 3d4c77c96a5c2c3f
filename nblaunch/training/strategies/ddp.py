"""Data parallel: every rank has the whole model, gradients are averaged (`DistributedDataParallel`)."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn import Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from nblaunch.errors import UnusedParametersError
from nblaunch.training.kinds import DDPCommunicationHookType as Hook
from nblaunch.training.options import DistributedDataParallelKwargs
from nblaunch.training.strategies.base import Strategy


class ParallelModule(DistributedDataParallel):
    """DDP that names the parameters which a loss didn't reach, and pickles as the user's module alone."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As of DDP.

        Raises:
            UnusedParametersError: The loss before this forward did not reach some parameters.
        """
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            names = self._unreached(str(error))
            if not names:
                raise
            shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            raise UnusedParametersError(
                f"the last loss did not depend on: {shown}. Let every output take part in the loss, freeze them "
                "(requires_grad_(False)) before prepare, or allow it by kwargs_handlers="
                "[DistributedDataParallelKwargs(find_unused_parameters=True)], at some cost"
            ) from error

    def _unreached(self, message: str) -> list[str]:
        """The names of the parameters whose indices DDP's message lists."""
        found = re.search(r"did not receive grad for rank \d+:([\d\s]*)", message)
        if "finished reduction" not in message or found is None:
            return []
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        return [trained[int(index)] for index in found[1].split()]

    def __reduce__(self) -> Any:
        """A process group does not travel; the user's module does."""
        return _itself, (self.module,)


def _itself(module: Module) -> Module:
    return module


class DataParallel(Strategy):
    """Every rank has the whole model; gradients are averaged over the ranks while backward runs.

    Args:
        options: Of DDP and its communication hook.
    """

    name = "ddp"

    def __init__(self, options: DistributedDataParallelKwargs) -> None:
        self.options = options

    def wrap(self, model: Module, device: torch.device) -> Module:
        """The model in DDP; one without trainable parameters stays as it is."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        if self.options.sync_batch_norm:
            model = SyncBatchNorm.convert_sync_batchnorm(model)
        places = {parameter.device for parameter in model.parameters()}
        ids = [device.index] if places == {device} and device.type != "cpu" else None
        wrapped = ParallelModule(model, device_ids=ids, output_device=None if ids is None else ids[0], **self._kwargs)
        self._compress(wrapped)
        return wrapped

    @property
    def _kwargs(self) -> dict[str, Any]:
        """What was chosen: DDP warns of some options even where they have their default."""
        return {name: value for name, value in self.options.to_kwargs().items() if name != "check_reduction"}

    def _compress(self, model: DistributedDataParallel) -> None:
        hook = _HOOKS[Hook(self.options.comm_hook)]
        if hook is None:
            return
        wrapper = _WRAPPERS[Hook(self.options.comm_wrapper)]
        state = None
        if self.options.comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.options.comm_state_option)
        model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))

    def unwrap(self, model: Module) -> Module:
        """The user's module inside DDP."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        """Backward passes inside leave gradients on their rank."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    @contextmanager
    def sync_in_backward(self, model: Module) -> Generator[None]:
        """The next backward exchanges gradients although its forward ran in `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])  # what a forward outside no_sync does
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def join(self, models: Sequence[Module]) -> AbstractContextManager[Any]:
        """Ranks that are done answer the others' collectives until all are (DDP's `Join`)."""
        joinable: list[Any] = [model for model in models if isinstance(model, DistributedDataParallel)]
        return Join(joinable) if joinable else nullcontext()


_HOOKS: dict[Hook, Any] = {
    Hook.NO: None,
    Hook.FP16: default_hooks.fp16_compress_hook,
    Hook.BF16: default_hooks.bf16_compress_hook,
    Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
    Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[Hook, Any] = {
    Hook.NO: None,
    Hook.FP16: default_hooks.fp16_compress_wrapper,
    Hook.BF16: default_hooks.bf16_compress_wrapper,
}
