"""Where the kernel counts and limits what this process uses: its control groups, version 1 or 2."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
MOUNT = Path("/sys/fs/cgroup")


def folders(controller: str, proc: Path = PROC, mount: Path = MOUNT) -> list[Path]:
    """The folders of this process's groups under `controller`, innermost first, up to where they are mounted.

    Args:
        controller: "memory", "cpu" or another; with version 2 all share one folder.
        proc: Where the process file system is mounted.
        mount: Where the control groups are mounted.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return [mount]
    found: list[Path] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = _mounted(controller, names, mount) if names else mount
        inside = root / path.lstrip("/")
        found += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(root) and folder.is_dir()]
    return found or [mount]


def _mounted(controller: str, names: str, mount: Path) -> Path:
    """Where version 1 mounts a controller, alone or with those that share it: "cpu,cpuacct"."""
    return mount / controller if (mount / controller).is_dir() else mount / names
