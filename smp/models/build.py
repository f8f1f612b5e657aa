"""The one place that chooses a model's class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from smp.config import ConfigError, ModelConfig
from smp.config.rules.dsa import chooses_keys, learns
from smp.kernels import TORCH, Kernels
from smp.models.gpt import GPT
from smp.models.part import ModelPart
from smp.models.protocol import Model
from smp.parallel.context import ParallelContext


def new_model(
    config: ModelConfig,
    parallel: ParallelContext | DeviceMesh,
    *,
    seed: int = 0,
    compute_dtype: torch.dtype | None = None,
    parts: Sequence[ModelPart] | None = None,
    kernels: Kernels = TORCH,
) -> Model:
    """A model without memory (on the meta device) and not yet sharded; arguments as of :class:`smp.models.gpt.GPT`.

    Raises:
        ConfigError: the architecture is one that transformers computes, not this project's decoder.
    """
    if config.is_foreign:
        raise ConfigError(
            "this model is computed by transformers, and this is for models of this project's decoder: --save-hf and "
            "tools/convert_checkpoint.py make a folder that transformers loads"
        )
    model = GPT(config, parallel, seed=seed, compute_dtype=compute_dtype, parts=parts, kernels=kernels)
    if chooses_keys(config):
        # In each stage of DSA's training some parameters are frozen. Here, before FSDP and the optimizer.
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(learns(config, name))
    return model
