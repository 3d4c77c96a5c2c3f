"""A checkpoint's folder: written beside its place, brought to disk, put into place as the last act, or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from nblaunch.errors import CheckpointError
from nblaunch.training.weights import to_disk

MANIFEST = "manifest.json"
FORMAT = 1
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def beside(target: Path, purpose: str) -> Path:
    """The hidden folder next to `target` that serves a purpose: "partial" (being written), "replaced" (the old one)."""
    return target.with_name(f".{target.name}.{purpose}")


def begin(target: Path) -> Path:
    """An empty folder to write a checkpoint into that `finish` will put at `target`.

    Raises:
        CheckpointError: `target` can't be replaced.
    """
    target = target.absolute()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a folder")
    if target.exists() and Path.cwd().is_relative_to(target.resolve()):
        raise CheckpointError(f"{target} holds the working folder, so it can't be replaced; name a folder inside it")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(target, "partial")
    if partial.exists():
        shutil.rmtree(partial)  # what a run that was killed left
    partial.mkdir()
    return partial


def finish(partial: Path, target: Path, facts: dict[str, Any]) -> None:
    """Bring the folder to disk, write its manifest, and put it in its place; another one there is replaced at once.

    Args:
        partial: Of `begin`, with all files written.
        target: Its place. Files in a folder there that are not of a checkpoint move into the new one.
        facts: What the manifest shall say beside the files.
    """
    target = target.absolute()
    files = {
        str(path.relative_to(partial)): {"size": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(partial.rglob("*"))
        if path.is_file()
    }
    for name in files:
        to_disk(partial / name)
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, **facts, "files": files}, indent=1), encoding="utf-8")
    to_disk(manifest)
    to_disk(partial)
    if target.exists():
        _replace(partial, target)
    else:
        partial.rename(target)
    to_disk(target.parent)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(partial: Path, target: Path) -> None:
    """Exchange the two, keep the old one's own files, remove the rest of it."""
    old = beside(target, "replaced")
    if old.exists():
        shutil.rmtree(old)
    if _exchange(partial, target):
        partial.rename(old)
    else:  # no such system call here: for a moment the old one has the other name, which `whole` knows
        target.rename(old)
        partial.rename(target)
    manifest = _read_manifest(old)
    ours = {Path(name).parts[0] for name in manifest["files"]} | {MANIFEST} if manifest else set[str]()
    for path in old.iterdir():
        if path.name not in ours and not (target / path.name).exists():
            path.rename(target / path.name)
    shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (Linux's renameat2); False where the system or the file system can't."""
    if sys.platform != "linux":
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "files" in manifest else None


def whole(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint whose files are all there in their sizes; None for anything else."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest.get("format") != FORMAT:
        return None
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts["size"]:
            return None
    return manifest


def verify(folder: Path, names: list[str]) -> None:
    """Compare files with the manifest's checksums.

    Raises:
        CheckpointError: One differs.
    """
    files = (_read_manifest(folder) or {"files": {}})["files"]
    for name in names:
        if name in files and _digest(folder / name) != files[name]["sha256"]:
            raise CheckpointError(f"{folder / name} has changed since it was written: its checksum differs")


def find(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The whole checkpoint of this name, and its manifest.

    Raises:
        CheckpointError: There is none.
    """
    for place in (folder, beside(folder.absolute(), "replaced")):
        manifest = whole(place)
        if manifest is not None:
            return place, manifest
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint {folder}")
    why = "its manifest names files that are missing or cut short" if _read_manifest(folder) else "it has no manifest"
    raise CheckpointError(f"{folder} is not a whole checkpoint: {why}")


def number_of(folder: Path) -> int:
    """The number in an automatic name, `checkpoint_<number>`; -1 for another name."""
    stem, _, number = folder.name.rpartition("_")
    return int(number) if stem == "checkpoint" and number.isdigit() else -1


def numbered(parent: Path) -> list[Path]:
    """The whole, automatically named checkpoints in a folder, oldest first."""
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if number_of(path) >= 0 and whole(path) is not None]
    return sorted(found, key=number_of)


def prune(parent: Path, keep: int) -> None:
    """Remove the oldest automatic checkpoints beyond `keep`, and what runs that were killed left of others."""
    for path in numbered(parent)[:-keep]:
        path.rename(beside(path, "removed"))  # so that one removed by half is no checkpoint any more
    for path in parent.glob(".checkpoint_*.*"):
        if path.suffix in (".removed", ".partial"):
            shutil.rmtree(path)
