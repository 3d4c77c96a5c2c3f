"""Every name of Accelerate that this version offers can be imported from nblaunch, and is documented."""

from __future__ import annotations

import inspect

import pytest

import nblaunch

FROM_ACCELERATE = """
Accelerator PartialState skip_first_batches debug_launcher notebook_launcher AutocastKwargs
DataLoaderConfiguration DDPCommunicationHookType DistributedDataParallelKwargs DistributedType
GradScalerKwargs InitProcessGroupKwargs ProfileKwargs find_executable_batch_size synchronize_rng_states
""".split()  # noqa: SIM905

FROM_ITS_UTILS = """
AORecipeKwargs AutocastKwargs DataLoaderConfiguration DDPCommunicationHookType DistributedDataParallelKwargs
DistributedType DynamoBackend GradientAccumulationPlugin GradScalerKwargs InitProcessGroupKwargs KwargsHandler
LoggerType PrecisionType ProfileKwargs ProjectConfiguration RNGType TorchDynamoPlugin broadcast
broadcast_object_list concatenate convert_to_fp32 copy_tensor_to_devices extract_model_from_parallel
find_batch_size find_executable_batch_size gather gather_object is_compiled_module is_torch_tensor
pad_across_processes recursively_apply reduce release_memory save send_to_device set_seed slice_tensors
synchronize_rng_state synchronize_rng_states tqdm wait_for_everyone
""".split()  # noqa: SIM905

FROM_ITS_MODULES = ["DistributedOperationException", "LocalSGD", "get_logger", "GeneralTracker"]


@pytest.mark.parametrize("name", sorted({*FROM_ACCELERATE, *FROM_ITS_UTILS, *FROM_ITS_MODULES}))
def test_the_name_is_there_and_documented(name):
    thing = getattr(nblaunch, name)
    assert name in dir(nblaunch)
    assert (inspect.getdoc(thing) or "").strip()


@pytest.mark.parametrize("name", FROM_ACCELERATE)
def test_accelerate_has_it_too(name):
    assert hasattr(pytest.importorskip("accelerate"), name)


@pytest.mark.parametrize("name", FROM_ITS_UTILS)
def test_accelerates_utils_have_it_too(name):
    assert hasattr(pytest.importorskip("accelerate.utils"), name)


def _parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FROM_ITS_UTILS
        if name not in ("DynamoBackend", "is_torch_tensor", "recursively_apply", "convert_to_fp32", "tqdm")
    ],
)
def test_arguments_are_named_as_theirs(name):
    theirs = getattr(pytest.importorskip("accelerate.utils"), name)
    ours = getattr(nblaunch, name)
    if inspect.isclass(theirs) and not inspect.isclass(ours):
        pytest.skip("a class there")
    known = _parameters(ours)
    missing = [name for name in _parameters(theirs) if name not in known]
    left_out = {
        "TorchDynamoPlugin": ["use_regional_compilation"],
        "extract_model_from_parallel": ["recursive"],
        "AORecipeKwargs": ["enable_fsdp_float8_all_gather"],
        "slice_tensors": ["process_index", "num_processes"],
    }
    assert missing == left_out.get(name, [])


def test_the_methods_of_the_accelerator_are_there():
    theirs = pytest.importorskip("accelerate").Accelerator
    ours = nblaunch.Accelerator
    instance = ours(cpu=True)
    left_out = {
        "context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank", "pipeline_parallel_rank",
        "tensor_parallel_rank", "torch_device_mesh", "is_fsdp2", "is_composable_parallelism_enabled",
        "parallelism_config", "maybe_context_parallel", "deepspeed_ulysses_dl_adapter", "lomo_backward",
        "fp8_backend", "should_save_model", "multi_device", "verify_device_map",
    }  # fmt: skip
    names = {name for name in dir(theirs) if not name.startswith("_")}
    assert names - set(dir(instance)) <= left_out
    for name in sorted(names - left_out):
        method = getattr(theirs, name)
        if inspect.isfunction(method):
            missing = set(_parameters(method)) - set(_parameters(getattr(instance, name)))
            assert not missing - {"self", "save_model_func_kwargs", "args", "kwargs"}, name
    missing = set(_parameters(theirs.__init__)) - set(_parameters(ours.__init__))
    assert not missing


def test_importing_nblaunch_imports_no_torch():
    import subprocess
    import sys

    code = "import nblaunch, sys; assert 'torch' not in sys.modules; nblaunch.LaunchConfig"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
