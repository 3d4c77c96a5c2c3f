"""nblaunch: train on several devices from a Jupyter notebook.

    from nblaunch import notebook_launcher

    run = notebook_launcher(train, num_processes=2)

Importing this package imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "notebook_launcher": "nblaunch.kernel.launcher",
    "debug_launcher": "nblaunch.kernel.launcher",
    "last_run": "nblaunch.kernel.launcher",
    "load_run": "nblaunch.kernel.run",
    "Run": "nblaunch.kernel.run",
    "LaunchConfig": "nblaunch.config",
    "log": "nblaunch.rank.metrics",
    "progress": "nblaunch.rank.bars",
    "NblaunchError": "nblaunch.errors",
    "ConfigError": "nblaunch.errors",
    "PayloadError": "nblaunch.errors",
    "ResultError": "nblaunch.errors",
    "AgentError": "nblaunch.errors",
    "RankError": "nblaunch.errors",
    "CheckpointError": "nblaunch.errors",
    "CollectiveError": "nblaunch.errors",
    "DistributedOperationException": "nblaunch.errors",
    "UnpreparedError": "nblaunch.errors",
    "UnusedParametersError": "nblaunch.errors",
    "Accelerator": "nblaunch.training.accelerator",
    "PartialState": "nblaunch.training.processes",
    "skip_first_batches": "nblaunch.training.data",
    "AORecipeKwargs": "nblaunch.training.options",
    "AutocastKwargs": "nblaunch.training.options",
    "DataLoaderConfiguration": "nblaunch.training.options",
    "DistributedDataParallelKwargs": "nblaunch.training.options",
    "GradScalerKwargs": "nblaunch.training.options",
    "GradientAccumulationPlugin": "nblaunch.training.options",
    "InitProcessGroupKwargs": "nblaunch.training.options",
    "KwargsHandler": "nblaunch.training.options",
    "ProfileKwargs": "nblaunch.training.options",
    "ProjectConfiguration": "nblaunch.training.options",
    "TorchDynamoPlugin": "nblaunch.training.options",
    "DDPCommunicationHookType": "nblaunch.training.kinds",
    "DistributedType": "nblaunch.training.kinds",
    "DynamoBackend": "nblaunch.training.kinds",
    "LoggerType": "nblaunch.training.kinds",
    "PrecisionType": "nblaunch.training.kinds",
    "RNGType": "nblaunch.training.kinds",
    "set_seed": "nblaunch.training.seeds",
    "synchronize_rng_state": "nblaunch.training.seeds",
    "synchronize_rng_states": "nblaunch.training.seeds",
    "find_executable_batch_size": "nblaunch.training.batch_size",
    "release_memory": "nblaunch.training.batch_size",
    "LocalSGD": "nblaunch.training.local_sgd",
    "get_logger": "nblaunch.training.logs",
    "tqdm": "nblaunch.training.bars",
    "GeneralTracker": "nblaunch.training.trackers",
    "extract_model_from_parallel": "nblaunch.training.preparing",
    "is_compiled_module": "nblaunch.training.preparing",
    "save": "nblaunch.training.weights",
    "is_aim_available": "nblaunch.training.availability",
    "is_bf16_available": "nblaunch.training.availability",
    "is_bnb_available": "nblaunch.training.availability",
    "is_boto3_available": "nblaunch.training.availability",
    "is_clearml_available": "nblaunch.training.availability",
    "is_comet_ml_available": "nblaunch.training.availability",
    "is_cuda_available": "nblaunch.training.availability",
    "is_datasets_available": "nblaunch.training.availability",
    "is_deepspeed_available": "nblaunch.training.availability",
    "is_dvclive_available": "nblaunch.training.availability",
    "is_fp16_available": "nblaunch.training.availability",
    "is_hpu_available": "nblaunch.training.availability",
    "is_matplotlib_available": "nblaunch.training.availability",
    "is_mlflow_available": "nblaunch.training.availability",
    "is_mlu_available": "nblaunch.training.availability",
    "is_mps_available": "nblaunch.training.availability",
    "is_musa_available": "nblaunch.training.availability",
    "is_neuron_available": "nblaunch.training.availability",
    "is_npu_available": "nblaunch.training.availability",
    "is_pandas_available": "nblaunch.training.availability",
    "is_peft_available": "nblaunch.training.availability",
    "is_pynvml_available": "nblaunch.training.availability",
    "is_pytest_available": "nblaunch.training.availability",
    "is_rich_available": "nblaunch.training.availability",
    "is_schedulefree_available": "nblaunch.training.availability",
    "is_sdaa_available": "nblaunch.training.availability",
    "is_swanlab_available": "nblaunch.training.availability",
    "is_tensorboard_available": "nblaunch.training.availability",
    "is_timm_available": "nblaunch.training.availability",
    "is_torch_xla_available": "nblaunch.training.availability",
    "is_torchao_available": "nblaunch.training.availability",
    "is_torchdata_available": "nblaunch.training.availability",
    "is_torchvision_available": "nblaunch.training.availability",
    "is_trackio_available": "nblaunch.training.availability",
    "is_transformers_available": "nblaunch.training.availability",
    "is_triton_available": "nblaunch.training.availability",
    "is_wandb_available": "nblaunch.training.availability",
    "is_xpu_available": "nblaunch.training.availability",
    "patch_environment": "nblaunch.training.availability",
    "broadcast": "nblaunch.ops",
    "broadcast_object_list": "nblaunch.ops",
    "concatenate": "nblaunch.ops",
    "convert_to_fp32": "nblaunch.ops",
    "copy_tensor_to_devices": "nblaunch.ops",
    "find_batch_size": "nblaunch.ops",
    "gather": "nblaunch.ops",
    "gather_object": "nblaunch.ops",
    "is_torch_tensor": "nblaunch.ops",
    "pad_across_processes": "nblaunch.ops",
    "recursively_apply": "nblaunch.ops",
    "reduce": "nblaunch.ops",
    "send_to_device": "nblaunch.ops",
    "slice_tensors": "nblaunch.ops",
    "wait_for_everyone": "nblaunch.ops",
}
"""Public name to the module that defines it."""

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nblaunch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nblaunch`: starts the agent in the background, so that the first launch is warm."""
    from nblaunch.kernel.magics import start_agent

    start_agent(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
