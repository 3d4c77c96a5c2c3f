"""Checkpoints: everything comes back, whole or not at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from itertools import islice

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from nblaunch.errors import CheckpointError, CollectiveError
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.checkpoints import folder as folders
from nblaunch.training.options import GradScalerKwargs, ProjectConfiguration


class Odd(nn.Module):
    """Tied, parametrised, non-contiguous and buffer tensors, and one that shares memory in part."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.embed.weight
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        whole = torch.randn(6)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[2:4])
        self.register_buffer("count", torch.tensor(3))
        self.extra = {"note": "kept"}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        return self.head(self.normed(self.embed(x))).sum() + self.turned.sum()


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count, "words": ["a", None]}

    def load_state_dict(self, state):
        self.count = state["count"]


def _setup(seed=0, **options):
    torch.manual_seed(seed)
    accelerator = Accelerator(**options)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=1, shuffle=True)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader), counter


def _steps(accelerator, model, optimizer, scheduler, loader, counter):  # noqa: PLR0917
    """Train on and on; yields what each step saw and drew, so that equal lists mean equal trainings."""
    while True:
        for x in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counter.count += 1
            drawn = (random.random(), numpy.random.rand(), torch.rand(()).item())
            yield x.tolist(), loss.item(), scheduler.get_last_lr(), drawn


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_training_goes_on_as_if_it_had_never_stopped(launch, tmp_path, precision):
    """Saved after 3 of 4 batches of an epoch; the next 6 steps are the same in the run that goes on and in the one
    that is started afresh: data, dropout, losses, learning rates, and all generators."""

    def first():
        things = _setup(mixed_precision=precision)
        random.seed(things[0].process_index)
        steps = _steps(*things)
        list(islice(steps, 3))
        folder = things[0].save_state(tmp_path / "state")
        return folder, list(islice(steps, 6)), things[-1].count

    def second():
        things = _setup(seed=9, mixed_precision=precision)
        things[0].load_state(tmp_path / "state")
        return list(islice(_steps(*things), 6)), things[-1].count

    for (folder, expected, count), (got, again) in zip(launch(first), launch(second), strict=True):
        assert folder == str(tmp_path / "state")
        assert got == expected
        assert (count, again) == (9, 9)
    manifest = json.loads((tmp_path / "state" / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    names = {"model.safetensors", "optimizer.bin", "scheduler.bin", "registered_0.bin", "rank_0.bin", "rank_1.bin"}
    assert set(manifest["files"]) == names | ({"scaler.bin"} if precision == "fp16" else set())
    assert manifest["versions"]["torch"] == torch.__version__


def test_odd_tensors_come_back_equal_and_tied(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Odd())
    accelerator.save_state(tmp_path / "odd")
    before = {name: getattr(value, "clone", lambda v=value: v)() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.whole.zero_()
    model.extra = {}
    accelerator.load_state(tmp_path / "odd")
    for name, value in model.state_dict().items():
        assert value == before[name] if isinstance(value, dict) else torch.equal(value, before[name]), name
    assert model.head.weight is model.embed.weight
    assert model.extra == {"note": "kept"}
    held = safetensors.torch.load_file(tmp_path / "odd" / "model.safetensors")
    assert ("embed.weight" in held) != ("head.weight" in held)


def test_several_models_and_other_serialization(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(1, 1), nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "two", safe_serialization=False)
    kept = [first.weight.clone(), second.weight.clone()]
    nn.init.zeros_(first.weight)
    nn.init.zeros_(second.weight)
    accelerator.load_state(tmp_path / "two")
    assert torch.equal(first.weight, kept[0])
    assert torch.equal(second.weight, kept[1])
    assert (tmp_path / "two" / "pytorch_model_1.bin").exists()


def test_automatic_names_limit_and_going_on(tmp_path):
    def project():
        return ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)

    accelerator = Accelerator(cpu=True, project_config=project())
    model = accelerator.prepare(nn.Linear(1, 1))
    for value in range(4):
        nn.init.constant_(model.weight, value)
        assert accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{value}")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    again = Accelerator(cpu=True, project_config=project())
    model = again.prepare(nn.Linear(1, 1))
    (tmp_path / "checkpoints" / "checkpoint_9").mkdir()  # torn: without a manifest
    again.load_state()
    assert model.weight.item() == 3
    assert again.save_iteration == 4
    again.project_configuration.iteration = 3
    with pytest.raises(CheckpointError, match="checkpoint_3 is there already"):
        again.save_state()


def test_where_to_is_asked(tmp_path):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CheckpointError, match="before anything was prepared"):
        accelerator.load_state(tmp_path)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="where"):
        accelerator.save_state()
    with pytest.raises(CheckpointError, match="where"):
        accelerator.load_state()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        accelerator.load_state(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        accelerator.save_state(tmp_path / "file")
    with pytest.raises(ValueError, match="int can't be checkpointed"):
        accelerator.register_for_checkpointing(3)


def test_a_folder_by_name_is_replaced_and_its_other_files_stay(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    target = tmp_path / "state"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        accelerator.save_state(target)
        assert (target / "notes.txt").read_text() == "mine"
    nn.init.zeros_(model.weight)
    accelerator.load_state(target)
    assert model.weight.item() == 2.0
    assert os.listdir(tmp_path) == ["state"]


def test_what_differs_is_said(tmp_path, launch):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    wrong = nn.Sequential(nn.Linear(2, 2))
    other.prepare(wrong, torch.optim.SGD(wrong.parameters(), lr=1.0))
    kept = wrong[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"architecture than Sequential: missing in it: 0\.weight, 0\.bias; unk"):
        other.load_state(tmp_path / "state")
    wider = Accelerator(cpu=True)
    wide = nn.Linear(3, 2)
    wider.prepare(wide, torch.optim.SGD(wide.parameters(), lr=1.0))
    with pytest.raises(CheckpointError, match=r"other shapes: weight \(2, 2\), here \(2, 3\)"):
        wider.load_state(tmp_path / "state")
    fewer = Accelerator(cpu=True)
    fewer.prepare(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="0 optimizers here, 1 in it"):
        fewer.load_state(tmp_path / "state")
    assert torch.equal(wrong[0].weight, kept)

    def two():
        accelerator = Accelerator()
        model = nn.Linear(2, 2)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        with pytest.raises(CheckpointError, match=r"written by 1 processes, this run has 2.*strict=False"):
            accelerator.load_state(tmp_path / "state")
        with pytest.warns(UserWarning, match="written by 1 processes"):
            accelerator.load_state(tmp_path / "state", strict=False)
        return accelerator.unwrap_model(model).weight.detach()

    for weight in launch(two):
        assert torch.equal(weight, model.weight)


def test_damage_is_noticed(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state")
    weights = tmp_path / "state" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        accelerator.load_state(tmp_path / "state")
    weights.write_bytes(bytes(data)[:-1])
    with pytest.raises(CheckpointError, match="missing or cut short"):
        accelerator.load_state(tmp_path / "state")
    (tmp_path / "state" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="it has no manifest"):
        accelerator.load_state(tmp_path / "state")


def test_nothing_is_unpickled(tmp_path):
    class Evil(Counter):
        def state_dict(self):
            return {"counter": Counter()}

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.register_for_checkpointing(Evil())
    with pytest.raises(CheckpointError, match="state of Evil holds something that can't be read back"):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_all_ranks_raise_if_one_fails(launch, tmp_path):
    class Failing(Counter):
        def state_dict(self):
            raise OSError("disk full")

    def save():
        accelerator = Accelerator()
        accelerator.prepare(nn.Linear(1, 1))
        accelerator.register_for_checkpointing(Failing())
        try:
            accelerator.save_state(tmp_path / "state")
        except (OSError, CollectiveError) as error:
            return type(error).__name__, str(error)

    first, second = launch(save)
    assert first == ("OSError", "disk full")
    assert second[0] == "CollectiveError"
    assert "rank 0: OSError: disk full" in second[1]


def test_hooks(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(1, 1), nn.Linear(2, 2))

    def save_second(models, weights, folder):
        assert models == [first, second]
        torch.save(weights.pop()["weight"], os.path.join(folder, "second.bin"))

    def load_second(models, folder):
        with torch.no_grad():
            models.pop().weight.copy_(torch.load(os.path.join(folder, "second.bin"), weights_only=True))

    saving = accelerator.register_save_state_pre_hook(save_second)
    loading = accelerator.register_load_state_pre_hook(load_second)
    accelerator.save_state(tmp_path / "state")
    kept = second.weight.clone()
    nn.init.zeros_(second.weight)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(second.weight, kept)
    assert not (tmp_path / "state" / "model_1.safetensors").exists()
    saving.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "model_1.safetensors").exists()


def _dies_at(step, folder, save):
    """Run `save` in a process that kills itself at the given use of the file system; whether it came to its end."""
    child = os.fork()
    if child == 0:
        left = step

        def count(event, arguments):
            nonlocal left
            touches = event.startswith("ctypes.") or any(str(folder) in str(one) for one in arguments)
            if touches:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            save()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_killed_at_any_point_the_old_one_stays_or_the_new_one_is_whole(tmp_path):
    """Every file opened, renamed or removed is a point to die at."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    target = tmp_path / "state"
    nn.init.constant_(model.weight, 1.0)
    accelerator.save_state(target)

    def save():
        nn.init.constant_(model.weight, 2.0)
        accelerator.save_state(target)

    seen, step, done = [], 0, False
    while not done:
        step += 1
        done = _dies_at(step, tmp_path, save)
        accelerator.load_state(target)
        seen.append(model.weight.item())
        nn.init.constant_(model.weight, 1.0)
        if seen[-1] == 2.0:
            accelerator.save_state(target)
    assert step > 10
    assert set(seen) == {1.0, 2.0}
    assert seen[0] == 1.0
    assert seen[-1] == 2.0


def test_killed_with_automatic_names_the_newest_whole_one_is_found(tmp_path):
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    parent = tmp_path / "checkpoints"
    newest, step, done = [], 0, False
    while not done:
        shutil.rmtree(parent, ignore_errors=True)
        for project.iteration in range(2):
            accelerator.save_state()
        step += 1
        done = _dies_at(step, tmp_path, accelerator.save_state)
        found = [folders.number_of(path) for path in folders.numbered(parent)]
        assert found in ([0, 1], [0, 1, 2], [1, 2])
        newest.append(found[-1])
        accelerator.load_state()
        assert project.iteration == found[-1] + 1
        accelerator.save_state()
        assert not list(parent.glob(".*"))
    assert set(newest) == {1, 2}
    assert step > 10


def test_save_model_for_other_programs(tmp_path):
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    net[2].weight = net[0].weight
    model = accelerator.prepare(net)
    accelerator.save_model(model, tmp_path)
    safetensors.torch.load_model(nn.Sequential(*[nn.Linear(10, 10)] * 3), tmp_path / "model.safetensors", strict=False)
    held = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert set(held) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.bias"}
    accelerator.save_model(model, tmp_path, max_shard_size="0.5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert not (tmp_path / "model.safetensors").exists()
    assert index["metadata"]["total_size"] == 2 * 400 + 3 * 40
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / file)[name], net.state_dict()[name])
    load_checkpoint = pytest.importorskip("accelerate").load_checkpoint_in_model
    fresh = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    fresh[2].weight = fresh[0].weight
    load_checkpoint(fresh, str(tmp_path))
    assert torch.equal(fresh[2].weight, net[0].weight)
    accelerator.save_model(model, tmp_path / "bin", safe_serialization=False)
    assert set(torch.load(tmp_path / "bin" / "pytorch_model.bin")) == set(net.state_dict())
    with pytest.raises(ValueError, match="size 'big' was not understood"):
        accelerator.save_model(model, tmp_path, max_shard_size="big")


def test_save_on_the_main_process_only(launch, tmp_path):
    def save():
        accelerator = Accelerator()
        accelerator.save({"rank": accelerator.process_index}, tmp_path / "thing.bin")
        accelerator.save({"rank": torch.tensor(accelerator.process_index)}, tmp_path / "thing.safetensors", True)
        model = accelerator.prepare(nn.Linear(1, 1))
        return sorted(accelerator.get_state_dict(model))

    assert launch(save)[0] == ["bias", "weight"]
    assert torch.load(tmp_path / "thing.bin") == {"rank": 0}
    assert safetensors.torch.load_file(tmp_path / "thing.safetensors")["rank"] == 0


def test_what_accelerate_saved_can_be_loaded(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    theirs = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = theirs.prepare(model, optimizer, scheduler)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    theirs.save_state(str(tmp_path / "theirs"))

    ours = Accelerator(cpu=True)
    mine = nn.Linear(2, 2)
    my_optimizer = torch.optim.AdamW(mine.parameters(), lr=0.3)
    mine, my_optimizer, my_scheduler = ours.prepare(
        mine, my_optimizer, torch.optim.lr_scheduler.StepLR(my_optimizer, 1)
    )
    with pytest.warns(UserWarning, match="stored as pickle, which is not read"):
        ours.load_state(tmp_path / "theirs")
    assert torch.equal(mine.weight, model.weight)
    assert my_scheduler.get_last_lr() == scheduler.get_last_lr()
    assert my_optimizer.state_dict()["param_groups"][0]["lr"] == optimizer.state_dict()["param_groups"][0]["lr"]


def test_a_scale_is_restored(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "state")
    again = Accelerator(cpu=True)
    again.prepare(model)
    again.load_state(tmp_path / "state")
    assert again.scaler.get_scale() == 8.0


def test_in_the_background_the_training_goes_on(launch, tmp_path):
    def save():
        accelerator = Accelerator()
        model = nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        kept = model.module.weight.detach().clone()
        accelerator.save_state(tmp_path / "state", wait=False)
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        accelerator.wait_for_checkpoint()
        assert folders.whole(tmp_path / "state") is not None
        accelerator.load_state(tmp_path / "state")
        assert torch.equal(model.module.weight, kept)
        accelerator.save_state(tmp_path / "state", wait=False)
        accelerator.save_state(tmp_path / "other", wait=False)  # waits for the first
        accelerator.end_training()
        assert folders.whole(tmp_path / "other") is not None

    launch(save)


def test_in_the_background_a_failure_reaches_all(launch, tmp_path):
    def save():
        accelerator = Accelerator()
        accelerator.prepare(nn.Linear(2, 2), DataLoader([1, 2]))
        if accelerator.process_index == 1:  # holds what can't be read back
            accelerator._prepared.loaders[0].state_dict = lambda: {"type": Counter}
        accelerator.save_state(tmp_path / "state", wait=False)
        with pytest.raises((CheckpointError, CollectiveError)) as caught:
            accelerator.wait_for_checkpoint()
        assert not (tmp_path / "state").exists()
        return str(caught.value)

    first, second = launch(save)
    assert "ranks [1] could not write" in first
    assert "state of a data loader holds something" in second
