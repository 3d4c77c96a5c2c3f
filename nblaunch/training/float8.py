"""Linear layers in fp8, by torchao."""

from __future__ import annotations

from typing import Any

import torch

from nblaunch.training.options import AORecipeKwargs


def convert_to_float8(model: torch.nn.Module, recipe: AORecipeKwargs) -> torch.nn.Module:
    """The model with its linear layers replaced by torchao's; parameters stay the same objects.

    By default the first and the last linear layer stay as they are, which keeps accuracy (torchao's advice for
    training), and so do those whose sizes fp8 matrix products can't take (multiples of 16).

    Raises:
        ImportError: torchao is not installed.
    """
    try:
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError:
        raise ImportError('mixed_precision="fp8" needs torchao, which is not installed; pip install torchao') from None
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    kept = {linear[0], linear[-1]} if linear else set[str]()

    def fits(module: Any, name: str) -> bool:
        if not isinstance(module, torch.nn.Linear) or name in kept:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    config = recipe.config or Float8LinearConfig(pad_inner_dim=bool(recipe.pad_inner_dim))
    return convert_to_float8_training(model, config=config, module_filter_fn=recipe.module_filter_func or fits)
