"""What a failure looks like: the cause first, soon, and the kernel usable."""

from __future__ import annotations

import pytest

from tests.acts.notebook import saw

FAIL = """
def fail(where):
    import torch, torch.distributed as dist
    dist.init_process_group()
    if dist.get_rank() == 1:
        time.sleep(0.2)
        raise ValueError(f"raised at {time.time()}")
    dist.all_reduce(torch.ones(1)) if where == "collective" else time.sleep(30)
def launch(where):
    try:
        notebook_launcher(fail, (where,), num_processes=2)
    finally:
        raised = float(str(sys.exc_info()[1].__cause__).split()[-1])
        print("late by", time.time() - raised)
"""


@pytest.fixture(scope="module", autouse=True)
def functions(notebook):
    notebook.run(FAIL).ok()


@pytest.mark.parametrize("where", ["sleep", "collective"])
def test_one_rank_raises_while_the_other_is_busy(notebook, where):
    for _ in range(3):
        cell = notebook.run(f"launch({where!r})")
        assert cell.error == "RankError"
        late = float(cell.stdout.split("late by")[1].split()[0])
        saw("from the raise to the cell's end", late, 1)
        assert "rank 1 raised ValueError" in cell.traceback
        assert '---> 6     raise ValueError(f"raised at {time.time()}")' in cell.traceback
        assert "Cell In[" in cell.traceback
        assert "Connection closed" not in cell.traceback
        assert len(cell.traceback.splitlines()) <= 41


def test_the_same_launch_fails_ten_times_and_then_another_works(notebook):
    code = """
for _ in range(10):
    try: notebook_launcher(fail, ("collective",), num_processes=2, dashboard="none")
    except nblaunch.RankError as error: print(type(error.__cause__).__name__, error.rank)
"""
    assert notebook.run(code).ok().stdout.split("\n")[:-1] == ["ValueError 1"] * 10
    assert notebook.run("notebook_launcher(lambda: 1, num_processes=2).results").ok().result == "[1, 1]"


DEATHS = {
    "kill": ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "rank 1 was killed by SIGSEGV"),
    "_exit": ("os._exit(3)", "rank 1 exited with code 3"),
    "sys.exit": ("sys.exit(2)", "rank 1 exited with code 2"),
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_names_rank_and_reason(notebook, how):
    act, says = DEATHS[how]
    notebook.run(f"""
def die():
    import torch, torch.distributed as dist
    dist.init_process_group()
    if dist.get_rank() == 1:
        time.sleep(0.1)
        open("died", "w").write(str(time.time()))
        {act}
    dist.all_reduce(torch.ones(1))
""").ok()
    for _ in range(20 if how == "kill" else 3):
        cell = notebook.run('notebook_launcher(die, num_processes=2, dashboard="none")')
        assert cell.error == "RankError" and says in cell.traceback, cell.traceback
        assert "Connection closed by peer" not in cell.traceback.split("rank 0")[0]
    if how == "segfault":
        assert "in die" in cell.traceback and "string_at" in cell.traceback
    late = notebook.evaluate("last_run().state.ended - float(open('died').read())")
    saw(f"from {how} to the run's end", late, 1)


def test_what_cannot_be_sent_is_named_by_its_path(notebook):
    cell = notebook.run("""
import threading
class Dataset:
    def __init__(self): self.lock = threading.Lock()
def make():
    loader = Dataset()
    def train(): return loader
    return train
notebook_launcher(make(), num_processes=2)
""")
    assert cell.error == "PayloadError"
    assert "train -> closure 'loader' -> Dataset.lock" in cell.traceback


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("fail, ('x',), 2, 'bf17'", "mixed_precision='bf17' is unknown"),
        ("fail, ('x',), 0", "num_processes=0"),
        ("fail, ('x',), 2, strategy='magic'", "strategy='magic' is unknown"),
        ("fail, (), 2", "missing a required argument: 'where'"),
        ("fail('x') if False else 3, (), 2", "expected a function"),
        ("fail, ('x',), 2, devices='cuda'", "there is no such device"),
        ("fail, ('x',), 2, worldsize=3", "unknown launch option worldsize"),
    ],
)
def test_arguments_are_checked_before_anything_starts(notebook, arguments, says):
    cell = notebook.run(f"notebook_launcher({arguments})")
    assert cell.error == "ConfigError", cell.traceback
    assert says in cell.traceback


def test_a_busy_port_is_an_error_at_once(notebook):
    cell = notebook.run("""
import socket
taken = socket.socket(); taken.bind(("127.0.0.1", 0)); taken.listen()
port = taken.getsockname()[1]
notebook_launcher(lambda: 1, num_processes=2, use_port=port)
""")
    assert cell.error == "ConfigError" and "can't be used" in cell.traceback
    assert notebook.run("taken.close(); notebook_launcher(lambda: 1, num_processes=2, use_port=port).results").ok()


@pytest.mark.parametrize("call", ["input('name?')", "breakpoint()"])
def test_nothing_can_be_typed_in_a_rank(notebook, call):
    cell = notebook.run(f"def ask():\n    {call}\nnotebook_launcher(ask, num_processes=2)")
    assert cell.error == "RankError"
    assert "nobody can type there" in cell.traceback


def test_magics_in_a_rank_say_why_they_fail(notebook):
    cell = notebook.run("def magic():\n    %timeit 1\nnotebook_launcher(magic, num_processes=1)")
    assert cell.error == "RankError" and "magics" in cell.traceback


def test_a_collective_that_does_not_fit_is_named(notebook):
    cell = notebook.run("""
def uneven():
    import torch.distributed as dist
    from nblaunch.rank import context
    from nblaunch.wire.messages import Collective
    rank = context.current().rank
    context.current().reporter.announce(Collective(rank, 0, "all_gather", [[2 + rank, 3]], ["float32"]))
    time.sleep(30)
notebook_launcher(uneven, num_processes=2)
""")
    assert cell.error == "RankError"
    assert (
        "rank 0: all_gather number 0 of float32[2, 3]; rank 1: all_gather number 0 of float32[3, 3]" in cell.traceback
    )


def test_restarts(notebook):
    cell = notebook.run("""
def flaky():
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
        raise OSError("not yet")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]
notebook_launcher(flaky, num_processes=2, max_restarts=2).results
""")
    assert cell.ok().result == "['2', '2']"
