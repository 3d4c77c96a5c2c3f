"""Real runs on a real page: what a person sees while a cell runs, presses Stop, or reads an error."""

import re

import nbformat
from nbconvert import HTMLExporter

from tests.browser.conftest import ROOT

TRAIN = """import math, random, time, warnings
import nblaunch

def train(epochs=2, batches=60, rank_that_fails=None):
    import os
    rank, step = int(os.environ["RANK"]), 0
    rng = random.Random(rank)
    for epoch in nblaunch.progress(range(epochs), desc="epoch"):
        for batch in nblaunch.progress(range(batches), desc="batch"):
            time.sleep(0.04)
            loss = 2 * math.exp(-step / 50) + 0.1 * rng.random()
            accuracy = 92 - 60 * math.exp(-step / 40) + rng.random()
            nblaunch.log({"train/loss": loss, "accuracy": accuracy}, step=step)
            step += 1
            if rank == rank_that_fails and step == 70:
                raise ValueError("label 11 is out of range")
        if rank == 0:
            nblaunch.log({"val/loss": 2.2 * math.exp(-step / 50) + 0.1}, step=step)
        print("epoch", epoch, "done")
    return step
"""
BLOCKING = "run = nblaunch.notebook_launcher(train, num_processes=2, devices='cpu')"


def number_in(text: str) -> int:
    return int(re.search(r"(\d+)/", text)[1])


def test_a_blocking_cell_is_shown_live_in_the_page_theme_and_leaves_a_snapshot(lab):
    lab.open("live.ipynb", TRAIN, BLOCKING).run(0).idle().run(1)
    page = lab.page
    row = page.locator(".nbl-ranks tbody tr").nth(1)
    row.locator(".nbl-bar").nth(1).wait_for()
    seen = number_in(row.locator(".nbl-label").nth(1).inner_text())
    page.wait_for_function(
        "n => +document.querySelectorAll('.nbl-label')[1].textContent.match(/(\\d+)\\//)[1] > n", arg=seen
    )
    assert "[*]" in page.locator(".jp-Notebook").inner_text(), "the cell still blocks"
    page.locator(".nbl-chart").nth(1).wait_for()
    page.locator(".nbl-log", has_text="epoch 0 done").wait_for()
    page.locator(".nbl-chart", has_text="val").wait_for()
    for name, least, most in (("JupyterLab Dark", 0, 40), ("JupyterLab Light", 240, 255)):
        lab.theme(name)
        background = "getComputedStyle(document.querySelector('.nbl')).backgroundColor.match(/\\d+/g)[0]"
        assert least <= int(page.evaluate(background)) <= most
        lab.shot(f"live-2-{name.split()[1].lower()}")
    lab.idle()
    page.wait_for_selector(".nblaunch-snapshot")
    assert page.locator(".nbl").count() == 0
    page.wait_for_selector(".jp-OutputArea-output img")
    assert "Done" in page.locator(".nblaunch-snapshot").inner_text()


def test_stop_ends_a_run_that_is_awaited(lab):
    lab.open(
        "stop.ipynb",
        TRAIN,
        "run = nblaunch.notebook_launcher(train, (50,), block=False, devices='cpu')\nawait run",
    )
    lab.run(0).idle().run(1)
    lab.page.locator(".nbl[data-status=running] .nbl-stop").click()
    lab.idle()
    lab.page.wait_for_selector(".nblaunch-snapshot")
    assert "Stopped" in lab.page.locator(".nblaunch-snapshot").inner_text()


def test_stop_says_to_interrupt_where_the_kernel_is_busy(lab):
    lab.open("busy.ipynb", TRAIN, BLOCKING).run(0).idle().run(1)
    button = lab.page.locator(".nbl[data-status=running] .nbl-stop")
    button.click()
    lab.page.wait_for_function(
        "() => { const b = document.querySelector('.nbl-stop');"
        " return !b || /interrupt the kernel/.test(b.textContent) || /Stopping/.test(b.textContent); }"
    )
    lab.page.wait_for_function(
        "() => { const n = document.querySelector('.nbl'); return !n || n.dataset.status === 'stopping' ||"
        " /interrupt the kernel/.test(n.querySelector('.nbl-stop').textContent); }"
    )
    lab.command("notebook:interrupt-kernel")
    lab.idle()
    assert "KeyboardInterrupt" in lab.page.locator(".jp-Notebook").inner_text()


def test_a_failure_shows_the_cause_and_the_line_of_the_cell(lab):
    lab.open(
        "failure.ipynb",
        TRAIN,
        "nblaunch.notebook_launcher(train, (2, 60, 1), num_processes=2, devices='cpu')",
    )
    lab.run(0).idle().run(1).idle()
    lab.page.wait_for_selector(".nblaunch-snapshot")
    text = lab.page.locator(".nblaunch-snapshot").inner_text()
    assert "Rank 1 raised ValueError" in text
    assert 'raise ValueError("label 11 is out of range")' in text
    line = next(i for i, source in enumerate(TRAIN.splitlines(), 1) if "raise" in source)
    assert f"Cell In[1], line {line}, in train" in text
    assert text.index("Rank 1 raised ValueError") < text.index("device")
    lab.shot("failure-snapshot-light", ".nblaunch-snapshot")


def test_a_saved_notebook_shows_the_run_without_a_kernel(lab):
    lab.open("saved.ipynb", TRAIN, BLOCKING + "\nrun").run(0).idle().run(1).idle()
    lab.page.wait_for_selector(".jp-OutputArea-output img")
    saved = lab.save()
    outputs = [output for output in saved.cells[1].outputs if output.output_type == "display_data"]
    assert [set(output.data) for output in outputs] == [
        {"text/html", "text/plain"},
        {"image/png", "text/plain"},
    ]
    assert sum(len(str(output.data)) for output in outputs) < 150_000
    assert "widget" not in str(saved), "nothing that needs a kernel is left"
    converted, _ = HTMLExporter().from_notebook_node(saved)
    assert "Both ranks returned" in converted
    assert outputs[1].data["image/png"][:200] in converted
    lab.command("notebook:shutdown-kernel")
    lab.reopen("saved.ipynb")
    lab.page.wait_for_selector(".jp-OutputArea-output img")
    assert "Done" in lab.page.locator(".jp-Notebook").inner_text()
    lab.shot("saved-light", ".jp-OutputArea:has(img)")


def test_what_a_rank_says_is_never_markup(lab):
    attack = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
    cell = f"""
import time, nblaunch
from IPython.display import display, HTML
attack = {attack!r}
def train():
    import os
    for i in nblaunch.progress(range(60), desc=attack):
        nblaunch.log({{attack: float(i)}}, step=i)
        print(attack + str(i // 20), "\\x1b[31mred\\x1b[0m")
        time.sleep(0.05)
    if os.environ["RANK"] == "1":
        display(HTML(attack))
        raise ValueError(attack)
nblaunch.notebook_launcher(train, num_processes=2, devices="cpu", name=attack)
"""
    lab.open("attack.ipynb", cell).run(0)
    page = lab.page
    page.locator(".nbl-log", has_text=attack).wait_for()
    page.locator(".nbl-chart").first.hover()
    assert page.locator(".nbl img, .nbl script").count() == 0
    lab.shot("attack-light")
    lab.idle()
    page.wait_for_selector(".nblaunch-snapshot")
    assert page.locator(".nblaunch-snapshot img, .nblaunch-snapshot script").count() == 0
    assert attack in page.locator(".nblaunch-snapshot").inner_text()
    assert page.evaluate("window.hacked") is None


def test_a_second_display_of_a_run_shows_its_present_state(lab):
    second = "from nblaunch.dashboard import open_view\nopen_view(run.state, 'widget', run.request_stop).start()"
    lab.open(
        "twice.ipynb",
        TRAIN,
        "run = nblaunch.notebook_launcher(train, (4,), block=False, devices='cpu')",
        second,
    )
    lab.run(0).idle().run(1).idle()
    page = lab.page
    page.locator(".nbl-log", has_text="epoch 0 done").wait_for()
    lab.run(2).idle()
    other = page.locator(".nbl").nth(1)
    other.locator(".nbl-log", has_text="epoch 0 done").wait_for()
    points = "(n) => n.querySelector('.nbl-line').getAttribute('d').split('L').length"
    drawn = page.evaluate(f"() => [...document.querySelectorAll('.nbl')].map({points})")
    assert drawn[0] == drawn[1] > 20, "both draw the whole curve"
    page.wait_for_function("() => document.querySelectorAll('.nblaunch-snapshot').length === 2", timeout=60_000)


def test_the_notebook_of_the_dashboard_on_a_page(lab):
    """Also makes the pictures of the README: `cp tests/browser/shots/readme-*.png docs/`."""
    notebook = nbformat.read(ROOT / "notebooks" / "04_dashboard.ipynb", as_version=4)
    function = next(cell.source for cell in notebook.cells if "def train" in cell.source)
    launch = "notebook_launcher(train, (5,), kwargs={}, num_processes=4, devices='cpu')"
    slow, failing = launch.format("{'slow_rank': 2}"), launch.format("{'fail_at': (1, 40)}")
    lab.open("pictures.ipynb", function, slow, failing).run(0).idle().run(1)
    page = lab.page
    page.set_viewport_size({"width": 1100, "height": 1000})
    page.locator(".nbl-foot", has_text="Rank 2 waits").wait_for(timeout=60_000)
    page.locator(".nbl-log", has_text="epoch 2").wait_for(timeout=60_000)
    lab.shot("readme-running")
    lab.idle().run(2).idle()
    page.set_viewport_size({"width": 1100, "height": 1500})
    page.wait_for_selector(".nblaunch-snapshot >> text=Rank 1 raised ValueError")
    lab.shot("readme-failed", ".jp-OutputArea:has(.nblaunch-snapshot b:has-text('Rank 1'))")
