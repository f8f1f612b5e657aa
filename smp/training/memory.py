"""Bytes that one process of a training run needs, by formula. No torch, so it runs on a login node.

Symbols: h hidden size, q = heads x head width, k = key/value heads x head width, f = MLP width, T = tokens of a
micro-batch on one of cp context-parallel processes, b = bytes of the compute precision, tp = tensor-parallel processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from smp.config import Config, Layout
from smp.config.layer_pattern import scores_flag
from smp.config.moe import has_experts
from smp.config.mtp import further_layers
from smp.config.qlora import packed_row_bytes
from smp.config.schema import OptimizerConfig, ParallelConfig
from smp.models.inventory import Parameter, block_parameters, inventory, vocabulary_matrix
from smp.models.part import ModelPart, whole
from smp.pipeline.plan import Plan
from smp.pipeline.validate import peak_activations, peak_losses


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process; see :func:`estimate_memory`.

    Attributes:
        accumulates: whether there are gradients in a forward pass, of an earlier micro-batch.
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
    accumulates: bool
    secondary: int = 0

    @property
    def total(self) -> int:
        """What is always there, and the most at one of three moments: at the loss, in the backward pass of the last
        block, when all activations are still there, and in that of the first, when all gradients are."""
        waiting = self.gradients if self.accumulates else 0
        kept, backward = waiting + self.activations + self.gathered, self.backward + self.reduced
        moments = kept + self.logits, kept + backward, self.gradients + self.gathered + backward
        return self.parameters + self.optimizer + self.secondary + max(moments)


@dataclass(frozen=True)
class Tuned:
    """What is different when a model is fine-tuned."""

    adapters: int = 0  # elements of all adapters on one of the tensor-parallel processes; 0: all weights are trained
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
      vocabulary matrix at the loss. Without FSDP (one data-parallel rank, no pipeline and no context parallelism) in
      bf16 runs the cast weights, which layers keep for the backward pass (under recompute those of one block).
    - secondary: with --zero-hpz-partition-size z the blocks' weights in compute precision, once more, / z.
    - reduced: the gradient of the largest unit, in compute precision and as the fp32 input of its reduction; without
      FSDP on its way to the sum.
    - activations: layers x what a block keeps (``_kept_per_token`` x T), and what the output layer takes and gives.
      With --offload-activations of --activation-loading-horizon layers only; cast weights leave with them.
    - backward: as much as one whole block for the gradients in flight, under recompute one more for the replayed block.
    - logits: one chunk, whose gradient replaces it; logits of all tokens never exist. The output matrix's gradient,
      summed over chunks in fp32 and kept in compute precision from the forward pass, where the loss computes it: one
      for each of the ``losses``.

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
    b, strategy = 2 if parallel.bf16 else 4, parallel.data_parallel_sharding_strategy
    tokens = tuned.rows * data.micro_batch_size * data.seq_length // layout.cp
    shards = layout.dp_shard * layout.cp
    parts = parts or (whole(model.num_layers),)
    last = any(p.head for p in parts)
    numbers = [*(i for part in parts for i in part.layers), *(further_layers(model) if last else ())]
    layers = len(numbers)
    mine = list(inventory(model, parts))
    before_ep = replace(layout, ep=1, etp=None)  # ep takes from FSDP what it cuts
    n = _elements(mine, before_ep)
    whole_n = _elements(inventory(model, parts), layout)
    blocks = [_elements(block_parameters(model, i), layout) for i in numbers]
    block = max(blocks, default=0)
    rows, hidden = vocabulary_matrix(model, "head", has_product=True).local_shape(layout)
    vocabulary = rows * hidden if last or any(p.embedding for p in parts) else 0
    adapters = tuned.adapters * layers // model.num_layers
    trained, frozen = (adapters, n * (tuned.copies + 1)) if adapters else (n, n * tuned.copies)
    largest = adapters // layers if adapters else max(block, vocabulary)
    if not layout.has_fsdp:
        gathered = 0 if b == 4 or tuned.adapters else _cast(parallel, blocks) + vocabulary
        reduced = 4 if b == 4 else b + 4
    else:
        freed = strategy == "optim_grads_params" if layout.pp == 1 else parallel.pipeline_reshard
        gathered = 2 * block + vocabulary if freed else whole_n
        reduced = b + 4
    kinds = {has_experts(model, i) for part in parts for i in part.layers} or {False}
    one_block = max(_kept_per_token(config, layout, b, "none", fused=is_fused(config), experts=kind) for kind in kinds)
    state = sum(_state_bytes(config.optim, p) * math.prod(p.local_shape(before_ep)) for p in mine)
    frozen_bytes: float = b * frozen
    if adapters:
        state = _state_bytes(config.optim, Parameter("layers.0.lora.a", (1, 1))) * adapters
        frozen_bytes = (tuned.copies + 1) * sum(_frozen_bytes(p, layout, tuned, b) for p in mine)
    at_once = layers * held / len(parts)
    if parallel.offload_activations:
        at_once = min(at_once, parallel.activation_loading_horizon)
    logits = last and not model.scalar_head  # a score's matrix is one row
    chunk = min(tokens, max(1, chunk_bytes // (4 * rows))) * rows * b
    head = 0 if adapters else vocabulary * (b * losses + (4 if b < 4 else 0))
    return MemoryEstimate(
        parameters=int(4 * trained + frozen_bytes) // shards,
        gradients=4 * trained // shards if layout.pp == 1 and strategy != "optim" else 4 * (adapters or whole_n),
        optimizer=int(state / shards),
        gathered=b * gathered if tuned.in_4_bits is None else _gathered_in_4_bits(config, layout, parts, tuned),
        reduced=reduced * largest,
        activations=int(tokens * _activations_per_token(config, layout, b, at_once, last)),
        backward=tokens * one_block * (1 if parallel.recompute_granularity == "none" else 2),
        logits=logits * (chunk + head),
        accumulates=layout.pp > 1 or (data.global_batch_size or 1) > data.micro_batch_size * layout.data_parallel,
        secondary=_secondary(config, layout, tuned),
    )


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


def _secondary(config: Config, layout: Layout, tuned: Tuned) -> int:
    """Of blocks, which are gathered twice; of experts where several of the neighbours have the same."""
    model, size = config.model, config.parallel.zero_hpz_partition_size
    if size == 1:
        return 0
    b, whole_layout = 2 if config.parallel.bf16 else 4, replace(layout, ep=1, etp=None)
    split = layout.tp // layout.expert_tp
    blocks = [p for layer in range(model.num_layers) for p in block_parameters(model, layer)]
    kept = [p for p in blocks if p.chosen is None or size * split // layout.ep > 1]
    return (sum(_frozen_bytes(p, whole_layout, tuned, b) for p in kept) + b * tuned.adapters) // size


def _cast(parallel: ParallelConfig, blocks: Sequence[int]) -> int:
    """Of weights of blocks, without FSDP in bf16, what layers keep in it for the backward pass."""
    block = max(blocks, default=0)
    kept = sum(blocks) if parallel.recompute_granularity == "none" else block  # a replay casts its block's again
    return min(kept, parallel.activation_loading_horizon * block) if parallel.offload_activations else kept


def _state_bytes(optim: OptimizerConfig, parameter: Parameter) -> float:
    """Bytes of the optimizer's state for each element, on the device."""
    if optim.optimizer_cpu_offload:
        return 0
    matrix = len(parameter.shape) > 1
    if optim.optimizer == "sgd":
        return 4 * (optim.sgd_momentum > 0)
    bias = parameter.name.endswith(".bias")  # of experts two-dimensional
    if optim.optimizer == "muon" and matrix and not bias and parameter.module.startswith("layers."):
        return 4
    kinds = (optim.exp_avg_dtype, optim.exp_avg_sq_dtype) if matrix else ("fp32", "fp32")
    return sum({"fp32": 4.0, "bf16": 2.0, "fp8": 1 + 4 / 128}[kind] for kind in kinds)


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


def is_fused(config: Config) -> bool:
    """Whether a GPU runs SwiGLU in a kernel of its own, which computes again what it could keep."""
    return config.parallel.kernels != "torch" and not config.parallel.compile


def kept_by_block(config: Config, layout: Layout, tuned: Tuned = Tuned()) -> int:
    """Bytes that a block keeps of a micro-batch for its backward pass, which --offload-activations takes to the host:
    of that kind of block which keeps more; without FSDP in bf16 its cast weights, too, if they are trained."""
    model, data, parallel = config.model, config.data, config.parallel
    assert data.seq_length is not None, "resolved before"
    b, recompute, fused = 2 if parallel.bf16 else 4, parallel.recompute_granularity, is_fused(config)
    kinds = {has_experts(model, i) for i in range(model.num_layers)}
    kept = max(_kept_per_token(config, layout, b, recompute, fused=fused, experts=kind) for kind in kinds)
    alone = not layout.has_fsdp
    weights = max(_elements(block_parameters(model, i), layout) for i in range(model.num_layers))
    cast = b * weights if alone and parallel.bf16 and recompute == "none" and not tuned.adapters else 0
    return tuned.rows * data.micro_batch_size * data.seq_length // layout.cp * kept + cast


def _activations_per_token(config: Config, layout: Layout, b: int, layers: float, head: bool) -> float:
    """Bytes per token of a micro-batch, of ``layers`` and the output layer."""
    hidden, split = config.model.hidden_size, layout.tp if config.parallel.sequence_parallel else 1
    model, recompute = config.model, config.parallel.recompute_granularity
    kinds = [has_experts(model, i) for i in range(model.num_layers)]
    kept = sum(_kept_per_token(config, layout, b, recompute, fused=is_fused(config), experts=kind) for kind in kinds)
    return layers * kept / len(kinds) + head * b * (2 * hidden // split + 2 * hidden)


def _kept_per_token(
    config: Config,
    layout: Layout,
    b: int,
    recompute: Literal["none", "selective", "full"],
    *,
    fused: bool,
    experts: bool = False,
) -> int:
    """Bytes per token that one block keeps for its backward pass on one of ``layout.tp`` processes.

    With h_l = h / tp under sequence parallelism, else h, and all other widths local:

    - none: input and output of both norms 4 h_l; query, key, value and output of attention 2 q + 2 k; MLP 2 f, with
      SwiGLU that is not ``fused`` 4 f (gate, up, SiLU, product); with qk-norm its inputs q + k, with norms before and
      behind 2 h_l more; log-sum-exp, 4 bytes per head, or with attention dropout per head and position the
      probabilities in fp32, the mask in one byte and the dropped probabilities in compute precision, and where scores
      are changed the probabilities, with a cap also the capped scores. Context parallelism that exchanges keys keeps
      no probabilities.
    - selective: input h_l; results of matrix products q + 2 k + (2 or 1) f + 2 h_l (the last after their reduction)
      and of attention q; log-sum-exp, or with attention dropout the scores in compute precision.
    - full: input h_l.

    A layer with experts keeps for each of a token's k experts of width e, instead of the MLP: its row and its result
    2 h, and 3 e or, not ``fused``, 4 e; selective: the result, with expert parallelism once more for each of both ways,
    and 2 e. Loads are taken to be even. A shared expert is an MLP beside them.

    Latent attention keeps besides what its up projections make, before heads are put together, and its latents, with
    their norms' results if these are not computed again.
    """
    model, length, tp = config.model, config.data.seq_length, layout.tp
    head_dim, groups, ffn = model.kv_channels, model.num_query_groups, model.ffn_hidden_size
    assert head_dim is not None and groups is not None and ffn is not None and length is not None, "resolved before"
    if experts:
        ffn = model.moe_shared_expert_intermediate_size or 0
    heads, f = model.num_attention_heads // tp, ffn // tp
    q, k = heads * head_dim, max(1, groups // tp) * head_dim
    split = tp if config.parallel.sequence_parallel else 1
    h_l = model.hidden_size // split
    if recompute == "full":
        return b * h_l
    if recompute == "selective":
        elements = 3 * h_l + 2 * q + 2 * k + (2 if model.gated else 1) * f
        per_position = b
        wide, results = 2, 1 + 2 * (layout.ep > 1)
    else:
        mlp = (2 if fused and model.swiglu else 4) if model.gated else 2
        norms = 6 if model.norm_placement == "sandwich" else 4
        elements = norms * h_l + 2 * q + 2 * k + mlp * f + (q + k if model.qk_layernorm else 0)
        per_position = 4 + 1 + b
        wide, results = 3 if fused else 4, 2
    if experts:
        rows = results * model.hidden_size * layout.expert_tp // tp  # of the tokens of the ranks that share an expert
        elements += model.moe_router_topk * (rows + wide * (model.moe_ffn_hidden_size or 0) // tp)
    if model.multi_latent_attention:
        low = (model.kv_lora_rank + (model.q_lora_rank or 0)) // split
        up = heads * (2 * (model.qk_head_dim + model.v_head_dim) + model.qk_pos_emb_head_dim)
        elements += low + up if recompute == "selective" else 2 * low + up
    # auto may choose to exchange heads
    by_heads = layout.cp == 1 or config.parallel.cp_comm_type not in ("p2p", "all_gather")
    if not by_heads or (model.attention_dropout == 0 and not scores_flag(model)):
        return b * elements + heads * 4
    if model.attention_dropout == 0:
        per_position = 8 if model.attn_logit_softcapping is not None and recompute == "none" else 4
    return b * elements + heads * per_position * length
