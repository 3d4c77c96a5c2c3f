"""What only a CUDA device can show: autocast, loss scaling, copies that overlap, NCCL."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    from nblaunch import RankError, notebook_launcher

    monkeypatch.chdir(tmp_path)

    def on_a_rank(function, *args):
        try:
            return notebook_launcher(function, args, 1, dashboard="none").result
        except RankError as error:
            raise (error.__cause__ or error) from error

    return on_a_rank


def _train(precision):
    from nblaunch import Accelerator, set_seed

    set_seed(0)
    accelerator = Accelerator(mixed_precision=precision)
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

        def forward(self, x):
            hidden = self.body[0](x)
            seen.append(hidden.dtype)
            return self.body[2](self.body[1](hidden))

    x = torch.randn(256, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32))
    losses = []
    for _ in range(8):
        for features, labels in loader:
            out = model(features)
            loss = nn.functional.cross_entropy(out, labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    states = {str(value.dtype) for value in model.state_dict().values()}
    return str(accelerator.device), str(seen[0]), str(out.dtype), states, losses


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_training_in_each_precision(launch, precision):
    device, inside, outside, states, losses = launch(_train, precision)
    assert device == "cuda:0"
    assert inside == {"no": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert outside == "torch.float32"
    assert states == {"torch.float32"}
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step(launch, fused):
    def train():
        from nblaunch import Accelerator, GradScalerKwargs

        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
        x = torch.ones(1, 2, device=accelerator.device)
        accelerator.backward(model(x).sum())
        optimizer.step()
        good = optimizer.step_was_skipped
        optimizer.zero_grad()
        before = model.weight.clone()
        accelerator.backward(model(x).sum() * 1e8)
        optimizer.step()
        return good, optimizer.step_was_skipped, torch.equal(before, model.weight), accelerator.scaler.get_scale()

    assert launch(train) == (False, True, True, 512.0)


def test_batches_are_copied_while_the_device_works(launch):
    """The copy of the next batch runs on a stream of its own, beside the kernels of the present one."""

    def overlap():
        from torch.profiler import ProfilerActivity, profile

        from nblaunch import Accelerator, DataLoaderConfiguration

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
        data = torch.randn(12, 2**20)
        loader = accelerator.prepare(DataLoader(data, batch_size=4, pin_memory=True))
        weight = torch.randn(4096, 4096, device=accelerator.device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for batch in loader:
                assert batch.device == accelerator.device
                for _ in range(20):
                    weight = (weight @ weight).clamp(-1, 1)
                total = batch.sum()
            torch.cuda.synchronize()
        assert torch.allclose(total.cpu(), data[-4:].sum(), rtol=1e-3)
        events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        copies = [e.time_range for e in events if "Memcpy HtoD" in e.name]
        kernels = [e.time_range for e in events if "gemm" in e.name.lower()]
        return any(c.start < k.end and k.start < c.end for c in copies for k in kernels)

    assert launch(overlap)


def test_nccl_with_one_rank_for_every_collective(launch):
    def collectives():
        import torch.distributed as dist

        from nblaunch import Accelerator
        from nblaunch.training import group

        accelerator = Accelerator()
        assert dist.get_backend() == "nccl"
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
            for device in (accelerator.device, torch.device("cpu")):
                one = torch.ones(2, 3, device=device).to(dtype)
                assert torch.equal(group.all_gather(one), one.unsqueeze(0))
                assert group.all_gather(one).device == one.device
                assert torch.equal(group.broadcast(one), one)
                for operation in ("max", "min", "sum", "mean"):
                    if dtype != torch.complex64 or operation in ("sum", "mean"):
                        reduced = group.all_reduce(one, operation)
                        assert torch.equal(reduced.to(dtype), one)
                        assert reduced.device == one.device
        assert group.all_gather(torch.tensor(1.0, device=accelerator.device)).shape == (1,)
        assert group.all_gather(torch.empty(0, 2, device=accelerator.device)).shape == (1, 0, 2)
        assert group.all_gather_object({"a": 1}) == [{"a": 1}]
        assert group.broadcast_object([1]) == [1]
        group.barrier()
        x = torch.ones(2, device=accelerator.device)
        assert torch.equal(accelerator.gather(x), x)
        assert torch.equal(accelerator.gather(torch.ones(2)), x)  # brought to the device
        return True

    assert launch(collectives)


def test_sync_batch_norm_on_request():
    from nblaunch import DistributedDataParallelKwargs
    from nblaunch.training.strategies.ddp import DataParallel

    strategy = DataParallel(DistributedDataParallelKwargs(sync_batch_norm=True))
    assert strategy.options.to_dict().get("sync_batch_norm") is None
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))
    assert isinstance(converted[0], nn.SyncBatchNorm)


def test_fp8_needs_torchao_or_a_newer_device(launch):
    def ask():
        from nblaunch import Accelerator

        try:
            Accelerator(mixed_precision="fp8").prepare(nn.Linear(16, 16))
        except (ImportError, ValueError) as error:
            return str(error)
        return "fp8"

    assert launch(ask) in (
        "fp8",
        'mixed_precision="fp8" needs torchao, which is not installed; pip install torchao',
    ) or "compute capability 8.9" in launch(ask)
