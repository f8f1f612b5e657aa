"""The model of a run, and the way its micro-batches go through it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from smp.config import Config
from smp.kernels.attention import AttentionShape, choose_attention
from smp.kernels.dispatch import Kernels, choose_kernels, describe_kernels
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.parallel.context import ParallelContext
from smp.pipeline.plan import Plan
from smp.sharding.parallelize import parallelize
from smp.training.passes import Accumulation, Inputs, MakeInputs, Passes
from smp.training.pipelined import Pipelined


@dataclass(frozen=True)
class Backends:
    """What computes in a run; decided once, before there is a model.

    Attributes:
        kernels: of attention and the operations that have fused ones.
        lines: which, and why, for the user.
    """

    kernels: Kernels
    lines: tuple[str, ...]


def choose_backends(
    config: Config, device: torch.device, *, documents: bool, other_lengths: tuple[int, ...] = ()
) -> Backends:
    """What --kernels and --attention-backend mean for this run, and why; see ``smp.kernels``.

    Args:
        config: resolved settings.
        device: of the run.
        documents: whether sequences hold several documents, which do not see each other.
        other_lengths: of sequences, where they are not all --seq-length long.

    Raises:
        ConfigError: a wish cannot be met.
    """
    model, parallel, length = config.model, config.parallel, config.data.seq_length
    groups = model.num_query_groups
    assert model.kv_channels is not None and groups is not None and length is not None, "resolved before"
    tp = parallel.tensor_model_parallel_size
    kernels, reasons = choose_kernels(
        parallel.kernels,
        device,
        features=model.hidden_size,
        compile=parallel.compile,
        selective=parallel.recompute_granularity == "selective",
    )
    shape = AttentionShape(
        heads=model.num_attention_heads // tp,
        groups=max(groups // tp, 1),
        length=length,
        head_dim=model.kv_channels,
        dtype=torch.bfloat16 if parallel.bf16 else torch.float32,
        masked=documents or (model.window_size is not None and model.window_size < length),
        spans=model.attention_dropout == 0.0,
        other_lengths=other_lengths,
    )
    deterministic = config.training.deterministic_mode
    attention = choose_attention(parallel.attention_backend, device, shape, deterministic=deterministic)
    used = {"swiglu": model.swiglu, "rope": model.position_embedding_type == "rope"}
    told = {name: reason for name, reason in reasons.items() if used.get(name, True)}
    lines = [*describe_kernels(kernels, told), str(attention)]
    if model.attention_dropout > 0.0:
        lines.append("attention: in training probabilities are materialised instead, for --attention-dropout")
    return Backends(replace(kernels, attention=attention.core), tuple(lines))


def build_model(
    config: Config, context: ParallelContext, device: torch.device, backends: Backends, plan: Plan | None = None
) -> GPT:
    """Built without memory, sharded, and only then filled: no rank ever holds more than its part.

    Args:
        config: resolved settings.
        context: of the run.
        device: where the parameters go.
        backends: what computes.
        plan: of the pipeline; without one every rank has the whole model.
    """
    model = assemble(config, context, backends, plan)
    parallelize(model, context, config.parallel)
    model.to_empty(device=device)
    init_weights(model, config.training.seed)
    return model


def assemble(config: Config, context: ParallelContext, backends: Backends, plan: Plan | None) -> GPT:
    """This rank's parts of the model, without memory and not yet sharded. Arguments as in :func:`build_model`."""
    return GPT(
        config.model,
        context,
        seed=config.training.seed,
        compute_dtype=torch.bfloat16 if config.parallel.bf16 else None,
        parts=None if plan is None else list(plan.stages_of(context.pp_rank).values()),
        kernels=backends.kernels,
    )


def build_passes(
    config: Config,
    context: ParallelContext,
    device: torch.device,
    model: GPT,
    plan: Plan | None,
    make_inputs: MakeInputs = Inputs,
    rows: int = 1,
) -> Passes:
    """Through the pipeline that ``plan`` describes, or without one by accumulation; ``rows`` of each sample."""
    if plan is None:
        return Accumulation(model, device, make_inputs)
    return Pipelined(config, plan, model, context, device, make_inputs, rows)
