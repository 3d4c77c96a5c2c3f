"""Runs a module's `main()` in a fresh interpreter: `python -P .../nblaunch/_start.py <module> <arguments>`.

Started by this file's path, so that the package is the one that the notebook uses, whatever lies in the working folder.
"""

import importlib.util
import sys
from pathlib import Path


def _load_package() -> None:
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "nblaunch", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["nblaunch"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _load_package()
    module = sys.argv.pop(1)
    importlib.import_module(module).main()
