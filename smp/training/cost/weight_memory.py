"""Bytes of weights, gradients and optimizer state on one process, by formula. No torch; symbols as in
:mod:`smp.training.cost.memory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from smp.config import Config, Layout
from smp.config.batch import count_micro_batches
from smp.config.parallel import ParallelConfig
from smp.config.rules.dsa import learns
from smp.config.rules.mtp import mtp_layers
from smp.config.rules.qlora import BLOCK, packed_row_bytes
from smp.config.schema import OptimizerConfig
from smp.models.inventory import Parameter, block_parameters, inventory
from smp.training.cost.model_share import Share, Tuned, elements


@dataclass(frozen=True)
class Weights:
    """Bytes of what belongs to weights; see :func:`smp.training.cost.memory.estimate_memory`.

    Attributes:
        adapters: elements of adapters on the process, before FSDP; 0 also on one that has no layers.
        partly: whether nothing else is trained.
        sharing: processes that share a weight.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reduced: int
    secondary: int
    adapters: int
    partly: bool
    sharing: int

    @staticmethod
    def of(config: Config, layout: Layout, share: Share, tuned: Tuned) -> Weights:
        """Bytes of weights of the process that has ``share``."""
        b = 2 if config.parallel.bf16 else 4
        before_ep = replace(layout, ep=1, etp=None)  # ep takes from FSDP what it cuts
        n, sharing = elements(share.parameters, before_ep), layout.dp_shard * layout.cp
        # A stage's share of the adapters, by its layers.
        adapters = tuned.adapters * len(share.layers) // config.model.num_layers
        if config.model.dsa_indexer_warmup:  # which train alone, as adapters do; the weights are in fp32
            adapters = elements([p for p in share.parameters if learns(config.model, p.name)], before_ep)
        partly = tuned.adapters > 0 or config.model.dsa_indexer_warmup
        trained, frozen = adapters if partly else n, float(b * n * tuned.copies)
        state = sum(state_bytes(config.optim, p) * math.prod(p.local_shape(before_ep)) for p in share.parameters)
        if partly:
            # LoRA factors are matrices of blocks, for Muon and for 8-bit moments.
            state = state_bytes(config.optim, Parameter("layers.0.lora.a", (1, 1))) * adapters
            frozen = (tuned.copies + 1) * sum(_frozen_bytes(p, before_ep, tuned, b) for p in share.parameters)
        if config.model.dsa_indexer_warmup:
            frozen = 4.0 * (n - adapters)
        # ZeRO-1 and pipelines keep whole gradients until the last micro-batch of a step.
        late = config.parallel.data_parallel_sharding_strategy == "optim" and has_several_micro_batches(config, layout)
        whole = layout.pp > 1 or late
        largest = adapters // max(1, len(share.layers)) if partly else share.largest(layout)
        return Weights(
            parameters=int(4 * trained + frozen) // sharing,
            # fp32 gradients: whole, or the rank's shard.
            gradients=4 * (adapters if partly else share.elements) if whole else 4 * trained // sharing,
            optimizer=int(state / sharing),
            gathered=(
                b * _gathered(config, layout, share, tuned)
                if tuned.in_4_bits is None
                else _gathered_in_4_bits(config, layout, share, tuned)
            ),
            # The unit whose gradients are reduced: in compute precision, and in fp32.
            reduced=(4 if b == 4 and not layout.has_fsdp else b + 4) * largest,
            secondary=_secondary(config, layout, tuned),
            adapters=adapters,
            partly=partly,
            sharing=sharing,
        )


def has_several_micro_batches(config: Config, layout: Layout) -> bool:
    """Whether a step has several micro-batches on a process."""
    return count_micro_batches(config.data, layout.data_parallel) > 1


def _gathered(config: Config, layout: Layout, share: Share, tuned: Tuned) -> int:
    """Elements of weights that are gathered at once, or without FSDP of those cast to compute precision."""
    parallel = config.parallel
    if not layout.has_fsdp:
        return _cast(parallel, share.blocks) + share.ends if parallel.bf16 and not tuned.adapters else 0
    freed = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    if layout.pp > 1:
        freed = parallel.pipeline_reshard
    # Two blocks: FSDP prefetches the next one.
    return 2 * share.block + share.ends if freed else share.elements


def _secondary(config: Config, layout: Layout, tuned: Tuned) -> int:
    """Bytes of the secondary shards (ZeRO++ hpZ, arXiv 2306.10209) of blocks; of experts only where several ranks of
    the node have the same ones."""
    model, size = config.model, config.parallel.zero_hpz_partition_size
    if size == 1:
        return 0
    b, whole_layout = 2 if config.parallel.bf16 else 4, replace(layout, ep=1, etp=None)
    split = layout.tp // layout.expert_tp
    layers = (*range(model.num_layers), *mtp_layers(model))
    blocks = [p for layer in layers for p in block_parameters(model, layer)]
    kept = [p for p in blocks if p.chosen is None or size * split // layout.ep > 1]
    return (sum(_frozen_bytes(p, whole_layout, tuned, b) for p in kept) + b * tuned.adapters) // size


def _cast(parallel: ParallelConfig, blocks: Sequence[int]) -> int:
    """Bytes of bf16 casts of blocks' weights that layers keep for the backward pass, without FSDP."""
    block = max(blocks, default=0)
    kept = sum(blocks) if parallel.recompute_granularity == "none" else block  # recompute casts a block's weights again
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
    # Vectors keep fp32 moments.
    kinds = (optim.exp_avg_dtype, optim.exp_avg_sq_dtype) if matrix else ("fp32", "fp32")
    # FP8: one byte, and an fp32 scale for 128 elements.
    return sum({"fp32": 4.0, "bf16": 2.0, "fp8": 1 + 4 / 128}[kind] for kind in kinds)


def trained_by_muon(optim: OptimizerConfig, parameter: Parameter) -> bool:
    """Whether Muon trains this parameter: matrices of blocks, but not biases of experts and convolution kernels, which
    are two-dimensional, too."""
    is_matrix = len(parameter.shape) > 1 and not parameter.name.endswith((".bias", "_conv"))
    return optim.optimizer == "muon" and is_matrix and parameter.module.startswith("layers.")


def update_bytes(optim: OptimizerConfig, layout: Layout, share: Share) -> int:
    """Bytes that the optimizer's step allocates. Muon gathers a whole matrix (of experts a process's) in fp32. At the
    end of a Newton-Schulz iteration there are five copies of it and its Gram matrix, in the middle three copies and
    four Gram matrices."""
    most = 0
    for p in share.parameters:
        if trained_by_muon(optim, p):
            out, into = p.shape[-2:]
            matrix, gram = out * into, min(out, into) ** 2
            most = max(most, _on_owner(p, layout) * max(5 * matrix + gram, 3 * matrix + 4 * gram))
    return 4 * most


def _on_owner(parameter: Parameter, layout: Layout) -> int:
    """Number of matrices of a stack of experts that are orthogonalized at once: FSDP shards experts whole where their
    number allows."""
    if parameter.chosen is None:
        return 1
    experts, shards = parameter.shape[0] // layout.ep, layout.expert_shard
    return experts // shards if experts % shards == 0 else experts


def _frozen_bytes(parameter: Parameter, layout: Layout, tuned: Tuned, b: int) -> int:
    """Bytes of a frozen parameter, before FSDP."""
    shape = parameter.local_shape(layout)
    # A row whose length is no multiple of the block stays in compute precision.
    if tuned.in_4_bits is None or not parameter.linear or shape[1] % BLOCK:
        return b * math.prod(shape)
    return shape[0] * packed_row_bytes(shape[1], double=tuned.in_4_bits)


def _gathered_in_4_bits(config: Config, layout: Layout, share: Share, tuned: Tuned) -> int:
    """Bytes of gathered weights in 4 bits, and of the largest matrix of a block, which is dequantized."""
    model, parallel = config.model, config.parallel
    b = 2 if parallel.bf16 else 4
    blocks = [list(block_parameters(model, layer)) for part in share.parts for layer in part.layers]
    sizes = [sum(_frozen_bytes(p, layout, tuned, b) for p in block) for block in blocks]
    widened = max((b * math.prod(p.local_shape(layout)) for block in blocks for p in block if p.linear), default=0)
    if not layout.has_fsdp:
        return widened
    ends = [p for p in inventory(model, share.parts) if not p.name.startswith("layers.")]
    freed = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    if layout.pp > 1:
        freed = parallel.pipeline_reshard
    outside = [_frozen_bytes(p, layout, tuned, b) for p in ends]
    if freed:
        return widened + 2 * max(sizes, default=0) + max(outside, default=0)
    return widened + sum(sizes) + sum(outside)
