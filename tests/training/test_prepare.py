"""What `prepare` takes and returns, and what the prepared models, optimizers and schedulers are."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from nblaunch.errors import UnpreparedError, UnusedParametersError
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.options import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from nblaunch.training.strategies.ddp import ParallelModule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.head = nn.Linear(4, 1)
        self.spare = nn.Linear(2, 1)

    def forward(self, x, use_spare=False):
        hidden = self.body(x)
        self.seen = hidden.dtype
        out = self.head(hidden)
        return {"out": out + self.spare(x) if use_spare else out, "hidden": (hidden, "text")}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_order_and_identity():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = object()
    got = accelerator.prepare(scheduler, other, optimizer, model)
    assert got[1] is other
    assert got[3] is model
    assert got[2].optimizer is optimizer
    assert got[0].scheduler is scheduler
    assert got[0].optimizers == [got[2]]
    assert accelerator.prepare(other) is other
    again = accelerator.prepare(*got)
    assert all(new is old for new, old in zip(again, got, strict=True))
    assert accelerator.prepare(model) is got[3]
    assert accelerator.prepare(optimizer) is got[2]
    assert isinstance(got[2], torch.optim.Optimizer)
    assert torch.optim.lr_scheduler.StepLR(got[2], 1).get_last_lr() == [1.0]


def test_device_placement_is_per_object():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="1 entries for 2 objects"):
        accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])
    meta = nn.Linear(1, 1, device="meta")
    assert accelerator.prepare(meta, device_placement=[False]).weight.device.type == "meta"
    assert Accelerator(device_placement=False).prepare(nn.Linear(1, 1, device="meta")).weight.is_meta
    mapped = nn.Linear(1, 1, device="meta")
    mapped.hf_device_map = {"": "meta"}
    assert accelerator.prepare(mapped).weight.is_meta


@pytest.mark.parametrize(
    ("precision", "inside"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_forward_computes_in_the_precision_and_returns_fp32(precision, inside):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(Net())
    original = Net.forward
    out = model(torch.ones(1, 2))
    assert model.seen == inside
    assert out["out"].dtype == out["hidden"][0].dtype == torch.float32
    assert out["hidden"][1] == "text"
    assert model.forward.__func__ is original
    assert all(one.dtype == torch.float32 for one in model.state_dict().values())
    model.seen = None
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert torch.equal(other(torch.ones(1, 2))["out"], out["out"])
        assert other.seen == inside
    assert torch.equal(pickle.loads(pickle.dumps(out["hidden"][0])), out["hidden"][0])
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is model
    plain(torch.ones(1, 2))
    assert plain.seen == torch.float32


def test_an_interrupt_in_a_forward_leaves_autocast():
    class Interrupted(nn.Module):
        def forward(self):
            raise KeyboardInterrupt

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(KeyboardInterrupt):
        accelerator.prepare(Interrupted())()
    assert not torch.is_autocast_enabled("cpu")


def test_several_ranks_wrap_share_and_unwrap(launch):
    def wrap():
        accelerator = Accelerator(
            mixed_precision="bf16", kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        torch.manual_seed(accelerator.process_index)
        net = Net()
        model = accelerator.prepare(net)
        assert isinstance(model, ParallelModule)
        assert accelerator.prepare(model) is model
        assert accelerator.prepare(net) is model
        assert accelerator.unwrap_model(model) is net
        assert net.forward.__func__ is Net.forward
        assert torch.equal(accelerator.gather(net.body.weight)[:4], accelerator.gather(net.body.weight)[4:])
        assert model(torch.ones(1, 2))["out"].dtype == torch.float32
        assert net.seen == torch.bfloat16
        travelled = pickle.loads(pickle.dumps(model))
        assert type(travelled) is Net
        assert torch.equal(travelled.body.weight, net.body.weight)

        tied = accelerator.prepare(Tied())
        accelerator.backward(tied(torch.ones(1, 3)).sum())
        inner = accelerator.unwrap_model(tied)
        assert inner.first.weight is inner.second.weight
        assert len(list(tied.parameters())) == 1

        frozen = Net()
        frozen.body.requires_grad_(False)
        frozen = accelerator.prepare(frozen)
        before = frozen.module.body.weight.clone()
        optimizer = torch.optim.SGD(frozen.parameters(), lr=1.0)
        optimizer = accelerator.prepare(optimizer)
        accelerator.backward(frozen(torch.ones(1, 2))["out"].sum())
        optimizer.step()
        assert torch.equal(accelerator.unwrap_model(frozen).body.weight, before)

        untrained = nn.Linear(1, 1).requires_grad_(False)
        assert accelerator.prepare(untrained) is untrained
        evaluated = nn.Linear(1, 1)
        assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
        return net.body.weight.detach()

    first, second = launch(wrap)
    assert torch.equal(first, second)


def test_a_loss_that_misses_parameters_names_them(launch):
    def miss():
        accelerator = Accelerator()
        model = accelerator.prepare(Net())
        accelerator.backward(model(torch.ones(1, 2))["out"].sum())
        with pytest.raises(UnusedParametersError, match=r"spare\.weight, spare\.bias\..*find_unused_parameters=True"):
            model(torch.ones(1, 2))

    launch(miss)


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "broadcast_buffers": False, "bucket_cap_mb": 1},
        {"comm_hook": "fp16"},
        {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}},
        {"comm_hook": "batched_power_sgd", "comm_wrapper": "fp16"},
    ],
)
def test_data_parallel_options(launch, options):
    def train():
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(1, 8) * (accelerator.process_index + 1)).sum())
            optimizer.step()
        return accelerator.unwrap_model(model).weight.detach()

    first, second = launch(train)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    expected = nn.Linear(8, 1).weight - 3 * 0.5 * 1.5
    assert torch.allclose(first, expected, atol=0.02)


def test_handlers():
    with pytest.raises(ValueError, match="two AutocastKwargs"):
        Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])
    with pytest.raises(TypeError, match="holds a dict"):
        Accelerator(kwargs_handlers=[{}])
    kept = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    assert kept.scaler.get_scale() == 8.0
    kept.end_training()  # the next may choose another precision
    off = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    model = off.prepare(Net())
    model(torch.ones(1, 2))
    assert model.seen == torch.float32
    assert InitProcessGroupKwargs().to_kwargs() == {}


def test_autocast_context():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with accelerator.autocast():
        assert layer(x).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert layer(x).dtype == torch.float32


def test_compile_on_request():
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    net = nn.Sequential(nn.Linear(2, 2))
    model = accelerator.prepare(net)
    assert model is not net
    assert torch.equal(model(torch.ones(1, 2)), net(torch.ones(1, 2)))
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    assert accelerator.get_state_dict(model).keys() == net.state_dict().keys()
    with pytest.raises(ValueError, match="either dynamo_backend or dynamo_plugin"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    with pytest.raises(ValueError, match="dynamo_backend='fast' is unknown; there are: no, eager"):
        Accelerator(dynamo_backend="fast")


def test_an_optimizer_of_no_prepared_model_is_refused():
    accelerator = Accelerator(cpu=True)
    stranger = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1.0)
    early = accelerator.prepare(stranger)
    with pytest.raises(UnpreparedError, match=r"2 of the 2 parameters of this SGD .*\(2, 3\), \(2,\)\) belong to none"):
        early.step()
    with pytest.raises(UnpreparedError, match=r"belong to none of the \d prepared models"):
        accelerator.prepare(nn.Linear(3, 2), torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1.0))
    model = nn.Linear(1, 1)
    late = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0), model)[0]
    model(torch.ones(1, 1)).backward()
    late.step()


def test_free_memory_lets_go():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    gone = weakref.ref(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert model is optimizer is None
    assert gone() is None
    assert isinstance(accelerator.prepare(nn.Linear(1, 1)), nn.Linear)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="mixed_precision='fp12' is unknown; there are: no, fp8, fp16, bf16"):
        Accelerator(mixed_precision="fp12")
    with pytest.raises(ValueError, match='fp8" needs a CUDA device'):
        Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(ValueError, match="not both"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(2))
    with pytest.raises(ValueError, match="num_steps=0 accumulates nothing"):
        GradientAccumulationPlugin(0)
    with pytest.raises(ValueError, match="fsdp_plugin: this strategy is not available"):
        Accelerator(fsdp_plugin=object())


def test_precision_comes_from_the_argument_then_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16"
    accelerator.end_training()
    explicit = Accelerator(cpu=True, mixed_precision="no")
    assert explicit.mixed_precision == "no"
