"""`launch(function, *args, num_processes=2)`: run a function on several gloo ranks, and get what each returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch._dynamo  # preloaded, as in a launch: the first optimizer needs it
import torch.distributed as dist

from nblaunch.training import processes

torch.set_num_threads(1)  # a process whose thread pool has run can't be forked

Launch = Callable[..., list[Any]]


def _rank(sender: Connection, rank: int, size: int, port: int, env: dict[str, str], call: Callable[[], Any]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="1",
        GLOO_SOCKET_IFNAME="lo",
        **env,
    )
    try:
        message = (call(), None, "")
        sent = pickle.dumps(message)
    except BaseException as error:
        message = (None, error, traceback.format_exc())
        try:
            sent = pickle.dumps(message)
            pickle.loads(sent)
        except Exception:
            sent = pickle.dumps((None, RuntimeError(repr(error)), message[2]))
    sender.send_bytes(sent)
    if message[1] is None and dist.is_initialized():
        dist.barrier()
    os._exit(0)


def run_ranks(
    function: Callable[..., Any], *args: Any, num_processes: int = 2, env: dict[str, str] | None = None
) -> list[Any]:
    """What each rank returned, in rank order; the first exception of a rank is raised here."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks: dict[Connection, int] = {}
    processes: list[Any] = []
    for rank in range(num_processes):
        receiver, sender = fork.Pipe(duplex=False)
        call = lambda: function(*args)
        process = fork.Process(target=_rank, args=(sender, rank, num_processes, port, env or {}, call), daemon=False)
        process.start()
        sender.close()
        ranks[receiver] = rank
        processes.append(process)
    results: list[Any] = [None] * num_processes
    try:
        while ranks:
            for receiver in wait(list(ranks), timeout=120) or pytest.fail(f"ranks {[*ranks.values()]} hang"):
                rank = ranks.pop(receiver)  # type: ignore[index]
                try:
                    results[rank], error, text = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    pytest.fail(f"rank {rank} died")
                if error is not None:
                    error.add_note(f"on rank {rank}:\n{text}")
                    raise error
    finally:
        for process in processes:
            if ranks:
                process.kill()
            process.join()
    return results


@pytest.fixture(autouse=True)
def fresh_settings():
    """Each test's first Accelerator decides for itself."""
    processes.forget_settings()


@pytest.fixture(scope="session")
def launch() -> Launch:
    """See `run_ranks`."""
    return run_ranks
