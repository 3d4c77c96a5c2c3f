"""Where a loader stands: passes, epochs, what is saved of them, and how a pass is taken up in the middle."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nblaunch.training.data.duplicates import Record
from nblaunch.training.data.samplers import SkippingSampler, Start


@dataclass
class Pass:
    """One pass over a loader."""

    epoch: int
    start: Start
    record: Record
    handed: int = 0
    """Batches handed to the user, counted from the whole pass's first."""
    generators: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """States of the loader's generators from which the pass began."""
    saved: dict[str, Any] | None = None
    """The state that the pass is taken up from."""
    ahead: dict[str, Any] | None = None
    """What a resume needs to fetch the next batch, noted before it was fetched ahead."""


class Position:
    """Where a loader stands; shared with what `skip_first_batches` makes of it.

    Args:
        num_processes: The number of ranks.
    """

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.epoch = 0
        """Of the next pass, unless one has begun."""
        self.present: Pass | None = None
        """The pass that the user's latest batch is of, until it is complete."""
        self.record: Record | None = None
        """Of the present or latest pass."""
        self.saved: dict[str, Any] | None = None
        """A loaded state that the next pass takes up."""

    def begin(self, skip: int) -> Pass:
        """Start a pass that leaves out the first `skip` batches, or those that a loaded state says."""
        saved, self.saved = self.saved, None
        if self.present is not None:  # broken off, or still going on around this one
            self.epoch = self.present.epoch + 1
        start = Start(first=skip)
        if saved is not None:
            start = Start(skip or saved["batches"], saved["begun"], saved["random"])
            self.epoch = saved["epoch"]
        self.record = Record(self.num_processes)
        self.present = Pass(self.epoch, start, self.record, handed=start.first, saved=saved)
        return self.present

    def hand_out(self, step: Pass) -> None:
        """The next batch of a pass goes to the user."""
        step.handed += 1
        self.present, self.record = step, step.record

    def complete(self, ended: Pass) -> None:
        """A pass has ended by itself."""
        if self.present is ended:  # unless set_epoch was called since its last batch
            self.epoch = ended.epoch + 1
        self.present, self.record = None, ended.record

    def set_epoch(self, epoch: int) -> None:
        """The next pass is the first of this epoch, unless a loaded state of this very epoch waits for it."""
        if self.saved is not None and self.saved["epoch"] == epoch:
            return
        self.epoch, self.present, self.saved = epoch, None, None

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors, without what only the loader knows."""
        present = self.present
        return {
            "epoch": self.epoch if present is None else present.epoch,
            "batches": 0 if present is None else present.handed,
            "begun": present is not None,
            "finished": present is not None and present.record.ended,
            "random": None if present is None else present.start.random,
            "num_processes": self.num_processes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass take up a saved one.

        Raises:
            ValueError: It was saved in the middle of a pass with another number of ranks.
        """
        saved_by = state["num_processes"]
        if saved_by != self.num_processes and state["batches"]:
            raise ValueError(
                f"the loader's position was saved by {saved_by} ranks after {state['batches']} batches each, "
                f"and there are {self.num_processes} now, whose batches are others; launch with "
                f"num_processes={saved_by}, or start from a state saved between two passes"
            )
        self.epoch, self.present, self.saved = state["epoch"], None, state


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """The same loader without the first batches of its next pass, for resuming in the middle of an epoch.

    The samples left out are not read where the dataset has indices. A prepared loader goes on counting its
    epochs, so the pass after a skipped one is the next epoch's; if a saved state was loaded into it before,
    `num_batches` counts from the beginning of the saved epoch all the same.

    Args:
        dataloader: Prepared or not.
        num_batches: How many of this process's batches to leave out.

    Raises:
        ValueError: `num_batches` is negative.

    Example:
        >>> [batch.tolist() for batch in skip_first_batches(DataLoader(range(5), batch_size=2), 1)]
        [[2, 3], [4]]
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative; it counts the batches to leave out")
    if hasattr(dataloader, "_skipping"):
        return dataloader._skipping(num_batches)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    if isinstance(dataloader.dataset, IterableDataset):
        return SkippingLoader(dataloader, num_batches)
    skipping = copy.copy(dataloader)
    name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    vars(skipping).update({name: SkippingSampler(getattr(dataloader, name), num_batches), "_iterator": None})
    return skipping


class SkippingLoader(DataLoader[Any]):
    """A loader of an iterable dataset without its first batches, which are read and dropped.

    Args:
        whole: The loader with all its batches.
        num_skipped: How many of them to leave out.
    """

    def __init__(self, whole: DataLoader[Any], num_skipped: int) -> None:
        vars(self).update(vars(whole))
        self.whole = whole
        self.num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return islice(iter(self.whole), self.num_skipped, None)

    def __len__(self) -> int:
        return max(0, len(self.whole) - self.num_skipped)
