"""What ran: collected at the launch, kept in the run's folder, and read back however torn it is."""

from __future__ import annotations

import json
import os
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch import __version__, record
from nblaunch.wire import channel as wire
from nblaunch.wire.messages import Bar, Failure, Finished, Metrics, Notice, Progress, RankUpdate


def batch(value: float) -> Metrics:
    return Metrics(
        0, ["loss"], struct.pack("i", 0), struct.pack("q", 5), struct.pack("d", value), struct.pack("d", 1.5)
    )


def kept(*batches: Metrics) -> bytes:
    bodies = [wire.encode(batch)[6:] for batch in batches]
    return b"".join(record.LENGTH.pack(len(body)) + body for body in bodies)


# ---- collected


def test_a_record_tells_what_ran_and_where():
    found = record.collect(kept, {"cell": "x = 1"}, 42, {"OMP_NUM_THREADS": "2", "HOME": "/me"})
    assert found["function"] == "tests.test_record.kept"
    assert (found["nblaunch"], found["python"], found["seed"]) == (__version__, sys.version, 42)
    assert found["cwd"] == os.getcwd()
    assert found["sources"] == {"cell": "x = 1"}
    assert {"torch", "numpy", "cloudpickle"} <= found["packages"].keys()
    assert found["environment"] == {"OMP_NUM_THREADS": "2"}
    json.dumps(found)


def test_anything_that_can_be_called_can_be_recorded():
    class Trainer:
        def __call__(self): ...

    assert "Trainer object" in record.collect(Trainer(), {}, 0, {})["function"]


@pytest.mark.parametrize("name", ["HF_TOKEN", "SLURM_JWT", "TORCH_PASSWORD", "HF_API_KEY", "NCCL_SECRET", "HF_AUTH"])
def test_secrets_are_not_recorded(name):
    assert record.collect(print, {}, 0, {name: "s3cret"})["environment"] == {}


# ---- read back


def test_a_folder_without_files_reads_as_empty(tmp_path):
    assert record.read_record(tmp_path) == {}
    assert list(record.read_events(tmp_path)) == []
    assert list(record.read_metrics(tmp_path)) == []
    assert record.read_log(tmp_path / "rank-0.log") == ""


def test_a_record_that_is_torn_reads_as_empty(tmp_path):
    (tmp_path / "record.json").write_text('{"seed": ')
    assert record.read_record(tmp_path) == {}


def test_lines_that_are_torn_or_unknown_are_left_out(tmp_path):
    import msgspec

    events = [
        Notice("one\r\nline"),
        RankUpdate("id", 0, "running", 1.0),
        Failure(1, "exit", 2.0),
        Finished("id", "failed", 3.0),
    ]
    lines = [msgspec.json.encode(event) for event in events]
    unknown = msgspec.json.encode(Progress(0, 1.0, [Bar(0)]))
    (tmp_path / "events.jsonl").write_bytes(b"\n".join([*lines[:2], b"{torn", unknown, b"", *lines[2:], lines[0][:9]]))
    assert list(record.read_events(tmp_path)) == events


@given(st.lists(st.floats(allow_nan=False), max_size=5), st.integers(0, 600))
def test_however_much_was_written_the_whole_batches_are_read(tmp_path_factory, values, length):
    folder = tmp_path_factory.mktemp("run")
    batches = [batch(value) for value in values]
    written = kept(*batches)[:length]
    (folder / "metrics.bin").write_bytes(written)
    size = len(kept(batch(0.0)))
    assert list(record.read_metrics(folder)) == batches[: len(written) // size]


def test_junk_in_the_middle_ends_the_metrics_without_an_error(tmp_path):
    (tmp_path / "metrics.bin").write_bytes(kept(batch(1.0)) + record.LENGTH.pack(3) + b"abc" + kept(batch(2.0)))
    assert list(record.read_metrics(tmp_path)) == [batch(1.0)]


def test_the_parts_of_a_log_that_is_being_written_are_read_in_order(tmp_path):
    log = tmp_path / "rank-3.log"
    newest, before = record.tails_of(log)
    log.write_text("first\n")
    newest.write_text("last\n")
    before.write_bytes(b"mid \xff\n")
    assert record.read_log(log) == "first\nmid \ufffd\nlast\n"
