"""Saving and loading, a part of `Accelerator`: each is done in its module."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nblaunch.training import group, weights
from nblaunch.training.checkpoints.keeper import Checkpointing
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.preparing import Prepared
from nblaunch.training.processes import PartialState
from nblaunch.training.strategies.base import Strategy


class Keeping(PartialState):
    """How an `Accelerator` saves and loads."""

    strategy: Strategy
    project_configuration: ProjectConfiguration
    _prepared: Prepared
    _checkpointing: Checkpointing

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        wait: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write a checkpoint of everything that was prepared or registered; all processes must call this.

        When it returns, on any process, the checkpoint is whole; whatever fails or ends the run before, it is not
        there, and what was there before is untouched.

        Args:
            output_dir: The folder; None with automatic naming is the next number.
            safe_serialization: Whether weights are safetensors.
            wait: Otherwise it is written in the background, from a copy in the host's memory, while the training goes
                on; it is whole when `wait_for_checkpoint` returns, which the next `save_state`, `load_state` or
                `end_training` calls too.
            **save_model_func_kwargs: Kept for compatibility.

        Returns:
            The folder.
        """
        return self._checkpointing.save(output_dir, safe_serialization, wait)

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is being written in the background is whole; all processes must call this.

        Raises:
            CheckpointError: It could not be written.
        """
        self._checkpointing.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Go on from a checkpoint; prepare and register the same objects first. All processes must call this.

        Args:
            input_dir: The folder; None is the newest whole one that was named automatically.
            load_kwargs: Kept for compatibility.
            **load_model_func_kwargs: Of `Module.load_state_dict`. `strict=False` also goes on where generators
                can't be restored, or the number of processes differs.

        Raises:
            CheckpointError: There is none, it is damaged, or it is of something else.
        """
        self._checkpointing.load(input_dir, **load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have `save_state` and `load_state` keep objects with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: One lacks these methods.
        """
        self._checkpointing.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before `save_state` writes; it may write, and remove from `weights`."""
        return self._checkpointing.add_hook(self._checkpointing.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` before `load_state` reads; it may read, and remove from `models`."""
        return self._checkpointing.add_hook(self._checkpointing.load_hooks, hook)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's whole state; complete on rank 0 whatever the strategy."""
        return self.strategy.state_dict(self._prepared.unwrap(model, False)) if unwrap else model.state_dict()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, on the main process only (one per machine with `save_on_each_node`).

        Args:
            obj: Of `torch.save`; a state dict with `safe_serialization`.
            f: The file, which is replaced when the new one is whole.
            safe_serialization: Whether to write safetensors.
        """
        weights.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for other programs; all processes must call this.

        Args:
            model: A prepared model, or any.
            save_directory: Gets `model.safetensors`, or shards of it and `model.safetensors.index.json`.
            max_shard_size: Such as "10GB", or in bytes.
            safe_serialization: Otherwise `pytorch_model.bin` and its shards.
        """
        state = self.get_state_dict(model)
        with group.together(f"saving a model to {save_directory}"):
            if self.is_main_process or (self.project_configuration.save_on_each_node and self.is_local_main_process):
                weights.export(state, Path(save_directory), max_shard_size, safe_serialization)
