"""What goes to the ranks and what comes home."""

from __future__ import annotations

from tests.acts.notebook import saw


def test_a_function_uses_other_cells_and_every_rank_returns(notebook):
    notebook.run("import math\ndef area(r):\n    return math.pi * r * r").ok()
    notebook.run("class Disc:\n    def __init__(self, r):\n        self.area = area(r)").ok()
    notebook.run("def train(r):\n    return int(os.environ['RANK']), round(Disc(r).area, 3)").ok()
    notebook.run("run = notebook_launcher(train, (2,), num_processes=2)").ok()
    assert notebook.evaluate("run.results") == [(0, 12.566), (1, 12.566)]
    assert notebook.evaluate("run.result") == (0, 12.566)


def test_large_returns(notebook):
    code = """
    import torch
    def big(n): return torch.full((n,), float(os.environ['RANK']))
    sizes = [[r.numel() for r in notebook_launcher(big, (n,), num_processes=2).results] for n in (50_000, 12_500_000)]
    values = [r[0].item() for r in last_run().results]
    """
    notebook.run("\n".join(line[4:] for line in code.splitlines())).ok()
    assert notebook.evaluate("sizes") == [[50_000, 50_000], [12_500_000, 12_500_000]]
    assert notebook.evaluate("values") == [0.0, 1.0]


def test_a_lock_as_return_value_names_itself_and_the_kernel_goes_on(notebook):
    code = """
import threading
def returns_lock():
    log(loss=1.5)
    print("was here")
    return {"model": 1, "lock": threading.Lock()}
notebook_launcher(returns_lock, num_processes=2)
"""
    cell = notebook.run(code)
    assert cell.error == "ResultError"
    assert "['lock']" in cell.traceback and "_thread.lock" in cell.traceback
    saw("ResultError", cell.seconds, 10)
    assert notebook.evaluate("last_run().metrics.values('loss')") == [1.5, 1.5]
    assert "was here" in notebook.evaluate("last_run().logs(1)")
    assert notebook.run("notebook_launcher(lambda: 7, num_processes=2).results").ok().result == "[7, 7]"


def test_an_instance_of_a_cells_class_comes_home_as_one_and_changes_nothing(notebook):
    notebook.run("class Point:\n    made = 0\n    def __init__(self, x): self.x = x\nlimit = 5").ok()
    notebook.run(
        "def move():\n    global limit\n    limit = 99\n    Point.made = 42\n    return Point(3), Point, move\n"
        "run = notebook_launcher(move, num_processes=2)\npoint, kind, function = run.results[1]"
    ).ok()
    assert notebook.evaluate("[isinstance(point, Point), kind is Point, function is move, point.x]") == [
        True,
        True,
        True,
        3,
    ]
    assert notebook.evaluate("(Point.made, limit)") == (0, 5)


def test_an_exception_class_from_a_cell_can_be_caught(notebook):
    notebook.run(
        "class BadLabel(Exception):\n    def __init__(self, label): super().__init__(label); self.label = label"
    ).ok()
    cell = notebook.run("""
def check():
    if os.environ["RANK"] == "1":
        raise BadLabel(11)
    time.sleep(30)
try:
    notebook_launcher(check, num_processes=2)
except nblaunch.RankError as error:
    print(error.rank, type(error.__cause__) is BadLabel, error.__cause__.label)
""")
    assert "1 True 11" in cell.ok().stdout


def test_pickle_and_getsource_of_a_cells_class_in_a_rank(notebook):
    notebook.run("class Net:\n    depth = 3  # three layers").ok()
    cell = notebook.run("""
def look():
    import pickle, inspect
    return pickle.loads(pickle.dumps(Net())).depth, inspect.getsource(Net), inspect.getsource(look).splitlines()[0]
notebook_launcher(look, num_processes=1).result
""")
    assert "three layers" in cell.ok().result and "def look():" in cell.result


def test_dataloader_workers_of_every_kind_have_the_cells_classes(notebook):
    notebook.run("""
import torch, collections
from torch.utils.data import Dataset, DataLoader
Pair = collections.namedtuple("Pair", "x y")
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return Pair(torch.tensor(i), torch.tensor(i * i))
def collate(rows): return Pair(torch.stack([r.x for r in rows]), torch.stack([r.y for r in rows]))
def load(method):
    loader = DataLoader(Squares(), 4, num_workers=1, collate_fn=collate, multiprocessing_context=method)
    return [(type(b).__name__, b.y.tolist()) for b in loader]
""").ok()
    for method in (None, "fork", "spawn", "forkserver"):
        cell = notebook.run(f"notebook_launcher(load, ({method!r},), num_processes=1).result", timeout=120)
        assert cell.ok().result == "[('Pair', [0, 1, 4, 9]), ('Pair', [16, 25, 36, 49])]", method


def test_torch_compile_in_a_rank(notebook):
    cell = notebook.run("""
import torch
def double(x): return x * 2
def compiled(): return torch.compile(double, backend="eager")(torch.ones(3)).tolist()
notebook_launcher(compiled, num_processes=2).results
""")
    assert cell.ok().result == "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]"
