"""Choose kernels, build the model of a run, and what runs its micro-batches, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from smp.config import Config, Layout
from smp.config.batch import BatchSizes
from smp.config.layer_pattern import hides_tokens, scores_flag
from smp.data.loader import BatchLoader, ReadBatch
from smp.kernels.attention import AttentionShape, choose_attention
from smp.kernels.attention_core import AttentionCore, BlockCore
from smp.kernels.dispatch import Kernels, choose_kernels, describe_kernels
from smp.kernels.grouped import describe_products
from smp.layers import init_weights
from smp.layers.context_parallel import context_parallel_attention
from smp.layers.fp8.apply import use_fp8
from smp.models.gpt import GPT
from smp.parallel.context import ParallelContext
from smp.pipeline.plan import Plan, plans_by_size
from smp.sharding.offload import Offload
from smp.sharding.parallelize import parallelize
from smp.training.eight_bit import choose_fp8, fp8_of, layers_without_fp8
from smp.training.exchange import exchange_of
from smp.training.forward_backward import Accumulation, ForwardBackward
from smp.training.pipelined import Pipelined


def choose_backends(
    config: Config,
    context: ParallelContext,
    device: torch.device,
    *,
    documents: bool,
    other_lengths: tuple[int, ...] = (),
) -> tuple[Kernels, list[str]]:
    """(what computes attention and the operations that have fused kernels, what the user should hear of the choice).

    It is what --kernels, --attention-backend, --cp-comm-type and --fp8-format mean for this run; see ``smp.kernels``,
    ``smp.layers.context_parallel`` and ``smp.layers.fp8``.

    Args:
        config: resolved settings.
        context: of the run.
        device: of the run.
        documents: whether sequences hold several documents, which do not see each other.
        other_lengths: of sequences, where they are not all --seq-length long.

    Raises:
        ConfigError: a wish cannot be met.
    """
    model, parallel = config.model, config.parallel
    kernels, reasons = choose_kernels(
        parallel.kernels,
        device,
        features=model.hidden_size,
        compile=parallel.compile,
        selective=parallel.recompute_granularity == "selective",
    )
    shape = _attention_shape(config, documents=documents, other_lengths=other_lengths)
    attention = choose_attention(
        parallel.attention_backend, device, shape, deterministic=config.training.deterministic_mode
    )
    core, exchanged = _over_context_ranks(attention.core, config, context, device)
    used = {"swiglu": model.swiglu, "rope": model.position_embedding_type == "rope"}
    used |= dict.fromkeys(("router", "permute"), model.num_experts is not None)
    # Of an operation that this model does not have the user need not hear.
    shown = {name: reason for name, reason in reasons.items() if used.get(name, True)}
    lines = [*describe_kernels(kernels, shown), str(attention), *exchanged]
    if model.attention_dropout > 0.0:
        lines.append("attention: in training probabilities are materialised instead, for --attention-dropout")
    lines += [*_products_of_experts(config, device, shape.dtype), *choose_fp8(config, device)]
    return replace(kernels, attention=core), lines


def _attention_shape(config: Config, *, documents: bool, other_lengths: tuple[int, ...]) -> AttentionShape:
    """Of one call on one rank: tensor parallelism cuts heads, and neighbours may share a key/value head."""
    model, tp, length = config.model, config.parallel.tensor_model_parallel_size, config.data.seq_length
    groups = model.num_query_groups
    assert model.kv_channels is not None and groups is not None and length is not None, "resolved before"
    return AttentionShape(
        heads=model.num_attention_heads // tp,
        groups=max(groups // tp, 1),
        length=length,
        head_dim=model.kv_channels,
        dtype=torch.bfloat16 if config.parallel.bf16 else torch.float32,
        masked=documents or hides_tokens(model, length),
        spans=model.attention_dropout == 0.0,
        other_lengths=other_lengths,
        changes_scores=scores_flag(model),
    )


def _over_context_ranks(
    core: BlockCore, config: Config, context: ParallelContext, device: torch.device
) -> tuple[AttentionCore, list[str]]:
    """``core``, with context parallelism inside of the core that exchanges with the other ranks; and lines for the
    user."""
    if context.cp_exchange is None:
        return core, []
    exchange = exchange_of(config, device.type)
    around = context_parallel_attention(core, context.cp_exchange, exchange.kind)
    return around, [*exchange.lines, f"context parallelism: {around}"]


def _products_of_experts(config: Config, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Lines for the user; none without experts."""
    model, parallel = config.model, config.parallel
    if model.num_experts is None:
        return []
    assert model.moe_ffn_hidden_size is not None, "resolved before"
    ranks = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return describe_products(device, dtype, (model.hidden_size, model.moe_ffn_hidden_size // ranks))


@dataclass(frozen=True)
class RunSetup:
    """Where and how a run computes, before there is a model.

    Attributes:
        context: meshes and groups.
        device: of the model.
        kernels: what computes attention and the operations that have fused kernels.
        plan: of the pipeline; None: every rank has the whole model.
        offload: where activations of all models wait; None: on the device.
        making_groups: entered while process groups are made, see :meth:`Watchdog.ending`.
        progress: called meanwhile after each of them.
    """

    context: ParallelContext
    device: torch.device
    kernels: Kernels
    plan: Plan | None = None
    offload: Offload | None = None
    making_groups: Callable[[], AbstractContextManager[None]] = nullcontext
    progress: Callable[[], None] = lambda: None


def build_model(config: Config, setup: RunSetup) -> GPT:
    """A model with initial weights. Built without memory, sharded, and only then filled: no rank ever holds more than
    its part."""
    model = assemble(config, setup)
    parallelize(model, setup.context, config.parallel, setup.offload)
    # ``to_empty`` loses buffers too, so ``init_weights`` fills all that has an initializer.
    model.to_empty(device=setup.device)
    init_weights(model, config.training.seed)
    return model


def assemble(config: Config, setup: RunSetup) -> GPT:
    """This rank's parts of the model, without memory and not yet sharded."""
    context, plan = setup.context, setup.plan
    model = GPT(
        config.model,
        context,
        seed=config.training.seed,
        compute_dtype=torch.bfloat16 if config.parallel.bf16 else None,
        parts=None if plan is None else list(plan.stages_of(context.pp_rank).values()),
        kernels=setup.kernels,
    )
    if (fp8 := fp8_of(config)) is not None:
        use_fp8(model, fp8, context, setup.device, leave=layers_without_fp8(config, model))
    return model


def build_forward_backward(config: Config, setup: RunSetup, model: GPT) -> ForwardBackward:
    """Through the pipeline, or without one by accumulation."""
    if setup.plan is None:
        return Accumulation(model, config.parallel.data_parallel_sharding_strategy)
    context = setup.context
    assert context.pp is not None, "a pipeline has ranks"
    world_size = context.data_size * context.cp_size * context.tp.size() * context.pp.size()
    # A ramp-up of the batch size changes the number of micro-batches, so there is a schedule for each. Before the
    # groups: many schedules take a while, in which no rank waits for another.
    plans = plans_by_size(config, Layout.from_config(config.parallel, world_size))
    with setup.making_groups():
        return Pipelined(config, setup.plan, plans, model, context, setup.device, setup.offload, setup.progress)


def batch_loader(
    config: Config,
    setup: RunSetup,
    dataset: Any,
    read: ReadBatch | None = None,
    *,
    start: int = 0,
    sizes: BatchSizes | None = None,
) -> BatchLoader:
    """Reads this rank's shares of a data set.

    Args:
        dataset: what to read: a ``SampleDataset``, or anything when ``read`` is given.
        read: makes a batch of numbered samples; without it they are stacked.
        start: samples already consumed by all ranks.
        sizes: of the steps; by default all are --global-batch-size.
    """
    data, context = config.data, setup.context
    assert data.global_batch_size is not None, "resolved before"
    return BatchLoader(
        dataset,
        micro_batch_size=data.micro_batch_size,
        num_microbatches=data.global_batch_size // (data.micro_batch_size * context.data_size),
        dp_rank=context.data_rank,
        dp_size=context.data_size,
        start_sample=start,
        batch_size=sizes,
        num_workers=data.num_workers if read is None else 1,  # ``read`` keeps the order of one epoch at a time
        with_documents=data.reset_attention_mask,
        with_positions=data.reset_position_ids,
        pin_memory=setup.device.type == "cuda",
        read=read,
    )
