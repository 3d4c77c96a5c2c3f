"""Is this package, or this kind of device, to be had? Answered as Accelerate answers."""

from __future__ import annotations

import os

import pytest

import nblaunch
from nblaunch.training import availability

NAMES = [name for name in nblaunch.__all__ if nblaunch._HOME.get(name) == availability.__name__]


# rich: theirs also asks a variable
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("is_") and "rich" not in name])
def test_the_answer_is_accelerates(name):
    theirs = getattr(pytest.importorskip("accelerate.utils"), name)
    assert getattr(nblaunch, name)() == bool(theirs())


def test_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("KEPT", "old")
    monkeypatch.delenv("MADE", raising=False)
    with pytest.raises(KeyError), nblaunch.patch_environment(kept=1, made="x"):
        assert (os.environ["KEPT"], os.environ["MADE"]) == ("1", "x")
        raise KeyError
    assert os.environ["KEPT"] == "old" and "MADE" not in os.environ
