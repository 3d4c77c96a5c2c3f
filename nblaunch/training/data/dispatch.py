"""Rank 0 reads, and sends each rank its batch, whole: batches may differ in shape and hold any object."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nblaunch.errors import CollectiveError
from nblaunch.training import group
from nblaunch.training.data.iterables import IterableSource
from nblaunch.training.data.samplers import Exchange, Start, drawing_from, random_state
from nblaunch.training.data.shards import Round, Sharding
from nblaunch.training.data.sources import Fetched, Source


class Processes(Protocol):
    """This process among the ranks; `PartialState` is one."""

    num_processes: int
    process_index: int
    device: torch.device
    backend: str | None


class RankExchange:
    """What loaders tell one another through the process group.

    Args:
        processes: This process among the ranks.
    """

    def __init__(self, processes: Processes) -> None:
        self.device = processes.device
        self.backend = processes.backend
        self.num_processes = processes.num_processes
        self.process_index = processes.process_index

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return group.broadcast_object(value) if self.num_processes > 1 else value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        return group.all_gather_object(value) if self.num_processes > 1 else [value]

    def scatter(self, values: list[Any] | None) -> Any:
        """Each rank's entry of rank 0's list; structure first, then the tensors, as one buffer per rank.

        Args:
            values: On rank 0, one picklable value per rank; elsewhere None.
        """
        if values is not None:
            packed = [pack(value) for value in values[1:]]
            group.broadcast_object([(structure, specs) for structure, specs, _ in packed])
            buffers = [buffer.to(self._carrier) for _, _, buffer in packed]
            sent = [dist.isend(buffer, rank) for rank, buffer in enumerate(buffers, 1) if buffer.numel()]
            for work in sent:
                if work is not None:
                    work.wait()
            return values[0]
        structure, specs = group.broadcast_object(None)[self.process_index - 1]
        buffer = torch.empty(_ends(specs)[-1], dtype=torch.uint8, device=self._carrier)
        if buffer.numel():
            dist.recv(buffer, 0)
        return unpack(structure, specs, buffer)

    @property
    def _carrier(self) -> torch.device:
        return torch.device("cpu") if self.backend == "gloo" else self.device


# ---- nested data as a structure and bytes

Spec = tuple[tuple[int, ...], torch.dtype]

_ALIGNMENT = 16
"""Bytes; as large as any dtype, so that each tensor's bytes can be viewed as its dtype."""


class _Pickler(pickle.Pickler):
    """Pickles everything but plain tensors, which it puts aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self.tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]


def pack(value: Any) -> tuple[bytes, list[Spec], torch.Tensor]:
    """A value as its structure, the shapes and dtypes of its tensors, and their bytes (1-d, uint8)."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    tensors = [tensor.detach().contiguous() for tensor in pickler.tensors]
    specs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    buffer = torch.zeros(_ends(specs)[-1], dtype=torch.uint8)
    for tensor, start in zip(tensors, _ends(specs), strict=False):
        if tensor.numel():
            buffer[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8).to("cpu")
    return file.getvalue(), specs, buffer


def unpack(structure: bytes, specs: list[Spec], buffer: torch.Tensor) -> Any:
    """The value that `pack` took apart; its tensors are views of `buffer`, on that one's device."""
    tensors = [
        buffer[start:stop][: shape_bytes(shape, dtype)].view(dtype).reshape(shape)
        for (shape, dtype), (start, stop) in zip(specs, pairwise(_ends(specs)), strict=True)
    ]
    return _Unpickler(structure, tensors).load()


def shape_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes that a contiguous tensor takes."""
    return torch.Size(shape).numel() * dtype.itemsize


def _ends(specs: list[Spec]) -> list[int]:
    """Where each tensor's bytes begin in the buffer, and last its whole length."""
    sizes = (-(-shape_bytes(*spec) // _ALIGNMENT) * _ALIGNMENT for spec in specs)
    return list(accumulate(sizes, initial=0))


# ---- the source


@dataclass(frozen=True, slots=True)
class _Part:
    """What rank 0 sends to a rank for a step."""

    batch: Any
    rows: tuple[int, ...]
    repeated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What rank 0 sends where it could not read."""

    reason: str


class DispatchSource:
    """Batches that rank 0 reads from a source of every rank's batches, and sends.

    Args:
        source: Reads every rank's batches in rank order; used on rank 0 alone.
        sharding: How batches are shared.
        exchange: What the ranks tell one another.
    """

    def __init__(self, source: Source, sharding: Sharding, exchange: Exchange) -> None:
        self.source = source
        self.stateful = source.stateful
        self.dataset = source.dataset
        self.exchange = exchange
        self.indexed = self.in_process = False
        self.sharding = sharding
        self._dealing = replace(sharding, batch_size=1, split_batches=False)

    def read(self, start: Start, saved: dict[str, Any] | None = None) -> Iterator[Fetched]:
        """This rank's batches of one pass, see `Source.read`.

        Raises:
            CollectiveError: On the other ranks, if rank 0 could not read.
        """
        rounds = self._rounds(start, saved) if self.exchange.process_index == 0 else None
        while True:
            mine = self.exchange.scatter(None if rounds is None else self._next(rounds))
            if mine is None:
                return
            if isinstance(mine, _Failure):
                raise CollectiveError(f"rank 0 could not read the next batch: {mine.reason}")
            if mine.rows[self.exchange.process_index]:
                yield Fetched(mine.batch, mine.rows, mine.repeated)
            if 0 in mine.rows:  # a rank without a batch must not wait for a round that isn't read yet
                return

    def _next(self, rounds: Iterator[list[Any]]) -> list[Any]:
        """One entry per rank; all ranks hear of an error before it is raised here."""
        nothing: list[Any] = [None] * self.exchange.num_processes
        try:
            return next(rounds, nothing)
        except Exception as error:
            self.exchange.scatter([_Failure(f"{type(error).__name__}: {error}")] * len(nothing))
            raise

    def _rounds(self, start: Start, saved: dict[str, Any] | None) -> Iterator[list[Any]]:
        skipped = 0
        begun = start
        if isinstance(self.source, IterableSource) and saved is None:
            # what is left out is read all the same: the last round is filled with the very first batches
            skipped = start.first
            begun = Start(0, start.replay, start.random)
        fetched = self.source.read(begun, saved)
        rounds = self._dealing.rounds([each] for each in fetched)
        with drawing_from(random_state(), replay=True) if start.replay else nullcontext():
            first = list(islice(rounds, skipped, skipped + 1))
        start.random = begun.random
        for number, step in enumerate(chain(first, rounds)):
            yield self._parts(step, keep=number == 0)

    def _parts(self, step: Round[Fetched], keep: bool) -> list[Any]:
        """What each rank is sent; the round's batches may be wanted again later (`keep`)."""
        several = [part[0] if part else None for part in step.parts]
        # a source of batches with indices counts for all ranks, one of an iterable dataset for the one batch
        rows = tuple(each.rows[rank % len(each.rows)] if each else 0 for rank, each in enumerate(several))
        repeated = tuple(
            (rows[rank] if again else each.repeated[rank % len(each.repeated)]) if each else 0
            for rank, (each, again) in enumerate(zip(several, step.repeated, strict=True))
        )
        batches = [each and each.batch for each in several]
        if keep:  # rank 0's user may change its batch in place
            batches[0] = copy.deepcopy(batches[0])
        return [_Part(batch, rows, repeated) for batch in batches]

    def note(self, handed: int) -> dict[str, Any] | None:
        """The readers' state on rank 0, see `Source.note`."""
        return self.source.note(handed) if self.exchange.process_index == 0 else None

    def __len__(self) -> int:
        return len(self.source)
