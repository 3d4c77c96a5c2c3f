"""A model's weights in files: safetensors, tied tensors once, in shards where they are large."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nblaunch.training.processes import PartialState
from nblaunch.training.structures import is_tensor

ALIASES = "nblaunch.aliases"
"""The entry of a file's metadata that says which tensors are others under a second name, as JSON."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def split_aliases(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """A state dict as files can hold it.

    Returns:
        The tensors, contiguous and each only once; second name to first name of those that share all their memory;
        what is no tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    others: dict[str, Any] = {}
    seen: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, value in state.items():
        if not is_tensor(value):
            others[name] = value
            continue
        tensor = value.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        storage = tensor.untyped_storage().data_ptr()
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[name] = tensor if whole and storage not in storages else tensor.contiguous().clone()
        storages.add(storage)
    return tensors, aliases, others


Parts = tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]
"""A state dict in parts, see `split_aliases`."""


def write(parts: Parts, path: Path, safe: bool = True) -> None:
    """Write a whole state dict as one file; with `safe`, what is no tensor belongs into the file `beside` it.

    Args:
        parts: Of `split_aliases`.
        path: Ends in `.safetensors`, or in `.bin` for `torch.save`.
        safe: Whether to write safetensors.
    """
    tensors, aliases, others = parts
    if safe:
        save_file(tensors, path, metadata={"format": "pt", ALIASES: json.dumps(aliases)})
    else:
        torch.save({**tensors, **{name: tensors[first] for name, first in aliases.items()}, **others}, path)


def write_any(thing: Any, path: Path, safe: bool) -> None:
    """Write a state dict as safetensors, or anything by `torch.save`."""
    if not safe:
        torch.save(thing, path)
        return
    tensors, aliases, others = split_aliases(thing)
    if others:
        raise TypeError(f"safetensors holds tensors only; found {', '.join(others)}; pass safe_serialization=False")
    save_file(tensors, path, metadata={"format": "pt", ALIASES: json.dumps(aliases)})


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file, whole or not at all, on the main process only.

    Args:
        obj: Of `torch.save`; a state dict with `safe_serialization`.
        f: The file.
        save_on_each_node: Whether the first process of every machine writes it.
        safe_serialization: Whether to write safetensors.
    """
    state = PartialState()
    if state.is_main_process or (save_on_each_node and state.is_local_main_process):
        replace_file(Path(f), lambda path: write_any(obj, path, safe_serialization))


def read(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The state dict that `write` wrote, or any safetensors or weights-only file.

    Args:
        path: Ends in `.safetensors` or `.bin`.
        device: Where the tensors go.
    """
    if path.suffix != ".safetensors":
        return torch.load(path, map_location=device, weights_only=True)
    state: dict[str, Any] = {}
    with safe_open(path, framework="pt", device=device) as file:
        for name in file.keys():  # noqa: SIM118
            state[name] = file.get_tensor(name)
        aliases = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
    state |= {name: state[first] for name, first in aliases.items()}
    if beside(path).exists():
        state |= torch.load(beside(path), map_location=device, weights_only=True)
    return state


def beside(path: Path) -> Path:
    """The file of what safetensors can't hold."""
    return path.with_suffix(".extra.bin")


def in_bytes(size: int | str) -> int:
    """A size such as "10GB", "500MiB" or a number, in bytes.

    Raises:
        ValueError: It was not understood.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", size.upper())
    if match is None:
        raise ValueError(f'size {size!r} was not understood; write it as "10GB" or "500MiB"')
    return int(float(match[1]) * (_UNITS.get(match[2]) or 2**40))


def export(state: Mapping[str, Any], folder: Path, max_shard_size: int | str = "10GB", safe: bool = True) -> None:
    """Write weights for other programs: `model.safetensors`, or shards of it and `model.safetensors.index.json`.

    Shards of an earlier export are removed. `safe=False` writes `pytorch_model.bin` and its shards.

    Args:
        state: Of `Module.state_dict()`.
        folder: Made if it isn't there.
        max_shard_size: No file is larger, unless one tensor is.
        safe: Whether to write safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors, aliases, _ = split_aliases(state)
    if not safe:
        tensors |= {name: tensors[first] for name, first in aliases.items()}
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    parts = _shards(tensors, in_bytes(max_shard_size))
    names = [f"{stem}.{suffix}"]
    if len(parts) > 1:
        names = [f"{stem}-{number + 1:05d}-of-{len(parts):05d}.{suffix}" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        _write_part(part, folder / name, safe, aliases)
    index = folder / f"{stem}.{suffix}.index.json"
    stale = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}")
    for path in folder.iterdir():
        if stale.fullmatch(path.name) and path.name not in names:
            path.unlink()
    if len(parts) == 1:
        index.unlink(missing_ok=True)
        return
    places = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)
    replace_file(index, lambda path: path.write_text(text + "\n", encoding="utf-8"))


def _write_part(part: dict[str, torch.Tensor], path: Path, safe: bool, aliases: dict[str, str]) -> None:
    if not safe:
        replace_file(path, lambda temporary: torch.save(part, temporary))
        return
    metadata = {"format": "pt"}
    here = {name: first for name, first in aliases.items() if first in part}
    if here:
        metadata[ALIASES] = json.dumps(here)
    replace_file(path, lambda temporary: save_file(part, temporary, metadata=metadata))


def _shards(tensors: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = limit
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts


def replace_file(path: Path, write: Any) -> None:
    """Have `write(temporary)` write a file beside `path`, bring it to disk, and give it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(temporary)
        to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Have the kernel bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
