"""What travels to the ranks and what comes home: pickled once, large buffers beside the pickle, mapped, not copied.

A rank maps the file (sealed.py) privately: what it changes in a tensor is its own, what it only reads is shared with
the other ranks.

Functions and classes that go by value (those of a notebook's cells) carry a number. What a rank sends home names them
by that number, so that the notebook gets its own class back and neither it nor its globals change.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from nblaunch.errors import PayloadError
from nblaunch.wire import sealed
from nblaunch.wire.sources import sources_of

_MAIN = "__main__"


@dataclass
class Payload:
    """A pickled call, ready to be sent."""

    fd: int
    nbytes: int
    home: dict[int, Any]
    """Number to the notebook's own function or class."""
    sources: dict[str, str]
    """File name of a cell, as its code objects have it, to its text."""


@dataclass
class Received:
    """What a rank made of a payload."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: dict[int, int] = field(default_factory=dict[int, int])
    """`id` of a function or class that came with the payload to its number."""
    labelled: list[Any] = field(default_factory=list[Any])
    """Those functions and classes, kept alive so that the ids stay theirs."""


# ---- from the kernel to the ranks


def dump_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Payload:
    """Pickle a call with all that it needs into one file.

    Raises:
        PayloadError: Something in it can't be sent; the message names the path to it.
    """
    from nblaunch.wire.culprit import find_culprit

    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = CallPickler(stream, buffers.append)
    try:
        pickler.dump((function, args, dict(kwargs)))
    except Exception as error:
        raise PayloadError(find_culprit(function, args, kwargs, error)) from None
    fd, nbytes = sealed.write(stream.getbuffer(), buffers)
    return Payload(fd, nbytes, pickler.home, sources_of(pickler.files, pickler.home.values()))


def load_call(fd: int, main: types.ModuleType) -> Received:
    """Rebuild a call in a rank; the names of the notebook's `__main__` go into `main`."""
    data, buffers = sealed.map_privately(fd)
    unpickler = _CallUnpickler(data, buffers, main)
    function, args, kwargs = unpickler.load()
    for thing in unpickler.labelled:
        if getattr(thing, "__module__", None) == _MAIN and "." not in thing.__qualname__:
            vars(main).setdefault(thing.__qualname__, thing)
    return Received(function, args, kwargs, unpickler.labels, unpickler.labelled)


# ---- from a rank to the kernel


def dump_home(value: Any, labels: Mapping[int, int]) -> int:
    """Pickle what a rank returns or raises into a file; device tensors arrive on the CPU. Returns its descriptor."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _HomePickler(stream, buffers.append, labels).dump(value)
    return sealed.write(stream.getbuffer(), buffers)[0]


def dump_home_bytes(value: Any, labels: Mapping[int, int]) -> bytes:
    """Like `dump_home`, for something small, as bytes."""
    stream = io.BytesIO()
    _HomePickler(stream, None, labels).dump(value)
    return stream.getvalue()


def load_home(source: int | bytes, home: Mapping[int, Any]) -> Any:
    """Rebuild in the kernel what `dump_home` wrote; closes a descriptor."""
    if isinstance(source, bytes):
        return _HomeUnpickler(source, [], home).load()
    try:
        data, buffers = sealed.map_privately(source)
    finally:
        os.close(source)
    return _HomeUnpickler(data, buffers, home).load()


def load_plain(fd: int) -> Any:
    """Rebuild what consists of numbers, texts and containers alone; leaves the descriptor open.

    Raises:
        pickle.UnpicklingError: It holds an instance of a class.
    """
    data, buffers = sealed.map_privately(fd)
    return _PlainUnpickler(io.BytesIO(data), buffers=buffers).load()


# ---- picklers


def _is_imported(module: types.ModuleType) -> bool:
    return sys.modules.get(module.__name__) is module


class TensorPickler(cloudpickle.Pickler):
    """cloudpickle with torch storages out of band, each once, and code objects that keep their file's name."""

    def __init__(self, stream: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> None:
        # the C pickler looks the table up once, as it is made
        inherited: Any = cloudpickle.Pickler.dispatch_table
        self.dispatch_table = ChainMap({types.CodeType: self._reduce_code}, inherited)
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self.files: set[str] = set()
        self._storages: dict[int, Any] = {}

    def _reduce_code(self, code: types.CodeType) -> tuple[Any, ...]:
        self.files.add(code.co_filename)
        make, args, *_ = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce storages here, and modules of other classes, such as `torch.ops`; leave the rest to cloudpickle."""
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and _is_imported(obj):
            return importlib.import_module, (obj.__name__,)
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "storage"):
            if isinstance(obj, torch.storage.TypedStorage):
                return _typed_storage, (self._storage(obj._untyped_storage), obj.dtype)
            if isinstance(obj, torch.UntypedStorage):
                canonical = self._storage(obj)
                if canonical is not obj:
                    return _same, (canonical,)
                return _untyped_storage, (_buffer_of(obj),)
        return super().reducer_override(obj)

    def _storage(self, storage: Any) -> Any:
        """The one object that stands for this memory, on the CPU."""
        key = storage._cdata
        if key not in self._storages:
            # the original is kept too, so that its address isn't given to another storage meanwhile
            self._storages[key] = (self.to_cpu(storage), storage)
        return self._storages[key][0]

    def to_cpu(self, storage: Any) -> Any:
        """A storage whose memory can be sent."""
        return storage if storage.device.type == "cpu" else storage.cpu()


class CallPickler(TensorPickler):
    """Pickles a call in the kernel; numbers what goes by value."""

    def __init__(self, stream: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> None:
        super().__init__(stream, buffer_callback)
        self.home: dict[int, Any] = {}
        self._main_globals = {"__name__": _MAIN}
        self.globals_ref[id(vars(sys.modules[_MAIN]))] = self._main_globals
        self._shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()

    def persistent_id(self, obj: Any) -> Any:
        """The namespace of the notebook's functions is that of the rank's fresh `__main__`; its shell is the rank's."""
        if obj is self._main_globals:
            return ("main",)
        if self._shell is None:
            return None
        if obj is self._shell:
            return ("shell", "")
        return ("shell", obj.__name__) if isinstance(obj, types.MethodType) and obj.__self__ is self._shell else None

    def reducer_override(self, obj: Any) -> Any:
        """Give functions and classes that go by value a number."""
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and len(reduced) == 6:
            make, args, *rest = reduced
            number = len(self.home)
            self.home[number] = obj
            return _labelled, (number, make, args), *rest
        return reduced

    def to_cpu(self, storage: Any) -> Any:
        """Refuse memory of a device: it belongs to this process."""
        if storage.device.type != "cpu":
            raise PayloadError(
                f"a tensor on {storage.device} belongs to the notebook's process and can't be sent; "
                "move it with .cpu(), or make it inside the function"
            )
        return storage


class _HomePickler(TensorPickler):
    """Pickles in a rank; what came with the payload goes by its number."""

    def __init__(
        self,
        stream: Any,
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None,
        labels: Mapping[int, int],
    ) -> None:
        super().__init__(stream, buffer_callback)
        self._labels = labels

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            number = self._labels.get(id(obj))
            return None if number is None else ("home", number)
        return None


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, data: memoryview, buffers: list[memoryview], main: types.ModuleType) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._main = main
        self.labels: dict[int, int] = {}
        self.labelled: list[Any] = []

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "main":
            return vars(self._main)
        get_shell: Any = vars(self._main).get("get_ipython")  # what stands for the notebook's shell in a rank
        return get_shell if pid[1] == "get_ipython" else get_shell() if not pid[1] else getattr(get_shell(), pid[1])

    def find_class(self, module: str, name: str, /) -> Any:
        if module == __name__ and name == _labelled.__name__:
            return self._make_labelled
        return super().find_class(module, name)

    def _make_labelled(self, number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        thing = make(*args)
        self.labels[id(thing)] = number
        self.labelled.append(thing)
        return thing


class _HomeUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes | memoryview, buffers: list[memoryview], home: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._home = home

    def persistent_load(self, pid: Any) -> Any:
        return self._home[pid[1]]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def _labelled(number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Stands in a pickle for "make this and remember its number"; a rank's unpickler puts its own in its place."""
    return make(*args)


def _same(thing: Any) -> Any:
    return thing


# ---- torch storages


def _buffer_of(storage: Any) -> pickle.PickleBuffer:
    """The memory of a CPU storage, not copied; the buffer keeps it alive."""
    if storage.nbytes() == 0:
        return pickle.PickleBuffer(b"")
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    memory._storage = storage
    return pickle.PickleBuffer(memory)


def _untyped_storage(buffer: Any) -> Any:
    import torch

    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
