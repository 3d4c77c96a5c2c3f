"""The file that a payload or a result travels in: a sealed memfd, or a temporary file without a name.

It holds a header, the pickle, and the pickle's large buffers, each on a page of its own, so that they can be mapped.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile

import msgspec

_PAGE = mmap.PAGESIZE
_CHUNK = 1 << 30


def write(pickled: memoryview, buffers: list[pickle.PickleBuffer]) -> tuple[int, int]:
    """Put pickle and buffers into a sealed file; returns its descriptor and its size in bytes."""
    parts = [pickled, *(buffer.raw() for buffer in buffers)]
    lengths = [part.nbytes for part in parts]
    header = msgspec.msgpack.encode(lengths)
    fd = _anonymous_file()
    try:
        _write_all(fd, len(header).to_bytes(8, "little") + header, 0)
        offset = _align(8 + len(header))
        for part in parts:
            _write_all(fd, part, offset)
            offset = _align(offset + part.nbytes)
        os.ftruncate(fd, offset)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, sum(lengths)


def map_privately(fd: int) -> tuple[memoryview, list[memoryview]]:
    """Pickle and buffers of a file, mapped: what is changed in them stays this process's own."""
    size = os.fstat(fd).st_size
    memory = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    header_length = int.from_bytes(memory[:8], "little")
    lengths = msgspec.msgpack.decode(memory[8 : 8 + header_length], type=list[int])
    offset = _align(8 + header_length)
    parts: list[memoryview] = []
    for length in lengths:
        parts.append(memory[offset : offset + length])
        offset = _align(offset + length)
    return parts[0], parts[1:]


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nblaunch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix="nblaunch-") as file:
        return os.dup(file.fileno())


def _seal(fd: int) -> None:
    try:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except (ImportError, AttributeError, OSError):
        return  # a temporary file can't be sealed; it has no name, so nobody else can write to it


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        written = os.pwrite(fd, view[:_CHUNK], offset)
        view, offset = view[written:], offset + written


def _align(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
