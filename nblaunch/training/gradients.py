"""Where training stands between two optimizer steps: shared by optimizers, schedulers and loaders."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from nblaunch.training.options import GradientAccumulationPlugin


class IteratedLoader(Protocol):
    """What a prepared loader tells while it is iterated over."""

    end_of_dataloader: bool
    """Whether the last batch is in the user's hands."""
    remainder: int
    """Real samples in the last global batch; -1 where unknown."""

    @property
    def batches_left(self) -> int | None:
        """Batches that this pass will still yield after the present one; None where the length is unknown."""
        ...


class GradientState:
    """Whether this micro-step exchanges gradients, and which loaders are being iterated over.

    One belongs to each `Accelerator`; whatever it prepares holds it. Loaders add themselves while they are
    iterated over, the innermost last. They are held weakly.

    Args:
        gradient_accumulation_plugin: How gradients are accumulated.
        iterated: Where the loaders that are being iterated over are kept, where several states share that.
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        iterated: list[weakref.ref[Any]] | None = None,
    ) -> None:
        self.plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self.sync_gradients = True
        """Whether the present backward exchanges gradients and optimizers act."""
        self._loaders: list[weakref.ref[IteratedLoader]] = [] if iterated is None else iterated

    @property
    def num_steps(self) -> int:
        """Micro-steps in a window."""
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """As the plugin says."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a window ends with the loader."""
        return self.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The plugin's options that differ from their defaults."""
        return self.plugin.to_kwargs()

    @property
    def dataloader_references(self) -> list[IteratedLoader]:
        """The prepared loaders that are being iterated over, outermost first."""
        return [loader for loader in (reference() for reference in self._loaders) if loader is not None]

    @property
    def active_dataloader(self) -> IteratedLoader | None:
        """The innermost loader that is being iterated over."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            self._loaders.pop()
        return None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated over."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the innermost loader's last batch is in the user's hands."""
        loader = self.active_dataloader
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the innermost loader's last global batch; -1 where unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    def _add_dataloader(self, loader: IteratedLoader) -> None:
        self._remove_dataloader(loader)
        self._loaders.append(weakref.ref(loader))

    def _remove_dataloader(self, loader: IteratedLoader) -> None:
        others = ((reference, reference()) for reference in self._loaders)
        self._loaders[:] = [reference for reference, other in others if other is not None and other is not loader]

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Loaders in iteration stay behind: a copy elsewhere iterates over none."""
        return {**self.__dict__, "_loaders": []}
