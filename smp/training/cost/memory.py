"""Bytes that one process of a training run needs, by formula. Without torch (but where context parallelism
chooses its exchange or gathers keys), so it runs on a login node.

Symbols: h hidden size, q = heads x head width, k = key/value heads x head width, f = MLP width, T = tokens of a
micro-batch on one of cp context-parallel processes, b = bytes of the compute precision, tp = tensor-parallel processes.
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
- activations: layers x what a block keeps (``kept_per_token`` x T), what the output layer takes and gives, and RoPE's
  tables, in fp32, of each micro-batch.
  With --offload-activations of --activation-loading-horizon layers only; cast weights leave with them.
- backward: gradients in flight through a block's MLP, and what recompute replays of the block; or the masks of dropout
  while they are made again.
- the optimizer's step: with Muon six copies of the largest matrix in fp32 and its Gram matrix, on top of the gradients.
- A matrix that embedding and output share stays gathered from the loss until the embedding's gradient is there, and so
  does its gradient as an output matrix, both in compute precision.
- logits: one chunk, whose gradient replaces it, with --final-logit-softcapping also the cap's derivative; logits of
  all tokens never exist. The output matrix's gradient, summed over chunks in fp32 and kept in compute precision from
  the forward pass, where the loss computes it, with multi-token prediction so many times more as there are
  predictions. Each of the ``losses`` but the one that is computed has one among the activations, with the last norm's
  input and its gradient, 2 h.

Of a pipeline's process n counts its own parts. Their gradients are whole, 4 n, until they are reduced, and the weights
are gathered for the whole step (without --pipeline-reshard), as --data-parallel-sharding-strategy may have it without a
pipeline. Activations are there ``held`` times for an average part, and each pass of its schedule is a moment of its
own, with the activations and gradients that are there then. Frozen weights (the model under adapters, and copies of it)
take b bytes instead of 4, and have no gradients and no optimizer state; those of linear layers in 4 bits take about
0.52, and one at a time is widened. What layers keep is counted as if they were trained: with adapters it is less.

Attention is taken to take key/value heads as they are; where it does not, as after a window, a block keeps
2 b (q - k) per token more without recompute. Left out: the CUDA context, NCCL's buffers, fragmentation, and
scores of --attention-backend math or dropout while context parallelism exchanges keys. Activations are those of fused
kernels (a GPU).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from smp.config import Config, Layout
from smp.config.at_once import CAPPED_LOGITS
from smp.config.layer_specs import LayerSpec, Recurrence
from smp.config.layers import layer_specs
from smp.models.inventory import of_each_block
from smp.models.part import ModelPart, whole
from smp.pipeline.actions import Op
from smp.pipeline.stage_plan import Plan
from smp.pipeline.validate_schedule import PassState, pass_states, peak_activations, peak_losses
from smp.training.cost.kept_memory import (
    in_flight_per_token,
    is_fused,
    kept_per_token,
    masking_per_token,
    pending_per_token,
    replayed_per_token,
)
from smp.training.cost.model_share import PRETRAINED, Share, Tuned, elements
from smp.training.cost.moments import Moments
from smp.training.cost.step_moments import (
    PartBytes,
    bytes_of_parts,
    gathered_at_moments,
    gradients_at_moments,
)
from smp.training.cost.weight_memory import Weights, update_bytes


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
        """Bytes at the moment of the peak, with weights and optimizer state."""
        return self.parameters + self.optimizer + self.secondary + self.most


def estimate_memory(
    config: Config,
    layout: Layout,
    chunk_bytes: int,
    parts: Sequence[ModelPart] | None = None,
    held: float = 1,
    losses: int = 1,
    tuned: Tuned = PRETRAINED,
    states: Collection[PassState] = (),
) -> MemoryEstimate:
    """Memory of one process of a training run by this file's formula: an estimate to choose a layout by, not a bound,
    for what takes too long to try with :mod:`smp.training.cost.fake_step`.

    Args:
        config: resolved.
        layout: degrees of the mesh.
        chunk_bytes: size of one chunk of fp32 logits, ``smp.layers.heads.head.CHUNK_BYTES`` of the device.
        parts: of the model that the process holds; by default all of it.
        held: most activations that it holds at once, in micro-batches of a part of average size.
        losses: most micro-batches at once between their loss and its backward pass.
        tuned: of fine-tuning.
        states: of a pipeline, what :func:`pass_states` says.
    """
    b, parallel = 2 if config.parallel.bf16 else 4, config.parallel
    share = Share.of(config.model, layout, parts or (whole(config.model.num_layers),))
    weights = Weights.of(config, layout, share, tuned)
    tokens, slices = tokens_of(config, layout, tuned), layout.tp if parallel.sequence_parallel else 1
    per_token, around = _activations_per_token(config, layout, b, share)
    rope = _rope_per_token(config)
    received = b * config.model.hidden_size // slices * (layout.pp > 1)  # the gradient of the next stage
    embeds = any(part.embedding for part in share.parts)

    backward = _backward_per_token(config, layout, b, share)
    later = _pending_per_token(config, layout, b, share)
    # Of losses that wait for their backward pass: the last norm's input, its gradient and the output matrix's.
    of_a_loss = share.head * b * 2 * config.model.hidden_size * tokens // slices
    if share.head and not share.scores and not weights.partly:
        of_a_loss += share.vocabulary * (1 + share.mtp) * b

    def activations(micro_batches: float, pending: float, waiting: int, extra: float = around) -> int:
        """Bytes of micro-batches before their backward pass, ``waiting`` of which, and the computed one, are between
        loss and backward, and of those that are ``pending`` between both parts of it."""
        layers = len(share.layers) / len(share.parts)
        at_once = layers * micro_batches
        if parallel.offload_activations:
            at_once = min(at_once, parallel.activation_loading_horizon)
        kept = at_once * per_token + layers * pending * later + extra + (micro_batches + pending) * rope
        return int(tokens * kept) + waiting * of_a_loss

    moments = Moments(
        activations=activations(held, 0, max(0, losses - 1)),
        kept_by_block=int(tokens * per_token),
        kept_by_head=share.head * tokens * b * (2 * config.model.hidden_size // slices + 2 * config.model.hidden_size),
        to_the_end=int(tokens * (rope + received)),
        logits=_logits(config, tokens, chunk_bytes, b, share, trained=not weights.partly),
        backward=tokens * backward,
        input_part=int(tokens * max(0, per_token + backward - later)),
        embedding=0 if weights.partly or not embeds else (b % 4) * share.vocabulary,
        **gathered_at_moments(config, layout, share, tuned, weights),
        **gradients_at_moments(config, layout, share, tuned, weights),
    )
    most = moments.most
    if states:
        of_parts = bytes_of_parts(config, layout, share, weights)
        most = _most_in_passes(moments, states, of_parts, activations, partial(activations, extra=received))
    if not weights.partly:
        reduced = min(weights.gradients, weights.parameters)  # cut as the weights are by then
        most = max(most, reduced + update_bytes(config.optim, layout, share))
    return MemoryEstimate(
        parameters=weights.parameters,
        gradients=weights.gradients,
        optimizer=weights.optimizer,
        gathered=weights.gathered,
        reduced=weights.reduced,
        activations=moments.activations,
        backward=moments.backward,
        logits=moments.logits,
        most=most,
        secondary=weights.secondary,
    )


def _most_in_passes(
    moments: Moments,
    states: Collection[PassState],
    of_parts: list[PartBytes],
    activations: Callable[[float, float, int], int],
    to_the_end: Callable[[float, float, int], int],
) -> int:
    """Most bytes in any pass of a pipeline's process.

    Args:
        of_parts: what :func:`bytes_of_parts` says.
        activations: bytes of (micro-batches, those between both parts of their backward pass, those of the first that
            wait between loss and backward pass).
        to_the_end: the same of those that are there besides its own when a pass reaches its first block.
    """
    most = 0
    for state in states:
        own = of_parts[state.part]
        before = sum(
            of_parts[part].reduced if part in state.reduced else of_parts[part].gradients
            for part in state.with_gradients
        )
        comes = 0 if state.part in state.with_gradients or state.op is Op.BACKWARD_INPUT else own.gradients
        waiting = state.losses - state.has_loss
        left = to_the_end(state.others, state.pending, waiting)
        sharded = sum(part.gathered for i, part in enumerate(of_parts) if i not in state.unsharded)
        # Made by the first stage's input part, and there until its weight part has added it to its sum. In the weight
        # part it takes no more than the inputs of blocks that are freed meanwhile, which the formula counts to its end.
        first = state.part == 0
        embedding = moments.embedding * (state.op is Op.FORWARD and state.pending > 0)
        # In an input part, whose micro-batch becomes pending block by block, none of it is at first.
        begins = state.pending - (state.activations - state.others) * (state.op is Op.BACKWARD_INPUT)
        there = replace(
            moments,
            waiting=before + embedding,
            gradients=before + comes,
            weight_part=own.made,
            embedding=moments.embedding * first,
            late=own.first if comes else 0,
            activations=activations(state.activations, begins, waiting),
            to_the_end=left,
            at_loss=moments.at_loss - sharded,
            in_blocks=moments.in_blocks - sharded,
            in_next=moments.in_next - sharded,
            in_first=moments.in_first - sharded,
            ends=(moments.in_blocks - sharded + own.sent + left) * state.reduces,
            logits=moments.logits * state.has_loss,
        )
        most = max(most, there.in_pass(state.op))
    return most


def largest_memory(
    config: Config, layout: Layout, chunk_bytes: int, plan: Plan | None, tuned: Tuned = PRETRAINED
) -> MemoryEstimate:
    """Memory of the pipeline rank that needs most, or of each rank without a pipeline; see :func:`estimate_memory`."""
    if plan is None:
        return estimate_memory(config, layout, chunk_bytes, tuned=tuned)
    sizes = _stage_sizes(plan)
    held, losses = peak_activations(plan.training, sizes), peak_losses(plan.training)
    states = pass_states(plan.training, sizes)
    ranks = (
        estimate_memory(
            config,
            layout,
            chunk_bytes,
            list(plan.stages_of(rank).values()),
            held[rank],
            losses,
            tuned,
            states[rank],
        )
        for rank in range(layout.pp)
    )
    return max(ranks, key=lambda estimate: estimate.total)


def _stage_sizes(plan: Plan) -> list[float]:
    """Layers of each stage, in those of an average part of its rank: the first and the last stage have fewer."""
    sizes = [1.0] * len(plan.parts)
    for rank in range(plan.training.ranks):
        layers = {stage: len(part.layers) for stage, part in plan.stages_of(rank).items()}
        for stage, own in layers.items():
            sizes[stage] = own * len(layers) / max(1, sum(layers.values()))
    return sizes


def tokens_of(config: Config, layout: Layout, tuned: Tuned) -> int:
    """Tokens of a micro-batch on one of the context-parallel processes."""
    assert config.data.seq_length is not None, "resolved before"
    return tuned.rows * config.data.micro_batch_size * config.data.seq_length // layout.cp


def _logits(config: Config, tokens: int, chunk_bytes: int, b: int, share: Share, *, trained: bool) -> int:
    """Bytes of a chunk, and of what is kept of the output matrix's gradients, of one loss."""
    if not share.head or share.scores:  # a score's matrix is one row
        return 0
    chunk = min(tokens, max(1, chunk_bytes // (4 * share.rows))) * share.rows * b
    slope = 0
    if config.model.final_logit_softcapping is not None:
        in_fp32 = 4 * min(chunk // b, CAPPED_LOGITS)
        slope = chunk + in_fp32 * (2 if b < 4 else 1)
    if not trained:
        return chunk + slope
    # The slope goes before the sum in fp32 is rounded.
    of_earlier, summed, rounded = share.mtp * b, 4, b if b < 4 else 0
    return chunk + share.vocabulary * (of_earlier + summed) + max(slope, share.vocabulary * rounded)


def kept_by_blocks(config: Config, layout: Layout, tuned: Tuned = PRETRAINED) -> list[int]:
    """Bytes that each block keeps of a micro-batch for its backward pass, which --offload-activations takes to the
    host; without FSDP in bf16 its cast weights, too, if they are trained."""
    model, parallel = config.model, config.parallel
    b, recompute, fused = 2 if parallel.bf16 else 4, parallel.recompute_granularity, is_fused(config)
    tokens = tokens_of(config, layout, tuned)
    kinds = [_kind(spec) for spec in layer_specs(model)[: model.num_layers]]
    kept = {kind: kept_per_token(config, layout, b, recompute, fused=fused, **dict(kind)) for kind in set(kinds)}
    weights = of_each_block(model, range(model.num_layers), lambda block: elements(block, layout))
    casts = not layout.has_fsdp and parallel.bf16 and recompute == "none" and not tuned.adapters
    return [int(tokens * kept[kind]) + b * one * casts for kind, one in zip(kinds, weights, strict=True)]


def _kind(spec: LayerSpec) -> tuple[tuple[str, Any], ...]:
    """Properties of a layer that decide how much memory it keeps: layers with equal ones keep equally much."""
    recurrence = next((mixer for mixer in spec.mixers if isinstance(mixer, Recurrence)), None)
    attends = any(not isinstance(mixer, Recurrence) for mixer in spec.mixers)
    parts = ("attends", attends), ("feeds", spec.feed_forward is not None)
    return ("experts", spec.has_experts), ("recurrence", recurrence), *parts


def _activations_per_token(config: Config, layout: Layout, b: int, share: Share) -> tuple[float, int]:
    """Bytes per token of a micro-batch that a block of ``share`` keeps on average, and the output layer.

    A layer of multi-token prediction keeps besides its block the embedding and both norms' results, 3 h_l,
    input and output of its own norm (but of the last one's the output), and the gradient of what its loss reads, h.
    """
    hidden, split = config.model.hidden_size, layout.tp if config.parallel.sequence_parallel else 1
    model, recompute, fused = config.model, config.parallel.recompute_granularity, is_fused(config)
    specs = layer_specs(model)
    kinds = [_kind(specs[i]) for i in share.layers]
    kept = sum(kept_per_token(config, layout, b, recompute, fused=fused, **dict(kind)) for kind in kinds)
    around = share.head * (2 * hidden // split + 2 * hidden)
    if share.mtp:
        around += share.mtp * (5 * hidden // split + hidden) - hidden // split
    if layout.pp > 1:
        around += 2 * hidden // split  # on its way between stages
    return kept / max(1, len(kinds)), b * around


def _rope_per_token(config: Config) -> int:
    """Bytes per token of the tables of a micro-batch, cosines and sines."""
    model = config.model
    assert model.kv_channels is not None, "resolved before"
    if model.position_embedding_type != "rope":
        return 0
    return 8 * (model.qk_pos_emb_head_dim if model.multi_latent_attention else model.kv_channels)


def _pending_per_token(config: Config, layout: Layout, b: int, share: Share) -> int:
    """Bytes per token that a block of ``share`` keeps at most between both parts of its backward pass."""
    specs = layer_specs(config.model)
    kinds = {_kind(specs[i]) for i in share.layers} or {()}
    return max(pending_per_token(config, layout, b, **dict(kind)) for kind in kinds)


def _backward_per_token(config: Config, layout: Layout, b: int, share: Share) -> int:
    """Bytes per token of gradients in flight in the backward pass of a block, and of what is replayed of it."""
    specs = layer_specs(config.model)
    kinds = {_kind(specs[i]) for i in share.layers} or {()}
    fused = is_fused(config)
    return max(
        max(
            in_flight_per_token(config, layout, b, **dict(kind))
            + replayed_per_token(config, layout, b, fused=fused, **dict(kind)),
            masking_per_token(config, layout, b, fused=fused, experts=dict(kind).get("experts", False)),
        )
        for kind in kinds
    )
