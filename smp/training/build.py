"""The model of a run, and the way its micro-batches go through it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from smp.config import Config
from smp.kernels.attention import AttentionChoice, AttentionShape, choose_attention
from smp.kernels.dispatch import Kernels, choose_kernels
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.pipeline.plan import Plan
from smp.sharding.parallelize import parallelize
from smp.training.passes import Accumulation, Inputs, MakeInputs, Passes
from smp.training.pipelined import Pipelined


def run_kernels(config: Config, device: torch.device) -> tuple[Kernels, dict[str, str]]:
    """What --kernels means for this run, and why; see ``smp.kernels.dispatch.choose_kernels``."""
    parallel = config.parallel
    return choose_kernels(parallel.kernels, device, features=config.model.hidden_size, compile=parallel.compile)


def attention_of(config: Config, device: torch.device) -> AttentionChoice:
    """What --attention-backend means for this run, and why; see ``smp.kernels.attention.choose_attention``."""
    model, parallel, length = config.model, config.parallel, config.data.seq_length
    assert model.kv_channels is not None and length is not None, "resolved before"
    shape = AttentionShape(
        heads=model.num_attention_heads // parallel.tensor_model_parallel_size,
        length=length,
        head_dim=model.kv_channels,
        dtype=torch.bfloat16 if parallel.bf16 else torch.float32,
        masked=config.data.reset_attention_mask or (model.window_size is not None and model.window_size < length),
    )
    return choose_attention(parallel.attention_backend, device, shape, deterministic=config.training.deterministic_mode)


def build_model(config: Config, mesh: DeviceMesh, device: torch.device, plan: Plan | None = None) -> GPT:
    """Built without memory, sharded, and only then filled: no rank ever holds more than its part.

    Args:
        config: resolved settings.
        mesh: of the run.
        device: where the parameters go.
        plan: of the pipeline; without one every rank has the whole model.
    """
    parts = None if plan is None else list(plan.stages_of(mesh.get_local_rank("pp")).values())
    split, seed = config.parallel.sequence_parallel, config.training.seed
    kernels, _ = run_kernels(config, device)
    model = GPT(config.model, mesh["tp"], sequence_parallel=split, seed=seed, parts=parts, kernels=kernels)
    parallelize(model, mesh, config.parallel)
    model.to_empty(device=device)
    init_weights(model, seed)
    return model


def build_passes(
    config: Config,
    mesh: DeviceMesh,
    device: torch.device,
    model: GPT,
    plan: Plan | None,
    make_inputs: MakeInputs = Inputs,
    rows: int = 1,
) -> Passes:
    """Through the pipeline that ``plan`` describes, or without one by accumulation; ``rows`` of each sample."""
    if plan is None:
        return Accumulation(model, device, make_inputs)
    return Pipelined(config, plan, model, mesh, device, make_inputs, rows)
