"""What a launch becomes on a machine: ranks, devices, threads, variables."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nblaunch.agent import launching
from nblaunch.agent.launching import Plan, cores, exec_environment, listen, rank_environment
from nblaunch.config import LaunchConfig
from nblaunch.errors import ConfigError
from nblaunch.wire.messages import Census, Device, Launch

GPUS = Census([Device("cuda", i, f"A100 number {i}", f"GPU-{i}{i}{i}") for i in range(4)], "nccl")
NONE = Census([], "gloo")


def plan(census: Census = GPUS, environment: dict[str, str] | None = None, **options) -> Plan:
    return launching.plan(LaunchConfig(**options), environment or {}, census)


def indices(plan: Plan) -> list[int]:
    return [device.index for device in plan.devices]


# ---- ranks and devices


def test_by_default_there_is_a_rank_for_each_device():
    there = plan()
    assert (there.ranks, indices(there), there.backend, there.world_size) == ([0, 1, 2, 3], [0, 1, 2, 3], "nccl", 4)


def test_without_devices_there_are_two_ranks_on_the_cpu():
    there = plan(NONE)
    assert (there.ranks, there.devices, there.backend) == ([0, 1], [Device("cpu")] * 2, "gloo")


def test_the_cpu_can_be_asked_for():
    for there in (
        plan(devices="cpu"),
        plan(environment={"ACCELERATE_USE_CPU": "1"}),
        plan(env={"ACCELERATE_USE_CPU": "true"}),
    ):
        assert [device.type for device in there.devices] == ["cpu", "cpu"]
        assert there.backend == "gloo"


@pytest.mark.parametrize("wanted", [[2, 0], ["2", "0"], ["GPU-222", "GPU-000"], ["GPU-222", 0]], ids=str)
def test_devices_are_named_by_index_or_uuid(wanted):
    assert indices(plan(devices=wanted)) == [2, 0]


def test_devices_are_named_by_kind():
    assert indices(plan(devices="cuda", num_processes=2)) == [0, 1]


def test_fewer_processes_than_devices_take_the_first_ones():
    assert indices(plan(num_processes=3)) == [0, 1, 2]


def test_a_backend_can_be_asked_for():
    assert plan(backend="gloo").backend == "gloo"


@pytest.mark.parametrize(
    ("census", "environment", "options", "words"),
    [
        (
            GPUS,
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            {"num_processes": 8},
            "asked for 8 processes, but 4 cuda devices are visible (CUDA_VISIBLE_DEVICES=0,1,2,3); "
            'pass num_processes=4, or devices="cpu"',
        ),
        (GPUS, {}, {"num_processes": 2, "devices": [1]}, "asked for 2 processes, but 1 cuda device is visible; pass"),
        (GPUS, {}, {"devices": "xpu"}, 'devices="xpu": there is no such device here; accelerators visible: cuda'),
        (NONE, {}, {"devices": "cuda"}, 'devices="cuda": there is no such device here; accelerators visible: none'),
        (GPUS, {}, {"devices": [9]}, "devices names 9, which is not visible here; there are: 0 (GPU-000), 1 (GPU-111)"),
        (NONE, {}, {"devices": [0]}, "devices names 0, which is not visible here; there are: none"),
        (GPUS, {}, {"devices": [1, "GPU-111"]}, "devices names 'GPU-111' a second time"),
    ],
)
def test_what_is_not_there_is_refused_in_words(census, environment, options, words):
    with pytest.raises(ConfigError) as caught:
        plan(census, environment, **options)
    assert words in str(caught.value)


def test_across_machines_ranks_go_on_where_the_last_machine_ended():
    there = plan(num_nodes=3, node_rank=2, use_port=29500)
    assert (there.ranks, there.world_size) == ([8, 9, 10, 11], 12)


# ---- threads and cores


def test_threads_are_the_ranks_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(launching, "cores", lambda: 10)
    assert plan(num_processes=4).threads == 2
    assert plan(num_processes=4, threads=7).threads == 7
    assert plan(environment={"OMP_NUM_THREADS": "3"}).threads == 3
    assert plan(env={"OMP_NUM_THREADS": "5,2"}).threads == 5
    assert plan(environment={"OMP_NUM_THREADS": "many"}).threads == 2
    monkeypatch.setattr(launching, "cores", lambda: 1)
    assert plan(num_processes=4).threads == 1


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes files of a machine with 16 cores, and tells how many this process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    def count(**files: str) -> int:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cores(tmp_path / "proc", tmp_path / "cgroup")

    return count


def test_without_a_quota_all_cores_of_the_affinity_count(machine):
    assert machine() == 16
    assert machine(proc__self__cgroup="0::/\n", cgroup__cpu_dot_max="max 100000\n") == 16


def test_a_containers_quota_counts(machine):
    assert machine(proc__self__cgroup="0::/\n", cgroup__cpu_dot_max="250000 100000\n") == 2
    assert machine(cgroup__cpu_dot_max="50000 100000\n") == 1
    assert machine(cgroup__cpu_dot_max="6400000 100000\n") == 16


def test_the_least_quota_from_the_own_group_upwards_counts(machine):
    assert (
        machine(
            proc__self__cgroup="0::/user.slice/jupyter.service\n",
            **{
                "cgroup__user.slice__cpu_dot_max": "400000 100000\n",
                "cgroup__user.slice__jupyter.service__cpu_dot_max": "800000 100000\n",
            },
        )
        == 4
    )


def test_a_quota_of_version_1_counts(machine):
    assert (
        machine(
            proc__self__cgroup="3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
            **{
                "cgroup__cpu,cpuacct__cpu_dot_cfs_quota_us": "300000\n",
                "cgroup__cpu,cpuacct__cpu_dot_cfs_period_us": "100000\n",
            },
        )
        == 3
    )
    assert machine(**{"cgroup__cpu,cpuacct__cpu_dot_cfs_quota_us": "-1\n"}) == 16


def test_a_file_that_says_nonsense_sets_no_limit(machine):
    assert machine(proc__self__cgroup="0::/\n", cgroup__cpu_dot_max="\n") == 16


# ---- the store's port


def test_the_store_listens_on_loopback_alone():
    with listen(LaunchConfig()) as listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1" and port > 0


def test_a_port_that_is_taken_is_refused_in_words():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"use_port={port} can't be used: Address already in use; pass another"):
            listen(LaunchConfig(use_port=port))


def test_across_machines_rank_0_holds_the_store():
    assert listen(LaunchConfig(num_nodes=2, use_port=29500)) is None


# ---- variables


def launch(environment: dict[str, str] | None = None, config: LaunchConfig | None = None) -> Launch:
    config = config or LaunchConfig()
    return Launch("run-1", config.to_dict(), environment or {}, "/", [], [], 0, {}, "", {}, "")


def variables(census: Census = NONE, local_rank: int = 1, environment=None, **options) -> dict[str, str]:
    config = LaunchConfig(**options)
    there = launching.plan(config, {}, census)
    return rank_environment(launch(environment, config), config, there, local_rank, port=4321, attempt=0)


def test_a_rank_finds_torchs_variables():
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run-1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "1",
    }
    assert expected.items() <= variables(num_processes=3).items()


def test_a_rank_of_the_second_machine():
    there = variables(num_processes=2, num_nodes=2, node_rank=1, use_port=29500, master_addr="10.0.0.1")
    assert (there["RANK"], there["LOCAL_RANK"], there["GROUP_RANK"], there["WORLD_SIZE"]) == ("3", "1", "1", "4")
    assert (there["MASTER_ADDR"], there["TORCHELASTIC_USE_AGENT_STORE"]) == ("10.0.0.1", "False")
    assert "GLOO_SOCKET_IFNAME" not in there


def test_a_network_interface_of_the_users_own_is_left_alone():
    assert "GLOO_SOCKET_IFNAME" not in variables(environment={"GLOO_SOCKET_IFNAME": "eth0"})
    assert "GLOO_SOCKET_IFNAME" not in variables(env={"GLOO_SOCKET_IFNAME": "eth0"})


def test_chosen_devices_are_made_the_visible_ones_and_nothing_else_is_touched():
    assert variables(GPUS, devices=[2, 0])["CUDA_VISIBLE_DEVICES"] == "GPU-222,GPU-000"
    assert "CUDA_VISIBLE_DEVICES" not in variables(GPUS)
    assert "ACCELERATE_USE_CPU" not in variables(GPUS)


@pytest.mark.parametrize(("precision", "fabric"), [("bf16", "bf16-mixed"), ("fp16", "16-mixed"), ("no", "32-true")])
def test_the_precision_is_told_to_accelerate_and_fabric(precision, fabric):
    there = variables(mixed_precision=precision)
    assert (there["ACCELERATE_MIXED_PRECISION"], there["LT_PRECISION"]) == (precision, fabric)
    assert "ACCELERATE_MIXED_PRECISION" not in variables()


def test_a_fresh_interpreter_finds_at_its_start_what_counts_there(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    config = LaunchConfig(env={"LD_PRELOAD": "libjemalloc.so", "OMP_NUM_THREADS": "7"})
    there = exec_environment(launch({"HOME": "/home/me"}, config), {"RANK": "0"}, threads=2)
    assert there["PYTHONHASHSEED"] == "42"
    assert there["LD_PRELOAD"] == "libjemalloc.so"
    assert (there["HOME"], there["RANK"]) == ("/home/me", "0")
    assert (there["OMP_NUM_THREADS"], there["MKL_NUM_THREADS"]) == ("7", "2")


def test_a_hash_seed_of_the_users_own_counts(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    assert exec_environment(launch({"PYTHONHASHSEED": "7"}), {}, threads=1)["PYTHONHASHSEED"] == "7"


def test_the_real_machine_has_a_core():
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    assert Path("/proc/self/cgroup").exists()
