"""The text of a notebook's cells, for tracebacks and `inspect.getsource` in a rank."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable
from typing import Any


def sources_of(files: set[str], things: Iterable[Any]) -> dict[str, str]:
    """The text of those files that exist only in this process's linecache, as a notebook's cells do."""
    classes = {thing.__name__ for thing in things if isinstance(thing, type) and thing.__module__ == "__main__"}
    names = {name for name in files if not os.path.exists(name)} | _files_defining(classes)
    texts = {name: "".join(linecache.getlines(name)) for name in sorted(names)}
    return {name: text for name, text in texts.items() if text}


def _files_defining(classes: set[str]) -> set[str]:
    """The newest cell that defines each class: a class without methods has no code that would tell."""
    found: dict[str, str] = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name):
            text = "".join(entry[2])
            defined = set(re.findall(r"^[ \t]*class[ \t]+(\w+)", text, re.MULTILINE))
            found.update(dict.fromkeys(classes & defined, name))
    return set(found.values())
