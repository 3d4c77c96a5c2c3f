"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

MODULES = ["curves", "displays", "failures", "formats", "output", "series", "state"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"nblaunch.dashboard.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
