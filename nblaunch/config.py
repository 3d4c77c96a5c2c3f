"""Every choice of a launch, explicit, checked, saved as YAML; and what a changed environment variable asks for."""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from nblaunch.errors import ConfigError

PRECISIONS = ("no", "fp16", "bf16", "fp8")
STRATEGIES = ("auto", "ddp", "fsdp", "deepspeed", "tensor_parallel")
START_METHODS = ("auto", "fork", "spawn")
DASHBOARDS = ("auto", "widget", "text", "none")
MATMUL_PRECISIONS = ("highest", "high", "medium")

_LINE_BREAKS = frozenset("\x85\u2028\u2029")
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One launch's choices. Immutable; `notebook_launcher` makes one of its arguments, or takes one as `config=`.

    Example:
        >>> LaunchConfig(num_processes=2, mixed_precision="bf16").num_processes
        2
    """

    name: str | None = None
    """What the run is called on the dashboard and in its folder; by default the function's name."""
    num_processes: int | None = None
    """Ranks on this machine; None is one per visible accelerator, or 2 on a CPU."""
    mixed_precision: str | None = None
    """"no", "fp16", "bf16" or "fp8"; None leaves it to the environment or the function."""
    use_port: int | None = None
    """The port of the process group's store; None or 0 is a free one."""
    master_addr: str = "127.0.0.1"
    node_rank: int = 0
    num_nodes: int = 1
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: dict[str, Any] | None = None
    rdzv_id: str | None = None
    max_restarts: int = 0
    """How often all ranks are started again after one of them failed."""
    monitor_interval: float = 0.1
    """Kept from Accelerate, seconds; nblaunch notices a death at once whatever it says."""
    log_line_prefix_template: str | None = None
    """What stands before a rank's lines in the cell, with `${rank}`, `${local_rank}`, `${role_name}`."""
    strategy: str = "auto"
    backend: str = "auto"
    """The process group's backend: "auto" is nccl on CUDA, gloo on a CPU, else what torch names for the device."""
    devices: str | list[int | str] | None = None
    """"cpu", a kind of accelerator such as "cuda", a list of indices or UUIDs, or None for all that are visible."""
    env: dict[str, str] | None = None
    """Variables for the ranks, on top of the notebook's own."""
    start_method: str = "auto"
    """"fork" from the clean agent, "spawn" (a fresh interpreter a rank), or "auto": fork where it is safe."""
    dashboard: str = "auto"
    """"auto", "widget", "text" or "none"."""
    seed: int | None = None
    """Python's and NumPy's global generators start from this plus the rank; None draws one and records it."""
    threads: int | None = None
    """Intra-op threads of a rank; None is cores // ranks on this machine, at least 1."""
    matmul_precision: str | None = None
    """`torch.set_float32_matmul_precision` in every rank: "highest", "high" or "medium"; None leaves torch's own."""
    exit_timeout: float = 30.0
    """Seconds that exit handlers and threads of a rank may take once every rank has returned."""
    run_limit: str = "200MB"
    """How large a run's folder may grow; of each log the first and the last part are kept."""
    keep_runs: int = 100
    """Older runs beyond this many are removed from the folder."""

    def __post_init__(self) -> None:
        self._check_types()
        _one_of("mixed_precision", self.mixed_precision, (None, *PRECISIONS))
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("start_method", self.start_method, START_METHODS)
        _one_of("dashboard", self.dashboard, DASHBOARDS)
        _one_of("matmul_precision", self.matmul_precision, (None, *MATMUL_PRECISIONS))
        _at_least("num_processes", self.num_processes, 1)
        _at_least("num_nodes", self.num_nodes, 1)
        _at_least("max_restarts", self.max_restarts, 0)
        _at_least("threads", self.threads, 1)
        _at_least("keep_runs", self.keep_runs, 1)
        _at_least("seed", self.seed, 0)
        if self.seed is not None and self.seed >= 2**32:
            raise ConfigError(f"seed={self.seed} is too large: NumPy takes seeds below 2**32")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(
                f"node_rank={self.node_rank} with num_nodes={self.num_nodes}: it counts the machines from 0"
            )
        if self.use_port is not None and not 0 <= self.use_port < 65536:
            raise ConfigError(f"use_port={self.use_port} is no port; give 1 to 65535, or None for a free one")
        if self.num_nodes > 1 and not self.use_port and not self.rdzv_endpoint:
            raise ConfigError("num_nodes > 1 needs a port that all machines know: pass use_port (and master_addr)")
        if isinstance(self.devices, list) and not self.devices:
            raise ConfigError('devices=[] names no device; pass indices, "cpu", or None for all visible ones')
        if not 0 <= self.exit_timeout < math.inf:
            raise ConfigError(f"exit_timeout={self.exit_timeout} makes no sense; it is a number of seconds")
        _ = self.run_limit_bytes

    def _check_types(self) -> None:
        """What is made in Python is checked as strictly as what is read from a file."""
        for name, kind in _field_types().items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, kind)
                msgspec.to_builtins(value)
            except (msgspec.ValidationError, TypeError) as error:
                raise ConfigError(f"{name}={value!r} has the wrong type: {error}") from None
        if isinstance(self.devices, tuple):
            msgspec.structs.force_setattr(self, "devices", list(self.devices))

    @property
    def run_limit_bytes(self) -> int:
        """`run_limit` in bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", self.run_limit)
        if match is None:
            raise ConfigError(f'run_limit={self.run_limit!r} was not understood; write it as "200MB" or "2GB"')
        return int(float(match[1]) * _BYTES[match[2]])

    @property
    def use_cpu(self) -> bool:
        """Whether the ranks keep to the CPU whatever accelerators there are."""
        return self.devices == "cpu"

    @property
    def prefix(self) -> str:
        """The template of what stands before a rank's lines."""
        return self.log_line_prefix_template or "[rank ${rank}] "

    def replace(self, **changes: Any) -> LaunchConfig:
        """A copy with these fields changed, checked again."""
        return from_mapping({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The choices as plain data."""
        return msgspec.to_builtins(self)

    def to_yaml(self) -> str:
        """The choices that differ from the defaults, as YAML."""
        import yaml

        default = LaunchConfig().to_dict()
        chosen = {key: value for key, value in self.to_dict().items() if value != default[key]}
        text = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)
        if _LINE_BREAKS.isdisjoint(text):
            return text
        return yaml.safe_dump(chosen, sort_keys=False)  # PyYAML writes these as they are, and reads them as spaces

    @classmethod
    def load(cls, path: str | Path) -> LaunchConfig:
        """Read a launch from a YAML file, such as a run's `launch.yaml`.

        Raises:
            ConfigError: The file can't be read, or an entry is unknown or has a wrong type or value.
        """
        import yaml

        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} can't be read as a launch: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds {type(data).__name__}, expected a mapping of launch options")
        return from_mapping(data)


@functools.cache
def _field_types() -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(LaunchConfig)}


def from_mapping(data: Mapping[str, Any]) -> LaunchConfig:
    """A `LaunchConfig` of plain data; unknown names and wrong types are a `ConfigError` that names them."""
    known = LaunchConfig.__struct_fields__
    unknown = [str(key) for key in data if key not in known]
    if unknown:
        raise ConfigError(f"unknown launch option {', '.join(unknown)}; there are: {', '.join(known)}")
    try:
        return msgspec.convert(dict(data), LaunchConfig)
    except ConfigError:
        raise
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"a launch option has the wrong type: {error}") from None


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed if word is not None)
        raise ConfigError(f"{name}={value!r} is unknown; there are: {words}")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name}={value} makes no sense; it must be at least {least}")


# ---- the table of variables that count at process start

Effect = Literal["rank", "agent"]

VARIABLES: dict[str, Effect] = {
    # applied in the rank, by torch.set_num_threads and threadpoolctl
    "OMP_NUM_THREADS": "rank",
    "MKL_NUM_THREADS": "rank",
    "OPENBLAS_NUM_THREADS": "rank",
    # read once, by the loader, the interpreter, the allocator or torch's import: only a new agent sees a change
    "LD_*": "agent",
    "PYTHONHASHSEED": "agent",
    "PYTHONMALLOC": "agent",
    "PYTHONPATH": "agent",
    "PYTHONHOME": "agent",
    "PYTHONWARNINGS": "agent",
    "PYTHONDEVMODE": "agent",
    "PYTHONUTF8": "agent",
    "PYTHONIOENCODING": "agent",
    "MALLOC_*": "agent",
    "GLIBC_TUNABLES": "agent",
    "LC_*": "agent",
    "LANG": "agent",
    "OMP_*": "agent",
    "KMP_*": "agent",
    "GOMP_*": "agent",
    "MKL_*": "agent",
    "OPENBLAS_*": "agent",
    "CUDA_*": "agent",
    "PYTORCH_*": "agent",
    "TORCH_*": "agent",
    "TORCHDYNAMO_*": "agent",
    "TORCHINDUCTOR_*": "agent",
    "ATEN_*": "agent",
    "HIP_*": "agent",
    "ROCR_*": "agent",
    "ZE_*": "agent",
    "DS_ACCELERATOR": "agent",
    "ASAN_*": "agent",
}
"""Name, or pattern, to where a change is applied. The first entry that fits counts; any other variable is plain:
set in the rank before the function's imports run."""


def effect_of(variable: str) -> Effect | None:
    """Where a change of this environment variable is applied; None for a plain one."""
    for pattern, effect in VARIABLES.items():
        if fnmatch.fnmatchcase(variable, pattern):
            return effect
    return None


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that an agent is started with and can't change afterwards."""
    return {name: value for name, value in environment.items() if effect_of(name) == "agent"}
