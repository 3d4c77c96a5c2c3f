"""`PreparedLoader`: gives this rank its part of the data, and knows where it is and what it repeated."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from nblaunch.training import seeds
from nblaunch.training.data.copies import DeviceCopies
from nblaunch.training.data.duplicates import Record
from nblaunch.training.data.resume import Pass, Position
from nblaunch.training.data.samplers import Exchange, drawing_from, generators_of, random_state
from nblaunch.training.data.sources import Fetched, Source


class Gradients(Protocol):
    """Who wants to know which loaders are being iterated over; `GradientState` is one."""

    @property
    def active_dataloader(self) -> Any | None:
        """The innermost loader that is being iterated over."""
        ...

    def _add_dataloader(self, loader: Any) -> None: ...

    def _remove_dataloader(self, loader: Any) -> None: ...


class PreparedLoader(DataLoader[Any]):
    """A loader that gives this rank its part of every global batch. `Accelerator.prepare` makes it.

    It has what the user's own loader has: `dataset`, `sampler`, `batch_sampler`, `batch_size`, ...

    Args:
        base: The user's loader, or its like with another sampler.
        source: Reads this rank's batches.
        exchange: What the ranks tell one another.
        gradient_state: Told when the loader is iterated over.
        copies: Brings batches to the device.
        rng_types: Generators to make equal on all ranks when a pass begins: "torch", "cuda", "xpu". The
            loader's own always are.
    """

    def __init__(
        self,
        base: DataLoader[Any],
        source: Source,
        exchange: Exchange,
        gradient_state: Gradients,
        copies: DeviceCopies,
        *,
        rng_types: Sequence[str] = (),
    ) -> None:
        # no super().__init__(): this is `base` to all who ask, and reads through `source`
        vars(self).update(vars(base), _iterator=None)
        self.base_dataloader = base
        self.source = source
        self.gradient_state = gradient_state
        self.rng_types = [kind for kind in map(str, rng_types) if kind != "generator"]
        self.end_of_dataloader = False
        """Whether the last batch is in the user's hands."""
        self.remainder = -1
        """Real samples in the last global batch, once it is in the user's hands; -1 before."""
        self._exchange = exchange
        self._copies = copies
        self._position = Position(exchange.num_processes)
        self._skipped = 0

    # ---- iterating

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        present = self._position.begin(self._skipped)
        self._begin(present)
        try:
            for fetched in self._fetched(present):
                present.record.add(fetched.rows, fetched.repeated, bool(fetched.last))
                self._hand_out(present)
                yield self._copies.arrived(fetched.batch)
            self._position.complete(present)
        finally:
            # a pass that was left may be closed late, while a newer one goes on
            if self._position.record is present.record:
                self.end_of_dataloader = False
                self.gradient_state._remove_dataloader(self)

    def _begin(self, present: Pass) -> None:
        """Epoch and generators at the start of a pass; the ranks' generators become rank 0's."""
        self._reach(present.epoch)
        if self._exchange.num_processes > 1 and self.rng_types:
            seeds.synchronize_rng_states(self.rng_types)
        generators = self._generators()
        states = [generator.get_state() for generator in generators]
        if present.saved is not None:
            states = present.saved["generators"]
        elif generators:
            states = self._exchange.share(states)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        present.generators = states
        self.end_of_dataloader, self.remainder = False, -1

    def _hand_out(self, present: Pass) -> None:
        if self.gradient_state.active_dataloader is not self:
            self.gradient_state._add_dataloader(self)
        self._position.hand_out(present)
        if present.record.ended:
            self.end_of_dataloader = True
            self.remainder = present.record.real_rows_of_step

    def _fetched(self, present: Pass) -> Iterator[Fetched]:
        """The pass's batches on their way to the device, each knowing whether it is the last."""
        saved = present.saved or {}
        if saved.get("finished"):
            return
        if present.handed != saved.get("batches"):  # skip_first_batches asks for another place than was saved
            saved = {}
        stream = self.source.read(present.start, saved.get("reader"))
        upcoming = self._first(stream, saved.get("fetch_random"))
        while upcoming is not None:
            fetched, upcoming = upcoming, None
            if fetched.last is None or self._copies.overlap:
                present.ahead = self._note(present.handed + 1)
                upcoming = self._next(stream)
                fetched.last = upcoming is None
                yield fetched
            else:
                yield fetched
                upcoming = self._next(stream)

    def _next(self, stream: Iterator[Fetched]) -> Fetched | None:
        fetched = next(stream, None)
        if fetched is not None:
            fetched.batch = self._copies.send(fetched.batch)
        return fetched

    def _first(self, stream: Iterator[Fetched], random: dict[str, Any] | None) -> Fetched | None:
        """The first batch of a pass; one that had been fetched ahead draws what it drew then."""
        if random is None:
            return self._next(stream)
        with drawing_from(random, replay=True):
            return self._next(stream)

    def _note(self, handed: int) -> dict[str, Any]:
        """What a resume after `handed` batches needs to fetch the next one, noted before that is fetched."""
        ahead = self._copies.overlap and self.source.in_process
        return {"reader": self.source.note(handed), "fetch_random": random_state() if ahead else None}

    # ---- epochs and resuming

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch; without a call each pass counts one epoch further.

        Reaches the sampler, the batch sampler and the dataset, where they have a `set_epoch`.
        """
        self._position.set_epoch(epoch)
        self._reach(epoch)

    def _reach(self, epoch: int) -> None:
        for holder in self._holders():
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def _holders(self) -> list[Any]:
        """What may have an epoch or a generator of its own, each once."""
        inner = getattr(self.batch_sampler, "sampler", None)
        every = (self.sampler, inner, self.batch_sampler, self.dataset, self.source.dataset)
        return list({id(each): each for each in every}.values())

    def _generators(self) -> list[torch.Generator]:
        return generators_of(self.base_dataloader, *self._holders())

    @property
    def iteration(self) -> int:
        """The epoch of the present pass, or of the next if none has begun."""
        present = self._position.present
        return self._position.epoch if present is None else present.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's loader stands, by what the user got, not what was read: plain data and tensors.

        Each rank has its own. Loaded into an equal loader, the next pass goes on behind the last batch that
        was handed out, in the same order, and so do the epochs after it.
        """
        if self._position.saved is not None:
            return copy.deepcopy(self._position.saved)
        present = self._position.present
        state = self._position.state_dict()
        if present is None or present.record.ended:
            states = [generator.get_state() for generator in self._generators()]
            return {**state, "generators": states, "reader": None, "fetch_random": None} | self._seed()
        ahead = present.ahead or self._note(present.handed)
        return {**state, "generators": present.generators, **ahead} | self._seed()

    def _seed(self) -> dict[str, Any]:
        return {"data_seed": next((each.initial_seed for each in self._seedable()), None)}

    def _seedable(self) -> list[Any]:
        return [each for each in self._holders() if hasattr(each, "initial_seed")]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass go on where `state_dict` was called.

        Raises:
            ValueError: The state was saved in the middle of a pass by another number of ranks, or by a loader
                with other generators.
        """
        if len(state["generators"]) != len(self._generators()):
            raise ValueError(
                f"the state holds {len(state['generators'])} generators, and this loader has "
                f"{len(self._generators())}; load it into a loader made in the same way"
            )
        if not self.source.stateful:
            state = {**state, "reader": None}
        self._position.load_state_dict(state)
        for each in self._seedable():
            each.initial_seed = state["data_seed"]

    def _skipping(self, num_batches: int) -> PreparedLoader:
        """This loader, sharing its position, without the first batches."""
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        view._skipped = self._skipped + num_batches
        return view

    # ---- what can be read off

    def __len__(self) -> int:
        return max(0, len(self.source) - self._skipped)

    @property
    def batches_left(self) -> int | None:
        """Batches that this rank gets after the one in hand; None where the length isn't known."""
        present = self._position.present
        if self.end_of_dataloader:
            return 0
        try:
            whole = len(self.source)
        except TypeError:
            return None
        return whole if present is None else max(1, whole - present.handed)

    @property
    def record(self) -> Record | None:
        """Which rows the present or latest pass handed out, and which of them were repeats."""
        return self._position.record

    @property
    def device(self) -> torch.device | None:
        """Where batches go; None if they stay."""
        return self._copies.device

    @property
    def total_batch_size(self) -> int | None:
        """Rows in a full batch of all ranks together; None where batches differ in size by design."""
        return self.source.sharding.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset; a TypeError where it has no length."""
        length = getattr(self.dataset, "total_length", None)
        return len(self.dataset) if length is None else length  # pyright: ignore[reportArgumentType]

    def __getstate__(self) -> dict[str, Any]:
        """A copy elsewhere stands before its epoch's first batch, and no one iterates over it."""
        position = Position(self._exchange.num_processes)
        position.epoch = self.iteration
        return {**vars(self), "_position": position, "end_of_dataloader": False, "remainder": -1}


@contextmanager
def even_batches(loaders: Sequence[PreparedLoader], value: bool | None) -> Generator[None]:
    """Passes that begin inside use this `even_batches`, for loaders of datasets with indices; restored after.

    Args:
        loaders: All prepared loaders; those of iterable datasets stay as they are.
        value: The value inside; None changes nothing.
    """
    shardings = [loader.source.sharding for loader in loaders if loader.source.indexed]
    before = [sharding.even_batches for sharding in shardings]
    for sharding in shardings:
        sharding.even_batches = sharding.even_batches if value is None else value
    try:
        yield
    finally:
        for sharding, earlier in zip(shardings, before, strict=True):
            sharding.even_batches = earlier
