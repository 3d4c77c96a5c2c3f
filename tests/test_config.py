"""Every choice of a launch: checked, saved as YAML and read back, and what a changed variable asks for."""

from __future__ import annotations

import typing

import msgspec
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nblaunch.config import (
    DASHBOARDS,
    MATMUL_PRECISIONS,
    PRECISIONS,
    START_METHODS,
    STRATEGIES,
    VARIABLES,
    LaunchConfig,
    agent_environment,
    effect_of,
    from_mapping,
)
from nblaunch.errors import ConfigError, NblaunchError

words = st.text(max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
configs = st.builds(
    LaunchConfig,
    name=st.none() | words,
    num_processes=st.none() | st.integers(1, 64),
    mixed_precision=st.sampled_from([None, *PRECISIONS]),
    use_port=st.integers(1, 65535),
    master_addr=words,
    num_nodes=st.integers(1, 4),
    rdzv_conf=st.none() | st.dictionaries(words, plain, max_size=3),
    max_restarts=st.integers(0, 5),
    monitor_interval=st.floats(0, 10),
    log_line_prefix_template=st.none() | words,
    strategy=st.sampled_from(STRATEGIES),
    devices=st.none() | words | st.lists(st.integers(0, 9) | words, min_size=1, max_size=4),
    env=st.none() | st.dictionaries(words, words, max_size=3),
    start_method=st.sampled_from(START_METHODS),
    dashboard=st.sampled_from(DASHBOARDS),
    seed=st.none() | st.integers(0, 2**32 - 1),
    threads=st.none() | st.integers(1, 64),
    matmul_precision=st.sampled_from([None, *MATMUL_PRECISIONS]),
    exit_timeout=st.floats(0, 1000),
    run_limit=st.sampled_from(["200MB", "1.5 GB", "10KB"]),
    keep_runs=st.integers(1, 1000),
)


@settings(max_examples=60)
@given(configs)
@example(LaunchConfig(name="a\x85b\u2028c\u2029d\r\n\t'\"é"))
def test_what_is_saved_is_read_back(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("launch") / "launch.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert LaunchConfig.load(path) == config
    assert from_mapping(config.to_dict()) == config


def test_only_what_was_chosen_is_saved():
    config = LaunchConfig(num_processes=2, mixed_precision="bf16", env={"A": "1"})
    assert config.to_yaml() == "num_processes: 2\nmixed_precision: bf16\nenv:\n  A: '1'\n"
    assert yaml.safe_load(LaunchConfig().to_yaml()) == {}


def test_a_copy_with_changes_is_checked_again():
    config = LaunchConfig(num_processes=2)
    assert config.replace(threads=3) == LaunchConfig(num_processes=2, threads=3)
    with pytest.raises(ConfigError, match="num_processes=0 makes no sense"):
        config.replace(num_processes=0)


def test_a_config_can_not_be_changed():
    with pytest.raises(AttributeError):
        LaunchConfig().seed = 3


def test_devices_may_be_given_as_a_tuple():
    assert LaunchConfig(devices=(0, 1)) == LaunchConfig(devices=[0, 1])


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixed_precision": "bf17"}, "mixed_precision='bf17' is unknown; there are: 'no', 'fp16', 'bf16', 'fp8'"),
        ({"strategy": "zero"}, "strategy='zero' is unknown; there are: 'auto', 'ddp'"),
        ({"start_method": "forkserver"}, "start_method='forkserver' is unknown; there are: 'auto', 'fork', 'spawn'"),
        ({"dashboard": "web"}, "dashboard='web' is unknown"),
        ({"matmul_precision": "low"}, "matmul_precision='low' is unknown"),
        ({"num_processes": 0}, "num_processes=0 makes no sense; it must be at least 1"),
        ({"num_nodes": 0}, "num_nodes=0 makes no sense"),
        ({"max_restarts": -1}, "max_restarts=-1 makes no sense; it must be at least 0"),
        ({"threads": 0}, "threads=0 makes no sense"),
        ({"keep_runs": 0}, "keep_runs=0 makes no sense"),
        ({"seed": -1}, "seed=-1 makes no sense"),
        ({"seed": 2**32}, "seed=4294967296 is too large: NumPy takes seeds below 2**32"),
        ({"node_rank": 1}, "node_rank=1 with num_nodes=1: it counts the machines from 0"),
        ({"use_port": 65536}, "use_port=65536 is no port"),
        ({"use_port": -1}, "use_port=-1 is no port"),
        ({"num_nodes": 2}, "num_nodes > 1 needs a port that all machines know"),
        ({"devices": []}, "devices=[] names no device"),
        ({"devices": ()}, "devices=[] names no device"),
        ({"exit_timeout": -0.1}, "exit_timeout=-0.1 makes no sense"),
        ({"exit_timeout": float("nan")}, "exit_timeout=nan makes no sense"),
        ({"run_limit": "lots"}, 'run_limit=\'lots\' was not understood; write it as "200MB" or "2GB"'),
        ({"run_limit": "200mb"}, "run_limit='200mb' was not understood"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("make", [lambda options: LaunchConfig(**options), from_mapping], ids=["made", "read"])
def test_what_makes_no_sense_is_refused_in_words(make, options, words):
    with pytest.raises(ConfigError) as caught:
        make(options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_processes": "2"}, "num_processes"),
        ({"num_processes": True}, "num_processes"),
        ({"num_processes": 2.5}, "num_processes"),
        ({"env": {"A": 1}}, "env"),
        ({"env": ["A=1"]}, "env"),
        ({"devices": {0: 1}}, "devices"),
        ({"devices": [0.5]}, "devices"),
        ({"run_limit": 200}, "run_limit"),
        ({"name": 7}, "name"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [lambda options: LaunchConfig(**options), from_mapping], ids=["made", "read"])
def test_a_wrong_type_is_refused_and_named(make, options, named):
    with pytest.raises(ConfigError, match="wrong type") as caught:
        make(options)
    assert named in str(caught.value)


def test_what_can_not_be_saved_is_refused():
    with pytest.raises(ConfigError, match="rdzv_conf"):
        LaunchConfig(rdzv_conf={"handler": object()})


def test_unknown_options_are_named_with_those_that_there_are():
    with pytest.raises(ConfigError) as caught:
        from_mapping({"num_proceses": 2, "turbo": True})
    assert "unknown launch option num_proceses, turbo; there are: name, num_processes, " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n- 2\n", "holds list, expected a mapping"),
        ("num_processes: [", "can't be read as a launch"),
        ("num_processes: two\n", "wrong type"),
        ("turbo: true\n", "unknown launch option turbo"),
        ("1: 2\n", "unknown launch option 1"),
        (b"name: \xff\n", "can't be read as a launch"),
        (None, "can't be read as a launch"),
    ],
)
def test_a_file_that_is_no_launch_is_refused_in_words(tmp_path, text, words):
    path = tmp_path / "launch.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        LaunchConfig.load(path)
    assert words in str(caught.value)


def test_an_empty_file_is_a_launch_of_defaults(tmp_path):
    (tmp_path / "launch.yaml").touch()
    assert LaunchConfig.load(tmp_path / "launch.yaml") == LaunchConfig()


def test_a_config_error_is_a_value_error_of_ours():
    assert issubclass(ConfigError, NblaunchError) and issubclass(ConfigError, ValueError)


def test_limits_are_understood():
    assert LaunchConfig(run_limit="200MB").run_limit_bytes == 200_000_000
    assert LaunchConfig(run_limit="1.5 GB").run_limit_bytes == 1_500_000_000
    assert LaunchConfig(run_limit="4KB").run_limit_bytes == 4000


def test_every_option_says_its_type():
    hints = typing.get_type_hints(LaunchConfig)
    assert list(hints)[: len(LaunchConfig.__struct_fields__)] == list(LaunchConfig.__struct_fields__)
    assert msgspec.convert({}, LaunchConfig) == LaunchConfig()


# ---- the table of variables


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_thread_counts_are_applied_in_the_rank(name):
    assert effect_of(name) == "rank"


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "MALLOC_ARENA_MAX", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS",
        "PYTORCH_CUDA_ALLOC_CONF", "OMP_PROC_BIND", "KMP_AFFINITY", "LANG", "LC_ALL", "DS_ACCELERATOR",
    ],
)  # fmt: skip
def test_what_is_read_at_process_start_needs_a_new_agent(name):
    assert effect_of(name) == "agent"


@pytest.mark.parametrize(
    "name", ["HOME", "WANDB_MODE", "NCCL_DEBUG", "HF_HOME", "MY_OMP_NUM_THREADS", "ld_preload", ""]
)
def test_any_other_variable_is_plain(name):
    assert effect_of(name) is None


def test_the_first_entry_that_fits_counts():
    assert list(VARIABLES).index("OMP_NUM_THREADS") < list(VARIABLES).index("OMP_*")


def test_an_agent_is_told_apart_by_what_it_can_not_change():
    environment = {"HOME": "/me", "LD_PRELOAD": "a.so", "OMP_NUM_THREADS": "4", "TORCH_LOGS": "+dynamo"}
    assert agent_environment(environment) == {"LD_PRELOAD": "a.so", "TORCH_LOGS": "+dynamo"}
