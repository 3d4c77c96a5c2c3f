"""How a failed run is shown: the cause first, the cell's own line with its caret, the rest folded, 40 lines at most."""

from __future__ import annotations

import pickle
import re
import traceback
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nblaunch import errors
from nblaunch.errors import AgentError, ConfigError, NblaunchError, PayloadError, RankError, ResultError
from nblaunch.rank import failure as rank_failure
from nblaunch.wire.messages import Failure, Frame

CELL = "/tmp/ipykernel_1/7.py"
LIBRARY = "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py"


def failed(message: str = "bad batch", rank: int = 1, **fields) -> Failure:
    fields.setdefault("frames", [Frame(CELL, 3, "train", "    loss = model(x)", 11, 19)])
    return Failure(rank, "exception", 1.0, host="box", type="ValueError", message=message, **fields)


def shown(error: RankError) -> list[str]:
    """The lines that a notebook shows, without colours."""
    return [re.sub(r"\x1b\[[\d;]*m", "", line) for line in error._render_traceback_()]


# ---- the text


def test_the_cause_comes_first_with_the_cells_own_line():
    error = RankError(failed(), [Failure(0, "stopped", 2.0)], "/runs/one")
    assert shown(error) == [
        "RankError: rank 1 raised ValueError: bad batch",
        "",
        "7.py, line 3, in train",
        "---> 3     loss = model(x)",
        "                  ^^^^^^^^",
        "ValueError: bad batch",
        "",
        "rank 0 was stopped",
        "log: /runs/one/rank-1.log",
    ]


def test_the_text_says_the_same_without_colours():
    error = RankError(failed(), [Failure(0, "stopped", 2.0)], "/runs/one")
    assert str(error).splitlines() == [
        "rank 1 raised ValueError: bad batch",
        *shown(error)[1:-1],
        "(log: /runs/one/rank-1.log)",
    ]
    assert "\x1b" not in str(error)


def test_only_the_notebook_gets_colours():
    lines = RankError(failed())._render_traceback_()
    assert any("\x1b[32m---> 3" in line for line in lines)
    assert any("\x1b[31m" in line and "^^^^" in line for line in lines)


@pytest.mark.parametrize(
    ("failure", "headline"),
    [
        (failed(), "rank 1 raised ValueError: bad batch"),
        (failed(""), "rank 1 raised ValueError"),
        (failed("first line\nsecond line"), "rank 1 raised ValueError: first line"),
        (Failure(0, "signal", 1.0, message="was killed by SIGSEGV (segmentation fault)", code=11),
         "rank 0 was killed by SIGSEGV (segmentation fault)"),
        (Failure(2, "exit", 1.0, message="exited with code 3 before it returned", code=3),
         "rank 2 exited with code 3 before it returned"),
        (Failure(2, "exit", 1.0, type="SystemExit", message="sys.exit(2) was called before it returned", code=2),
         "rank 2 exited with code 2: sys.exit(2) was called before it returned"),
        (Failure(0, "collective", 1.0, message="the ranks' collectives do not fit"),
         "rank 0: the ranks' collectives do not fit"),
        (Failure(0, "memory", 1.0, message="the system ran out of memory and killed it (SIGKILL)", code=9),
         "rank 0 the system ran out of memory and killed it (SIGKILL)"),
    ],
)  # fmt: skip
def test_a_headline_is_one_line(failure, headline):
    assert RankError(failure).headline == headline


def test_what_followed_is_a_line_a_rank():
    others = [
        failed("gloo says: connection closed", 3, symptom=True),
        failed("first\nsecond", 2),
        Failure(0, "stopped", 2.0, frames=[Frame(CELL, 9, "step", "  loss.backward()")]),
        Failure(4, "signal", 2.0, message="was killed by SIGKILL (killed)", code=9),
    ]
    lines = shown(RankError(failed(), others))
    assert lines[-4:] == [
        "rank 0 was stopped in step, line 9: loss.backward()",
        "rank 2 raised ValueError in train, line 3: loss = model(x): first",
        "rank 3 lost its peers in train, line 3: loss = model(x)",
        "rank 4 was killed by SIGKILL: was killed by SIGKILL (killed)",
    ]


def test_of_many_ranks_a_few_are_shown():
    lines = shown(RankError(failed(), [Failure(rank, "stopped", 2.0) for rank in range(2, 64)]))
    assert lines[-1] == "... and 54 more"


def test_a_rank_that_died_without_words_shows_its_last_lines():
    died = Failure(0, "exit", 1.0, message="exited with code 3 before it returned", code=3, output=["loading", "oops"])
    assert shown(RankError(died))[1:] == ["", "its last lines:", "  loading", "  oops"]


def test_the_beginning_of_a_chain_is_named():
    chain = (
        "Traceback (most recent call last):\n  ...\nKeyError: 'label'\n\nThe above exception was the direct cause of "
        "the following exception:\n\nTraceback (most recent call last):\n  ...\nValueError: bad batch\n"
    )
    assert "which came from KeyError: 'label'" in shown(RankError(failed(text=chain)))


def test_a_long_message_hides_neither_the_line_nor_the_other_ranks():
    message = "\n".join(f"size mismatch for layer {number}" for number in range(500))
    lines = shown(RankError(failed(message), [Failure(0, "stopped", 2.0)], "/runs/one"))
    assert len(lines) == 40
    assert lines[0] == "RankError: rank 1 raised ValueError: size mismatch for layer 0"
    assert "---> 3     loss = model(x)" in lines
    assert any("lines left out, see the log" in line for line in lines)
    assert lines[-2:] == ["rank 0 was stopped", "log: /runs/one/rank-1.log"]


def test_a_line_without_end_is_cut():
    lines = shown(RankError(failed("x" * 1_000_000)))
    assert max(map(len, lines)) < 1100
    assert "characters)" in lines[0]


words = st.from_regex(r"[A-Za-z_.]{0,10}", fullmatch=True)
frames = st.builds(
    Frame,
    filename=st.sampled_from([CELL, LIBRARY]),
    lineno=st.integers(1, 999),
    name=words,
    line=st.text(max_size=80),
    colno=st.integers(-1, 90),
    end_colno=st.integers(-1, 90),
)
kinds = st.sampled_from(["exception", "signal", "exit", "memory", "stopped", "collective"])
anything = st.builds(
    Failure,
    rank=st.integers(0, 99),
    kind=kinds,
    time=st.floats(0, 9),
    type=words,
    message=st.text(max_size=200) | st.just("long\n" * 100),
    text=st.text(max_size=50),
    frames=st.lists(frames, max_size=12),
    code=st.integers(-5, 300),
    symptom=st.booleans(),
    output=st.lists(st.text(max_size=30), max_size=15),
)


@settings(max_examples=40)
@given(anything, st.lists(anything, max_size=12), st.sampled_from(["", "/runs/one"]))
def test_whatever_went_wrong_takes_40_lines_at_most(cause, others, folder):
    error = RankError(cause, others, folder)
    assert len(shown(error)) <= 40
    assert len(str(error).split("\n")) <= 40
    assert "\n" not in error.headline
    assert str(error).startswith(error.headline[:900])


# ---- the caret


def raised_by(source: str) -> Failure:
    """What a rank says of an exception that this source raises, in a cell of its own."""
    import linecache

    linecache.cache[CELL] = (len(source), None, source.splitlines(keepends=True), CELL)
    try:
        exec(compile(source, CELL, "exec"), {})
    except Exception as error:
        while error.__traceback__.tb_frame.f_code.co_filename != CELL:
            error.__traceback__ = error.__traceback__.tb_next
        return rank_failure.describe(error, 0, "id", {})
    raise AssertionError("it raised nothing")


def width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def under_caret(lines: list[str]) -> str:
    """The part of the source line that stands above the carets, as a terminal shows it."""
    at = max(index for index, line in enumerate(lines) if line.startswith("---> "))
    source, carets = lines[at], lines[at + 1]
    assert set(carets.strip()) == {"^"}
    start, end = len(carets) - len(carets.lstrip()), len(carets)
    columns, marked = 0, ""
    for character in source:
        if start <= columns < end:
            marked += character
        columns += 8 - columns % 8 if character == "\t" else width(character)
    return marked


@pytest.mark.parametrize(
    ("source", "expression"),
    [
        ("x = {}\ny = 1 + x['a'] + 2\n", "x['a']"),
        ("def f(x):\n    return 1 + x.nix\nf(3)\n", "x.nix"),
        ("def f(x):\n\treturn 1 + x.nix\nf(3)\n", "x.nix"),
        ("größe = {}\nä = 1 + größe['ü'] + 2\n", "größe['ü']"),
        ("d = {}\ny = 'ééé' + d['é'] + 'é'\n", "d['é']"),
        ("d = {}\ny = '你好' + d['键'] + '好'\n", "d['键']"),
        ("d = {}\ny\t=\td['a']\t+ 1\n", "d['a']"),
    ],
    ids=["plain", "spaces", "tab", "umlauts", "accents", "wide", "tab inside"],
)
def test_the_caret_is_under_the_expression_that_failed(source, expression):
    assert under_caret(shown(RankError(raised_by(source)))) == expression


def test_a_line_without_positions_has_no_caret():
    lines = shown(RankError(failed(frames=[Frame(CELL, 3, "train", "    loss = model(x)")])))
    assert not any("^" in line for line in lines)


# ---- the exceptions


@pytest.mark.parametrize("kind", [ConfigError, PayloadError, ResultError, AgentError, RankError])
def test_all_are_errors_of_nblaunch(kind):
    assert issubclass(kind, NblaunchError)


def test_what_is_known_of_a_failure_is_at_hand():
    error = RankError(Failure(3, "signal", 1.0, host="box", message="was killed", code=11), folder="/runs/one")
    assert (error.rank, error.host, error.kind, error.signal, error.exit_code) == (3, "box", "signal", "SIGSEGV", None)
    assert error.log == "/runs/one/rank-3.log"
    assert RankError(Failure(0, "exit", 1.0, code=3)).exit_code == 3
    assert RankError(Failure(0, "memory", 1.0, code=9)).signal == "SIGKILL"
    assert errors.signal_name(250) == "signal 250"


def test_an_error_survives_pickling():
    error = RankError(failed(), [Failure(0, "stopped", 2.0)], "/runs/one")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.log, again.rank, again.failure) == (error.log, error.rank, error.failure)


def test_python_prints_it_with_the_ranks_own_exception():
    error = RankError(failed())
    error.__cause__ = ValueError("bad batch")
    text = "".join(traceback.format_exception(error))
    assert text.startswith("ValueError: bad batch\n\nThe above exception was the direct cause")
    assert "nblaunch.errors.RankError: rank 1 raised ValueError: bad batch" in text
