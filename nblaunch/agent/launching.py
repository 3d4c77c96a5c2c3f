"""What a launch becomes on this machine: how many ranks, on which devices, with which variables and threads."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from nblaunch.agent import cgroups
from nblaunch.config import LaunchConfig
from nblaunch.errors import ConfigError
from nblaunch.wire.messages import Census, Device, Launch

_CPU_RANKS = 2
_FABRIC_PRECISION = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Plan:
    """A launch, resolved."""

    devices: list[Device]
    """One a rank of this machine, in the order of local ranks."""
    backend: str
    ranks: list[int]
    """The ranks of this machine."""
    world_size: int
    threads: int


def plan(config: LaunchConfig, environment: dict[str, str], census: Census) -> Plan:
    """Resolve a launch against what this machine has.

    Raises:
        ConfigError: It asks for more, or for other devices, than there are.
    """
    environment = {**environment, **(config.env or {})}
    keeps_to_cpu = config.use_cpu or environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    available = [] if keeps_to_cpu else _select(config, census.devices)
    count = config.num_processes or len(available) or _CPU_RANKS
    if available and count > len(available):
        kind = available[0].type
        shown = environment.get("CUDA_VISIBLE_DEVICES") if kind == "cuda" else None
        raise ConfigError(
            f"asked for {count} processes, but {len(available)} {kind} device{'s are' * (len(available) > 1) or ' is'} "
            f"visible{f' (CUDA_VISIBLE_DEVICES={shown})' if shown else ''}; "
            f'pass num_processes={len(available)}, or devices="cpu"'
        )
    first = config.node_rank * count
    backend = census.backend if available else "gloo"
    return Plan(
        devices=available[:count] or [Device("cpu") for _ in range(count)],
        backend=backend if config.backend == "auto" else config.backend,
        ranks=list(range(first, first + count)),
        world_size=config.num_nodes * count,
        threads=config.threads or _threads_asked_for(environment) or max(1, cores() // count),
    )


def _select(config: LaunchConfig, found: list[Device]) -> list[Device]:
    """Those of the machine's accelerators that the launch names."""
    wanted = config.devices
    if wanted is None:
        return found
    if isinstance(wanted, str):
        matching = [device for device in found if device.type == wanted]
        if not matching:
            kinds = ", ".join(sorted({device.type for device in found})) or "none"
            raise ConfigError(f'devices="{wanted}": there is no such device here; accelerators visible: {kinds}')
        return matching
    selected: list[Device] = []
    for name in wanted:
        match = [device for device in found if name in (device.index, device.uuid, str(device.index))]
        if not match:
            there = ", ".join(f"{device.index} ({device.uuid or device.name})" for device in found) or "none"
            raise ConfigError(f"devices names {name!r}, which is not visible here; there are: {there}")
        if match[0] in selected:
            raise ConfigError(f"devices names {name!r} a second time; each rank needs a device of its own")
        selected += match
    return selected


def _threads_asked_for(environment: dict[str, str]) -> int:
    text = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(text) if text.isdecimal() else 0


def cores(proc: Path = cgroups.PROC, mount: Path = cgroups.MOUNT) -> int:
    """Cores that this process may use: the least of its affinity and its control groups' quotas, at least 1."""
    quotas = [_quota(folder) for folder in cgroups.folders("cpu", proc, mount)]
    return max(1, int(min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])))


def _quota(folder: Path) -> float | None:
    """The cores that a control group of version 2 or 1 allows; None where it sets no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None  # no such file, or "max"


def listen(config: LaunchConfig) -> socket.socket | None:
    """The socket of the process group's store on loopback; None across machines, where rank 0 holds the store.

    Raises:
        ConfigError: The port that was asked for is taken.
    """
    if config.num_nodes > 1:
        return None
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", config.use_port or 0))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"use_port={config.use_port} can't be used: {error.strerror}; pass another, or None for a free one"
        ) from None
    listening.listen(1024)
    return listening


def rank_environment(
    launch: Launch, config: LaunchConfig, plan: Plan, local_rank: int, *, port: int, attempt: int
) -> dict[str, str]:
    """The variables of one rank, as torch, torchelastic, Accelerate and Fabric read them."""
    count = len(plan.ranks)
    environment = {
        "RANK": plan.ranks[local_rank],
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": config.node_rank,
        "GROUP_WORLD_SIZE": config.num_nodes,
        "NODE_RANK": config.node_rank,
        "ROLE_RANK": plan.ranks[local_rank],
        "ROLE_WORLD_SIZE": plan.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1" if config.num_nodes == 1 else config.master_addr,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": config.rdzv_id or launch.run,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": config.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": config.num_nodes == 1,
        "LT_DEVICES": count,
        "LT_NUM_NODES": config.num_nodes,
    }
    if config.num_nodes == 1 and "GLOO_SOCKET_IFNAME" not in {**launch.environment, **(config.env or {})}:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if plan.devices[local_rank].type == "cpu":
        environment |= {"ACCELERATE_USE_CPU": 1, "LT_ACCELERATOR": "cpu"}
    elif isinstance(config.devices, list):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_cuda_names(plan.devices, launch.environment))
    if config.mixed_precision is not None:
        environment["ACCELERATE_MIXED_PRECISION"] = config.mixed_precision
        if config.mixed_precision in _FABRIC_PRECISION:
            environment["LT_PRECISION"] = _FABRIC_PRECISION[config.mixed_precision]
    return {name: str(value) for name, value in environment.items()}


def _cuda_names(devices: list[Device], environment: dict[str, str]) -> list[str]:
    """Devices as CUDA_VISIBLE_DEVICES names them: in the notebook's own words (a MIG slice's UUID) if it has some."""
    words = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    named = max(device.index for device in devices) < len(words)
    return [words[device.index] if named else device.uuid or str(device.index) for device in devices]


def exec_environment(launch: Launch, own: dict[str, str], threads: int) -> dict[str, str]:
    """What a rank that is started by exec finds when its interpreter starts; the hash seed is the agent's for all."""
    defaults = {name: str(threads) for name in _THREAD_VARIABLES}
    if "PYTHONHASHSEED" in os.environ:
        defaults["PYTHONHASHSEED"] = os.environ["PYTHONHASHSEED"]
    return {**defaults, **launch.environment, **(launch.config.get("env") or {}), **own}
