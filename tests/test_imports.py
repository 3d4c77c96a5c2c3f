"""Which folder may import which, what `import nblaunch` costs, and that every public name is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nblaunch

PACKAGE = Path(nblaunch.__file__).parent
MAY_IMPORT = {
    "wire": {"errors"},
    "kernel": {"wire", "dashboard", "config", "errors", "record"},
    "agent": {"wire", "config", "errors", "record"},
    "rank": {"wire", "training", "config", "errors"},
    "dashboard": {"wire", "config"},
}
"""Folder to what else of the package it imports: folders by their names, and the modules beside them."""
MAY_NOT_IMPORT = {"training": {"kernel", "agent", "dashboard"}}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every import in a file, those inside functions too: its line, and what of nblaunch it names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import; the package has none"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "nblaunch")


def targets(folder: str) -> dict[str, str]:
    """What a folder imports of the rest of the package, each with the place where it does."""
    found: dict[str, str] = {}
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for line, name in imports_of(path):
            part = name.split(".")[1] if "." in name else ""
            if (PACKAGE / f"{part}.py").exists() or (PACKAGE / part / "__init__.py").exists():
                found[part] = f"{path.relative_to(PACKAGE)}:{line} imports {name}"
    found.pop(folder, None)
    found.pop("", None)
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_it_may(folder):
    wrong = [place for target, place in targets(folder).items() if target not in MAY_IMPORT[folder]]
    assert wrong == []


@pytest.mark.parametrize("folder", MAY_NOT_IMPORT)
def test_a_folder_does_not_import_what_it_may_not(folder):
    wrong = [place for target, place in targets(folder).items() if target in MAY_NOT_IMPORT[folder]]
    assert wrong == []


def test_the_check_sees_imports_in_functions(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for folder in ("agent", "kernel"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "agent/server.py").write_text("def f():\n    from nblaunch.kernel import run\n")
    assert targets("agent") == {"kernel": "agent/server.py:2 imports nblaunch.kernel.run"}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(done.stdout.split())


def test_importing_nblaunch_imports_no_torch():
    assert {"torch", "numpy", "IPython", "matplotlib"}.isdisjoint(loaded_by("import nblaunch"))


def test_the_launcher_imports_no_torch_either():
    assert "torch" not in loaded_by(
        "from nblaunch import notebook_launcher, Run, LaunchConfig, RankError, log, progress"
    )


def test_the_agent_itself_imports_no_torch():
    assert "torch" not in loaded_by("import nblaunch.agent.server")


@pytest.mark.parametrize("name", nblaunch.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    assert getattr(nblaunch, name) is not None
    assert name == "__version__" or getattr(nblaunch, name).__doc__


def test_the_public_names_are_listed():
    assert set(nblaunch.__all__) == {*nblaunch._HOME, "__version__"} == set(dir(nblaunch))
    assert {"notebook_launcher", "Run", "LaunchConfig", "log", "progress", "RankError"} <= set(nblaunch.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'nblaunch' has no attribute 'turbo'"):
        _ = nblaunch.turbo


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_is_named_for_what_it_does_and_says_so(path):
    assert path.stem not in {"utils", "helpers", "common", "misc"}
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
