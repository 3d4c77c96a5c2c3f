"""A run's folder: private, whole after every step, elsewhere or cut short where the disk refuses."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml

from nblaunch import record
from nblaunch.agent.appending import Appended
from nblaunch.agent.folder import RunFolder, prune
from nblaunch.wire import channel as wire
from nblaunch.wire.messages import Display, Failure, Finished, Launch, Metrics, Notice


def launch(folder: Path) -> Launch:
    return Launch("id", {}, {}, "/", [], [], 0, {}, "name: train\n", {"seed": 7}, str(folder))


class Told(list):
    """What the folder says to the user."""

    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def make(tmp_path, told):
    """Makes run folders below `tmp_path`, and closes them."""
    made = []

    def make(name: str = "train", limit: int = 10**6, ranks=(0, 1), runs: Path = tmp_path / "project/.nblaunch/runs"):
        made.append(RunFolder(launch(runs), name, limit, list(ranks), told))
        return made[-1]

    yield make
    for folder in made:
        folder.close()


def batch(value: float) -> Metrics:
    return Metrics(
        0, ["loss"], struct.pack("i", 0), struct.pack("q", 5), struct.pack("d", value), struct.pack("d", 1.5)
    )


def body(message) -> bytes:
    return wire.encode(message)[6:]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, for as long as the test runs."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a file system")
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "nblaunch-test", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 1024):
                pass
        except OSError:
            return path
    raise AssertionError("the disk has no end")


# ---- where, and for whom


def test_a_run_has_its_files_in_a_folder_of_its_time_and_name(make):
    folder = make("train: v2/é")
    assert folder.path.name.endswith("-train_v2_é")
    assert {file.name for file in folder.path.iterdir()} == {
        "launch.yaml", "record.json", "events.jsonl", "metrics.bin", "rank-0.log", "rank-1.log"
    }  # fmt: skip
    assert yaml.safe_load((folder.path / "launch.yaml").read_text()) == {"name": "train"}
    assert record.read_record(folder.path) == {"seed": 7}


def test_nobody_else_can_look_into_it(make):
    path = make().path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_git_ignores_it(make):
    assert (make().path.parents[1] / ".gitignore").read_text() == "*\n"


def test_an_ignore_file_that_a_full_disk_left_empty_is_written_again(make, tmp_path):
    (tmp_path / "project/.nblaunch").mkdir(parents=True)
    (tmp_path / "project/.nblaunch/.gitignore").touch()
    assert (make().path.parents[1] / ".gitignore").read_text() == "*\n"


def test_two_runs_of_one_second_have_two_folders(make):
    paths = {make().path for _ in range(3)}
    assert len(paths) == 3


def test_a_place_that_can_not_be_written_is_left_for_a_temporary_one(make, told, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "file").touch()
    folder = make(runs=tmp_path / "file/.nblaunch/runs")
    assert folder.path.is_relative_to(tmp_path / f"temporary/nblaunch-{os.getuid()}/runs")
    assert len(told) == 1
    assert "can't be written (Not a directory); the run's folder is in" in told[0]
    folder.log(0, b"it goes on\n")
    assert record.read_log(folder.path / "rank-0.log") == "it goes on\n"


@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_a_temporary_folder_that_others_prepared_is_not_used(make, tmp_path, monkeypatch, trap):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    expected = tmp_path / f"temporary/nblaunch-{os.getuid()}"
    expected.parent.mkdir()
    if trap == "link":
        (tmp_path / "theirs").mkdir()
        expected.symlink_to(tmp_path / "theirs")
    elif trap == "open":
        expected.mkdir()
        expected.chmod(0o777)
    else:
        expected.touch()
    (tmp_path / "file").touch()
    folder = make(runs=tmp_path / "file/runs")
    assert not folder.path.is_relative_to(expected)
    assert not folder.path.is_relative_to(tmp_path / "theirs")
    assert stat.S_IMODE(folder.path.parents[1].stat().st_mode) == 0o700


# ---- what is kept


def test_events_are_kept_a_line_each_and_exceptions_as_text_alone(make):
    folder = make()
    folder.event(Notice("careful", "warning"))
    folder.event(Failure(0, "exception", 1.0, message="bad", pickled=b"secret"))
    folder.event(Finished("id", "failed", 2.0))
    kinds = [type(event).__name__ for event in record.read_events(folder.path)]
    assert kinds == ["Notice", "Failure", "Finished"]
    assert b"secret" not in (folder.path / "events.jsonl").read_bytes()


def test_metrics_can_be_read_while_they_grow(make):
    folder = make()
    folder.metrics(body(batch(1.0)))
    assert list(record.read_metrics(folder.path)) == [batch(1.0)]
    folder.metrics(body(batch(2.0)))
    assert list(record.read_metrics(folder.path)) == [batch(1.0), batch(2.0)]


def test_a_torn_last_batch_is_left_out(make):
    folder = make()
    for value in (1.0, 2.0):
        folder.metrics(body(batch(value)))
    path = folder.path / "metrics.bin"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert list(record.read_metrics(folder.path)) == [batch(1.0)][: length >= len(whole) // 2]


def test_a_folder_keeps_to_its_limit_and_says_what_it_left_out_once(make, told):
    folder = make(limit=200_000)
    for number in range(3000):
        folder.metrics(body(batch(float(number))))
        folder.log(0, b"x" * 499 + b"\n")
        folder.log(1, b"y" * 499 + b"\n")
    for _ in range(30):
        folder.event(Display(0, {"image/png": "p" * 10_000}))
    folder.event(Finished("id", "done", 1.0))
    folder.close()
    assert sum(file.stat().st_size for file in folder.path.iterdir()) <= 200_000
    assert [text.partition(" outgrew")[0] for text in told] == ["the run's metrics", "what the run displayed"]
    assert isinstance(list(record.read_events(folder.path))[-1], Finished)


def test_what_comes_after_the_end_changes_nothing(make):
    folder = make()
    folder.close()
    folder.close()
    folder.event(Notice("late"))
    folder.log(0, b"late\n")
    folder.metrics(body(batch(1.0)))
    assert list(record.read_events(folder.path)) == list(record.read_metrics(folder.path)) == []


# ---- a full disk


def test_on_a_full_disk_the_run_goes_on_and_it_is_said_once(make, told, small_disk):
    folder = make(runs=small_disk / "runs")
    folder.event(Notice("before"))
    fill(small_disk)
    for number in range(500):
        folder.log(0, b"line\n" * 10)
        folder.event(Notice(f"event {number} " + "x" * 100))
        folder.metrics(body(batch(float(number))))
    folder.close()
    assert len(told) == 1 and told[0].endswith("is cut short: No space left on device")
    assert next(record.read_events(folder.path)) == Notice("before")


def test_what_is_written_once_there_is_room_again_can_be_read(make, small_disk):
    folder = make(runs=small_disk / "runs")
    folder.metrics(body(batch(1.0)))
    filler = fill(small_disk)
    for number in range(300):
        folder.metrics(body(batch(float(number))))
        folder.event(Notice("y" * 100))
    filler.unlink()
    folder.metrics(body(batch(-1.0)))
    folder.event(Finished("id", "done", 1.0))
    assert list(record.read_metrics(folder.path))[-1] == batch(-1.0)
    assert isinstance(list(record.read_events(folder.path))[-1], Finished)


def test_a_log_that_can_not_be_joined_for_lack_of_room_is_read_all_the_same(make, small_disk):
    folder = make(limit=20_000, ranks=[0], runs=small_disk / "runs")
    for number in range(2000):
        folder.log(0, b"line %d\n" % number)
    fill(small_disk)
    folder.close()
    text = record.read_log(folder.path / "rank-0.log")
    assert text.startswith("line 0\n") and text.endswith("line 1999\n")


def test_a_disk_that_is_full_from_the_start_sends_the_run_elsewhere(make, told, small_disk, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    fill(small_disk)
    folder = make(runs=small_disk / "project/.nblaunch/runs")
    assert folder.path.is_relative_to(tmp_path / "temporary")
    assert "No space left on device" in told[0]
    assert record.read_record(folder.path) == {"seed": 7}


def test_a_piece_that_does_not_fit_is_taken_back(small_disk):
    file = Appended(small_disk / "file")
    file.append(b"first\n")
    fill(small_disk)
    with pytest.raises(OSError):
        file.append(b"x" * 100_000)
    assert (small_disk / "file").read_bytes() == b"first\n"
    assert file.size == 6
    file.close()


# ---- old runs


def finished_runs(runs: Path, count: int) -> list[Path]:
    paths = []
    for number in range(count):
        path = runs / f"2024-01-01T00-00-0{number}-train"
        path.mkdir(parents=True)
        (path / "events.jsonl").touch()
        paths.append(path)
    return paths


def test_the_newest_runs_are_kept(tmp_path):
    paths = finished_runs(tmp_path, 5)
    prune(tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == paths[-2:]
    prune(tmp_path, 10)
    assert sorted(tmp_path.iterdir()) == paths[-2:]


def test_a_run_that_goes_on_is_kept(tmp_path):
    paths = finished_runs(tmp_path, 4)
    with (paths[0] / "events.jsonl").open("ab") as going_on:
        fcntl.flock(going_on, fcntl.LOCK_EX)
        prune(tmp_path, 1)
    assert sorted(tmp_path.iterdir()) == [paths[0], paths[-1]]


def test_a_folder_that_is_still_written_counts_as_going_on(make):
    first, second = make(), make()
    prune(first.path.parent, 1)
    assert first.path.exists() and second.path.exists()
    first.close()
    prune(first.path.parent, 1)
    assert not first.path.exists() and second.path.exists()


def test_what_is_no_run_is_left_alone(tmp_path):
    finished_runs(tmp_path, 2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").touch()
    prune(tmp_path, 1)
    assert (tmp_path / "notes/mine.txt").exists()


def test_pruning_never_fails(tmp_path, monkeypatch):
    prune(tmp_path / "nowhere", 1)
    finished_runs(tmp_path, 3)

    def no_locks(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    prune(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_system_without_locks_can_hold_a_run(make, monkeypatch, told):
    def no_locks(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert json.loads((make().path / "record.json").read_text()) == {"seed": 7}
    assert told == []
