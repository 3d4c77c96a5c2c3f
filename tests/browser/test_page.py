"""What the page shows of a run in every state and size; the pictures are in shots/ for people to look at."""

import base64

import pytest

from nblaunch.dashboard.curves import CAPACITY
from nblaunch.wire.messages import Display, Notice
from tests.browser.conftest import keep
from tests.browser.stage import Stage
from tests.dashboard.scripted import RUN, ScriptedRun, metrics


@pytest.fixture
def page(browser):
    opened = browser.new_page(viewport={"width": 1000, "height": 700})
    yield opened
    opened.close()


def played(ranks: int, state: str = "running") -> ScriptedRun:
    run = ScriptedRun(ranks, late=5, cpu=ranks == 2).start().advance(30, tick=0.25 if ranks < 64 else 1).talk()
    if state == "failed":
        return run.fail()
    return run.finish() if state == "done" else run


@pytest.mark.parametrize("state", ["running", "failed", "done"])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_every_state_in_both_themes(page, ranks, state):
    stage = Stage(page, played(ranks, state))
    assert stage.text(".nbl-word").lower() == state
    assert page.locator(".nbl-chart").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    for theme in ("light", "dark"):
        stage.theme(theme)
        keep(f"{ranks}-{state}-{theme}", page.locator(".nbl").screenshot())


def test_eight_ranks_fit_a_laptop_screen(page):
    Stage(page, played(8))
    assert page.locator(".nbl-ranks").bounding_box()["height"] < 400
    assert page.locator(".nbl").bounding_box()["height"] < 760


@pytest.mark.parametrize(("ranks", "state"), [(8, "running"), (64, "failed")])
def test_it_holds_at_400_px(page, ranks, state):
    page.set_viewport_size({"width": 400, "height": 800})
    Stage(page, played(ranks, state))
    keep(f"{ranks}-{state}-400px", page.locator(".nbl").screenshot())
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    clipped = page.evaluate(
        "() => [...document.querySelectorAll('.nbl-ranks tbody :is(td, th, .nbl-right), .nbl-head > *')]"
        ".filter((n) => n.offsetParent && n.getBoundingClientRect().right > 389).length"
    )
    assert clipped == 0


def test_it_prints_whole(page):
    run = played(8)
    for i in range(60):
        run.write(0, f"line {i}")
    Stage(page, run)
    page.emulate_media(media="print")
    keep("8-running-print", page.locator(".nbl").screenshot())
    assert page.locator(".nbl-stop").is_hidden()
    assert (
        page.evaluate("() => { const l = document.querySelector('.nbl-log'); return l.scrollHeight - l.clientHeight; }")
        <= 1
    )


def test_rows_and_curves_follow_the_frames(page):
    run = ScriptedRun(2).start()
    stage = Stage(page, run)
    run.state.apply(metrics(0, {"loss": [3.0, 2.0]}, 0, run.now))
    stage.push()
    before = stage.path()
    run.state.apply(metrics(0, {"loss": [1.0]}, 2, run.now))
    stage.push()
    assert stage.path() != before
    assert stage.path().count("L") == 2
    assert stage.text(".nbl-now") == "1.000"


def test_a_page_that_merges_buckets_draws_what_a_new_page_would(page, browser):
    run = ScriptedRun(4).start()
    stage = Stage(page, run)
    for first in range(0, 5 * CAPACITY, 100):
        for rank in range(4):
            values = [((first + i) * 37 % 100) / 10 + rank for i in range(100)]
            run.state.apply(metrics(rank, {"loss": values}, first, run.now))
        stage.push()
    late = browser.new_page(viewport={"width": 1000, "height": 700})
    assert Stage(late, run).push(full=True).path() == stage.path()
    late.close()


def test_a_series_that_comes_later_joins_its_chart(page):
    run = ScriptedRun(1).start()
    stage = Stage(page, run)
    run.state.apply(metrics(0, {"train/loss": [3.0, 2.0]}, 0, run.now))
    stage.push()
    assert stage.text(".nbl-title") == "train/loss"
    run.state.apply(metrics(0, {"val/loss": [3.0, 2.5]}, 0, run.now))
    stage.push()
    assert [stage.text(".nbl-title"), page.locator(".nbl-chart").count()] == ["loss", 1]


def test_a_missed_frame_is_asked_for(page):
    run = played(2)
    stage = Stage(page, run)
    run.advance(1)
    stage.writer.delta()
    run.advance(1)
    stage.push()
    assert page.evaluate("sent") == [{"kind": "sync"}]
    stage.push(full=True)
    assert page.evaluate("sent.length") == 1


def test_charts_have_a_readout_ranks_log_and_smoothing(page):
    stage = Stage(page, played(8))
    chart = page.locator(".nbl-chart").first
    chart.locator("svg").hover()
    assert "step" in stage.text(".nbl-readout")
    assert "train" in stage.text(".nbl-readout")
    chart.locator("svg").click()
    assert chart.locator(".nbl-own").count() == 8, "of the training loss; the validation is rank 0's alone"
    assert "rank" in stage.text(".nbl-readout")
    ticks = chart.locator("svg text").all_inner_texts()
    chart.get_by_role("button", name="log").click()
    assert chart.locator("svg text").all_inner_texts() != ticks
    rough = stage.path()
    chart.get_by_role("button", name="smooth").click()
    assert chart.locator(".nbl-faint").count() == 2
    assert stage.path() == rough, "what was logged stays, faint"
    chart.locator("svg").hover()
    keep("chart-options", chart.screenshot())


def test_the_keyboard_reaches_everything(page):
    stage = Stage(page, played(64))
    seen = []
    for _ in range(30):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("() => document.activeElement.className.baseVal ?? document.activeElement.className"))
    assert any("nbl-stop" in name for name in seen)
    assert any("nbl-plot" in name for name in seen)
    assert any("nbl-log" in name for name in seen)
    page.locator(".nbl-cells button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert stage.text(".nbl-ranks tbody tr:last-child th b") == "1"
    page.locator(".nbl-plot").first.focus()
    page.keyboard.press("End")
    last = stage.text(".nbl-readout")
    page.keyboard.press("ArrowLeft")
    assert stage.text(".nbl-readout") != last
    keep("64-keyboard", page.locator(".nbl").screenshot())


def test_tabs_are_moved_through_with_arrows(page):
    run = played(2)
    run.write(1, "only rank 1 says this")
    stage = Stage(page, run)
    page.get_by_role("tab", name="all").focus()
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("tab", name="rank 1").get_attribute("aria-selected") == "true"
    assert "epoch 1" not in stage.text(".nbl-log")
    assert "only rank 1 says this" in stage.text(".nbl-log")


def test_output_follows_unless_scrolled_up(page):
    run = played(2)
    stage = Stage(page, run)
    for i in range(30):
        run.write(0, f"line {i}")
    stage.push()
    log = "document.querySelector('.nbl-log')"
    bottom = f"() => {log}.scrollHeight - {log}.scrollTop - {log}.clientHeight"
    assert page.evaluate(bottom) < 2
    page.evaluate(f"() => {{ {log}.scrollTop = 0; }}")
    page.wait_for_selector(".nbl-newest:visible")
    run.write(0, "newest of all")
    stage.push()
    assert page.evaluate(bottom) > 50
    page.locator(".nbl-newest").click()
    assert page.evaluate(bottom) < 2


def test_ansi_colours_and_unknown_escapes(page):
    run = ScriptedRun(1).start()
    run.write(
        0,
        "\x1b[1;31mbold red\x1b[0m \x1b[38;5;46mgreen\x1b[39m "
        "\x1b[38;2;1;2;3mrgb\x1b[m \x1b[2Kplain \x1b]0;title\x07end",
    )
    stage = Stage(page, run)
    assert stage.text(".nbl-log") == "[rank 0] bold red green rgb plain end"
    colours = page.evaluate(
        "() => [...document.querySelectorAll('.nbl-log div > span')].slice(1).map((n) => n.style.color)"
    )
    assert colours == ["var(--nbl-red)", "rgb(0, 255, 0)", "rgb(1, 2, 3)"]


def test_the_failed_rank_is_opened(page):
    stage = Stage(page, played(8, "failed"))
    assert page.get_by_role("tab", name="rank 1").get_attribute("aria-selected") == "true"
    assert stage.text(".nbl-cause b") == "Rank 1 raised ValueError"
    assert "raise ValueError" in stage.text(".nbl-here:has-text('raise')")


def test_displays_of_other_ranks_are_a_click_away_and_can_run_nothing(page):
    run = played(2)
    attack = "<script>parent.hacked = 1</script><b onmouseover='parent.hacked = 1'>hello</b>"
    run.state.apply(Display(rank=1, data={"text/html": attack, "text/plain": "hello"}))
    run.state.apply(
        Display(rank=1, data={"image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg' onload='hacked=1'/>"})
    )
    run.state.apply(Notice(text="<b>folder</b> is full", level="warning"))
    Stage(page, run)
    assert page.locator(".nbl-display").count() == 0
    page.locator(".nbl-displays summary").click()
    page.wait_for_selector(".nbl-display iframe")
    assert page.locator(".nbl-display iframe").get_attribute("sandbox") == ""
    assert page.locator(".nbl-notices").inner_text() == "<b>folder</b> is full"
    assert page.evaluate("window.hacked") is None
    assert RUN


def test_a_rank_without_a_sign_is_marked_in_words(page):
    run = played(8)
    run.now += 7
    for rank in range(7):
        run.state.apply(run._progress(rank))
    stage = Stage(page, run)
    row = page.locator(".nbl-ranks tbody tr").nth(7)
    assert "no sign for 7.0 s" in row.inner_text()
    assert "nbl-silent" in row.get_attribute("class")
    keep("8-silent", page.locator(".nbl").screenshot())
    assert "No sign from rank 7" in stage.text(".nbl-foot")


def test_sixty_four_ranks_are_drawn_quickly(page):
    run = played(64)
    stage = Stage(page, run)
    run.advance(0.25)
    frame, curves = stage.writer.delta()
    took = page.evaluate(
        "([f, c]) => { const t = performance.now(); push(f, c); return performance.now() - t; }",
        [frame, base64.b64encode(curves).decode()],
    )
    print(f"a frame of 64 ranks is taken in {took:.1f} ms")
    assert page.locator(".nbl-cells button").count() == 64
