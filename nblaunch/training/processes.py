"""Who this process is among the ranks, and who does what: `PartialState`."""

from __future__ import annotations

import builtins
import functools
import os
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nblaunch.errors import ConfigError
from nblaunch.rank import context
from nblaunch.training import devices, group
from nblaunch.training.kinds import DistributedType
from nblaunch.training.partition import partition

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Identity:
    """Who this process is; the same for every `PartialState` of a process."""

    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    backend: str | None
    """The process group's backend, or None without a group."""
    environment: tuple[str | None, ...]
    """What the environment said when this was found out."""
    settings: dict[str, str] = field(default_factory=dict[str, str])
    """What the first `Accelerator` decided for all of this process."""
    iterated: list[weakref.ref[Any]] = field(default_factory=list[weakref.ref[Any]])
    """The prepared loaders that are being iterated over, outermost first, whichever `Accelerator` prepared them."""
    loaders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet[Any])
    """All prepared loaders."""


_identity: Identity | None = None
"""Found out once; anew when a group was made or ended since, or a launcher's variables changed (a fork)."""

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def identity(cpu: bool = False, **group_options: Any) -> Identity:
    """Who this process is; makes the process group if a launcher asks for one and there is none yet.

    Args:
        cpu: Keep to the CPU whatever accelerators there are.
        **group_options: `backend`, `timeout`, `init_method` of a group that is made now.

    Raises:
        ConfigError: `cpu` contradicts what this process already does.
    """
    global _identity
    environment = tuple(os.environ.get(name) for name in _VARIABLES)
    known = _identity
    if known is not None and known.environment == environment and (known.backend is not None) == group.active():
        _refuse_contradiction(known, cpu, group_options.get("backend"))
        return known
    _identity = _find_out(cpu, environment, group_options)
    return _identity


def _refuse_contradiction(known: Identity, cpu: bool, backend: str | None) -> None:
    if cpu and known.device.type != "cpu":
        raise ConfigError(
            f"cpu=True was asked for, but this process already trains on {known.device}; ask for the CPU in the "
            'first PartialState or Accelerator, or launch with devices="cpu"'
        )
    if backend is not None and known.backend is not None and backend != known.backend:
        raise ConfigError(
            f"backend={backend!r} was asked for, but this process is in a {known.backend} group already; ask for it "
            "in the first PartialState or Accelerator"
        )


def _find_out(cpu: bool, environment: tuple[str | None, ...], options: dict[str, Any]) -> Identity:
    launch = context.current()
    cpu = cpu or (launch is not None and launch.config.use_cpu)
    local_rank = int(os.environ.get("LOCAL_RANK") or _local_rank_of_group())
    device = devices.bind(local_rank, cpu=cpu)
    asked = None not in environment[:2] and (None not in environment[3:] or environment[1] != "1")
    backend = dist.get_backend() if group.active() else None
    if asked and backend is None:
        chosen = options.pop("backend", None) or (launch.config.backend if launch is not None else "auto")
        backend = devices.backend_for(device) if chosen == "auto" else chosen
        given = {name: value for name, value in options.items() if value is not None}
        dist.init_process_group(backend, **{**devices.group_options(device, backend), **given})
    if backend is None:
        return Identity(1, 0, 0, device, None, environment)
    return Identity(group.size(), group.rank(), local_rank, device, backend, environment)


def _local_rank_of_group() -> int:
    """Where no launcher told it: all ranks of a group that the user made are taken to be on this machine."""
    return group.rank()


def settled(name: str, asked: str | None, decide: Callable[[str | None], str]) -> str:
    """A setting that a process has only once: what its first `Accelerator` settled, or else a decision made now.

    Args:
        name: Of the setting.
        asked: What is asked for now, or None.
        decide: Makes a decision of it.

    Raises:
        ConfigError: Something else was settled before.
    """
    first = identity().settings.get(name)
    if first is not None and asked is None:
        return first
    decided = decide(asked)
    if first not in (None, decided):
        raise ConfigError(
            f"{name}={decided!r} contradicts this process's first Accelerator, which has {name}={first!r}; "
            "use one for all, or end_training() before the next"
        )
    return decided


def settle(name: str, value: str) -> None:
    """Make this what later calls of `settled` go by."""
    identity().settings[name] = value


def forget_settings() -> None:
    """Let the next `Accelerator` of this process decide anew."""
    identity().settings.clear()


class PartialState:
    """This process's place among the ranks: device, numbers, and control of who does what.

    Works alone (one process), in a launch, and under torchrun. The process group is made when the first one is
    constructed, unless there is one already, which is used as it is.

    Args:
        cpu: Keep to the CPU whatever accelerators there are; so does `ACCELERATE_USE_CPU=1`.
        **kwargs: `backend`, `timeout` and `init_method` of `torch.distributed.init_process_group`.

    Example:
        >>> state = PartialState(cpu=True)
        >>> state.num_processes, state.is_main_process
        (1, True)
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        me = identity(cpu, **kwargs)
        self.num_processes = me.num_processes
        self.process_index = me.process_index
        self.local_process_index = me.local_process_index
        self.device = me.device
        self.backend = me.backend
        self.distributed_type = DistributedType.of(me.device.type, me.num_processes)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{'  Backend: ' + self.backend if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    @property
    def initialized(self) -> bool:
        """Always true: constructing it found everything out."""
        return True

    @property
    def debug(self) -> bool:
        """Whether collectives are compared among the ranks before they start, outside a launch."""
        return group.debug()

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0 of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank of all."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here."""
        if self.use_distributed:
            group.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    # ---- who does what

    def on_main_process(self, function: F | None = None) -> F:
        """Decorator: only rank 0 runs the function, elsewhere it returns None."""
        return self._only_if("is_main_process", True, function)

    def on_local_main_process(self, function: F | None = None) -> F:
        """Decorator: only the first process of each machine runs the function, elsewhere it returns None."""
        return self._only_if("is_local_main_process", True, function)

    def on_last_process(self, function: F | None = None) -> F:
        """Decorator: only the highest rank runs the function, elsewhere it returns None."""
        return self._only_if("is_last_process", True, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> F:
        """Decorator: only rank `process_index` runs the function, elsewhere it returns None."""
        return self._only_if("process_index", _given("process_index", process_index), function)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> F:
        """Decorator: only the process of this number on each machine runs the function, elsewhere it returns None."""
        return self._only_if("local_process_index", _given("local_process_index", local_process_index), function)

    def _only_if(self, attribute: str, value: object, function: F | None) -> F:
        if function is None:
            return cast(F, functools.partial(self._only_if, attribute, value))

        @functools.wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if getattr(self, attribute) == value else None

        return cast(F, chosen)

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Rank 0 goes through the block before the others enter it, for instance to fill a cache.

        Raises:
            CollectiveError: On the others, if rank 0 raised in the block.
        """
        with self._first("the block of main_process_first", self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Generator[None]:
        """The first process of each machine goes through the block before the others enter it.

        Raises:
            CollectiveError: On the others, if one of the first raised in the block.
        """
        with self._first("the block of local_main_process_first", self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, what: str, goes_first: bool) -> Generator[None]:
        if not self.use_distributed:
            yield
            return
        if not goes_first:
            group.agree(None, what)
            yield
            return
        try:
            yield
        except BaseException as error:
            group.agree(error, what)
        else:
            group.agree(None, what)

    # ---- shares of the work

    @contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Generator[T]:
        """This process's contiguous part of `inputs`; the first ranks get one more where it doesn't divide.

        Args:
            inputs: A list, tuple, string, tensor (split along dim 0), a dict of these with equal lengths, or a
                `datasets.Dataset`. It is not changed.
            apply_padding: Repeat the last element so that all parts are equally long, for a later `gather`.

        Yields:
            The part: of the same type as `inputs`, empty where there are fewer elements than ranks.

        Raises:
            ValueError: The values of a dict have different lengths.
            TypeError: `inputs` is of another type.
        """
        yield partition(inputs, self.process_index, self.num_processes, apply_padding)

    # ---- the end

    def destroy_process_group(self, process_group: Any = None) -> None:
        """End the process group; the launcher does so by itself when a rank ends."""
        if group.active():
            dist.destroy_process_group(process_group)

    @property
    def default_device(self) -> torch.device:
        """The device that a single process takes here."""
        return devices.device_for(0)

    def set_device(self) -> None:
        """Make `device` the current one again."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"which process? pass {name}=")
    return value
