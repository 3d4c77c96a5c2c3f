"""Writing a checkpoint: collected on all ranks, each file by one of them, put into place as the last act of all."""

from __future__ import annotations

import contextlib
import copy
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nblaunch
from nblaunch.errors import CheckpointError
from nblaunch.training import group, seeds, weights
from nblaunch.training.checkpoints import folder as folders
from nblaunch.training.checkpoints.contents import Training, counts, file_name, rank_file
from nblaunch.training.options import ProjectConfiguration
from nblaunch.training.processes import PartialState
from nblaunch.training.structures import map_leaves

Writer = Callable[[Path], None]
"""Writes one file."""


def save(training: Training, target: Path, project: ProjectConfiguration, safe: bool) -> None:
    """Write a checkpoint; when this returns, on any rank, it is whole for all.

    Args:
        training: What to save.
        target: The folder, replaced in one step if it is there.
        project: Says whether each machine keeps one, and how many are kept.
        safe: Whether weights are safetensors, else `torch.save`.

    Raises:
        CheckpointError: Something can't be saved, on the rank that met it; `CollectiveError` on the others.
            What was there before is untouched.
    """
    state = PartialState()
    owner = _owns(state, project)
    partial = _begin(target, owner)
    with group.together(f"saving {target}"):
        partial.mkdir(parents=True, exist_ok=True)  # where a machine keeps none of its own
        for name, write in _collect(training, partial, owner, safe).items():
            write(partial / name)
    with group.together(f"saving {target}"):
        if owner:
            if not project.save_on_each_node:
                _require_rank_files(partial, state.num_processes)
            _finish(partial, target, project, _facts(training, state))


class Background:
    """A checkpoint that is being written by a thread of each rank, from copies in the host's memory.

    The ranks' threads meet in the folder, where each puts its files by their names once they are whole; rank 0's
    finishes the checkpoint when all are there.

    Args:
        training: What to save; it may go on as soon as this is constructed.
        target: The folder.
        project: How many checkpoints are kept.
        safe: Whether weights are safetensors.
        patience: Seconds that rank 0 waits for the others' files.
    """

    def __init__(
        self, training: Training, target: Path, project: ProjectConfiguration, safe: bool, patience: float = 1800.0
    ) -> None:
        if project.save_on_each_node:
            raise CheckpointError("checkpoints in the background need one folder that all ranks see")
        self.target = target
        self._state = PartialState()
        self._project = project
        self._patience = patience
        self._error: Exception | None = None
        owner = _owns(self._state, project)
        self._partial = _begin(target, owner)
        self._facts = _facts(training, self._state)
        self._writers: dict[str, Writer] = {}
        with group.together(f"saving {target}"):
            self._writers = _collect(training, self._partial, owner, safe, copied=True)
        self._thread = threading.Thread(target=self._run, args=(owner,), name="nblaunch-checkpoint")
        self._thread.start()

    def _run(self, owner: bool) -> None:
        try:
            mine = rank_file(self._state.process_index)
            for name, write in sorted(self._writers.items(), key=lambda item: item[0] == mine):
                weights.replace_file(self._partial / name, write)
            if owner:
                self._wait_for_files()
                _finish(self._partial, self.target, self._project, self._facts)
        except Exception as error:
            self._error = error
            with contextlib.suppress(OSError):
                self._failed(self._state.process_index).touch()

    def _failed(self, rank: int) -> Path:
        return self._partial / f"failed_{rank}"

    def _wait_for_files(self) -> None:
        """Until each rank's own file, its last, is there, or one has failed."""
        ranks = range(self._state.num_processes)
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            if all((self._partial / rank_file(rank)).is_file() for rank in ranks):
                return
            failed = [rank for rank in ranks if self._failed(rank).exists()]
            if failed:
                raise CheckpointError(f"ranks {failed} could not write their files")
            time.sleep(0.02)
        _require_rank_files(self._partial, self._state.num_processes)

    def wait(self) -> None:
        """Until the checkpoint is whole for all; all ranks must call this.

        Raises:
            CheckpointError: It could not be written, on the rank that met it; `CollectiveError` on the others.
        """
        with group.together(f"saving {self.target}"):
            self._thread.join()
            if self._error is not None:
                raise self._error


def _owns(state: PartialState, project: ProjectConfiguration) -> bool:
    return state.is_main_process or (project.save_on_each_node and state.is_local_main_process)


def _begin(target: Path, owner: bool) -> Path:
    with group.together(f"saving {target}"):
        if owner:
            folders.begin(target)
    return folders.beside(target.absolute(), "partial")


def _finish(partial: Path, target: Path, project: ProjectConfiguration, facts: dict[str, Any]) -> None:
    folders.finish(partial, target, facts)
    if project.automatic_checkpoint_naming and project.total_limit is not None:
        folders.prune(target.parent, project.total_limit)


def _collect(training: Training, folder: Path, owner: bool, safe: bool, copied: bool = False) -> dict[str, Writer]:
    """The files that this rank writes; all ranks take part in collecting, the owner writes what is the same on all.

    Args:
        training: What to save.
        folder: Where hooks may write.
        owner: Whether this rank writes what is the same on all.
        safe: Whether weights are safetensors.
        copied: Whether the training may go on before they are written.
    """
    keep: Callable[[Any], Any] = _copied if copied else lambda state: state
    states = [training.state_dict(model) for model in training.models]
    for hook in training.save_hooks:
        hook(list(training.models), states, str(folder))
    state = PartialState()
    own = keep(_rank_state(training, state))
    files: dict[str, Writer] = {
        rank_file(state.process_index): lambda path: _write_checked(own, path, "a data loader"),
    }
    if not owner:
        return files
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    for number, model_state in enumerate(states):
        parts = weights.split_aliases(model_state)
        tensors, others = keep(parts[0]), keep(parts[2])
        files[file_name(stem, number, suffix)] = _model_writer((tensors, parts[1], others), safe)
        if safe and others:
            files[weights.beside(Path(file_name(stem, number, suffix))).name] = _writer(others)
    for number, optimizer in enumerate(training.optimizers):
        files[file_name("optimizer", number, "bin")] = _writer(keep(optimizer.state_dict()))
    for number, scheduler in enumerate(training.schedulers):
        files[file_name("scheduler", number, "bin")] = _checked(keep(scheduler.state_dict()), _kind(scheduler))
    if training.scaling is not None:
        files["scaler.bin"] = _writer(training.scaling.state_dict())
    for number, thing in enumerate(training.registered):
        files[f"registered_{number}.bin"] = _checked(keep(thing.state_dict()), _kind(thing))
    return files


def _copied(state: Any) -> Any:
    """A copy in the host's memory that later steps don't change."""
    copies = map_leaves(lambda tensor: tensor.detach().to("cpu", copy=True), state)
    return copy.deepcopy(copies)


def _model_writer(parts: weights.Parts, safe: bool) -> Writer:
    return lambda path: weights.write(parts, path, safe)


def _writer(state: Any) -> Writer:
    return lambda path: torch.save(state, path)


def _checked(state: Any, what: str) -> Writer:
    return lambda path: _write_checked(state, path, what)


def _write_checked(state: Any, path: Path, what: str) -> None:
    """Write a small state, and see at once whether it can be read without pickle's powers."""
    torch.save(state, path)
    try:
        torch.load(path, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"the state of {what} holds something that can't be read back without running code from the file; "
            "have its state_dict() return tensors, numbers, text, lists and dicts"
        ) from error


def _kind(thing: Any) -> str:
    inner = getattr(thing, "scheduler", thing)
    return type(inner).__name__


def _rank_state(training: Training, state: PartialState) -> dict[str, Any]:
    plain, tensors = seeds.states(state.device)
    return {"rng": plain, "rng_tensors": tensors, "loaders": [loader.state_dict() for loader in training.loaders]}


def _require_rank_files(partial: Path, num_processes: int) -> None:
    missing = [rank for rank in range(num_processes) if not (partial / rank_file(rank)).is_file()]
    if missing:
        raise CheckpointError(
            f"ranks {missing} wrote their files where rank 0 can't see them; checkpoint to a folder that all machines "
            "share, or pass ProjectConfiguration(save_on_each_node=True)"
        )


def _facts(training: Training, state: PartialState) -> dict[str, Any]:
    return {
        "world_size": state.num_processes,
        "counters": training.counters,
        "holds": counts(training),
        "models": [type(training.unwrap(model)).__qualname__ for model in training.models],
        "versions": {
            "nblaunch": nblaunch.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "time": time.time(),
    }
