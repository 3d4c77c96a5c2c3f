"""What ranks write: whole lines, logs within their limit, and a rate that a page can take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nblaunch import record
from nblaunch.agent import output
from nblaunch.agent.output import Lines, LogFile, Teller

# ---- lines


def cut(*pieces: bytes) -> bytes:
    lines = Lines()
    return b"".join([*(lines.feed(piece) for piece in pieces), lines.end()])


def test_only_whole_lines_are_passed_on():
    lines = Lines()
    assert lines.feed(b"one\ntw") == b"one\n"
    assert lines.feed(b"o") == b""
    assert lines.feed(b"\nthree") == b"two\n"
    assert lines.end() == b"three\n"
    assert lines.end() == b""


def test_a_carriage_return_replaces_what_stood_before_it():
    assert cut(b"10%\r50%\r100%\nnext\n") == b"100%\nnext\n"
    assert cut(b"10%\r", b"50%\r", b"100%") == b"100%\n"
    assert cut(b"windows\r\nlines\r\n") == b"windows\nlines\n"
    assert cut(b"kept\r\r\n") == b"kept\n"


def test_a_bar_that_never_ends_its_line_takes_no_memory():
    lines = Lines()
    for number in range(1000):
        lines.feed(b"%d%%\r" % number)
    assert len(lines._rest) < 10


def test_a_line_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(output, "_LONGEST_LINE", 10)
    lines = Lines()
    assert lines.feed(b"x" * 8) == b""
    assert lines.feed(b"x" * 8) == b"x" * 16 + b"\n"


pieces = st.lists(st.text(alphabet="ab \r\né", max_size=6).map(str.encode), max_size=10)


@given(pieces)
@example([b"a\r\r", b"\n"])
@example([b"\xc3", b"\xa9\n"])
def test_where_the_stream_is_cut_makes_no_difference(pieces):
    assert cut(*pieces) == cut(b"".join(pieces))


@given(pieces)
def test_lines_come_out_whole_and_none_is_lost(pieces):
    lines = Lines()
    whole = [lines.feed(piece) for piece in pieces]
    assert all(part.endswith(b"\n") for part in whole if part)
    text = b"".join(pieces)
    assert b"".join(whole).count(b"\n") == text.count(b"\n")
    assert b"\r" not in b"".join(whole)


# ---- the log


def written(tmp_path, limit, lines):
    path = tmp_path / "rank-0.log"
    log = LogFile(path, limit)
    for line in lines:
        log.write(line)
    growing = record.read_log(path)
    log.close()
    return path, growing


def test_a_short_log_is_kept_whole(tmp_path):
    path, growing = written(tmp_path, 10_000, [b"one\n", b"two\n"])
    assert growing == path.read_text() == "one\ntwo\n"


@pytest.mark.parametrize("count", [1000, 1500, 4000, 20_000])
def test_of_a_long_log_the_first_and_the_last_part_are_kept(tmp_path, count):
    lines = [b"line %07d\n" % number for number in range(count)]
    path, growing = written(tmp_path, 20_000, lines)
    kept = path.read_text().splitlines()
    assert path.stat().st_size <= 20_000 + 100
    assert kept[:750] == [line.decode().strip() for line in lines[:750]]
    assert kept[-350:] == [line.decode().strip() for line in lines[-350:]]
    assert growing.splitlines()[-1] == kept[-1]
    gaps = [line for line in kept if line.startswith("...")]
    missing = count - (len(kept) - len(gaps))
    assert (f"... {missing * 13:,} bytes left out here by nblaunch (run_limit) ..." in gaps) == (missing > 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rank-0.log"]


@given(st.lists(st.integers(1, 3000), max_size=30))
def test_a_log_never_outgrows_its_limit_by_more_than_a_piece(tmp_path_factory, sizes):
    folder = tmp_path_factory.mktemp("log")
    pieces = [b"x" * (size - 1) + b"\n" for size in sizes]
    path, growing = written(folder, 8192, pieces)
    assert path.stat().st_size <= 8192 + 3000 + 100
    assert path.read_bytes().endswith(pieces[-1] if pieces else b"")
    assert len(growing) <= sum(sizes)


def test_a_part_that_vanishes_while_the_log_is_read_is_no_error(tmp_path):
    (tmp_path / "rank-0.tail").write_text("newest\n")
    assert record.read_log(tmp_path / "rank-0.log") == "newest\n"


# ---- what is told


class Page:
    """Takes what a teller tells, at a time that the test sets."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.lines: list[str] = []
        self.skipped = 0
        self.calls = 0
        self.teller = Teller(self.tell)

    def tell(self, lines: list[str], skipped: int) -> None:
        self.lines += lines
        self.skipped += skipped
        self.calls += 1


@pytest.fixture
def page(monkeypatch):
    return Page(monkeypatch)


def test_a_few_lines_are_all_told_at_once(page):
    page.teller.add(b"one\ntwo\n")
    assert page.teller.flush()
    assert (page.lines, page.skipped) == (["one", "two"], 0)
    assert list(page.teller.tail) == ["one", "two"]


def test_nothing_to_tell_tells_nothing(page):
    assert page.teller.flush()
    assert page.calls == 0


def test_a_steady_stream_within_the_rate_is_told_whole(page):
    for second in range(30):
        page.now = float(second)
        page.teller.add(b"line\n" * 390)
        page.teller.flush()
    assert (len(page.lines), page.skipped) == (30 * 390, 0)


def test_of_a_flood_the_newest_lines_are_told_and_the_rest_counted(page):
    number = 0
    for tick in range(200):  # ten seconds of 100,000 lines a second
        page.now = tick * 0.05
        page.teller.add(b"".join(b"%d\n" % (number + i) for i in range(5000)))
        number += 5000
        page.teller.flush()
    page.teller.flush(at_once=True)
    assert page.lines[-1] == str(number - 1)
    assert len(page.lines) + page.skipped == number
    assert len(page.lines) <= 2000 + 10 * 400 + 3 * 50
    assert page.calls <= 10 * 4 + 3
    assert page.lines == sorted(page.lines, key=int)


def test_after_a_flood_all_is_told_again(page):
    page.teller.add(b"noise\n" * 50_000)
    page.teller.flush(at_once=True)
    page.now = 60.0
    page.lines.clear()
    page.skipped = 0
    page.teller.add(b"quiet\n" * 100)
    assert page.teller.flush()
    assert (len(page.lines), page.skipped) == (100, 0)


@given(st.lists(st.tuples(st.integers(0, 4000), st.floats(0, 2)), max_size=20))
def test_every_line_is_told_or_counted(steps):
    with pytest.MonkeyPatch.context() as patch:
        page = Page(patch)
        for count, pause in steps:
            page.teller.add(b"x\n" * count) if count else None
            page.now += pause
            page.teller.flush()
        page.teller.flush(at_once=True)
    assert len(page.lines) + page.skipped == sum(count for count, _ in steps)


def test_bytes_that_are_no_text_are_told_all_the_same(page):
    page.teller.add(b"caf\xe9\n")
    page.teller.flush()
    assert page.lines == ["caf\ufffd"]
