"""Choose kernels, build the model of a run, and what runs its micro-batches, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from smp.config import Config, ConfigError, Layout
from smp.config.batch import BatchSizes
from smp.config.layers import hides_tokens, scores_flag
from smp.data.loader import BatchLoader, ReadBatch
from smp.generation import Generator
from smp.kernels.attention_cores.attention_core import AttentionCore, BlockCore
from smp.kernels.attention_cores.select_attention import AttentionShape, choose_attention
from smp.kernels.cpp.library import why_not
from smp.kernels.dispatch import Kernels, choose_kernels, describe_kernels
from smp.kernels.experts.grouped import describe_products
from smp.layers.context_parallel import context_parallel_attention
from smp.layers.fp8.apply import use_fp8
from smp.models.build import new_model
from smp.models.protocol import Model, require_capability, require_stages
from smp.parallel.agree import gather
from smp.parallel.context import ParallelContext
from smp.pipeline.stage_plan import Plan, plan_pipeline, plans_by_size
from smp.sharding.offload import Offload
from smp.sharding.parallelize import parallelize
from smp.training.eight_bit import choose_fp8, fp8_of, layers_without_fp8
from smp.training.exchange import exchange_of, recurrence_exchange
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
    dtype = torch.bfloat16 if parallel.bf16 else torch.float32
    no_cpp = _without_cpp(config, device, dtype)
    kernels, reasons = choose_kernels(
        parallel.kernels,
        device,
        features=model.hidden_size,
        compile=parallel.compile,
        selective=parallel.recompute_granularity == "selective",
        dtype=dtype,
        no_cpp=no_cpp,
    )
    if model.is_foreign:
        shown = {name: reason for name, reason in reasons.items() if name == "cross_entropy"}
        return kernels, [*describe_kernels(kernels, shown), "attention: transformers' sdpa"]
    shape = _attention_shape(config, documents=documents, other_lengths=other_lengths)
    attention = choose_attention(
        parallel.attention_backend,
        device,
        shape,
        deterministic=config.training.deterministic_mode,
        no_cpp=no_cpp,
    )
    # After choose_attention: the core that exchanges keys and values calls the one chosen for a
    # single rank on each block.
    core, exchanged = _over_context_ranks(attention.core, config, context, device)
    of_recurrences, told = recurrence_exchange(config)
    # fla is flash-linear-attention.
    if kernels.delta_rule == "fla" and (why := _not_by_fla(config, of_recurrences)):
        kernels, reasons = replace(kernels, delta_rule="torch"), {**reasons, "delta_rule": why}
    if kernels.grouped_gemm == "triton" and parallel.fp8_format is not None:
        why = "in FP8 each expert has a scaled product of its own"
        kernels, reasons = replace(kernels, grouped_gemm="torch"), {**reasons, "grouped_gemm": why}
    used = {"swiglu": model.swiglu, "rope": model.position_embedding_type == "rope"}
    used |= dict.fromkeys(("router", "permute", "grouped_gemm"), model.num_experts is not None)
    used |= {"delta_rule": model.linear_attention_type == "gated_delta_net"}
    # The reasons are printed: those of operations that the model does not have are left out.
    shown = {name: reason for name, reason in reasons.items() if used.get(name, True)}
    lines = [*describe_kernels(kernels, shown), str(attention), *exchanged, *told]
    if model.attention_dropout > 0.0:
        lines.append("attention: in training probabilities are materialised instead, for --attention-dropout")
    if kernels.grouped_gemm == "torch":
        lines += _products_of_experts(config, device, shape.dtype)
    lines += [*_uncompiled_experts(config, device), *choose_fp8(config, device)]
    return replace(kernels, attention=core, recurrence_exchange=of_recurrences), lines


def _without_cpp(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Why some process cannot take the C++ kernels; "": all can, or none asks. Nodes may have other processors, or lack
    a compiler; what all ranks compute alike (norms of tensor-parallel ranks) has to have the same bits on all."""
    if device.type != "cpu" or not {config.parallel.kernels, config.parallel.attention_backend} & {"auto", "cpp"}:
        return ""
    found = gather(why_not(dtype))
    return next((why if all(found) else f"on rank {rank} {why}" for rank, why in enumerate(found) if why), "")


def _not_by_fla(config: Config, exchange: str) -> str:
    """Why the kernels of flash-linear-attention do not compute this run's recurrences; "": they do."""
    if config.parallel.context_parallel_size > 1 and exchange == "states":
        return "context parallelism by states multiplies them in fp32, which flash-linear-attention does not"
    return "" if config.parallel.bf16 else "flash-linear-attention does not take fp32"


def _attention_shape(config: Config, *, documents: bool, other_lengths: tuple[int, ...]) -> AttentionShape:
    """Shape of one attention call on one rank: tensor parallelism cuts heads; neighbours may share a key/value head."""
    model, tp, length = config.model, config.parallel.tensor_model_parallel_size, config.data.seq_length
    groups = model.num_query_groups
    assert model.kv_channels is not None and groups is not None and length is not None, "resolved before"
    return AttentionShape(
        # Heads are split over tp; with fewer key/value heads than tp each rank holds one, shared
        # with its neighbours.
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
    """The core of the run and lines for the user: ``core``, or around it the core that exchanges keys and values over
    the context-parallel ranks."""
    if context.cp_exchange is None:
        return core, []
    exchange = exchange_of(config, device.type)
    around = context_parallel_attention(core, context.cp_exchange, exchange.kind)
    return around, [*exchange.lines, f"context parallelism: {around}"]


def _products_of_experts(config: Config, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Lines for the user on how the experts' matrix products are computed; none without experts."""
    model, parallel = config.model, config.parallel
    if model.num_experts is None:
        return []
    assert model.moe_ffn_hidden_size is not None, "resolved before"
    # Experts may have a tensor-parallel size of their own (--expert-tensor-parallel-size).
    ranks = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    experts = model.num_experts // parallel.expert_model_parallel_size
    return describe_products(device, dtype, (model.hidden_size, model.moe_ffn_hidden_size // ranks), experts)


def _uncompiled_experts(config: Config, device: torch.device) -> list[str]:
    """A line for the user, where --compile leaves blocks with experts as they are."""
    if config.model.num_experts is None or not config.parallel.compile or not (why := _why_uncompiled(device)):
        return []
    return [f"--compile: blocks with experts are not compiled: {why}"]


def compiles_experts(device: torch.device) -> bool:
    """Whether --compile takes blocks with experts there."""
    return not _why_uncompiled(device)


def _why_uncompiled(device: torch.device) -> str:
    """Why blocks with experts are not compiled on ``device``; "" where they are.

    On an H100 with torch 2.11 compiled experts in fp32 had gradients of zero (:func:`smp.kernels.returned.returned`
    says why; an eager run on a CPU in which these are zero has that card's losses, 5.3016, 4.9659, 4.8730). What torch
    2.11 generates for CUDA now has the right gradients in Triton's interpreter; on a GPU ``tests/gpu/test_features.py``
    has yet to show it. On a CPU torch 2.11 generates another gradient for routers with sigmoid scores, off by half of
    it; 2.13 is compared in every layout. 2.12 was not tried."""
    if device.type == "cuda":
        return "on CUDA torch 2.11 made wrong gradients of them, and the fix has not run on a GPU yet"
    if torch.__version__ < "2.13":  # TorchVersion compares as a version, not as text
        return f"torch {torch.__version__} is before 2.13: that of 2.11 made wrong gradients of their routers"
    return ""


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


def setup_for_second_model(config: Config, setup: RunSetup, *, documents: bool, trim: bool) -> RunSetup:
    """The set-up for a second model, such as a teacher, in the layout of ``config``, on the process groups of
    ``setup``. Arguments as in :func:`choose_backends`; ``trim``: sequences may have any length."""
    context, length = setup.context, config.data.seq_length
    assert length is not None, "resolved before"
    shorter = (1, max(length - 1, 1)) if trim else ()
    kernels, _ = choose_backends(config, context, setup.device, documents=documents, other_lengths=shorter)
    # The meshes are shared; kernels and the pipeline's plan depend on the second model's own sizes.
    layout = Layout.from_config(config.parallel, context.world_size)
    return replace(setup, kernels=kernels, plan=plan_pipeline(config, layout) if layout.pp > 1 else None)


def build_model(config: Config, setup: RunSetup) -> Model:
    """A model with initial weights. It is built on the meta device and sharded, and only then filled, so that no rank
    ever holds more than its shard."""
    model = assemble(config, setup)
    experts = compiles_experts(setup.device)
    # FSDP wraps layers that are tensor parallel by construction. The optimizer comes later: FSDP
    # replaces the parameters.
    parallelize(model, setup.context, config.parallel, setup.offload, compile_experts=experts)
    # Keyed by (seed, parameter name), so each rank draws its own shard and all layouts start from
    # equal bits.
    model.draw(setup.device, config.training.seed)
    return model


def assemble(config: Config, setup: RunSetup) -> Model:
    """This rank's stages of the model, on the meta device and not yet sharded.

    Raises:
        ConfigError: the model cannot do what the layout asks of it.
    """
    context, plan = setup.context, setup.plan
    if config.model.is_foreign:
        return foreign_model(config, context, setup.kernels)
    model = new_model(
        config.model,
        context,
        seed=config.training.seed,
        compute_dtype=torch.bfloat16 if config.parallel.bf16 else None,
        parts=None if plan is None else list(plan.stages_of(context.pp_rank).values()),
        kernels=setup.kernels,
    )
    if plan is not None:
        require_stages(model)
    if context.cp_group is not None:
        require_capability(model, "context parallelism", "--context-parallel-size")
    if (fp8 := fp8_of(config)) is not None:
        use_fp8(model, fp8, context, setup.device, leave=layers_without_fp8(config, model))
    return model


def foreign_model(config: Config, context: ParallelContext, kernels: Kernels) -> Model:
    """A model that transformers computes.

    Raises:
        ConfigError: it cannot be cut, or cannot be trained on these sequences.
    """
    # Here, because a model of this project's own needs none of that room.
    from smp.hf.run.model import TransformersModel

    model = TransformersModel(config.model, context, kernels)
    packed = config.data.packing == "best-fit" if config.objective is not None else config.data.reset_attention_mask
    if packed and model.no_documents:
        raise ConfigError(model.no_documents)
    return model


def build_forward_backward(config: Config, setup: RunSetup, model: Model) -> ForwardBackward:
    """How micro-batches go through the model: by the pipeline's schedule, or without a pipeline by gradient
    accumulation."""
    if setup.plan is None:
        return Accumulation(model, config.parallel.data_parallel_sharding_strategy)
    context, staged = setup.context, require_stages(model)
    assert context.pp is not None, "a pipeline has ranks"
    # A ramp-up of the batch size changes the number of micro-batches, so there is a schedule for each. Before the
    # groups: many schedules take a while, in which no rank waits for another.
    plans = plans_by_size(config, Layout.from_config(config.parallel, context.world_size))
    with setup.making_groups():
        return Pipelined(config, setup.plan, plans, staged, context, setup.device, setup.offload, setup.progress)


def build_generator(config: Config, setup: RunSetup, model: Model, *, batch_size: int = 32) -> Generator:
    """What writes texts with the model of a run, where it is; see :class:`smp.generation.Generator`. Under pipeline
    parallelism it makes process groups: one serves for the whole run."""
    plan, stages = setup.plan, None
    if plan is not None:
        # By stage: its chunk of the model and the pipeline rank that has it.
        stages = [(part, plan.training.rank_of(stage)) for stage, part in enumerate(plan.parts)]
    dtype = torch.bfloat16 if config.parallel.bf16 else torch.float32
    with setup.making_groups():
        return Generator(
            model, setup.context, batch_size=batch_size, stages=stages, dtype=dtype, progress=setup.progress
        )


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
        dp_rank=context.data_rank,
        dp_size=context.data_size,
        start_sample=start,
        batch_size=sizes or data.global_batch_size,
        num_workers=data.num_workers if read is None else 1,  # ``read`` keeps the order of one epoch at a time
        with_documents=data.reset_attention_mask,
        with_positions=data.reset_position_ids,
        pin_memory=setup.device.type == "cuda",
        read=read,
    )
