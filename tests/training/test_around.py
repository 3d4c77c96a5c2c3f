"""Seeds, trackers, logging, bars, profiles, and batches that fit."""

from __future__ import annotations

import logging
import random

import numpy
import pytest
import torch
from torch import nn

from nblaunch.training import batch_size, trackers
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.bars import tqdm
from nblaunch.training.batch_size import find_executable_batch_size, release_memory
from nblaunch.training.logs import get_logger
from nblaunch.training.options import ProfileKwargs, ProjectConfiguration
from nblaunch.training.seeds import set_seed, synchronize_rng_states
from nblaunch.training.trackers import GeneralTracker


def _draw():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def test_set_seed(launch):
    set_seed(3)
    first = _draw()
    set_seed(3)
    assert _draw() == first
    set_seed(4)
    other = _draw()
    assert other != first

    def specific():
        accelerator = Accelerator()
        set_seed(3, device_specific=True)
        assert accelerator.num_processes == 2
        return _draw()

    assert launch(specific) == [first, other]


def test_deterministic():
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def test_rng_states_become_rank_0s(launch):
    def synchronise():
        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        generator = torch.Generator()
        generator.manual_seed(10 + accelerator.process_index)
        synchronize_rng_states(["torch", "generator"], generator)
        with pytest.raises(ValueError, match="rng_type='dice' is unknown; there are: torch, cuda"):
            synchronize_rng_states(["dice"])
        return torch.rand(()).item(), torch.rand((), generator=generator).item()

    first, second = launch(synchronise)
    assert first == second
    assert first[0] == torch.rand((), generator=torch.Generator().manual_seed(0)).item()


# ---- batches that fit


def test_smaller_batches_until_memory_suffices():
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(size, word):
        tried.append(size)
        if size > 80:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return word, size

    assert train("done") == ("done", 72)
    assert tried == [100, 90, 81, 72]
    assert train("again") == ("again", 72)
    assert tried[4] == 100  # each call starts afresh
    with pytest.raises(TypeError, match="as the first argument; leave it out"):
        train(64, "done")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")]
)
def test_memory_errors_of_the_cpu_count_and_zero_ends(error):
    @find_executable_batch_size(starting_batch_size=2, reduce_batch_size_fn=None)
    def train(size):
        raise error

    with pytest.raises(RuntimeError, match="no batch size fits: 2 and all smaller"):
        train()


def test_other_errors_and_another_reduction():
    sizes = iter([7, 3])

    @find_executable_batch_size(starting_batch_size=9, reduce_batch_size_fn=lambda: next(sizes))
    def train(size):
        if size > 3:
            raise MemoryError
        raise KeyError(size)

    with pytest.raises(KeyError, match="3"):
        train()


def test_all_ranks_agree_on_the_size(launch):
    @find_executable_batch_size(starting_batch_size=10)
    def train(size):
        if size > 8 and Accelerator().process_index == 1:
            raise MemoryError
        return size

    assert launch(train) == [8, 8]


def test_release_memory():
    assert release_memory(torch.ones(1), nn.Linear(1, 1)) == [None, None]
    batch_size.clear_device_cache(garbage_collection=True)


# ---- logging, bars, profiles


def test_loggers_say_things_once(launch, tmp_path):
    def say():
        rank = Accelerator().process_index
        form = "%(name)s:%(funcName)s:%(message)s"
        logging.basicConfig(level="INFO", format=form, filename=tmp_path / f"{rank}.log", force=True)
        logger = get_logger("here")
        logger.info("main only")
        logger.info("everyone %s", "says", main_process_only=False)
        logger.info("in turn", in_order=True)
        logger.warning_once("once")
        logger.warning_once("once")
        logger.debug("not shown")
        return [line for line in (tmp_path / f"{rank}.log").read_text().splitlines() if line.startswith("here")]

    assert launch(say) == [
        [
            "here:say:[RANK 0] main only",
            "here:say:[RANK 0] everyone says",
            "here:say:[RANK 0] in turn",
            "here:say:[RANK 0] once",
        ],
        ["here:say:[RANK 1] everyone says", "here:say:[RANK 1] in turn"],
    ]


def test_bars_show_on_the_main_process(launch):
    def bars():
        Accelerator()
        return tqdm(range(3)).disable, tqdm(range(3), main_process_only=False).disable, list(tqdm(range(2)))

    assert launch(bars) == [(False, False, [0, 1]), (True, False, [0, 1])]


def test_profile(tmp_path):
    options = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path), record_shapes=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    with accelerator.profile() as profiler:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert any("aten::" in event.key for event in profiler.key_averages())
    assert (tmp_path / "profile_0.json").stat().st_size > 0
    with pytest.raises(ValueError, match="activity 'tpu' is unknown; there are: 'cpu'"):
        ProfileKwargs(activities=["tpu"]).build()
    ready = []
    scheduled = ProfileKwargs(
        activities=["cpu"], schedule_option={"wait": 0, "warmup": 0, "active": 1}, on_trace_ready=ready.append
    )
    with accelerator.profile(scheduled) as profiler:
        for _ in range(2):
            profiler.step()
    assert ready


# ---- trackers


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.said = []

    @property
    def tracker(self):
        return self.said

    def store_init_configuration(self, values):
        self.said.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.said.append((values, step, kwargs))

    def finish(self):
        self.said.append("finished")


def test_a_tracker_of_ones_own_on_the_main_process_only(launch):
    def track():
        accelerator = Accelerator(log_with=[Memory()])
        accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={})
        accelerator.log({"loss": 1.0}, step=3, log_kwargs={"memory": {"commit": True}})
        said = accelerator.get_tracker("memory", unwrap=accelerator.is_main_process)
        accelerator.end_training()
        return said if accelerator.is_main_process else type(said).__name__

    config = {"lr": 0.1}
    assert launch(track) == [
        [("config", config), ({"loss": 1.0}, 3, {"commit": True}), "finished"],
        "GeneralTracker",
    ]


def test_an_incomplete_tracker_is_refused():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half must define requires_logging_directory, tracker"):
        Half()


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    config = {"lr": 0.1, "layers": [1, 2], "none": None, "inner": {"kind": nn.Linear}, "flag": True}
    accelerator.init_trackers("run", config)
    accelerator.log({"loss": torch.tensor(0.5), "note": "text", "both": {"a": 1, "b": 2}}, step=1)
    accelerator.log({"loss": numpy.float32(0.25)}, step=2)
    accelerator.log_images({"picture": numpy.zeros((1, 3, 4, 4), dtype="uint8")}, step=2)
    assert accelerator.get_tracker("tensorboard", unwrap=True).log_dir == str(tmp_path / "run")
    with pytest.raises(ValueError, match="no tracker 'wandb'; there are: tensorboard"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert events.Tags()["images"] == ["picture"]
    text = (tmp_path / "run" / "hparams.yml").read_text()
    assert "layers/0: 1" in text
    assert "inner/kind" in text


class Run:
    """Stands in for a run of W&B or Trackio."""

    def __init__(self, **options):
        self.options = options
        self.config = {}
        self.said = []

    def log(self, values, step=None, **kwargs):
        self.said.append((values, step))

    def finish(self):
        self.said.append("finished")


class Config(dict):
    def update(self, values, allow_val_change=False):
        super().update(values)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_are_given_what_they_take(monkeypatch, name):
    run = Run()
    run.config = Config()

    class Library:
        Image = staticmethod(lambda image: ("image", image))

        @staticmethod
        def init(**options):
            run.options = options
            return run

    kind = trackers.TRACKERS[name]
    monkeypatch.setattr(kind, "library", Library)
    monkeypatch.setattr(kind, "installed", classmethod(lambda cls: True))
    accelerator = Accelerator(cpu=True, log_with=name)
    accelerator.init_trackers("project", {"layers": [1, nn.Linear], "none": None}, {name: {"tags": ["a"]}})
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert run.options == {"project": "project", "tags": ["a"]}
    assert run.config == {"layers": [1, str(nn.Linear)], "none": None}
    assert run.said == [({"loss": 1.0}, 1), "finished"]


def test_trackers_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="log_with='paper' is unknown; there are: tensorboard, wandb, mlflow, trackio"):
        Accelerator(log_with="paper")
    with pytest.raises(ValueError, match="log_with='tensorboard' writes files; pass project_dir="):
        Accelerator(log_with="tensorboard")
    missing = next(name for name, kind in trackers.TRACKERS.items() if not kind.installed())
    with pytest.raises(ImportError, match=f"log_with='{missing}' needs .* pip install {missing}"):
        Accelerator(log_with=missing)
    project = ProjectConfiguration(project_dir=tmp_path, logging_dir=tmp_path / "logs")
    accelerator = Accelerator(log_with=["all", Memory()], project_config=project)
    assert trackers.TensorBoardTracker in accelerator.log_with
    assert accelerator.logging_dir == tmp_path / "logs"
    assert accelerator.project_dir == tmp_path


def test_metrics_go_to_the_dashboard(monkeypatch):
    from nblaunch.config import LaunchConfig
    from nblaunch.rank import context

    said = []

    class Reporter:
        def log(self, values, step):
            said.append((values, step))

    rank = context.RankContext(LaunchConfig(), 0, 0, 1, Reporter())
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(context, "_current", rank)
    accelerator.log({"loss": 1.0, "tensor": torch.tensor(2.0), "many": torch.ones(3), "text": "no"}, step=4)
    assert said == [({"loss": 1.0, "tensor": torch.tensor(2.0)}, 4)]
