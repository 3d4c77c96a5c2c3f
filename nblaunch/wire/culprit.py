"""What in a payload can't be pickled, and what makes it large: by the path that leads there."""

from __future__ import annotations

import functools
import io
import pickle
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nblaunch.wire.payload import TensorPickler

_SECONDS = 10.0
_DEPTH = 30


def find_culprit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException
) -> str:
    """One sentence: the path from the function or an argument to the thing that can't be pickled, and why not."""
    from nblaunch.wire.payload import CallPickler

    for path, thing in [(_name(function), function), *_arguments(args, kwargs)]:
        found = _explain(path, thing, CallPickler)
        if found is not None:
            return f"{found[0]} can't be sent to the ranks: {found[1]}"
    return f"{_name(function)} can't be sent to the ranks: {error}"


def find_part(path: str, thing: Any, error: BaseException) -> str:
    """One sentence: the path from `thing`, on its way home, to the part of it that can't be pickled, and why not."""
    from nblaunch.wire.payload import TensorPickler

    where, why = _explain(path, thing, TensorPickler) or (path, error)
    return f"{where} can't be sent to the notebook: {why}"


def _explain(path: str, thing: Any, kind: type[TensorPickler]) -> tuple[str, str] | None:
    """The path to the part that such a pickler can't take, and why not; None where it takes all."""
    failure = _failure(thing, kind)
    if failure is None:
        return None
    steps, thing, failure = _descend([path], thing, failure, kind)
    return " -> ".join(steps), _why(thing, failure)


def largest_parts(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], most: int = 5
) -> list[tuple[str, int]]:
    """The variables that make a payload large, largest first, with their size in bytes."""
    parts = [(f"{_name(function)} -> {step}", thing) for step, thing in _children(function)]
    sizes = [(path, _size(thing)) for path, thing in [*parts, *_arguments(args, kwargs)]]
    return sorted(sizes, key=lambda part: -part[1])[:most]


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        *((f"args[{i}]", arg) for i, arg in enumerate(args)),
        *((f"kwargs[{k!r}]", v) for k, v in kwargs.items()),
    ]


def _descend(
    steps: list[str], thing: Any, failure: Exception, kind: type[TensorPickler]
) -> tuple[list[str], Any, Exception]:
    """Follow the first part that can't be pickled, as deep as there is one."""
    until = time.monotonic() + _SECONDS
    seen = {id(thing)}
    while len(steps) < _DEPTH:
        for step, child in _children(thing):
            if time.monotonic() > until:
                return steps, thing, failure
            child_failure = None if id(child) in seen else _failure(child, kind)
            if child_failure is not None:
                steps, thing, failure = _joined(steps, thing, step), child, child_failure
                seen.add(id(child))
                break
        else:
            return steps, thing, failure
    return steps, thing, failure


def _joined(steps: list[str], thing: Any, step: str) -> list[str]:
    """`Dataset.lock` rather than `Dataset -> lock`; `loader[0]` rather than `loader -> [0]`."""
    if step.startswith("["):
        return [*steps[:-1], steps[-1] + step]
    if step.startswith("."):
        return [*steps, type(thing).__name__ + step]
    return [*steps, step]


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a thing that pickle would visit, each with how it is reached."""
    if isinstance(thing, types.MethodType):
        yield "self", thing.__self__
        yield from _children(thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing)
    elif isinstance(thing, functools.partial):
        yield ".func", thing.func
        yield from ((f".{step}", part) for step, part in _arguments(thing.args, thing.keywords))
    elif isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    elif isinstance(thing, type):
        yield from _parts_of_class(thing)
    else:
        for name, value in _attributes(thing).items():
            yield f".{name}", value
        yield "class", type(thing)


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        if isinstance(value, staticmethod | classmethod):
            yield f"method {name}", value.__func__
        elif not isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType | property):
            yield f"{'method' if callable(value) else 'attribute'} {name}", value


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closure {name!r}", cell.cell_contents
        except ValueError:
            continue  # a variable that has no value yet
    for name, value in function.__globals__.items():
        if name in _global_names(function.__code__):
            yield f"global {name!r}", value
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default {index}", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"default {name!r}", value


def _global_names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_global_names(const) for const in inner))


def _attributes(thing: Any) -> dict[str, Any]:
    slots = [slot for kind in type(thing).__mro__ for slot in _slots(kind) if hasattr(thing, slot)]
    return {**{slot: getattr(thing, slot) for slot in slots}, **getattr(thing, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _failure(thing: Any, kind: type[TensorPickler]) -> Exception | None:
    """Why this can't be pickled, or None if it can."""
    if isinstance(thing, types.ModuleType | type(None) | int | float | str | bytes):
        return None
    try:
        kind(io.BytesIO(), lambda buffer: False).dump(thing)
    except Exception as error:
        return error
    return None


def _size(thing: Any) -> int:
    from nblaunch.wire.payload import CallPickler

    sizes: list[int] = []
    stream = io.BytesIO()
    try:
        CallPickler(stream, lambda buffer: sizes.append(buffer.raw().nbytes)).dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError):
        return 0
    return stream.tell() + sum(sizes)


def _why(thing: Any, failure: Exception) -> str:
    if type(failure).__name__ == "PayloadError":
        return str(failure)
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
    hint = "make it inside the function, or leave it out"
    return f"it is a {kind}, and {type(failure).__name__} says: {failure}; {hint}"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
