"""What goes to the page: small, absolute, complete."""

import json
import struct

from nblaunch.dashboard.frames import LINES_A_FRAME, FrameWriter
from nblaunch.wire.messages import Display, Output
from tests.dashboard.scripted import RUN, ScriptedRun, metrics


def blocks(data: bytes) -> dict[int, list[list[float]]]:
    """Each series' rows, read as the page reads them."""
    found, at = {}, 0
    while at < len(data):
        series, _shift, rows, columns, _first = struct.unpack_from("<IIIId", data, at)
        at += 24
        flat = struct.unpack_from(f"<{rows * columns}f", data, at)
        at += 4 * rows * columns
        found[series] = [list(flat[i * columns : (i + 1) * columns]) for i in range(rows)]
    return found


def test_a_delta_holds_only_what_changed():
    run = ScriptedRun(2).start().advance(5).talk()
    writer = FrameWriter(run.state)
    first, _ = writer.delta()
    assert {"head", "rows", "charts", "now", "lines"} <= first.keys()
    second, curves = writer.delta()
    assert set(second) == {"seq"}
    assert curves == b""
    assert second["seq"] == first["seq"] + 1


def test_new_buckets_go_as_bytes():
    run = ScriptedRun(2).start()
    writer = FrameWriter(run.state)
    run.state.apply(metrics(0, {"loss": [1.0, 3.0]}, 0, run.now))
    run.state.apply(metrics(1, {"loss": [2.0, 5.0]}, 0, run.now))
    frame, curves = writer.delta()
    assert frame["charts"] == [["loss", [[0, "loss", "loss", "", [0, 1]]]]]
    assert frame["now"] == [["4.000", "3.000", "5.000"]]
    assert blocks(curves) == {0: [[2.0, 1.5, 1.0, 2.0, 1.0, 2.0], [2.0, 4.0, 3.0, 5.0, 3.0, 5.0]]}
    run.state.apply(metrics(1, {"loss": [6.0]}, 2, run.now))
    assert blocks(writer.delta()[1])[0][0][:4] == [1.0, 6.0, 6.0, 6.0]


def test_a_page_that_comes_late_gets_everything():
    run = ScriptedRun(4).start()
    writer = FrameWriter(run.state)
    for _ in range(8):
        run.advance(2)
        writer.delta()
    run.talk()
    frame, curves = writer.full()
    assert frame["full"]
    assert len(frame["rows"]) == 4
    assert len(frame["lines"]) == 4
    assert {len(rows) for rows in blocks(curves).values()} >= {len(run.state.metrics["train/loss"].counts)}
    assert "lines" in writer.delta()[0], "a full frame takes nothing from the deltas of other pages"


def test_a_flood_of_output_keeps_the_frame_small():
    run = ScriptedRun(2).start()
    writer = FrameWriter(run.state)
    run.state.apply(Output(run=RUN, rank=0, stream="stdout", lines=[f"line {i}" for i in range(5_000)]))
    frame, _ = writer.delta()
    assert len(frame["lines"]) == LINES_A_FRAME
    assert frame["lines"][-1][-1] == "line 4999"
    assert frame["written"] == 5_000


def test_a_rank_that_joins_a_line_revises_it():
    run = ScriptedRun(2).start()
    writer = FrameWriter(run.state)
    run.write(0, "UserWarning: careful", stream="stderr")
    writer.delta()
    run.write(1, "UserWarning: careful", stream="stderr")
    assert writer.delta()[0]["lines"] == [[0, 1, "ranks 0, 1", [0, 1], "UserWarning: careful"]]


def test_displays_of_other_ranks_go_once():
    run = ScriptedRun(2).start()
    writer = FrameWriter(run.state)
    for rank in range(2):
        run.state.apply(Display(rank=rank, data={"image/png": "aGk=", "text/plain": "figure"}))
    assert writer.delta()[0]["displays"] == {"keep": [], "new": [[1, 1, "image/png", "aGk="]]}
    run.state.apply(Display(rank=1, data={"text/html": "<b>hi</b>"}))
    assert writer.delta()[0]["displays"] == {"keep": [1], "new": [[2, 1, "text/html", "<b>hi</b>"]]}


def test_a_frame_of_eight_ranks_is_small_however_long_the_run():
    sizes = {}
    for steps in (1_000, 20_000):
        run = ScriptedRun(8, speed=steps / 50).start().advance(50)
        run.speed = 40
        writer = FrameWriter(run.state)
        writer.delta()
        total = 0
        for _ in range(20):
            frame, curves = (run.advance(0.25), writer.delta())[1]
            total += len(json.dumps(frame)) + len(curves)
        sizes[steps] = total / 20
    assert max(sizes.values()) < 4_096, sizes


def test_everything_in_a_frame_is_json():
    run = ScriptedRun(17).start().advance(3).talk().fail()
    writer = FrameWriter(run.state)
    for frame, curves in (writer.full(), writer.delta()):
        assert json.loads(json.dumps(frame))["failure"]["title"] == "Rank 1 raised ValueError"
        assert isinstance(curves, bytes)
