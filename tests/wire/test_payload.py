"""What a cell's function needs arrives in a rank, and what it returns comes home as the notebook's own."""

from __future__ import annotations

import fcntl
import functools
import os
import threading
import types

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch.errors import PayloadError
from nblaunch.wire import payload
from tests.wire.cell import run_cells


def sent(*args, **kwargs):
    """Arguments as a rank gets them."""
    call = payload.dump_call(print, args, kwargs)
    try:
        received = payload.load_call(call.fd, types.ModuleType("__main__"))
    finally:
        os.close(call.fd)
    return received.args if not kwargs else received.kwargs


def home(value):
    """A return value as the notebook gets it."""
    return payload.load_home(payload.dump_home(value, {}), {})


# ---- functions and classes of cells


def test_a_function_brings_what_it_uses_from_other_cells():
    out = run_cells(
        "import math\nscale = 10\ndef double(x): return 2 * x",
        "class Point:\n    def __init__(self, x): self.x = x",
        """
        def make(offset):
            def train(y, *, bonus):
                return double(scale) + offset + y + bonus + math.floor(0.5) + Point(7).x
            return train
        """,
        "print(in_a_rank(make(100), 1000, bonus=0.5))",
    )
    assert out == "1127.5\n"


def test_an_instance_comes_home_as_one_of_the_notebooks_own_class():
    out = run_cells(
        "class Point:\n    seen = 0\n    def __init__(self, x): self.x = x",
        "def train():\n    Point.seen = 99\n    return Point(3), Point",
        """
        before, names = Point, set(globals())
        point, kind = in_a_rank(train)
        print(type(point) is Point, kind is Point, Point is before, point.x, Point.seen)
        print(sorted(set(globals()) - names))
        """,
    )
    assert out.splitlines() == ["True True True 3 0", "['before', 'kind', 'names', 'point']"]


def test_a_function_comes_home_as_the_notebooks_own():
    out = run_cells(
        "def helper(): return 1",
        "def train(): return helper, [helper]",
        "one, (two,) = in_a_rank(train)\nprint(one is helper, two is helper)",
    )
    assert out == "True True\n"


def test_an_enum_a_dataclass_and_a_namedtuple_of_a_cell_come_home():
    out = run_cells(
        """
        import collections, dataclasses, enum
        class Mode(enum.Enum):
            TRAIN = 1
        @dataclasses.dataclass
        class Metrics:
            loss: float
        Pair = collections.namedtuple("Pair", "a b")
        """,
        "def train(mode): return mode, Metrics(0.5), Pair(1, 2)",
        """
        mode, metrics, pair = in_a_rank(train, Mode.TRAIN)
        print(mode is Mode.TRAIN, metrics == Metrics(0.5), type(pair) is Pair, pair.b)
        """,
    )
    assert out == "True True True 2\n"


def test_the_rank_has_the_names_in_its_main_module():
    out = run_cells(
        "class Point: pass\ndef helper(): return 1",
        """
        def train():
            import __main__, pickle
            again = pickle.loads(pickle.dumps(Point()))
            return __main__.Point is Point, __main__.helper is helper, type(again) is Point
        """,
        "print(in_a_rank(train))",
    )
    assert out == "(True, True, True)\n"


def test_functions_share_one_set_of_globals():
    out = run_cells(
        "count = 0\ndef bump():\n    global count\n    count += 1",
        "def train():\n    bump()\n    bump()\n    return count",
        "print(in_a_rank(train), count)",
    )
    assert out == "2 0\n"


def test_code_keeps_the_name_of_its_cell_and_the_cells_text_travels():
    out = run_cells(
        "class Config:\n    rate = 0.1",
        """
        def train():
            def inner(): pass
            return train.__code__.co_filename, inner.__code__.co_filename, Config.rate
        """,
        """
        print(in_a_rank(train))
        sources = payload.dump_call(train, (), {}).sources
        print(sorted(sources), "rate = 0.1" in sources["/tmp/ipykernel_1/1.py"])
        """,
    )
    assert out.splitlines() == [
        "('/tmp/ipykernel_1/2.py', '/tmp/ipykernel_1/2.py', 0.1)",
        "['/tmp/ipykernel_1/1.py', '/tmp/ipykernel_1/2.py'] True",
    ]


def test_a_class_may_have_a_name_that_is_no_identifier():
    out = run_cells(
        "Box = type('Box[z-a]', (), {'__module__': '__main__'})",
        "def train(): return Box.__name__",
        "print(in_a_rank(train))",
    )
    assert out == "Box[z-a]\n"


def test_an_exception_of_a_cell_comes_home_to_be_caught():
    out = run_cells(
        "class BadLabel(Exception):\n    def __init__(self, label):\n        super().__init__(label); self.no = label",
        "def train(): return BadLabel(7)",
        "try:\n    raise in_a_rank(train)\nexcept BadLabel as error:\n    print(error.no)",
    )
    assert out == "7\n"


# ---- tensors and arrays


def test_a_tensor_and_its_view_stay_aliased():
    base = torch.arange(12.0).reshape(3, 4)
    whole, row, flat = sent(base, base[1], base.view(-1))
    row.fill_(-1)
    assert whole[1].tolist() == [-1.0] * 4
    assert flat[4:8].tolist() == [-1.0] * 4
    assert base[1].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_shared_memory_is_sent_once():
    base = torch.zeros(1_000_000)
    call = payload.dump_call(print, (base, base[10:], [base.view(1000, 1000)] * 5), {})
    assert 4_000_000 <= call.nbytes < 4_100_000
    os.close(call.fd)


def test_tied_weights_stay_tied_and_gradients_wanted():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(True)
    (there,) = sent(model)
    assert there[1].weight is there[0].weight
    assert isinstance(there[0].weight, torch.nn.Parameter) and there[0].weight.requires_grad
    assert torch.equal(there[0].weight, model[0].weight)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(3, 0, dtype=torch.int64),
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(4)[::2],
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.eye(3).to_sparse(),
        torch.tensor([1.0], requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{tensor.layout}",
)
@pytest.mark.parametrize("way", [lambda tensor: sent(tensor)[0], home], ids=["to the rank", "home"])
def test_every_kind_of_tensor(way, tensor):
    there = way(tensor)
    assert (there.dtype, there.shape, there.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert torch.equal(there.to_dense(), tensor.to_dense())


@settings(max_examples=30)
@given(
    start=st.integers(0, 10),
    shape=st.lists(st.integers(0, 4), max_size=3),
    strides=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int16, torch.uint8, torch.float16]),
)
def test_any_view_of_any_memory(start, shape, strides, dtype):
    memory = torch.arange(100).to(dtype)
    view = memory.as_strided(shape, strides[: len(shape)], start)
    there, whole = sent(view, memory)
    assert torch.equal(there, view) and there.stride() == view.stride()
    assert there.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_arrays_go_beside_the_pickle():
    array = numpy.arange(100_000, dtype=numpy.float64)
    call = payload.dump_call(print, (array, array.reshape(2, -1)[:, ::2], numpy.empty((0, 3))), {"name": b"bytes"})
    received = payload.load_call(call.fd, types.ModuleType("__main__"))
    same, strided, empty = received.args
    assert numpy.array_equal(same, array) and same.flags.writeable
    assert numpy.array_equal(strided, array.reshape(2, -1)[:, ::2])
    assert empty.shape == (0, 3)
    assert received.kwargs == {"name": b"bytes"}
    os.close(call.fd)


def test_a_read_only_array_stays_read_only():
    array = numpy.arange(10)
    array.flags.writeable = False
    (there,) = sent(array)
    assert not there.flags.writeable


def test_each_rank_changes_memory_of_its_own():
    tensor = torch.zeros(5000)
    call = payload.dump_call(print, (tensor,), {})
    first, second = (payload.load_call(call.fd, types.ModuleType("__main__")).args[0] for _ in range(2))
    first.fill_(1)
    assert (first.sum(), second.sum(), tensor.sum()) == (5000, 0, 0)
    os.close(call.fd)


def test_the_file_is_sealed():
    call = payload.dump_call(print, (), {})
    seals = fcntl.fcntl(call.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_WRITE and seals & fcntl.F_SEAL_GROW and seals & fcntl.F_SEAL_SHRINK
    with pytest.raises(OSError):
        os.pwrite(call.fd, b"x", 0)
    os.close(call.fd)


def test_results_survive_the_file_that_they_came_in():
    fd = payload.dump_home({"weights": torch.ones(3000), "table": numpy.ones(3000)}, {})
    result = payload.load_home(fd, {})
    with pytest.raises(OSError):
        os.fstat(fd)
    assert result["weights"].sum() == result["table"].sum() == 3000


def test_nothing_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        sent(torch.ones(100), numpy.ones(10))
        home(torch.ones(100))
        with pytest.raises(PayloadError):
            payload.dump_call(print, (threading.Lock(),), {})
    assert len(os.listdir("/proc/self/fd")) == before


def test_something_small_goes_home_as_bytes():
    error = ValueError("bad", torch.ones(2))
    there = payload.load_home(payload.dump_home_bytes(error, {}), {})
    assert type(there) is ValueError and there.args[0] == "bad" and torch.equal(there.args[1], torch.ones(2))


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_plain_data_is_the_same_there_and_back(value):
    assert sent(value)[0] == value
    assert home(value) == value


def test_a_partial_and_a_bound_method_can_be_launched():
    assert sent(functools.partial(int, base=2))[0]("101") == 5
    assert sent("abc".upper)[0]() == "ABC"


def test_modules_of_other_classes_go_by_name():
    [again] = sent(torch.ops)
    assert again is torch.ops
