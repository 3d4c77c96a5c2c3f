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
from nblaunch.training import devices
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
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    channel = Channel(socket.socket(fileno=channel_fd))
    stores: dict[str, TCPStore] = {}
    while not channel.closed:
        for frame in channel.wait():
            message = frame.open()
            if isinstance(message, OpenStore):
                host, port = socket.socket(fileno=os.dup(frame.fds[0])).getsockname()
                stores[message.run] = TCPStore(
                    host, port, is_master=True, wait_for_workers=False, master_listen_fd=frame.fds[0]
                )
            elif isinstance(message, CloseStore):
                stores.pop(message.run, None)
    os._exit(0)


def take_census(channel_fd: int) -> None:
    """Tell the agent which accelerators there are; asking may start the driver, hence in a process of its own."""
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
    before = frozenset(sys.modules)
    try:
        value = _call(message, reporter, payload_fd)
        reporter.finish()
        reporter.send(Imported(message.rank, installed_modules(before)))
        _return(channel, reporter, message, value)
    except BaseException as error:
        reporter.finish()
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _return(channel, reporter, message, None)
        else:
            reporter.send(failure.describe(error, message.rank, message.launch.run, _received.labels))
            code = 1
    finally:
        ending.end(reporter, code)


_received = payload.Received(print, (), {})


def _call(message: Begin, reporter: Reporter, payload_fd: int) -> object:
    """Set the process up as the launch asks and run the user's function in it."""
    global _received
    launch = message.launch
    config = from_mapping(launch.config)
    surroundings.prepare(message, config)
    main = surroundings.fresh_main(launch.sources, payload_fd)
    install_hooks(reporter, message)
    if message.device.type != "cpu":
        devices.bind(message.local_rank)
    world_size = int(message.environment["WORLD_SIZE"])
    context.enter(context.RankContext(config, message.rank, message.local_rank, world_size, reporter))
    reporter.start(message.device)
    _received = payload.load_call(payload_fd, main)
    reporter.send(State(message.rank, "running", time.time()))
    return _received.function(*_received.args, **_received.kwargs)


def _return(channel: Channel, reporter: Reporter, message: Begin, value: object) -> None:
    """Send the return value home, and stay until all ranks have returned: they may need this one's connections."""
    run = message.launch.run
    try:
        reporter.send(Result(message.rank, run), (payload.dump_home(value, _received.labels),))
    except Exception as error:
        reporter.send(failure.unsendable(value, error, message.rank, run))
    reporter.send(State(message.rank, "returned", time.time()))
    while not channel.closed:
        if any(isinstance(frame.open(), Dismiss) for frame in channel.wait()):
            return


def main() -> None:
    """Be a rank that was started by exec, with the agent's pid and the descriptors as arguments; never returns."""
    agent, *fds = map(int, sys.argv[1:])
    die_with_parent(agent)
    _run(*fds)
