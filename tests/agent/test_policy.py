"""What a death means: which failure is the cause, and which only followed from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.agent import policy
from nblaunch.agent.policy import MemoryKills, crash_lines, death, is_symptom, root_cause
from nblaunch.wire.messages import Failure

GLOO = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
DIST = "torch.distributed."
LOST_PEERS = {
    "gloo, peer died": (
        f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:26515. This is typically caused by a remote "
        "worker crashing. Check the logs of the remote worker before reporting an error. GLHF!"
    ),
    "gloo, reset": f"{GLOO}pair.cc:525] Read error [127.0.0.1]:5: Connection reset by peer",
    "gloo, timeout": f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "gloo, caused by a timeout": "RuntimeError: Application timeout caused pair closure",
    "nccl, remote": (
        f"{DIST}DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:318, remote "
        "process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due "
        "to a network error or a remote process exiting prematurely."
    ),
    "nccl, aborted": f"{DIST}DistBackendError: NCCL communicator was aborted on rank 1.",
    "nccl, watchdog": (
        f"{DIST}DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600044 milliseconds before timing out."
    ),
    "store": f"{DIST}DistNetworkError: failed to recv, got 0 bytes",
    "store, timeout": (
        f"{DIST}DistNetworkError: The client socket has timed out after 300000ms while trying to connect to "
        "(127.0.0.1, 29500)."
    ),
}
OF_ITS_OWN = {
    "value": "ValueError: expected 3 classes, found 4",
    "shape": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of",
    "device": "RuntimeError: CUDA error: device-side assert triggered",
    "loader": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "file": "FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'",
}


def raised(text: str, rank: int = 0, time: float = 0.0) -> Failure:
    return Failure(rank, "exception", time, text=f"Traceback (most recent call last):\n{text}\n")


@pytest.mark.parametrize("text", LOST_PEERS.values(), ids=LOST_PEERS)
def test_the_loss_of_a_peer_is_a_symptom(text):
    assert is_symptom(raised(text))


@pytest.mark.parametrize("text", OF_ITS_OWN.values(), ids=OF_ITS_OWN)
def test_a_failure_of_its_own_is_none(text):
    assert not is_symptom(raised(text))


def test_an_exception_that_came_from_the_loss_of_a_peer_is_a_symptom():
    text = LOST_PEERS["gloo, peer died"]
    chained = "The above exception was the direct cause of the following exception:"
    assert is_symptom(raised(f"{text}\n\n{chained}\n\nTrainingError: step 7 failed"))


@pytest.mark.parametrize("kind", ["signal", "exit", "memory", "stopped", "collective"])
def test_only_exceptions_are_symptoms(kind):
    assert not is_symptom(Failure(0, kind, 0.0, text=LOST_PEERS["gloo, peer died"]))


# ---- the cause


def test_nothing_wrong_has_no_cause():
    assert root_cause([], {}) is None


def test_a_later_exception_beats_an_earlier_symptom():
    lost = Failure(0, "exception", 1.0, symptom=True)
    own = Failure(1, "exception", 1.2)
    assert root_cause([lost, own], {}) is own


def test_what_a_rank_said_after_it_was_told_to_stop_is_no_cause():
    died = Failure(1, "signal", 2.0)
    complained = Failure(0, "exception", 1.5)
    assert root_cause([complained, died], {0: 1.4}) is died


def test_a_symptom_alone_is_the_cause():
    lost = Failure(0, "exception", 1.0, symptom=True)
    assert root_cause([lost, Failure(1, "stopped", 1.6)], {1: 1.5}) is lost


def test_of_two_causes_the_first_counts():
    first, second = Failure(1, "exit", 1.0), Failure(0, "exception", 1.1)
    assert root_cause([second, first], {}) is first


failures = st.builds(
    Failure,
    rank=st.integers(0, 7),
    kind=st.sampled_from(["exception", "signal", "exit", "memory", "stopped", "collective"]),
    time=st.floats(0, 100),
    symptom=st.booleans(),
)


@given(st.lists(failures, min_size=1, max_size=8), st.dictionaries(st.integers(0, 7), st.floats(0, 100)), st.randoms())
def test_the_order_in_which_failures_arrive_does_not_count(found, stopped, random):
    cause = root_cause(found, stopped)
    shuffled = random.sample(found, len(found))
    assert root_cause(shuffled, stopped) == cause or root_cause(shuffled, stopped).time == cause.time


@given(st.lists(failures, min_size=1, max_size=8), st.dictionaries(st.integers(0, 7), st.floats(0, 100)))
def test_the_cause_is_of_the_best_kind_there_is(found, stopped):
    cause = root_cause(found, stopped)
    in_time = [f for f in found if f.kind != "stopped" and not (f.rank in stopped and f.time >= stopped[f.rank])]
    own = [failure for failure in in_time if not failure.symptom]
    best = own or in_time
    if best:
        assert cause in best and cause.time == min(failure.time for failure in best)
    elif any(failure.kind != "stopped" for failure in found):
        assert cause.kind != "stopped"


# ---- a death without words


def status_of(end) -> int:
    """The wait status of a process that ends so."""
    pid = os.fork()
    if pid == 0:
        end()
        os._exit(99)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("code", [0, 3, 255])
def test_an_exit_tells_its_code(code):
    failure = death(1, status_of(lambda: os._exit(code)), out_of_memory=False)
    assert (failure.rank, failure.kind, failure.code) == (1, "exit", code)
    assert failure.message == f"exited with code {code} before it returned"


def test_a_signal_is_called_by_its_name():
    failure = death(0, status_of(lambda: os.kill(os.getpid(), signal.SIGKILL)), out_of_memory=False)
    assert (failure.kind, failure.code, failure.message) == ("signal", 9, "was killed by SIGKILL (killed)")


def test_a_kill_while_memory_ran_out_is_one_for_memory():
    killed = status_of(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert death(0, killed, out_of_memory=True).kind == "memory"
    assert death(0, status_of(lambda: os.kill(os.getpid(), signal.SIGTERM)), out_of_memory=True).kind == "signal"
    assert death(0, status_of(lambda: os._exit(1)), out_of_memory=True).kind == "exit"


def test_signals_without_a_name():
    assert policy.signal_name(signal.SIGSEGV) == "SIGSEGV (segmentation fault)"
    assert policy.signal_name(signal.SIGRTMIN + 3).startswith("signal ")


def test_of_a_crash_the_fault_handlers_report_is_shown():
    lines = [
        "loading",
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x1 (most recent call first):",
        '  File "/tmp/ipykernel_1/1.py", line 3 in train',
        f'  File "{os.sep}x{os.sep}nblaunch{os.sep}rank{os.sep}main.py", line 9 in _call',
        "",
        "Extension modules: numpy._core (total: 1)",
    ]
    assert crash_lines(lines) == [lines[1], lines[3], lines[4]]
    assert crash_lines(["just", "output"]) == ["just", "output"]


# ---- killed for memory


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_version_2_counts_in_the_processs_own_group(tmp_path):
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/user.slice/jupyter.service\n")
    events = write(
        mount / "user.slice/jupyter.service/memory.events", "low 0\nmax 3\noom 1\noom_kill 4\noom_group_kill 9\n"
    )
    kills = MemoryKills(proc, mount)
    assert not kills.happened()
    write(events, "low 0\nmax 3\noom 1\noom_kill 4\noom_group_kill 10\n")
    assert not kills.happened()
    write(events, "low 0\nmax 3\noom 2\noom_kill 5\noom_group_kill 9\n")
    assert kills.happened()
    assert kills.happened(), "several ranks may be killed by one shortage"


def test_version_1_counts_in_the_memory_controller(tmp_path):
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n")
    control = write(mount / "memory/docker/abc/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    kills = MemoryKills(proc, mount)
    write(control, "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert kills.happened()


def test_inside_a_container_the_group_is_the_mounted_one(tmp_path):
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "4:memory:/docker/abc\n")  # a path of the host, which is not there
    control = write(mount / "memory/memory.oom_control", "oom_kill 0\n")
    kills = MemoryKills(proc, mount)
    write(control, "oom_kill 1\n")
    assert kills.happened()


def test_the_whole_machine_counts_in_vmstat(tmp_path):
    vmstat = write(tmp_path / "proc/vmstat", "nr_free_pages 5\noom_kill 7\n")
    kills = MemoryKills(tmp_path / "proc", tmp_path / "cgroup")
    assert not kills.happened()
    write(vmstat, "nr_free_pages 5\noom_kill 8\n")
    assert kills.happened()


def test_a_machine_that_counts_nothing_was_never_out_of_memory(tmp_path):
    assert not MemoryKills(tmp_path, tmp_path).happened()
