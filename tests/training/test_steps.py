"""Steps: backward, accumulation, clipping, schedulers, loss scaling, against one process and hand-computed values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import notebook_launcher
from nblaunch.errors import UnpreparedError
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.local_sgd import LocalSGD
from nblaunch.training.options import DataLoaderConfiguration, GradientAccumulationPlugin, GradScalerKwargs

torch.manual_seed(0)
FEATURES = torch.randn(48, 5)
LABELS = torch.randint(0, 3, (48,))


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def _weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _train(global_batch=8, steps=1, precision="no", epochs=2, size=48, **options):
    """Train on the first samples; `global_batch` is that of all ranks in one step. Returns the parameters."""
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(split_batches=True, **options),
    )
    data = TensorDataset(FEATURES[:size], LABELS[:size])
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=global_batch // steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    synced = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
    return _weights(accelerator.unwrap_model(model)), synced


def _by_hand(global_batch=8, epochs=2, size=48):
    """The same, in plain PyTorch: every step over one whole global batch, the last one as short as it is."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for start in range(0, size, global_batch):
            x, y = FEATURES[:size][start : start + global_batch], LABELS[:size][start : start + global_batch]
            nn.functional.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return _weights(model)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_ranks_reach_the_parameters_of_one_process(launch, num_processes):
    expected = _by_hand()
    for got, _ in launch(_train, num_processes=num_processes):
        assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_accumulation_is_the_same_step_in_parts(launch, num_processes):
    expected = _by_hand(global_batch=16)
    for got, synced in launch(lambda: _train(global_batch=16, steps=4), num_processes=num_processes):
        assert torch.allclose(got, expected, atol=1e-6)
        assert synced == [False, False, False, True] * 6


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_short_last_window_is_divided_by_its_own_length(launch, num_processes):
    """40 samples in micro-batches of 4 are 10 micro-steps: two windows of 4, and one of 2."""
    expected = _by_hand(global_batch=16, size=40)
    for got, synced in launch(lambda: _train(global_batch=16, steps=4, size=40), num_processes=num_processes):
        assert torch.allclose(got, expected, atol=1e-6)
        assert synced == ([False, False, False, True] * 2 + [False, True]) * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_alike_on_one_and_two_ranks(launch, precision):
    one = launch(lambda: _train(precision=precision), num_processes=1)[0][0]
    two = [got for got, _ in launch(lambda: _train(precision=precision))]
    assert torch.equal(two[0], two[1])
    assert torch.allclose(one, two[0], atol=0.05)
    assert torch.allclose(one, _by_hand(), atol=0.2)


def test_weighted_losses_are_exact_however_tokens_are_spread(launch):
    """Sums over 1, 2, 3, ... samples per micro-step and rank, divided by all samples of the window."""
    sizes = [[1, 4], [3, 2]]  # by micro-step: each rank's number of samples
    start, parts = 0, []
    for step in sizes:
        parts.append([])
        for count in step:
            parts[-1].append(slice(start, start + count))
            start += count

    def train():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = _net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for step in parts:
            part = step[accelerator.process_index]
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(FEATURES[part]), LABELS[part], reduction="sum")
                accelerator.backward(loss, weight=len(LABELS[part]))
                optimizer.step()
                optimizer.zero_grad()
        return _weights(model)

    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.functional.cross_entropy(model(FEATURES[:start]), LABELS[:start]).backward()
    optimizer.step()
    for got in launch(train):
        assert torch.allclose(got, _weights(model), atol=1e-6)


def test_weights_belong_to_all_losses_of_a_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum(), weight=1)
    with accelerator.accumulate(model), pytest.raises(ValueError, match="every backward of a window has a weight"):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_no_sync_and_the_step_after_it(launch):
    def train():
        accelerator = Accelerator()
        model = nn.Linear(1, 1, bias=False)
        model = accelerator.prepare(model)
        inner = accelerator.unwrap_model(model)
        x = torch.full((1, 1), float(accelerator.process_index + 1))
        with accelerator.no_sync(model):
            accelerator.backward(model(x).sum())
        alone = inner.weight.grad.item()
        accelerator.backward(model(x).sum())
        together = inner.weight.grad.item()
        inner.weight.grad = None
        with accelerator.no_sync(model):
            first, second = model(x), model(2 * x)
        with accelerator.no_sync(model):
            accelerator.backward(first.sum())
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second.sum())
        return alone, together, inner.weight.grad.item()

    assert launch(train) == [(1.0, 3.0, 4.5), (2.0, 3.0, 4.5)]


def test_plain_backward_is_undivided_and_synchronised(launch):
    def train():
        accelerator = Accelerator(gradient_accumulation_steps=4)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), float(accelerator.process_index))).sum().backward()
        return accelerator.unwrap_model(model).weight.grad.item()

    assert launch(train) == [0.5, 0.5]


def test_optimizers_and_schedulers_act_only_where_gradients_are_exchanged(launch):
    def train():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        seen = []
        for _ in range(4):
            with accelerator.accumulate(model):
                before = _weights(model).item()
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                moved = _weights(model).item() != before
                left = accelerator.unwrap_model(model).weight.grad is not None
                seen.append((accelerator.sync_gradients, moved, left, round(1 / scheduler.get_last_lr()[0])))
        return seen

    expected = [(False, False, True, 1), (True, True, False, 3), (False, False, True, 3), (True, True, False, 5)]
    assert launch(train) == [expected] * 2


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 2), ({"split_batches": True}, 1), ({"step_scheduler_with_optimizer": False}, 1)],
)
def test_how_far_a_scheduler_advances(launch, options, steps):
    def train():
        accelerator = Accelerator(**options)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n)
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            torch.optim.SGD(model.parameters(), lr=1.0), max_lr=1.0, total_steps=3
        )
        model, optimizer, scheduler, cycle = accelerator.prepare(model, optimizer, scheduler, cycle)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        for _ in range(2):
            cycle.step()
        return scheduler.get_last_lr()[0], cycle.scheduler.last_epoch

    assert launch(train) == [(float(steps), 2)] * 2


def test_clipping_returns_the_norm_and_waits_for_the_exchange(launch):
    def train():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(nn.Linear(2, 1, bias=False))
        norms = []
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        clipped = accelerator.unwrap_model(model).weight.grad.clone()
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        return norms, clipped, accelerator.unwrap_model(model).weight.grad.tolist()

    for norms, clipped, values in launch(train):
        assert norms == [2.5, 5.0]
        assert torch.allclose(clipped, torch.tensor([[0.6, 0.8]]))
        assert values == [[pytest.approx(0.1), pytest.approx(0.1)]]


def test_two_models_and_optimizers_in_one_micro_step(launch):
    def train():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        g, d = _net(), _net()
        g_step, d_step = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (g, d))
        g, d, g_step, d_step = accelerator.prepare(g, d, g_step, d_step)
        for index in range(4):
            part = slice(index * 4 + 2 * accelerator.process_index, index * 4 + 2 * accelerator.process_index + 2)
            with accelerator.accumulate(g, d):
                for model, optimizer, sign in ((d, d_step, 1), (g, g_step, -1)):
                    accelerator.backward(sign * nn.functional.cross_entropy(model(FEATURES[part]), LABELS[part]))
                    optimizer.step()
                    optimizer.zero_grad()
        return _weights(g), _weights(d)

    def by_hand(sign):
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for start in (0, 8):
            loss = nn.functional.cross_entropy(model(FEATURES[start : start + 8]), LABELS[start : start + 8])
            (sign * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return _weights(model)

    for g, d in launch(train):
        assert torch.allclose(g, by_hand(-1), atol=1e-6)
        assert torch.allclose(d, by_hand(1), atol=1e-6)


def test_options_of_the_accumulation_plugin(launch):
    def train(sync_with_dataloader, sync_each_batch):
        plugin = GradientAccumulationPlugin(
            num_steps=2, sync_with_dataloader=sync_with_dataloader, sync_each_batch=sync_each_batch
        )
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        loader = DataLoader(torch.arange(6.0).reshape(6, 1), batch_size=1)
        model, loader = accelerator.prepare(nn.Linear(1, 1, bias=False), loader)
        synced, equal = [], []
        for _ in range(2):
            for x in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).sum())
                    grads = accelerator.gather(accelerator.unwrap_model(model).weight.grad)
                    synced.append(accelerator.sync_gradients)
                    equal.append(bool(grads[0] == grads[1]))
                    if accelerator.sync_gradients:
                        accelerator.unwrap_model(model).weight.grad = None
        return synced, equal

    def both():
        return train(True, False), train(False, False), train(True, True)

    ends = [False, True, True, False, True, True]
    straddles = [False, True] * 3
    for first, second, third in launch(both):
        assert first == (ends, ends)
        assert second == (straddles, straddles)
        assert third == (ends, [True] * 6)


def test_an_fp16_overflow_skips_the_step_and_the_schedule(launch):
    def train():
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**14)])
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        x = torch.ones(1, 2)
        accelerator.backward(model(x).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        good = accelerator.optimizer_step_was_skipped, round(1 / scheduler.get_last_lr()[0]), norm.item()
        before = _weights(model)
        factor = 1e8 if accelerator.process_index == 0 else 1.0
        accelerator.backward(model(x).sum() * factor)  # overflows on rank 0, so on all
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        scheduler.step()
        bad = accelerator.optimizer_step_was_skipped, round(1 / scheduler.get_last_lr()[0])
        return good, bad, torch.equal(before, _weights(model)), accelerator.scaler.get_scale()

    for good, bad, unchanged, scale in launch(train):
        assert good == (False, 3, pytest.approx(3**0.5, rel=1e-2))
        assert bad == (True, 3)
        assert unchanged
        assert scale == 2.0**13


def test_two_optimizers_share_one_scale():
    """Both divide by the scale that the backward multiplied with, although the first one's overflow lowers it."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    steps = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    first, second, *steps = accelerator.prepare(first, second, *steps)
    before = [_weights(first), _weights(second)]
    accelerator.backward(first(torch.ones(1, 1)).sum() + second(torch.ones(1, 1)).sum())
    first.weight.grad.fill_(float("inf"))
    accelerator.clip_grad_norm_(second.parameters(), 100.0)
    for optimizer in steps:
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in steps] == [True, False]
    assert torch.equal(_weights(first), before[0])
    assert torch.allclose(_weights(second), before[1] - 1.0)
    assert accelerator.scaler.get_scale() == 2.0


def test_clipping_unscales_only_the_optimizer_concerned():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    steps = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    first, second, *_ = accelerator.prepare(first, second, *steps)
    accelerator.backward(first(torch.ones(1, 1)).sum() + second(torch.ones(1, 1)).sum())
    assert accelerator.clip_grad_norm_(first.parameters(), 100.0).item() == 1.0
    assert accelerator.clip_grad_norm_(first.parameters(), 100.0).item() == 1.0
    assert (first.weight.grad.item(), second.weight.grad.item()) == (1.0, 4.0)
    accelerator.unscale_gradients()
    assert second.weight.grad.item() == 1.0


def test_bad_losses_and_models_are_refused(launch):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 2))
    with pytest.raises(ValueError, match=r"scalar loss, found shape \(1, 2\)"):
        accelerator.backward(model(torch.ones(1, 1)))
    with pytest.raises(UnpreparedError, match="Linear that is not prepared"):
        accelerator.accumulate(nn.Linear(1, 1))

    def gathered():
        accelerator = Accelerator()
        net = nn.Linear(1, 1)
        model = accelerator.prepare(net)
        with pytest.raises(ValueError, match="carries no gradient"):
            accelerator.backward(accelerator.gather(model(torch.ones(1, 1))).mean())
        with pytest.raises(ValueError, match="carries no gradient"):
            accelerator.backward(accelerator.reduce(model(torch.ones(1, 1))).mean())
        with pytest.raises(UnpreparedError, match="pass what prepare returned"):
            accelerator.accumulate(net)

    launch(gathered)


def test_ranks_with_fewer_batches_shadow_the_others(launch):
    def train():
        accelerator = Accelerator()
        loader = DataLoader(torch.ones(3, 1), batch_size=1)
        model, loader = accelerator.prepare(nn.Linear(1, 1, bias=False), loader)
        steps = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for x in loader:
                accelerator.backward(model(x).sum())
                steps += 1
        return steps, len(loader), accelerator.unwrap_model(model).weight.grad.item()

    first, second = launch(train)
    assert first[:2] == (2, 2)
    assert second[:2] == (1, 2)


def test_local_sgd_averages_now_and_then(launch):
    def train():
        accelerator = Accelerator()
        model = nn.Linear(1, 1, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        inner = accelerator.unwrap_model(model)
        with torch.no_grad():
            inner.weight.zero_()
        seen = []
        with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
            for _ in range(3):
                accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index + 1))).sum())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                seen.append(inner.weight.item())
        return [*seen, inner.weight.item()]

    assert launch(train) == [[-1.0, -3.0, -4.0, -4.5], [-2.0, -3.0, -5.0, -4.5]]


def test_the_scale_and_overflows_are_metrics_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def train():
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for factor in (1.0, 1e8, 1e8, 1.0):
            accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.scaler.get_scale()

    run = notebook_launcher(train, num_processes=2, devices="cpu", dashboard="none")
    assert run.results == [1.0, 1.0]
    frame = run.metrics.to_pandas()
    assert list(frame[(frame.name == "scaler/scale") & (frame["rank"] == 0)].value) == [4.0, 2.0, 1.0]
    assert list(frame[(frame.name == "scaler/overflows") & (frame["rank"] == 1)].value) == [0, 1, 2]
    assert list(frame[(frame.name == "scaler/overflows_in_a_row") & (frame["rank"] == 1)].value) == [0, 1, 2]
