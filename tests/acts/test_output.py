"""What ranks write, show and log: whole, in its place, at a rate that a page can take."""

from __future__ import annotations

import re


def test_numbered_lines_of_four_ranks_are_whole(notebook):
    cell = notebook.run("""
def count():
    for i in range(200): print(f"rank {os.environ['RANK']} line {i:03d} ü", flush=i % 7 == 0)
notebook_launcher(count, num_processes=4)
""")
    shown = re.findall(r"^rank (\d) line (\d{3}) ü$", cell.ok().stdout, re.MULTILINE)
    assert shown == [("0", f"{i:03d}") for i in range(200)]
    for rank in range(4):
        lines = notebook.evaluate(f"last_run().logs({rank})").splitlines()
        assert lines == [f"rank {rank} line {i:03d} ü" for i in range(200)]


def test_stderr_is_prefixed_and_equal_lines_are_shown_once(notebook):
    cell = notebook.run("""
def warn():
    print("the same", file=sys.stderr)
    print("only", os.environ["RANK"], file=sys.stderr)
    os.write(2, b"from C\\n")
    time.sleep(0.3)
notebook_launcher(warn, num_processes=2)
""")
    assert cell.ok().stderr.count("the same") == 1 and "[ranks 0, 1] the same" in cell.stderr
    assert "[rank 0] only 0" in cell.stderr and "[rank 1] only 1" in cell.stderr
    assert "[ranks 0, 1] from C" in cell.stderr


def test_lines_before_a_kill_are_there_c_level_too(notebook):
    notebook.run("""
def die():
    import ctypes
    print("python's last line")
    ctypes.CDLL(None).puts(b"C's last line")
    os.kill(os.getpid(), 9)
try: notebook_launcher(die, num_processes=1)
except nblaunch.RankError: pass
""").ok()
    assert notebook.evaluate("last_run().logs(0)").splitlines() == ["python's last line", "C's last line"]


def test_a_flood_neither_blocks_nor_floods(notebook):
    cell = notebook.run("""
def flood():
    began = time.time()
    for i in range(100_000): print("line", i)
    return time.time() - began
run = notebook_launcher(flood, num_processes=2)
""")
    shown = cell.ok().stdout.splitlines()
    assert len(shown) < 10_000 and "line 99999" in shown
    assert any("lines of rank 0 are in its log alone" in line for line in shown)
    assert notebook.evaluate("len(run.logs(1).splitlines())") == 100_000
    print("100,000 lines took", notebook.evaluate("run.results"))


def test_carriage_returns_replace(notebook):
    notebook.run("""
def bar():
    for i in range(5): sys.stdout.write(f"\\r{i}/4"); sys.stdout.flush()
    print()
notebook_launcher(bar, num_processes=1)
""").ok()
    assert notebook.evaluate("last_run().logs(0)") == "4/4\n"


def test_tqdm_of_every_flavour_is_a_bar_of_the_rank(notebook):
    notebook.run("""
def bars():
    from tqdm import tqdm
    from tqdm.auto import tqdm as auto, trange
    from tqdm.notebook import tqdm as fancy
    for kind in (tqdm, auto, fancy):
        for _ in kind(range(50), desc=kind.__module__): time.sleep(0.001)
    for _ in nblaunch.progress(range(7), desc="own"): pass
    for _ in trange(3): pass
run = notebook_launcher(bars, num_processes=2)
""").ok()
    bars = notebook.evaluate("[(b.description, b.n, b.total) for b in run.state.ranks[1].bars]")
    assert ("own", 7, 7) in bars and ("", 3, 3) in bars
    assert notebook.evaluate("run.logs(0)") == ""


def test_a_tqdm_auto_bar_shows_50_of_50(notebook):
    cell = notebook.run("""
def bar():
    from tqdm.auto import tqdm
    for _ in tqdm(range(50), desc="epoch"): time.sleep(0.01)
notebook_launcher(bar, num_processes=2)
""")
    assert "50/50" in cell.ok().stdout + str(cell.displays)


def test_metrics_come_home_from_every_rank(notebook):
    notebook.run("""
import torch
def train():
    rank = int(os.environ["RANK"])
    for step in range(100):
        log(loss=torch.tensor(1.0 / (step + 1)), acc=step, step=step)
    log({"eval/loss": 0.5 + rank})
run = notebook_launcher(train, num_processes=2)
""").ok()
    assert notebook.evaluate("len(run.metrics)") == 402
    assert notebook.evaluate("run.metrics.values('eval/loss', rank=1)") == [1.5]
    assert notebook.evaluate("run.metrics.to_pandas().groupby('name').value.max().to_dict()") == {
        "acc": 99.0,
        "eval/loss": 1.5,
        "loss": 1.0,
    }
    assert notebook.run("run.plot('loss').savefig('loss.png')").ok()
    assert (notebook.folder / "loss.png").stat().st_size > 1000
    assert notebook.evaluate("nblaunch.load_run(run.path).metrics.values('acc')[-1]") == 99.0


def test_what_cannot_be_logged_is_an_error_that_says_so(notebook):
    cell = notebook.run("def bad():\n    log(name='text')\nnotebook_launcher(bad, num_processes=1)")
    assert "log(name=...) got str 'text', expected a number" in cell.traceback


def test_display_and_figures_of_rank_0_show_in_the_cell(notebook):
    cell = notebook.run("""
def show():
    import matplotlib.pyplot as plt
    class Table:
        def _repr_html_(self): return f"<b>rank {os.environ['RANK']}</b>"
    display(Table())
    plt.plot([1, 2]); plt.show()
notebook_launcher(show, num_processes=2)
""")
    cell.ok()
    assert any(data.get("text/html") == "<b>rank 0</b>" for data in cell.displays)
    assert not any(data.get("text/html") == "<b>rank 1</b>" for data in cell.displays)
    assert any("image/png" in data and "Figure" in data["text/plain"] for data in cell.displays)
