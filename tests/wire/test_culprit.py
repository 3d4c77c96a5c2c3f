"""What can't be sent is named by the path that leads to it."""

from __future__ import annotations

import functools
import threading

import numpy
import pytest
import torch

from nblaunch.errors import PayloadError
from nblaunch.wire import payload
from nblaunch.wire.culprit import find_part, largest_parts
from tests.wire.cell import run_cells


class Dataset:
    def __init__(self, inside):
        self.lock = inside

    def train(self):
        return self.lock


class Slotted:
    __slots__ = ("handle",)

    def __init__(self, handle):
        self.handle = handle


def refused(function, *args, **kwargs):
    with pytest.raises(PayloadError) as caught:
        payload.dump_call(function, args, kwargs)
    return str(caught.value)


def local(function):
    """A function as a cell's is: sent by value."""
    function.__module__ = "__main__"
    return function


def test_a_variable_of_a_closure():
    loader = Dataset(threading.Lock())

    @local
    def train():
        return loader

    text = refused(train)
    assert text.startswith(
        "test_a_variable_of_a_closure.<locals>.train -> closure 'loader' -> Dataset.lock can't be sent"
    )
    assert "_thread.lock" in text and "make it inside the function, or leave it out" in text


def test_a_global_of_a_cell():
    out = run_cells(
        "import threading\nlock = threading.Lock()\nunused = threading.Lock()",
        "def train():\n    with lock: pass",
        "try:\n    in_a_rank(train)\nexcept payload.PayloadError as error:\n    print(error)",
    )
    assert out.startswith("train -> global 'lock' can't be sent to the ranks: it is a _thread.lock")


def test_a_global_that_another_function_of_the_cells_uses():
    out = run_cells(
        "import threading\nlock = threading.Lock()\ndef helper():\n    with lock: pass",
        "def train():\n    def inner(): helper()\n    inner()",
        "try:\n    in_a_rank(train)\nexcept payload.PayloadError as error:\n    print(error)",
    )
    assert out.startswith("train -> global 'helper' -> global 'lock' can't be sent")


def test_an_attribute_of_a_cells_class():
    out = run_cells(
        "import threading\nclass Model:\n    guard = threading.Lock()\n    def step(self): pass",
        "def train(): return Model()",
        "try:\n    in_a_rank(train)\nexcept payload.PayloadError as error:\n    print(error)",
    )
    assert out.startswith("train -> global 'Model' -> attribute guard can't be sent")


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        (threading.Lock(), "args[0]"),
        ([1, threading.Lock()], "args[0][1]"),
        ({"a": {"b": threading.Lock()}}, "args[0]['a']['b']"),
        (Dataset([Dataset(threading.Lock())]), "args[0] -> Dataset.lock[0] -> Dataset.lock"),
        (Slotted(threading.Lock()), "args[0] -> Slotted.handle"),
        (functools.partial(print, threading.Lock()), "args[0] -> partial.args[0]"),
        (functools.partial(print, sep=threading.Lock()), "args[0] -> partial.kwargs['sep']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_part_of_an_argument(argument, path):
    assert refused(print, argument).startswith(f"{path} can't be sent to the ranks: it is a _thread.lock")


def test_a_keyword_argument():
    assert refused(print, 1, sep=threading.Lock()).startswith("kwargs['sep'] can't be sent")


def test_the_object_of_a_method():
    assert refused(Dataset(threading.Lock()).train).startswith("Dataset.train -> self -> Dataset.lock can't be sent")


def test_defaults():
    lock = threading.Lock()

    @local
    def train(first=lock):
        return first

    @local
    def other(*, second=lock):
        return second

    assert "train -> default 0 can't be sent" in refused(train)
    assert "other -> default 'second' can't be sent" in refused(other)


def test_a_thing_that_holds_itself():
    ring = [threading.Lock()]
    ring.insert(0, ring)
    assert refused(print, ring).startswith("args[0][1] can't be sent")


def test_a_tensor_on_a_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "device", torch.device("cuda", 0))
    weights = torch.ones(2)

    @local
    def train():
        return weights

    text = refused(train)
    assert "closure 'weights'" in text
    assert "a tensor on cuda:0 belongs to the notebook's process" in text and ".cpu()" in text


def test_of_a_return_value_the_device_tensor_is_not_blamed(monkeypatch):
    def refuse(pickler, storage):
        raise PayloadError("a tensor on cuda:0 belongs to the notebook's process")

    monkeypatch.setattr(payload.CallPickler, "to_cpu", refuse)
    value = {"weights": torch.ones(2), "lock": threading.Lock()}
    text = find_part("the return value", value, TypeError("?"))
    assert text.startswith("the return value['lock'] can't be sent to the notebook: it is a _thread.lock")


def test_what_fails_only_as_a_whole_is_explained_by_the_error():
    assert (
        find_part("the return value", [1], TypeError("no luck"))
        == "the return value can't be sent to the notebook: no luck"
    )


def test_the_largest_parts_come_first():
    small, large = numpy.ones(1000), torch.ones(10_000)

    @local
    def train(first, second):
        return small, large

    parts = largest_parts(train, (numpy.ones(5000),), {"second": 1})
    assert [path.rpartition(".")[2] for path, _ in parts] == [
        "train -> closure 'large'",
        "args[0]",
        "train -> closure 'small'",
        "kwargs['second']",
    ]
    assert 40_000 <= parts[0][1] < 41_000
    assert parts == sorted(parts, key=lambda part: -part[1])
