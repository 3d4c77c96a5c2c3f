"""`launch(function, *args, num_processes=2)`: run a function on several gloo ranks, and get what each returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nblaunch import RankError, notebook_launcher
from nblaunch.training import processes

torch.set_num_threads(1)  # the ranks that tests start at the same time share few cores

Launch = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def fresh_settings():
    """Each test's first Accelerator decides for itself."""
    processes.forget_settings()


@pytest.fixture
def launch(tmp_path_factory, monkeypatch) -> Launch:
    """Results in rank order; a rank's exception is raised here."""
    monkeypatch.chdir(tmp_path_factory.mktemp("launch"))

    def on_ranks(
        function: Callable[..., Any], *args: Any, num_processes: int = 2, env: dict[str, str] | None = None
    ) -> list[Any]:
        try:
            run = notebook_launcher(
                function, args, num_processes, devices="cpu", env=env or {}, dashboard="none", threads=1
            )
        except RankError as error:
            raise (error.__cause__ or error) from error
        return run.results

    return on_ranks
