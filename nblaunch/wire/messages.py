"""Everything that kernel, agent and rank can say to each other: this list is the list of what can happen.

Each message is a msgspec Struct, tagged by its class name, sent as msgpack (`wire.channel` frames it). Times are
seconds since the epoch. Large things (the payload, a rank's result) travel beside their message as an attachment.

    kernel -> agent     Launch, Stop, Goodbye
    agent  -> kernel    Ready, Refused, Started, RankUpdate, Output, Finished, Progress, Metrics, Display, Result,
                        Failure, Notice
    agent  -> template  Fork, Import                (the agent's preloaded, clean process that ranks are forked from)
    template -> agent   Warm, Forked
    census   -> agent   Census
    agent  -> stores    OpenStore, CloseStore       (one process that holds the process groups' stores)
    agent  -> rank      Begin, Dismiss
    rank   -> agent     State, Result, Failure, Display, Collective, Imported, Notice, and Metrics and Progress, which
                        the agent forwards unopened
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, tag=True, tag_field="_", omit_defaults=True):
    """The base of all messages."""


# ---- values inside messages


class Device(msgspec.Struct, omit_defaults=True):
    """One accelerator, or the CPU, as the agent found it."""

    type: str
    index: int = 0
    name: str = ""
    uuid: str = ""
    memory: int = 0
    """Bytes in all."""


class Bar(msgspec.Struct, omit_defaults=True):
    """One progress bar of a rank, as it stands."""

    id: int
    description: str = ""
    n: float = 0
    total: float | None = None
    rate: float | None = None
    """Iterations a second, smoothed."""
    unit: str = "it"
    depth: int = 0
    closed: bool = False
    postfix: str = ""


class Sample(msgspec.Struct, omit_defaults=True):
    """What a rank's device and process use now. Bytes; utilisation in percent; -1 where unknown."""

    memory_used: int = -1
    memory_peak: int = -1
    memory_total: int = -1
    utilization: float = -1
    host_memory: int = -1
    """Resident memory of the rank's process."""


class Frame(msgspec.Struct, omit_defaults=True):
    """One line of a remote traceback."""

    filename: str
    lineno: int
    name: str
    line: str = ""
    """The source line as it stands in the file, or "" where there is none."""
    colno: int = -1
    """Where the failing expression starts in `line`, in characters; -1 unknown."""
    end_colno: int = -1


# ---- kernel -> agent


class Launch(Message):
    """Run the attached payload. Answered by Started or Refused."""

    run: str
    config: dict[str, Any]
    """`LaunchConfig`, as plain data."""
    environment: dict[str, str]
    cwd: str
    path: list[str]
    warnings: list[Any]
    """The rows of `warnings.filters`, patterns as text."""
    log_level: int
    sources: dict[str, str]
    """File name of a cell to its text, for tracebacks and `inspect.getsource`."""
    yaml: str
    """What `launch.yaml` shall hold."""
    record: dict[str, Any]
    folder: str
    """The folder that runs are kept in, `.nblaunch/runs` of the working folder."""
    log_format: str = ""
    """The format of the root logger's handler, or "" where it has none."""


class Stop(Message):
    """End the run: SIGINT, SIGTERM, SIGKILL, each after a bounded wait; `now` goes straight to SIGKILL."""

    run: str
    now: bool = False


class Goodbye(Message):
    """No more launches: end once the last run has ended."""


# ---- agent -> kernel


class Ready(Message):
    """The agent is up."""

    pid: int
    host: str


class Refused(Message):
    """The launch can't be done here; nothing was started."""

    run: str
    reason: str
    kind: str = "config"
    """"config": what was asked for is wrong. "agent": this machine can't do it."""


class Started(Message):
    """The ranks exist."""

    run: str
    folder: str
    """The folder of this run, absolute."""
    world_size: int
    ranks: list[int]
    pids: list[int]
    devices: list[Device]
    backend: str
    start_method: str
    time: float


class RankUpdate(Message):
    """A rank's state changed."""

    run: str
    rank: int
    state: str
    """"starting", "running", "returned", "failed", "stopped", "ended"."""
    time: float
    detail: str = ""


class Output(Message):
    """Whole lines that a rank wrote, oldest first, and how many the agent left to the log."""

    run: str
    rank: int
    stream: str
    """"stdout" or "stderr"."""
    lines: list[str]
    skipped: int = 0


class Finished(Message):
    """The last rank has ended; nothing of this run follows."""

    run: str
    status: str
    """"done", "failed", "stopped"."""
    time: float
    cause: Failure | None = None
    """The root cause, where the status is "failed"."""
    others: list[Failure] = []
    """What followed from it."""


# ---- rank -> agent -> kernel


class State(Message):
    """Where a rank stands: "running", "returned"."""

    rank: int
    state: str
    time: float


class Result(Message):
    """A rank's return value, attached."""

    rank: int
    run: str = ""


class Failure(Message):
    """Why a rank did not return."""

    rank: int
    kind: str
    """One of "exception", "signal", "exit", "memory", "stopped", "collective", and "result", which can't be sent."""
    time: float
    host: str = ""
    type: str = ""
    """The exception's class, qualified unless it is a builtin."""
    message: str = ""
    text: str = ""
    """The whole traceback as Python would print it, with chained exceptions."""
    frames: list[Frame] = []
    """The frames of the user's code and of libraries, outermost first, without those of nblaunch."""
    pickled: bytes = b""
    """The exception itself, where it can be pickled; only ever loaded by the kernel that launched the run."""
    code: int = 0
    """The exit code, or the number of the signal."""
    symptom: bool = False
    """True for the loss of a peer: something that follows from another rank's failure."""
    output: list[str] = []
    """The last lines that the rank wrote."""
    run: str = ""


class Display(Message):
    """A rank called `display(...)` or showed a figure."""

    rank: int
    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str = ""
    update: bool = False
    run: str = ""
    time: float = 0


class Notice(Message):
    """Something that a person should know about the run, said by nblaunch and not by the function."""

    text: str
    level: str = "info"
    """"info" or "warning"."""
    rank: int = -1
    run: str = ""


class Metrics(Message):
    """What a rank logged since the last batch: parallel arrays, one entry a value. Forwarded and kept unopened."""

    rank: int
    names: list[str]
    """The metrics' names; `which` points into it."""
    which: bytes
    """int32: index into `names`."""
    steps: bytes
    """int64."""
    values: bytes
    """float64."""
    times: bytes
    """float64: seconds since the epoch."""
    thinned: int = 0
    """Values left out of this batch because the rank logged more than 1,000 a second."""
    run: str = ""


class Progress(Message):
    """A rank's bars and device sample as they stand; only the latest counts."""

    rank: int
    time: float
    bars: list[Bar] = []
    sample: Sample | None = None
    where: str = ""
    """The innermost line of the user's code that the main thread is in, sampled."""
    run: str = ""


class Collective(Message):
    """A rank is about to enter a collective of `nblaunch.ops`."""

    rank: int
    number: int
    """Counts the collectives of one group on this rank, from 0."""
    kind: str
    """"all_gather", "broadcast", ..."""
    shapes: list[list[int]] = []
    dtypes: list[str] = []
    group: str = ""
    """Which process group; "" is the default one."""


class Imported(Message):
    """Installed packages that a rank imported and the template did not have."""

    rank: int
    modules: list[str]


# ---- agent <-> template


class Import(Message):
    """Import these in a copy of the template; attached: the copy's channel. Answered on it by Warm."""

    modules: list[str]
    environment: dict[str, str] | None = None
    """The environment to import under; None is the agent's own."""
    path: list[str] | None = None


class Warm(Message):
    """A template is ready, with all these modules in place, or gave up."""

    pid: int
    modules: list[str] = []
    rejected: dict[str, str] = {}
    """Module to reason: it could not be imported, or it started a thread or a device."""
    dirty: str = ""
    """Why no rank can be forked from it, or ""."""
    accelerator: str = ""
    """The kind of accelerator that torch was built for; whether there is one, the census tells."""
    fork_safe: bool = True
    """False where the accelerator's runtime does not bear a fork (ROCm, XPU)."""


class Census(Message):
    """The accelerators of this machine, as a process found them that ended at once."""

    devices: list[Device]
    backend: str
    """The process group backend that serves them; gloo where there are none."""


class Fork(Message):
    """Fork one process; attached: its channel, stdout, stderr and payload, or what else its role needs."""

    run: str
    role: str
    """"rank", or, with a channel attached, "stores" or "census"."""
    rank: int = 0


class OpenStore(Message):
    """Serve the store of this run's process group; attached: the listening socket."""

    run: str


class CloseStore(Message):
    """The run is over, or starts again with a store of its own."""

    run: str


class Forked(Message):
    """The process exists and is the agent's child; or `dirty` says why it was not forked."""

    run: str
    role: str
    rank: int
    pid: int
    dirty: str = ""


# ---- agent -> rank


class Begin(Message):
    """All that a rank needs to run the payload."""

    launch: Launch
    rank: int
    local_rank: int
    environment: dict[str, str]
    """Variables of this rank alone: RANK, MASTER_PORT and so on."""
    threads: int
    seed: int
    device: Device


class Dismiss(Message):
    """All ranks have returned: end."""
