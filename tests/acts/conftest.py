from __future__ import annotations

import pytest

from tests.acts.notebook import Notebook

SETUP = """
import nblaunch, os, sys, time, signal
from nblaunch import notebook_launcher, log, last_run
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A kernel for a module's acts."""
    kernel = Notebook(tmp_path_factory.mktemp("notebook"))
    kernel.run(SETUP).ok()
    yield kernel
    kernel.close()


@pytest.fixture
def fresh_notebook(tmp_path):
    """Makes kernels for acts that end them."""
    made: list[Notebook] = []

    def make(**environment: str) -> Notebook:
        made.append(Notebook(tmp_path, **environment))
        made[-1].run(SETUP).ok()
        return made[-1]

    yield make
    for kernel in made:
        kernel.close()
