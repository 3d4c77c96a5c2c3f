"""`nblaunch.ops`: gathering, reducing, padding and broadcasting nested data."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from nblaunch import ops
from nblaunch.errors import CollectiveError, RankError
from nblaunch.rank import context
from nblaunch.training.accelerator import Accelerator

Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor


def _rank():
    return Accelerator().process_index


def test_gather_keeps_every_structure(launch):
    def gather():
        mine = torch.tensor([_rank()])
        data = {
            "list": [mine],
            "tuple": (mine, mine),
            "named": Point(mine, y=[mine]),
            "mapping": UserDict(a=mine),
            "ordered": OrderedDict(b=mine),
            "record": Batch(mine, mine),
            "empty": [],
        }
        got = ops.gather(data)
        both = torch.tensor([0, 1])
        assert type(got["list"]) is list
        assert torch.equal(got["list"][0], both)
        assert type(got["tuple"]) is tuple
        assert torch.equal(got["tuple"][1], both)
        assert isinstance(got["named"], Point)
        assert torch.equal(got["named"].y[0], both)
        assert isinstance(got["mapping"], UserDict)
        assert torch.equal(got["mapping"]["a"], both)
        assert isinstance(got["ordered"], OrderedDict)
        assert isinstance(got["record"], Batch)
        assert torch.equal(got["record"].mask, both)
        assert got["empty"] == []
        assert torch.equal(data["list"][0], mine)

    launch(gather)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64,
]  # fmt: skip


def test_gather_and_broadcast_of_every_dtype_and_shape(launch):
    def gather():
        rank = _rank()
        for dtype in DTYPES:
            one = torch.full((2, 3), rank).to(dtype)
            both = torch.cat([torch.zeros(2, 3), torch.ones(2, 3)]).to(dtype)
            assert torch.equal(ops.gather(one), both), dtype
            assert ops.gather(one).dtype == dtype
            assert torch.equal(ops.gather(one.t()), torch.cat([both[:2].t(), both[2:].t()])), dtype
            assert torch.equal(ops.gather(torch.tensor(rank).to(dtype)), torch.tensor([0, 1]).to(dtype))
            assert ops.gather(torch.empty(0, 4, dtype=dtype)).shape == (0, 4)
            assert torch.equal(ops.broadcast(one, from_process=1), both[2:]), dtype
            assert torch.equal(one, torch.full((2, 3), rank).to(dtype))
        assert not ops.gather(torch.ones(1, requires_grad=True)).requires_grad

    launch(gather)


def test_reduce(launch):
    def reduce():
        rank = _rank()
        mine = torch.tensor([1.0, 10.0 * rank])
        assert ops.reduce(mine, "sum").tolist() == [3.0, 30.0]
        assert ops.reduce(mine, "mean").tolist() == [1.0, 10.0]
        assert ops.reduce(mine, "max").tolist() == [1.0, 20.0]
        assert ops.reduce(mine, "min").tolist() == [1.0, 0.0]
        assert ops.reduce(mine).tolist() == [1.0, 10.0]
        assert ops.reduce({"a": [mine]}, "sum", scale=0.5)["a"][0].tolist() == [1.5, 15.0]
        assert mine.tolist() == [1.0, 10.0 * rank]
        assert Accelerator().reduce(mine).tolist() == [3.0, 30.0]
        assert ops.reduce(torch.tensor([rank]), "mean").tolist() == [1.0]
        assert ops.reduce(torch.tensor([rank == 1, True]), "sum").tolist() == [1, 3]
        assert ops.reduce(torch.tensor([rank == 1, True]), "max").tolist() == [True, True]
        assert ops.reduce(torch.tensor([rank == 1, True]), "min").tolist() == [False, True]
        for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.complex64):
            total = ops.reduce(torch.tensor([1, rank]).to(dtype), "sum")
            assert torch.equal(total, torch.tensor([3, 3]).to(dtype)), dtype
        assert ops.reduce(torch.tensor(1.0), "sum").shape == ()
        assert ops.reduce(torch.empty(0), "sum").shape == (0,)
        with pytest.raises(ValueError, match="'median' is unknown; there are: sum, mean, max, min"):
            ops.reduce(mine, "median")

    launch(reduce, num_processes=3)


def test_pad_across_processes(launch):
    def pad():
        rank = _rank()
        mine = torch.full((rank + 1, 2), rank + 1)
        after = ops.pad_across_processes(mine)
        before = ops.pad_across_processes(mine, pad_first=True, pad_index=-1)
        assert after.tolist() == ([[1, 1], [0, 0]], [[2, 2], [2, 2]])[rank]
        assert before.tolist() == ([[-1, -1], [1, 1]], [[2, 2], [2, 2]])[rank]
        wide = ops.pad_across_processes({"x": torch.ones(2, rank + 1)}, dim=1)["x"]
        assert wide.tolist() == ([[1, 0], [1, 0]], [[1, 1], [1, 1]])[rank]
        assert ops.pad_across_processes(torch.ones(2, rank + 1), dim=-1).shape == (2, 2)
        with pytest.raises(ValueError, match=r"can't pad along dim 2: found a tensor of shape \(2, 1\)"):
            ops.pad_across_processes(torch.ones(2, 1), dim=2)

    launch(pad)


def test_objects(launch):
    def objects():
        rank = _rank()
        assert ops.gather_object([rank, "x"]) == [0, "x", 1, "x"]
        assert ops.gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        held = [rank, {"a": rank}, None]
        assert ops.broadcast_object_list(held, from_process=1) is held
        assert held == [1, {"a": 1}, None]
        assert ops.copy_tensor_to_devices(torch.tensor([7, 8]) if rank == 1 else None).tolist() == [7, 8]
        with pytest.raises(TypeError, match="rank 0: list, rank 1: int"):
            ops.gather_object([rank] if rank == 0 else rank)

    launch(objects)


def test_with_one_process_things_stay_as_they_are():
    tensor = torch.ones(2, 2)
    assert ops.gather({"a": tensor})["a"] is tensor
    assert ops.gather(torch.tensor(1.0)).shape == ()
    assert ops.gather_object([1]) == [1]
    assert ops.broadcast_object_list([1]) == [1]
    assert ops.reduce(tensor, "sum", scale=2.0).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert ops.pad_across_processes(tensor) is tensor
    assert torch.equal(ops.copy_tensor_to_devices(tensor), tensor)


@pytest.mark.parametrize("operation", [ops.gather, ops.reduce, ops.broadcast, ops.pad_across_processes])
def test_a_leaf_of_another_type_is_named(operation):
    with pytest.raises(TypeError, match=r"found str at \['a'\]\[1\]"):
        operation({"a": [torch.ones(1), "text"]})


def test_in_a_launch_the_agent_ends_a_run_whose_ranks_differ(launch):
    with pytest.raises(RankError) as caught:
        launch(lambda: ops.gather(torch.ones(_rank() + 1, 2)))
    assert caught.value.kind == "collective"
    assert "rank 0: gather number 0 of float32[1, 2]; rank 1: gather number 0 of float32[2, 2]" in str(caught.value)


def test_in_a_launch_a_structure_that_differs_is_named(launch):
    def differ():
        rank = _rank()
        ops.gather({"loss": torch.ones(1), "guess" if rank else "label": torch.ones(1)})

    with pytest.raises(RankError, match=r"\['guess'\] float32\[1\]"):
        launch(differ)


def _without_agent():
    """As under torchrun: no agent listens."""
    context._current = None
    return _rank()


def test_elsewhere_debug_mode_names_every_ranks_shape(launch):
    def unequal():
        rank = _without_agent()
        with pytest.raises(CollectiveError) as caught:
            ops.gather(torch.ones(rank + 1, 2))
        return str(caught.value)

    for text in launch(unequal, env={"ACCELERATE_DEBUG_MODE": "1"}):
        assert "rank 0: gather of float32[1, 2]" in text
        assert "rank 1: gather of float32[2, 2]" in text


def test_elsewhere_debug_mode_names_another_collective(launch):
    def differ():
        rank = _without_agent()
        with pytest.raises(CollectiveError, match="rank 1: barrier") as caught:
            if rank:
                ops.wait_for_everyone()
            else:
                ops.reduce(torch.ones(2))
        return str(caught.value)

    assert "rank 0: reduce to mean of float32[2]" in launch(differ, env={"TORCH_DISTRIBUTED_DEBUG": "INFO"})[0]


def test_walking_nested_data():
    data = {"a": [torch.ones(2, 3), "text"], "b": Batch(torch.zeros(2), torch.tensor(1))}
    assert ops.find_batch_size(data) == 2
    with pytest.raises(TypeError, match="found str, which has no batch size"):
        ops.find_batch_size("text")
    assert ops.slice_tensors({"x": torch.arange(4)}, slice(1, 3))["x"].tolist() == [1, 2]
    joined = ops.concatenate([{"x": torch.ones(1, 2), "y": (torch.zeros(1),)}] * 2)
    assert joined["x"].shape == (2, 2)
    assert joined["y"][0].shape == (2,)
    moved = ops.send_to_device(data, "cpu")
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], Batch)
    meta = ops.send_to_device({"x": torch.ones(1), "y": torch.ones(1)}, "meta", skip_keys="y")
    assert (meta["x"].device.type, meta["y"].device.type) == ("meta", "cpu")
    half = ops.convert_to_fp32([torch.ones(1).half(), torch.ones(1).bfloat16(), torch.tensor(1), "text"])
    assert [getattr(one, "dtype", one) for one in half] == [torch.float32, torch.float32, torch.int64, "text"]
    doubled = ops.recursively_apply(lambda x: 2 * x, {"x": torch.ones(1)})
    assert doubled["x"].tolist() == [2.0]
    assert not dist.is_initialized()
