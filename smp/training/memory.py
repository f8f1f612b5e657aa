"""Bytes that one process of a training run needs, by formula. No torch, so it runs on a login node.

Symbols: h hidden size, q = heads x head width, k = key/value heads x head width, f = MLP width, T = tokens of a
micro-batch on one of cp context-parallel processes, b = bytes of the compute precision, tp = tensor-parallel processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from smp.config import Config, Layout, ModelConfig
from smp.config.moe import has_experts
from smp.config.mtp import further_layers
from smp.config.parallel import ParallelConfig
from smp.config.qlora import packed_row_bytes
from smp.config.schema import OptimizerConfig
from smp.models.inventory import (
    Parameter,
    block_parameters,
    inventory,
    of_each_block,
    prediction_parameters,
    vocabulary_matrix,
)
from smp.models.part import ModelPart, whole
from smp.pipeline.plan import Plan
from smp.pipeline.validate import peak_activations, peak_losses
from smp.training.kept_memory import in_flight_per_token, is_fused, kept_per_token, replayed_per_token
from smp.training.moments import Moments


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process; see :func:`estimate_memory`.

    Attributes:
        most: of gradients and what follows, at the moment at which they are most: not all are there at once.
        secondary: secondary shards of the weights.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reduced: int
    activations: int
    backward: int
    logits: int
    most: int
    secondary: int = 0

    @property
    def total(self) -> int:
        """At that moment, with what is always there."""
        return self.parameters + self.optimizer + self.secondary + self.most


@dataclass(frozen=True)
class Tuned:
    """Settings of a fine-tuning run that change its memory."""

    adapters: int = 0  # elements on one of the tensor-parallel processes, before ep; 0: all weights are trained
    in_4_bits: bool | None = None  # frozen weights of linear layers are; True: with double quantization
    rows: int = 1  # sequences of a sample: 2 when it is a pair
    copies: int = 0  # of the model, frozen


def estimate_memory(
    config: Config,
    layout: Layout,
    chunk_bytes: int,
    parts: Sequence[ModelPart] | None = None,
    held: int = 1,
    losses: int = 1,
    tuned: Tuned = Tuned(),
) -> MemoryEstimate:
    """Memory of one process of a training run: an estimate to choose a layout by, not a bound, for what takes too long
    to try with :mod:`smp.training.fake_step`.

    With n = parameters on one of tp processes (vocabulary padding included) and d = ``layout.dp_shard`` x cp:

    - parameters 4 n / d and gradients 4 n / d: fp32 masters, sharded by FSDP.
    - optimizer 8 n / d for Adam's two moments, less with --exp-avg-dtype and --exp-avg-sq-dtype (with
      --optimizer-cpu-offload they are on the host), 4 n / d for SGD with momentum and for the matrices that Muon
      trains, 0 for SGD without.
    - gathered: weights in compute precision that FSDP holds unsharded: two blocks (one in use, one on its way) and the
      vocabulary matrix at the loss, with multi-token prediction also the embedding and its projections. Without FSDP
      (one data-parallel rank, no pipeline and no context parallelism) in bf16 runs the cast weights, which layers keep
      for the backward pass (under recompute those of one block).
    - secondary: with --zero-hpz-partition-size z the blocks' weights in compute precision, once more, / z.
    - reduced: the gradient of the largest unit, in compute precision and as the fp32 input of its reduction; without
      FSDP on its way to the sum.
    - activations: layers x what a block keeps (``kept_per_token`` x T), and what the output layer takes and gives.
      With --offload-activations of --activation-loading-horizon layers only; cast weights leave with them.
    - backward: gradients in flight through a block's MLP, and what recompute replays of the block.
    - logits: one chunk, whose gradient replaces it; logits of all tokens never exist. The output matrix's gradient,
      summed over chunks in fp32 and kept in compute precision from the forward pass, where the loss computes it: one
      for each of the ``losses``, with multi-token prediction so many times more as there are predictions.

    Of a pipeline's process n counts its own parts. Their gradients are whole, 4 n, until they are reduced, and the
    weights are gathered for the whole step (without --pipeline-reshard), as --data-parallel-sharding-strategy may have
    it without a pipeline. Activations are there ``held`` times for an
    average part. Frozen weights (the model under adapters, and copies of it) take b bytes instead of 4, and have no
    gradients and no optimizer state; those of linear layers in 4 bits take about 0.52, and one at a time is widened.
    What layers keep is counted as if they were trained: with adapters it is less.

    Attention is taken to take key/value heads as they are; where it does not, as behind a window, a block keeps
    2 b (q - k) per token more without recompute. Left out: the CUDA context, NCCL's buffers, fragmentation, RoPE
    tables, and keys of other context-parallel processes while they are used. Activations are those of fused kernels (a
    GPU).

    Args:
        config: resolved.
        layout: degrees of the mesh.
        chunk_bytes: size of one chunk of fp32 logits, ``smp.layers.head.CHUNK_BYTES`` of the device.
        parts: of the model that the process holds; by default all of it.
        held: most activations that it holds at once, in micro-batches of one part.
        losses: most micro-batches at once between their loss and its backward pass.
        tuned: of fine-tuning.
    """
    model, data, parallel = config.model, config.data, config.parallel
    assert data.seq_length is not None, "resolved before"
    b = 2 if parallel.bf16 else 4
    tokens = tuned.rows * data.micro_batch_size * data.seq_length // layout.cp
    shards = layout.dp_shard * layout.cp
    parts = parts or (whole(model.num_layers),)
    share = _Share.of(model, layout, parts)
    before_ep = replace(layout, ep=1, etp=None)  # ep takes from FSDP what it cuts
    n = _elements(share.parameters, before_ep)
    adapters = tuned.adapters * len(share.layers) // model.num_layers
    trained, frozen = (adapters, n * (tuned.copies + 1)) if adapters else (n, n * tuned.copies)
    state = sum(state_bytes(config.optim, p) * math.prod(p.local_shape(before_ep)) for p in share.parameters)
    frozen_bytes: float = b * frozen
    if adapters:
        state = state_bytes(config.optim, Parameter("layers.0.lora.a", (1, 1))) * adapters
        frozen_bytes = (tuned.copies + 1) * sum(_frozen_bytes(p, before_ep, tuned, b) for p in share.parameters)
    at_once = len(share.layers) * held / len(parts)
    if parallel.offload_activations:
        at_once = min(at_once, parallel.activation_loading_horizon)
    whole_gradients = layout.pp > 1 or parallel.data_parallel_sharding_strategy == "optim"
    gradients = 4 * (adapters or share.elements) if whole_gradients else 4 * trained // shards
    per_token, around = _activations_per_token(config, layout, b, share)
    backward = tokens * _backward_per_token(config, layout, b, share)
    logits = _logits(tokens, chunk_bytes, b, losses, share, trained=not adapters)
    gathered = (
        b * _gathered(config, layout, share, tuned)
        if tuned.in_4_bits is None
        else _gathered_in_4_bits(config, layout, parts, tuned)
    )
    moments = Moments(
        activations=int(tokens * (at_once * per_token + around)),
        kept_by_block=int(tokens * per_token),
        kept_behind=share.head * tokens * b * 2 * model.hidden_size // (layout.tp if parallel.sequence_parallel else 1),
        logits=logits,
        backward=backward,
        **_weights_at_moments(config, layout, share, gathered, tuned),
        **_gradients_at_moments(config, layout, share, gradients, shards, adapters),
    )
    return MemoryEstimate(
        parameters=int(4 * trained + frozen_bytes) // shards,
        gradients=gradients,
        optimizer=int(state / shards),
        gathered=gathered,
        reduced=(4 if b == 4 and not layout.has_fsdp else b + 4)
        * (adapters // len(share.layers) if adapters else share.largest(layout)),
        activations=moments.activations,
        backward=backward,
        logits=logits,
        most=moments.most,
        secondary=_secondary(config, layout, tuned),
    )


def _weights_at_moments(config: Config, layout: Layout, share: _Share, gathered: int, tuned: Tuned) -> dict[str, int]:
    """Bytes of ``gathered``: FSDP has one block when the loss has the ends (two, if experts are units of their own),
    and then two without them. Cast weights go with their block."""
    b = 2 if config.parallel.bf16 else 4
    if tuned.in_4_bits is not None or layout.pp > 1:
        return {"at_loss": gathered, "in_blocks": gathered, "in_first": gathered}
    if not layout.has_fsdp:
        return {"at_loss": gathered, "in_blocks": gathered, "in_first": min(gathered, b * share.block)}
    if config.parallel.data_parallel_sharding_strategy != "optim_grads_params":
        return {"at_loss": gathered, "in_blocks": gathered, "in_first": gathered}
    # Shards are cast before a gather, those of a root with further layers long ago.
    ends, cast = b * share.ends, (4 // b - 1) / (layout.dp_shard * layout.cp)
    blocks = gathered - ends
    at_loss = (blocks // 2 if layout.ep == 1 else blocks) + ends
    at_loss += int(cast * (at_loss - (ends if share.further else 0)))
    blocks += int(cast * blocks)
    return {"at_loss": at_loss, "in_blocks": blocks, "in_first": blocks}


def _gradients_at_moments(
    config: Config, layout: Layout, share: _Share, gradients: int, shards: int, adapters: int
) -> dict[str, int]:
    """Bytes of gradients that are whole, and of all. A pipeline adds them up in fp32 until its step ends; FSDP has one
    unit's on its way to its reduction, in fp32, while the next one's comes in compute precision."""
    b, data = 2 if config.parallel.bf16 else 4, config.data
    accumulates = (data.global_batch_size or 1) > data.micro_batch_size * layout.data_parallel
    block = adapters // len(share.layers) if adapters else share.block
    vocabulary, ends = (0, 0) if adapters else (share.vocabulary, share.ends if share.further else share.vocabulary)
    found = {"gradients": gradients, "waiting": gradients, "late": 0, "own": b * block}
    if layout.pp > 1:
        return found | {"head": b * block, "block": 0, "ends": 4 * max(block, ends)}
    untied = vocabulary * config.model.untie_embeddings_and_output_weights
    if not accumulates:
        # beside two gathered blocks, the gradients of two are still to come
        two = share.layers[: 2 if shards > 1 else 1]
        first = sum(_elements(block_parameters(config.model, i), replace(layout, ep=1, etp=None)) for i in two)
        found |= {"waiting": 0, "late": 0 if adapters else 4 * (first + untied) // shards}
    if not layout.has_fsdp:
        return found | {"head": 4 * vocabulary, "block": 0, "ends": (b % 4) * vocabulary}
    reduced = {"head": 4 * ends, "block": 4 * block, "ends": (b + 4) * max(vocabulary, ends)}
    return found | reduced


@dataclass(frozen=True)
class _Share:
    """What a process has of a model, in elements.

    Attributes:
        layers: numbers of its layers, with those of multi-token prediction.
        parameters: of all of it.
        elements: of them.
        blocks: of each layer.
        rows: of its part of the vocabulary's matrix; 0: it has none.
        vocabulary: of that.
        further: how many layers of multi-token prediction are its own.
        around: of what stands around the block of one.
        matrices: of the vocabulary that are used at its loss: the output matrix, and for further layers the embedding.
        head, scores: it has the loss, and that is one of scores.
    """

    layers: list[int]
    parameters: list[Parameter]
    elements: int
    blocks: list[int]
    rows: int
    vocabulary: int
    further: int
    around: int
    matrices: int
    head: bool
    scores: bool

    @staticmethod
    def of(model: ModelConfig, layout: Layout, parts: Sequence[ModelPart]) -> _Share:
        """Of these parts."""
        head = any(p.head for p in parts)
        further = further_layers(model) if head else range(0)
        layers = [*(i for part in parts for i in part.layers), *further]
        parameters = list(inventory(model, parts))
        rows, hidden = vocabulary_matrix(model, "head", has_product=True).local_shape(layout)
        has_matrix = head or any(p.embedding for p in parts)
        return _Share(
            layers,
            parameters,
            _elements(parameters, layout),
            of_each_block(model, layers, lambda block: _elements(block, layout)),
            rows * has_matrix,
            rows * hidden * has_matrix,
            len(further),
            _elements(prediction_parameters(model, 0), layout) if further else 0,
            1 + (len(further) > 0 and model.untie_embeddings_and_output_weights),
            head,
            model.scalar_head,
        )

    @property
    def block(self) -> int:
        """The largest."""
        return max(self.blocks, default=0)

    @property
    def ends(self) -> int:
        """Used behind the blocks."""
        return self.matrices * self.vocabulary + self.further * self.around

    def largest(self, layout: Layout) -> int:
        """What is reduced at once: a block, or a matrix; or with further layers the root's unit, which has the ends."""
        together = self.further and layout.pp == 1 and layout.has_fsdp
        return max(self.block, self.ends if together else self.vocabulary)


def largest_memory(
    config: Config, layout: Layout, chunk_bytes: int, plan: Plan | None, tuned: Tuned = Tuned()
) -> MemoryEstimate:
    """Of the pipeline rank that needs most, or without a pipeline of each; arguments as of :func:`estimate_memory`."""
    if plan is None:
        return estimate_memory(config, layout, chunk_bytes, tuned=tuned)
    held, losses = peak_activations(plan.training), peak_losses(plan.training)
    ranks = (
        estimate_memory(config, layout, chunk_bytes, list(plan.stages_of(rank).values()), held[rank], losses, tuned)
        for rank in range(layout.pp)
    )
    return max(ranks, key=lambda estimate: estimate.total)


def _elements(parameters: Iterable[Parameter], layout: Layout) -> int:
    """Elements on one process."""
    return sum(math.prod(p.local_shape(layout)) for p in parameters)


def _gathered(config: Config, layout: Layout, share: _Share, tuned: Tuned) -> int:
    """Elements that are gathered, or without FSDP kept as they were cast."""
    parallel = config.parallel
    if not layout.has_fsdp:
        return _cast(parallel, share.blocks) + share.ends if parallel.bf16 and not tuned.adapters else 0
    freed = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    if layout.pp > 1:
        freed = parallel.pipeline_reshard
    return 2 * share.block + share.ends if freed else share.elements


def _logits(tokens: int, chunk_bytes: int, b: int, losses: int, share: _Share, *, trained: bool) -> int:
    """Bytes of a chunk, and of what is kept of the output matrix's gradients, one for each loss."""
    if not share.head or share.scores:  # a score's matrix is one row
        return 0
    chunk = min(tokens, max(1, chunk_bytes // (4 * share.rows))) * share.rows * b
    gradients = losses * (1 + share.further) * b + (4 if b < 4 else 0)
    return chunk + (share.vocabulary * gradients if trained else 0)


def _secondary(config: Config, layout: Layout, tuned: Tuned) -> int:
    """Of blocks, which are gathered twice; of experts where several of the neighbours have the same."""
    model, size = config.model, config.parallel.zero_hpz_partition_size
    if size == 1:
        return 0
    b, whole_layout = 2 if config.parallel.bf16 else 4, replace(layout, ep=1, etp=None)
    split = layout.tp // layout.expert_tp
    layers = (*range(model.num_layers), *further_layers(model))
    blocks = [p for layer in layers for p in block_parameters(model, layer)]
    kept = [p for p in blocks if p.chosen is None or size * split // layout.ep > 1]
    return (sum(_frozen_bytes(p, whole_layout, tuned, b) for p in kept) + b * tuned.adapters) // size


def _cast(parallel: ParallelConfig, blocks: Sequence[int]) -> int:
    """Of weights of blocks, without FSDP in bf16, what layers keep in it for the backward pass."""
    block = max(blocks, default=0)
    kept = sum(blocks) if parallel.recompute_granularity == "none" else block  # a replay casts its block's again
    return min(kept, parallel.activation_loading_horizon * block) if parallel.offload_activations else kept


def state_bytes(optim: OptimizerConfig, parameter: Parameter) -> float:
    """Bytes of the optimizer's state for each element, on the device."""
    if optim.optimizer_cpu_offload:
        return 0
    matrix = len(parameter.shape) > 1
    if optim.optimizer == "sgd":
        return 4 * (optim.sgd_momentum > 0)
    if trained_by_muon(optim, parameter):
        return 4
    kinds = (optim.exp_avg_dtype, optim.exp_avg_sq_dtype) if matrix else ("fp32", "fp32")
    return sum({"fp32": 4.0, "bf16": 2.0, "fp8": 1 + 4 / 128}[kind] for kind in kinds)


def trained_by_muon(optim: OptimizerConfig, parameter: Parameter) -> bool:
    """Matrices of blocks; biases of experts are two-dimensional, too."""
    is_matrix = len(parameter.shape) > 1 and not parameter.name.endswith(".bias")
    return optim.optimizer == "muon" and is_matrix and parameter.module.startswith("layers.")


def _frozen_bytes(parameter: Parameter, layout: Layout, tuned: Tuned, b: int) -> int:
    """Of a frozen parameter, before FSDP."""
    shape = parameter.local_shape(layout)
    if tuned.in_4_bits is None or not parameter.linear:
        return b * math.prod(shape)
    return shape[0] * packed_row_bytes(shape[1], double=tuned.in_4_bits)


def _gathered_in_4_bits(config: Config, layout: Layout, parts: Sequence[ModelPart], tuned: Tuned) -> int:
    """What is gathered of weights in 4 bits, as of others, and the largest matrix of a block, which is widened."""
    model, parallel = config.model, config.parallel
    b = 2 if parallel.bf16 else 4
    blocks = [list(block_parameters(model, layer)) for part in parts for layer in part.layers]
    sizes = [sum(_frozen_bytes(p, layout, tuned, b) for p in block) for block in blocks]
    widened = max((b * math.prod(p.local_shape(layout)) for block in blocks for p in block if p.linear), default=0)
    if not layout.has_fsdp:
        return widened
    ends = [p for p in inventory(model, parts) if not p.name.startswith("layers.")]
    freed = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    if layout.pp > 1:
        freed = parallel.pipeline_reshard
    outside = [_frozen_bytes(p, layout, tuned, b) for p in ends]
    if freed:
        return widened + 2 * max(sizes, default=0) + max(outside, default=0)
    return widened + sum(sizes) + sum(outside)


def kept_by_blocks(config: Config, layout: Layout, tuned: Tuned = Tuned()) -> list[int]:
    """Bytes that each block keeps of a micro-batch for its backward pass, which --offload-activations takes to the
    host; without FSDP in bf16 its cast weights, too, if they are trained."""
    model, data, parallel = config.model, config.data, config.parallel
    assert data.seq_length is not None, "resolved before"
    b, recompute, fused = 2 if parallel.bf16 else 4, parallel.recompute_granularity, is_fused(config)
    tokens = tuned.rows * data.micro_batch_size * data.seq_length // layout.cp
    kinds = [has_experts(model, i) for i in range(model.num_layers)]
    kept = {kind: kept_per_token(config, layout, b, recompute, fused=fused, experts=kind) for kind in set(kinds)}
    weights = of_each_block(model, range(model.num_layers), lambda block: _elements(block, layout))
    casts = not layout.has_fsdp and parallel.bf16 and recompute == "none" and not tuned.adapters
    return [int(tokens * kept[kind]) + b * one * casts for kind, one in zip(kinds, weights, strict=True)]


def _activations_per_token(config: Config, layout: Layout, b: int, share: _Share) -> tuple[float, int]:
    """Bytes per token of a micro-batch that a block of ``share`` keeps on average, and the output layer.

    A further layer of multi-token prediction keeps besides its block the embedding and both norms' results, 3 h_l,
    input and output of its own norm (but of the last one's the output), and the gradient of what its loss reads, h.
    """
    hidden, split = config.model.hidden_size, layout.tp if config.parallel.sequence_parallel else 1
    model, recompute, fused = config.model, config.parallel.recompute_granularity, is_fused(config)
    kinds = [has_experts(model, i) for i in share.layers]
    kept = sum(kept_per_token(config, layout, b, recompute, fused=fused, experts=kind) for kind in kinds)
    around = share.head * (2 * hidden // split + 2 * hidden)
    if share.further:
        around += share.further * (5 * hidden // split + hidden) - hidden // split
    if layout.pp > 1:
        around += 2 * hidden // split  # on its way between stages
    return kept / max(1, len(kinds)), b * around


def _backward_per_token(config: Config, layout: Layout, b: int, share: _Share) -> int:
    """Bytes per token of gradients in flight in the backward pass of a block, and of what is replayed of it."""
    kinds = {has_experts(config.model, i) for i in share.layers} or {False}
    return max(
        in_flight_per_token(config, layout, b, experts=kind)
        + replayed_per_token(config, layout, b, fused=is_fused(config), experts=kind)
        for kind in kinds
    )
