"""A rank from its start to its exit.

forked, or started by exec
  -> Begin from the agent -> surroundings -> payload -> the user's function -> Result or Failure
  -> Dismiss, once all ranks have returned -> exit handlers, threads, process group, output -> exit
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from nblaunch.config import from_mapping
from nblaunch.rank import context, ending, failure, surroundings
from nblaunch.rank.imports import install_hooks, installed_modules
from nblaunch.rank.reporter import Reporter
from nblaunch.wire import payload
from nblaunch.wire.channel import Channel
from nblaunch.wire.lifelines import die_with_parent
from nblaunch.wire.messages import Begin, Census, CloseStore, Dismiss, Imported, OpenStore, Result, State


def begin(channel_fd: int, stdout_fd: int, stderr_fd: int, payload_fd: int) -> None:
    """Be a rank that was forked from the template; never returns."""
    ending.clear_inherited()
    _run(channel_fd, stdout_fd, stderr_fd, payload_fd)


def keep_stores(channel_fd: int) -> None:
    """Hold the process groups' stores of all runs, on loopback sockets that the agent bound; never returns."""
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel = Channel(socket.socket(fileno=channel_fd))
    stores: dict[str, dist.TCPStore] = {}
    while not channel.closed:
        for frame in channel.wait():
            message = frame.open()
            if isinstance(message, OpenStore):
                host, port = socket.socket(fileno=os.dup(frame.fds[0])).getsockname()
                stores[message.run] = dist.TCPStore(
                    host, port, is_master=True, wait_for_workers=False, master_listen_fd=frame.fds[0]
                )
            elif isinstance(message, CloseStore):
                stores.pop(message.run, None)
    os._exit(0)


def take_census(channel_fd: int) -> None:
    """Tell the agent which accelerators there are; asking may start the driver, hence in a process of its own."""
    from nblaunch.training import devices

    channel = Channel(socket.socket(fileno=channel_fd))
    found = devices.visible()
    backend = devices.backend_for(devices.device_for(0)) if found else "gloo"
    channel.send(Census(found, backend))
    while channel.waiting:
        channel.flush()
    os._exit(0)


def _run(channel_fd: int, stdout_fd: int, stderr_fd: int, payload_fd: int) -> None:
    os.setpgid(0, 0)
    surroundings.connect_streams(stdout_fd, stderr_fd)
    channel = Channel(socket.socket(fileno=channel_fd))
    frames = channel.wait()
    if not frames:
        os._exit(1)
    message = frames[0].open()
    assert isinstance(message, Begin)
    reporter = Reporter(channel, message.rank, message.launch.run)
    code = 0
    try:
        before = frozenset(sys.modules)
        value, received = _call(message, reporter, payload_fd)
        reporter.finish()
        reporter.send(Imported(message.rank, installed_modules(before)))
        _send_result(reporter, message, value, received)
        reporter.send(State(message.rank, "returned", time.time()))
        _await_dismissal(channel)
    except BaseException as error:
        code = _report(reporter, message, error)
    finally:
        ending.end(reporter, code)


_received = payload.Received(print, (), {})


def _call(message: Begin, reporter: Reporter, payload_fd: int) -> tuple[object, payload.Received]:
    """Set the process up as the launch asks and run the user's function in it."""
    global _received
    launch = message.launch
    config = from_mapping(launch.config)
    main = surroundings.fresh_main(launch.sources, payload_fd)
    surroundings.prepare(message, config)
    install_hooks(reporter, message)
    world_size = int(message.environment["WORLD_SIZE"])
    context.enter(context.RankContext(config, message.rank, message.local_rank, world_size, reporter))
    reporter.start(message.device)
    _received = payload.load_call(payload_fd, main)
    reporter.send(State(message.rank, "running", time.time()))
    return _received.function(*_received.args, **_received.kwargs), _received


def _send_result(reporter: Reporter, message: Begin, value: object, received: payload.Received) -> None:
    try:
        fd = payload.dump_home(value, received.labels)
    except Exception as error:
        from nblaunch.wire.culprit import find_part

        what = find_part("the return value", value, error)
        raise failure.ResultUnsendable(what) from None
    reporter.send(Result(message.rank, message.launch.run), (fd,))


def _report(reporter: Reporter, message: Begin, error: BaseException) -> int:
    """Say why this rank did not return; gives the exit code."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        reporter.finish()
        _send_result(reporter, message, None, _received)
        reporter.send(State(message.rank, "returned", time.time()))
        return 0
    reporter.finish()
    reporter.send(failure.describe(error, message.rank, message.launch.run, _received.labels))
    return 1


def _await_dismissal(channel: Channel) -> None:
    """Stay until all ranks have returned: others may still need this one's connections."""
    while not channel.closed:
        if any(isinstance(frame.open(), Dismiss) for frame in channel.wait()):
            return


def main() -> None:
    """Be a rank that was started by exec, with the agent's pid and the descriptors as arguments; never returns."""
    agent, *fds = map(int, sys.argv[1:])
    die_with_parent(agent)
    _run(*fds)
