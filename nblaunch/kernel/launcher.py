"""`notebook_launcher`: from a function in a cell to a `Run`."""

from __future__ import annotations

import inspect
import logging
import os
import random
import re
import sys
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # noqa: F401 # pyright: ignore[reportUnusedImport] # LaunchConfig's; an interrupted import leaves half of it

from nblaunch import config as launch_config
from nblaunch import record
from nblaunch.config import LaunchConfig
from nblaunch.errors import ConfigError, NblaunchError
from nblaunch.kernel import agents
from nblaunch.kernel.run import Run
from nblaunch.wire import payload
from nblaunch.wire.messages import Launch

_LARGE = 10**9
_UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()

_last: Run | None = None


def notebook_launcher(  # noqa: PLR0917 (Accelerate's order)
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = _UNSET,
    mixed_precision: str | None = _UNSET,
    use_port: int | str | None = _UNSET,
    master_addr: str = _UNSET,
    node_rank: int = _UNSET,
    num_nodes: int = _UNSET,
    rdzv_backend: str = _UNSET,
    rdzv_endpoint: str = _UNSET,
    rdzv_conf: dict[str, Any] | None = _UNSET,
    rdzv_id: str | None = _UNSET,
    max_restarts: int = _UNSET,
    monitor_interval: float = _UNSET,
    log_line_prefix_template: str | None = _UNSET,
    *,
    kwargs: Mapping[str, Any] | None = None,
    strategy: str = _UNSET,
    backend: str = _UNSET,
    devices: str | Sequence[int] | Sequence[str] | None = _UNSET,
    env: Mapping[str, str] | None = _UNSET,
    start_method: str = _UNSET,
    block: bool = True,
    dashboard: str = _UNSET,
    name: str | None = _UNSET,
    config: LaunchConfig | str | Path | None = None,
    **options: Any,
) -> Run:
    """Run `function(*args, **kwargs)` on one process per device, show what each does, and bring everything home.

    The function, and all that it uses from the notebook, is sent to fresh processes; the notebook's own process is not
    forked and touches no device, so this works after CUDA was used in it, and again and again.

    Args:
        function: The training function. In it RANK, WORLD_SIZE, MASTER_ADDR and so on are set, as torchrun sets them.
        args: Its arguments.
        num_processes: Ranks on this machine; None is one per visible accelerator, or 2 on a CPU.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None leaves it to the environment or the function.
        use_port: The port of the process group's store; None or 0 is a free one.
        master_addr: Across machines, the address of the machine with `node_rank` 0.
        node_rank: Across machines, which one this is.
        num_nodes: The number of machines.
        rdzv_backend: Kept from Accelerate.
        rdzv_endpoint: Kept from Accelerate.
        rdzv_conf: Kept from Accelerate.
        rdzv_id: Kept from Accelerate; the run's name for torchelastic.
        max_restarts: How often all ranks start again after one of them failed.
        monitor_interval: Kept from Accelerate; a death is noticed at once whatever it says.
        log_line_prefix_template: What stands before a rank's lines in the cell, with `${rank}`.
        kwargs: Keyword arguments of the function.
        strategy: "auto", "ddp", ...: what `Accelerator` wraps models in.
        backend: The process group's backend; "auto" is nccl on CUDA, gloo on a CPU.
        devices: "cpu", a kind of accelerator, a list of indices or UUIDs; None for all visible ones.
        env: Environment variables of the ranks, on top of the notebook's.
        start_method: "fork" (from the clean agent), "spawn" (fresh interpreters), or "auto".
        block: False returns at once; `run.wait()` or `await run` later.
        dashboard: "auto", "widget", "text" or "none".
        name: What the run is called; by default the function's name.
        config: A `LaunchConfig`, or the path of a `launch.yaml`, that the other arguments change.
        **options: Any other field of `LaunchConfig`, such as `seed` or `threads`.

    Returns:
        The `Run`: `.results`, `.metrics`, `.logs(rank)`, `.plot(...)` and more.

    Raises:
        ConfigError: The launch makes no sense, or asks for what this machine has not; nothing was started.
        PayloadError: The function needs something that can't be sent; the message names the path to it.
        RankError: A rank failed; its exception is the `__cause__`. The run stays reachable as `last_run()`.
        ResultError: A return value can't be sent home; metrics and logs stay.
        AgentError: The agent could not start or ended.

    Example:
        >>> run = notebook_launcher(max, (3, 5), num_processes=2, dashboard="none")  # doctest: +SKIP
        >>> run.results  # doctest: +SKIP
        [5, 5]
    """
    given = {**_given(locals()), **options}
    chosen = _choose(function, given, config)
    kwargs = dict(kwargs or {})
    args = _checked_args(args)
    _check_call(function, args, kwargs)
    _not_in_a_rank()
    _working_folder()
    return _launch(function, args, kwargs, chosen, block)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = 2) -> Run:
    """Run `function(*args)` on ranks that keep to the CPU, for tests; see `notebook_launcher`."""
    return notebook_launcher(function, args, num_processes, devices="cpu")


def last_run() -> Run:
    """The run that was launched last, also where its cell ended in an error.

    Raises:
        NblaunchError: Nothing was launched yet.
    """
    if _last is None:
        raise NblaunchError("nothing was launched yet in this process")
    return _last


def _launch(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: LaunchConfig,
    block: bool,
) -> Run:
    global _last
    agent = agents.get({**os.environ, **(config.env or {})})  # it starts, if need be, while the payload is pickled
    pickled = payload.dump_call(function, args, kwargs)
    if pickled.nbytes > _LARGE:
        _tell_size(pickled.nbytes, function, args, kwargs)
    run = Run(config.name or "run", config, uuid.uuid4().hex[:12], pickled.home)
    message = _message(run, function, pickled, config)
    try:
        run.begin(agent)
        _last = run
        agent.launch(message, pickled.fd, run)
        run.show(waited_for=block)
        if block:
            run.wait()
    except KeyboardInterrupt:
        raise run.abandon() from None
    return run


def _message(run: Run, function: Callable[..., Any], pickled: payload.Payload, config: LaunchConfig) -> Launch:
    environment = {name: value for name, value in os.environ.items() if _is_text(name + value)}
    root = logging.getLogger()
    cwd = _working_folder()
    return Launch(
        run=run._id,
        config=config.to_dict(),
        environment=environment,
        cwd=cwd,
        path=[os.path.abspath(entry) if entry else cwd for entry in sys.path],
        warnings=[_warning_row(row) for row in warnings.filters],
        log_level=root.level,
        sources=pickled.sources,
        yaml=config.to_yaml(),
        record=record.collect(function, pickled.sources, config.seed or 0, environment),
        folder=os.path.join(cwd, ".nblaunch", "runs"),
        log_format=next((_format(handler) for handler in root.handlers if _format(handler)), ""),
    )


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working folder was removed; os.chdir(...) to one that exists") from None


def _is_text(value: str) -> bool:
    """Whether a variable is UTF-8; the few that are not can't travel."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _format(handler: logging.Handler) -> str:
    """A handler's format where it is of the usual % kind, else ""."""
    formatter = handler.formatter
    usual = formatter is not None and type(getattr(formatter, "_style", None)) is logging.PercentStyle
    return (formatter._fmt or "") if formatter is not None and usual else ""


def _warning_row(row: Any) -> list[Any]:
    action, message, category, module, lineno = row
    patterns = [item.pattern if isinstance(item, re.Pattern) else item or "" for item in (message, module)]
    return [action, patterns[0], f"{category.__module__}.{category.__qualname__}", patterns[1], lineno]


# ---- checks, before anything starts


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are options of the launch and were given."""
    return {
        name: value
        for name, value in arguments.items()
        if name in LaunchConfig.__struct_fields__ and value is not _UNSET
    }


def _choose(
    function: Callable[..., Any], given: dict[str, Any], base: LaunchConfig | str | Path | None
) -> LaunchConfig:
    if not callable(function):
        raise ConfigError(
            f"the first argument is a {type(function).__name__}, expected a function; "
            "pass the function itself, without calling it"
        )
    if isinstance(base, str | Path):
        base = LaunchConfig.load(base)
    if isinstance(given.get("use_port"), str):
        given["use_port"] = _port(given["use_port"])
    if isinstance(given.get("devices"), Sequence) and not isinstance(given["devices"], str):
        given["devices"] = list(given["devices"])
    if isinstance(given.get("env"), Mapping):
        given["env"] = dict(given["env"])
    chosen = launch_config.from_mapping({**(base.to_dict() if base is not None else {}), **given})
    name = chosen.name or getattr(function, "__name__", type(function).__name__)
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(2**31)
    return chosen.replace(name=name, seed=seed)


def _port(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"use_port={text!r} is no port; give a number, or None for a free one")
    return int(text)


def _checked_args(args: Any) -> tuple[Any, ...]:
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ConfigError(f"args is a {type(args).__name__}, expected a tuple of arguments; for one, write args=(x,)")
    return tuple(args)


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin that does not tell its signature; the ranks will say
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ConfigError(
            f"{name}{signature} can't be called with {len(args)} arguments"
            f"{f' and {list(kwargs)}' if kwargs else ''}: {error}; pass them as args=(...) and kwargs={{...}}"
        ) from None


def _not_in_a_rank() -> None:
    context = sys.modules.get("nblaunch.rank.context")  # where it is not loaded, this is no rank
    if context is not None and context.current() is not None:
        raise ConfigError("notebook_launcher was called inside a rank; launch from the notebook")


def _tell_size(nbytes: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from nblaunch.wire.culprit import largest_parts

    parts = ", ".join(f"{path} {size / 1e6:,.0f} MB" for path, size in largest_parts(function, args, kwargs))
    warnings.warn(
        f"{nbytes / 1e9:.1f} GB are sent to the ranks (once; they share the memory until they write to it): {parts}",
        stacklevel=4,
    )
