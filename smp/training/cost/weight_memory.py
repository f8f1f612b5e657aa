"""Bytes of weights, gradients and optimizer state on one process, by formula. No torch; symbols as in
:mod:`smp.training.cost.memory`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from smp.config import Config, Layout
from smp.config.batch import count_micro_batches
from smp.config.parallel import ParallelConfig
from smp.config.rules.dsa import learns
from smp.config.rules.mtp import mtp_layers
from smp.config.rules.qlora import packed_row_bytes
from smp.config.schema import OptimizerConfig
from smp.models.inventory import Parameter, block_parameters, inventory, of_each_block
from smp.training.cost.model_share import Share, Tuned, elements


@dataclass(frozen=True)
class Weights:
    """Bytes of what belongs to weights; see :func:`smp.training.cost.memory.estimate_memory`.

    Attributes:
        adapters: elements of adapters on the process, before FSDP.
        sharing: processes that share a weight.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reduced: int
    secondary: int
    adapters: int
    sharing: int

    @staticmethod
    def of(config: Config, layout: Layout, share: Share, tuned: Tuned) -> Weights:
        """Bytes of weights of the process that has ``share``."""
        b = 2 if config.parallel.bf16 else 4
        before_ep = replace(layout, ep=1, etp=None)  # ep takes from FSDP what it cuts
        n, sharing = elements(share.parameters, before_ep), layout.dp_shard * layout.cp
        adapters = tuned.adapters * len(share.layers) // config.model.num_layers
        if config.model.dsa_indexer_warmup:  # which train alone, as adapters do, beside weights in fp32
            adapters = elements([p for p in share.parameters if learns(config.model, p.name)], before_ep)
        trained, frozen = adapters or n, float(b * n * tuned.copies)
        state = sum(state_bytes(config.optim, p) * math.prod(p.local_shape(before_ep)) for p in share.parameters)
        if adapters:
            state = state_bytes(config.optim, Parameter("layers.0.lora.a", (1, 1))) * adapters
            frozen = (tuned.copies + 1) * sum(_frozen_bytes(p, before_ep, tuned, b) for p in share.parameters)
        if config.model.dsa_indexer_warmup:
            frozen = 4.0 * (n - adapters)
        late = config.parallel.data_parallel_sharding_strategy == "optim" and has_several_micro_batches(config, layout)
        whole = layout.pp > 1 or late
        largest = adapters // len(share.layers) if adapters else share.largest(layout)
        return Weights(
            parameters=int(4 * trained + frozen) // sharing,
            gradients=4 * (adapters or share.elements) if whole else 4 * trained // sharing,
            optimizer=int(state / sharing),
            gathered=(
                b * _gathered(config, layout, share, tuned)
                if tuned.in_4_bits is None
                else _gathered_in_4_bits(config, layout, share, tuned)
            ),
            reduced=(4 if b == 4 and not layout.has_fsdp else b + 4) * largest,
            secondary=_secondary(config, layout, tuned),
            adapters=adapters,
            sharing=sharing,
        )


def gathered_at_moments(config: Config, layout: Layout, share: Share, tuned: Tuned, weights: Weights) -> dict[str, int]:
    """Bytes of weights that are gathered. FSDP gathers into one buffer, which stays until the next gather, and copies
    out of it: at the loss the ends are there twice, in blocks one is there and the next one in that buffer. What is not
    sharded is only copied. Cast weights go with their block."""
    b, gathered = 2 if config.parallel.bf16 else 4, weights.gathered
    alike = {"at_last": 0, "at_loss": gathered, "in_blocks": gathered, "in_next": gathered, "in_first": gathered}
    if tuned.in_4_bits is not None or layout.pp > 1:
        return alike
    if not layout.has_fsdp:
        return alike | {"in_first": min(gathered, b * share.block)}
    ends, times = b * share.ends, 2 if weights.sharing > 1 else 1
    accumulates = has_several_micro_batches(config, layout)
    if config.parallel.data_parallel_sharding_strategy != "optim_grads_params":
        # nothing is gathered from the second micro-batch on, which has gradients of the first
        return alike if accumulates else alike | _until_backward(config, layout, share, gathered, (times - 1) * b, b)
    experts, sharing = b * share.experts * (layout.ep > 1), layout.expert_shard > 1
    dense = b * share.block - experts
    blocks = times * dense + (1 + sharing) * experts
    if share.mtp:  # the ends are the root's, and stay
        # Shards are cast before a gather.
        cast = (4 // b - 1) / weights.sharing
        ends += int((1 + cast) * b * share.block)
        return alike | {"at_loss": ends, "in_blocks": blocks, "in_next": blocks, "in_first": blocks}
    return alike | {"at_loss": times * ends, "in_blocks": blocks, "in_next": blocks, "in_first": blocks}


def _until_backward(config: Config, layout: Layout, share: Share, gathered: int, buffer: int, b: int) -> dict[str, int]:
    """Bytes of weights that stay until their backward pass, the only one of a step; ``buffer`` bytes per element of
    what was gathered last: the output matrix, or where the embedding's unit has it, which comes first, a block."""
    at_both_ends = _used_at_both_ends(config, layout, share) > 0
    in_blocks = gathered if at_both_ends else gathered - b * share.ends
    last = share.blocks[-1] if share.blocks else 0
    return {
        "at_last": in_blocks + buffer * last,
        "at_loss": gathered + buffer * (share.block if at_both_ends else share.ends),
        "in_blocks": in_blocks,
        "in_next": in_blocks - b * share.blocks[-1],
        "in_first": in_blocks - b * sum(share.blocks[1:]),
    }


def has_several_micro_batches(config: Config, layout: Layout) -> bool:
    """Whether a step has several micro-batches on a process."""
    return count_micro_batches(config.data, layout.data_parallel) > 1


def gradients_at_moments(
    config: Config, layout: Layout, share: Share, tuned: Tuned, weights: Weights
) -> dict[str, int]:
    """Bytes of gradients that are whole, and of all. A pipeline adds them up in fp32 until its step ends; FSDP has one
    unit's on its way to its reduction, in fp32, while the next one's comes in compute precision."""
    b, adapters = 2 if config.parallel.bf16 else 4, weights.adapters
    gradients, sharing = weights.gradients, weights.sharing
    block = adapters // len(share.layers) if adapters else share.block
    vocabulary, ends = (0, 0) if adapters else (share.vocabulary, share.ends if share.mtp else share.vocabulary)
    found = {"gradients": gradients, "waiting": gradients, "behind": 0, "before_last": 0, "before": 0, "late": 0}
    last = of_each_block(config.model, share.layers, lambda block: _last_product(block, layout))
    found |= {"own": b * block, "own_first": 0 if adapters else b * max(last, default=0), "tied": 0}
    if layout.pp > 1:
        # A stage's gradients are reduced before its weights are freed: what is sent, and what comes.
        sent = 4 * max(block, ends)
        return found | {
            "head": 0,
            "block": 0,
            "ends": weights.gathered + sent + (sent // sharing if sharing > 1 else 0),
        }
    at_the_end = vocabulary * config.model.untie_embeddings_and_output_weights
    if (both := _used_at_both_ends(config, layout, share)) > 0:
        at_the_end = ends
        freed = config.parallel.data_parallel_sharding_strategy == "optim_grads_params" and not tuned.in_4_bits
        found["tied"] = b * (both * freed + ends)
    if not has_several_micro_batches(config, layout):
        # in addition to two gathered blocks, the gradients of two are still to come
        two = share.layers[: 2 if sharing > 1 else 1]
        first = sum(elements(block_parameters(config.model, i), replace(layout, ep=1, etp=None)) for i in two)
        come = vocabulary * config.model.untie_embeddings_and_output_weights if layout.has_fsdp else vocabulary
        found |= {"behind": 4 * come // sharing, "before_last": 4 * block // sharing}
        found |= {"waiting": 0, "late": 0 if adapters else 4 * (first + at_the_end) // sharing}
    elif layout.has_fsdp and config.parallel.data_parallel_sharding_strategy != "optim":
        found["before"] = 4 * ends
    elif layout.has_fsdp:
        found["late"] = 4 * block  # its own whole gradient is what is reduced there
    if not layout.has_fsdp:
        head = 0 if found["behind"] else 4 * vocabulary  # it is added to what is there
        return found | {"head": head, "block": 0, "ends": (b % 4) * vocabulary}
    reduced = {"head": 0 if both else 4 * ends, "block": 4 * block, "ends": (b + 4) * max(vocabulary, ends)}
    return found | reduced


def _last_product(block: Iterable[Parameter], layout: Layout) -> int:
    """Elements of the MLP's, or the experts', last weight."""
    return elements((p for p in block if p.module.endswith("down")), layout)


def gradients_of_parts(config: Config, layout: Layout, share: Share, weights: Weights) -> tuple[list[int], list[int]]:
    """Bytes of each part's gradients in a pipeline, and of those that come when its backward pass reaches its first
    block: of that block, and of the embedding."""
    parts = [Share.of(config.model, layout, [part]) for part in share.parts]
    if weights.adapters:
        return [weights.gradients * len(part.layers) // len(share.layers) for part in parts], [0 for _ in parts]
    first = [4 * (part.blocks[0] if part.blocks else 0) for part in parts]
    embedding = [4 * share.vocabulary * part.embedding for part in share.parts]
    return [4 * part.elements for part in parts], [sum(both) for both in zip(first, embedding, strict=True)]


def _used_at_both_ends(config: Config, layout: Layout, share: Share) -> int:
    """Elements of FSDP's root unit, of a whole model that uses its embedding at the loss, too: it is gathered until the
    embedding's gradient is there, and its gradients are reduced then."""
    tied = not config.model.untie_embeddings_and_output_weights
    return share.ends if layout.has_fsdp and layout.pp == 1 and (tied or share.mtp) else 0


def _gathered(config: Config, layout: Layout, share: Share, tuned: Tuned) -> int:
    """Elements that are gathered, or without FSDP kept as they were cast."""
    parallel = config.parallel
    if not layout.has_fsdp:
        return _cast(parallel, share.blocks) + share.ends if parallel.bf16 and not tuned.adapters else 0
    freed = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    if layout.pp > 1:
        freed = parallel.pipeline_reshard
    return 2 * share.block + share.ends if freed else share.elements


def _secondary(config: Config, layout: Layout, tuned: Tuned) -> int:
    """Bytes of the second shards of blocks, gathered twice; of experts where several neighbours have the same."""
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
    """Matrices of blocks; biases of experts and kernels of convolutions are two-dimensional, too."""
    is_matrix = len(parameter.shape) > 1 and not parameter.name.endswith((".bias", "_conv"))
    return optim.optimizer == "muon" and is_matrix and parameter.module.startswith("layers.")


def update_bytes(optim: OptimizerConfig, layout: Layout, share: Share) -> int:
    """Bytes that the optimizer's step works with. Muon has a whole matrix, of experts those of a process, that
    Newton-Schulz steps hold six copies of, and its Gram matrix, in fp32."""
    most = 0
    for p in share.parameters:
        if trained_by_muon(optim, p):
            out, into = p.shape[-2:]
            most = max(most, _on_owner(p, layout) * (6 * out * into + min(out, into) ** 2))
    return 4 * most


def _on_owner(parameter: Parameter, layout: Layout) -> int:
    """How many matrices of a stack of experts are orthogonalized at once: FSDP cuts experts where they are enough."""
    if parameter.chosen is None:
        return 1
    experts, shards = parameter.shape[0] // layout.ep, layout.expert_shard * layout.cp
    return experts // shards if experts % shards == 0 else experts


def _frozen_bytes(parameter: Parameter, layout: Layout, tuned: Tuned, b: int) -> int:
    """Bytes of a frozen parameter, before FSDP."""
    shape = parameter.local_shape(layout)
    if tuned.in_4_bits is None or not parameter.linear:
        return b * math.prod(shape)
    return shape[0] * packed_row_bytes(shape[1], double=tuned.in_4_bits)


def _gathered_in_4_bits(config: Config, layout: Layout, share: Share, tuned: Tuned) -> int:
    """What is gathered of weights in 4 bits, as of others, and the largest matrix of a block, which is widened."""
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
