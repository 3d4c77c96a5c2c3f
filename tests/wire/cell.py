"""Plays a notebook: its text runs as a `__main__` of its own in one process, the payload is loaded in another."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]

_NOTEBOOK = """
import linecache, os, sys
from nblaunch.wire import payload

def cell(number, text):
    name = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), globals())

def in_a_rank(function, *args, **kwargs):
    import subprocess
    sent = payload.dump_call(function, args, kwargs)
    read, write = os.pipe()
    subprocess.run(
        [sys.executable, "-c", RANK, str(sent.fd), str(write)], pass_fds=(sent.fd, write), check=True, env=ENV
    )
    os.close(write)
    os.close(sent.fd)
    with open(read, "rb") as file:
        return payload.load_home(file.read(), sent.home)
"""

_RANK = """
import os, sys, types
from nblaunch.wire import payload

fd, home = map(int, sys.argv[1:])
main = sys.modules["__main__"] = types.ModuleType("__main__")
received = payload.load_call(fd, main)
value = received.function(*received.args, **received.kwargs)
with open(home, "wb") as file:
    file.write(payload.dump_home_bytes(value, received.labels))
"""


def run_cells(*cells: str) -> str:
    """Run cells one after the other in a fresh process; gives what they printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [f"RANK = {_RANK!r}", f"ENV = {environment!r}", _NOTEBOOK]
    script += [f"cell({number}, {textwrap.dedent(text)!r})" for number, text in enumerate(cells, start=1)]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
