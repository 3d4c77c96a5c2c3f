"""An accelerator's checkpoints: where they go, what they hold, and the hooks around them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nblaunch.errors import CheckpointError
from nblaunch.training import group
from nblaunch.training.accumulation import Accumulation
from nblaunch.training.checkpoints import folder as folders
from nblaunch.training.checkpoints import foreign, loading, saving
from nblaunch.training.checkpoints.contents import Training
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.preparing import Prepared
from nblaunch.training.strategies.base import Strategy


class Checkpointing:
    """Saves and loads what one accelerator prepared.

    Args:
        prepared: The models and the rest.
        strategy: Knows a model's whole state.
        accumulation: Its counter is kept.
        project: Where checkpoints go.
    """

    def __init__(
        self, prepared: Prepared, strategy: Strategy, accumulation: Accumulation, project: ProjectConfiguration
    ) -> None:
        self.prepared = prepared
        self.strategy = strategy
        self.accumulation = accumulation
        self.project = project
        self.registered: list[Any] = []
        self._background: saving.Background | None = None
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def add_hook(self, hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
        """Keep a hook until its handle removes it."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def register(self, objects: Sequence[Any]) -> None:
        """Keep objects of the user's own in checkpoints.

        Raises:
            ValueError: One has no `state_dict` and `load_state_dict`.
        """
        methods = ("state_dict", "load_state_dict")
        unable = [one for one in objects if not all(callable(getattr(one, name, None)) for name in methods)]
        if unable:
            kinds = ", ".join(type(one).__name__ for one in unable)
            raise ValueError(f"{kinds} can't be checkpointed: state_dict() and load_state_dict() are needed")
        self.registered.extend(objects)

    def _training(self) -> Training:
        prepared = self.prepared

        def unwrap(model: torch.nn.Module) -> torch.nn.Module:
            return prepared.unwrap(model, False)

        return Training(
            models=prepared.models,
            unwrap=unwrap,
            state_dict=lambda model: self.strategy.state_dict(unwrap(model)),
            optimizers=prepared.optimizers,
            schedulers=prepared.schedulers,
            loaders=prepared.loaders,
            scaling=prepared.scaling,
            registered=self.registered,
            save_hooks=list(self.save_hooks.values()),
            load_hooks=list(self.load_hooks.values()),
            counters={"step": self.accumulation.step, "iteration": self.project.iteration},
        )

    def wait(self) -> None:
        """Until the checkpoint that is being written in the background, if any, is whole."""
        background, self._background = self._background, None
        if background is not None:
            background.wait()

    @property
    def _parent(self) -> Path:
        if self.project.project_dir is None:
            raise CheckpointError("where? pass a folder, or give the Accelerator a project_dir")
        return Path(self.project.project_dir) / "checkpoints"

    def save(self, folder: str | os.PathLike[str] | None, safe: bool, wait: bool) -> str:
        """Write a checkpoint; see `Accelerator.save_state`."""
        self.wait()
        if folder is not None:
            target = Path(folder)
        elif self.project.automatic_checkpoint_naming:
            target = self._parent / f"checkpoint_{self.project.iteration}"
            if folders.whole(target) is not None:
                raise CheckpointError(
                    f"{target} is there already; load_state() goes on with the next number, or set "
                    f"ProjectConfiguration(iteration={self.project.iteration + 1})"
                )
        else:
            raise CheckpointError("where? pass a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        if wait:
            saving.save(self._training(), target, self.project, safe)
        else:
            self._background = saving.Background(self._training(), target, self.project, safe)
        if folder is None:
            self.project.iteration += 1
        return str(target)

    def load(self, folder: str | os.PathLike[str] | None, strict: bool = True, **model_options: Any) -> None:
        """Go on from a checkpoint; see `Accelerator.load_state`."""
        self.wait()
        if not self.prepared.models and not self.prepared.optimizers and not self.registered:
            raise CheckpointError("load_state came before anything was prepared; prepare models and optimizers first")
        given = self._newest() if folder is None else Path(folder)
        if foreign.recognised(given):
            foreign.load(self._training(), given, strict, model_options)
            return
        with group.together(f"loading {given}"):
            found, manifest = folders.find(given)
        loading.load(self._training(), found, manifest, strict, model_options)
        self.accumulation.step = manifest["counters"]["step"]
        if folders.number_of(given) >= 0:
            self.project.iteration = folders.number_of(given) + 1

    def _newest(self) -> Path:
        newest: Path | None = None
        if group.rank() == 0:
            newest = next(reversed(folders.numbered(self._parent)), None)
        if group.size() > 1:
            newest = group.broadcast_object(newest)
        if newest is None:
            raise CheckpointError(f"there is no whole checkpoint in {self._parent}")
        return newest
