"""What stays in a saved notebook: complete, escaped, small."""

import re
from html.parser import HTMLParser

import pytest

from nblaunch.config import LaunchConfig
from nblaunch.dashboard import snapshot
from nblaunch.dashboard.state import RunState
from nblaunch.wire.messages import Display, Failure, Finished, Frame, Output
from tests.dashboard.scripted import RUN, ScriptedRun, metrics

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(1)>$x^2$"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(html: str) -> set[str]:
    parser = Tags()
    parser.feed(html)
    assert parser.open == [], "every tag is closed"
    return set(parser.seen)


def test_a_run_that_is_done():
    html = snapshot.html(ScriptedRun(2, cpu=True).start().advance(20).talk().finish().state)
    text = re.sub(r"<[^>]+>", " ", html)
    for part in ("Done", "train", "in 20.0 s", "epoch 5/5", "train/loss", "val/loss", "Both ranks returned"):
        assert part in text
    assert tags(html) <= {
        "div", "p", "b", "code", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre",
    }  # fmt: skip


def test_the_root_cause_stands_first():
    html = snapshot.html(ScriptedRun(4).start().advance(2).fail(2).state)
    assert html.index("Rank 2 raised ValueError") < html.index("<table")
    assert "---&gt; 18     raise ValueError" in html
    assert "What followed on 3 more ranks" in html


def test_what_comes_from_a_rank_is_escaped():
    state = RunState(ATTACK, LaunchConfig())
    state.apply(metrics(0, {ATTACK: [1.0, 2.0]}, 0, 0.0))
    state.apply(Output(run=RUN, rank=0, stream="stderr", lines=[ATTACK]))
    state.apply(Display(rank=1, data={"text/html": ATTACK, "text/plain": ATTACK}))
    state.apply(Display(rank=1, data={"image/png": '"><script>alert(1)</script>'}))
    frame = Frame(filename=ATTACK, lineno=1, name=ATTACK, line=ATTACK)
    cause = Failure(rank=0, kind="exception", time=0.0, type=ATTACK, message=ATTACK, text=ATTACK, frames=[frame])
    state.apply(Finished(run=RUN, status="failed", time=1.0, cause=cause))
    html = snapshot.html(state)
    assert "script" not in tags(html)
    assert html.count("<img") == 1
    assert "onerror=alert" not in re.sub(r"&lt;.*?&gt;", "", html)
    assert snapshot.png(state).startswith(b"\x89PNG"), "a name is never read as mathematics"


def test_one_that_has_not_ended_says_so():
    run = ScriptedRun(2).start().advance(5)
    assert "unfinished" in snapshot.html(run.state)
    assert "unfinished" in snapshot.text(run.state)


@pytest.mark.parametrize("ranks", [2, 64])
def test_it_stays_small_whatever_the_run(ranks):
    run = ScriptedRun(ranks).start().advance(10)
    for i in range(40):
        run.state.apply(metrics(0, {f"metric/{i}": [float(j) for j in range(400)]}, 0, run.now))
        run.write(i % ranks, *[f"{'x' * 500} {i} {j}" for j in range(50)])
        run.state.apply(Display(rank=1, data={"image/png": "A" * 15_000}))
    cause = run.failure()
    cause.text = "frame\n" * 50_000
    run.state.apply(Finished(run=RUN, status="failed", time=run.now, cause=cause))
    html, picture = snapshot.html(run.state), snapshot.png(run.state)
    assert len(html) + len(picture) * 4 / 3 < 150_000
    assert len(picture) > 1_000


def test_a_run_without_metrics_has_no_picture():
    assert snapshot.png(ScriptedRun(2).state) == b""


def test_the_figure_draws_what_is_asked_for():
    state = ScriptedRun(2).start().advance(3).state
    figure = snapshot.figure(state, "train/loss", "accuracy")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["train/loss", "accuracy"]
    assert len(snapshot.figure(state).axes) == 3
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows it without pyplot"
    with pytest.raises(KeyError, match="no metric 'los' was logged; there are: train/loss"):
        snapshot.figure(state, "los")


def test_text_is_plain():
    run = ScriptedRun(2).start().advance(3)
    run.state.apply(metrics(0, {"\x1b[31mred": [1.0]}, 0, run.now))
    assert "\x1b" not in snapshot.text(run.finish().state)
