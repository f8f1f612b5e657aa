"""Which weights are gathered, and which gradients are there, at the moments of a step, by formula. No torch; symbols as
in :mod:`smp.training.cost.memory`, moments as in :mod:`smp.training.cost.moments`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from smp.config import Config, Layout
from smp.config.batch import count_micro_batches
from smp.models.inventory import Parameter, block_parameters, of_each_block
from smp.training.cost.model_share import Share, Tuned, elements
from smp.training.cost.weight_memory import Weights, has_several_micro_batches


def gathered_at_moments(config: Config, layout: Layout, share: Share, tuned: Tuned, weights: Weights) -> dict[str, int]:
    """Bytes of weights that are gathered. FSDP gathers into one buffer, which stays until the next gather, and copies
    out of it: at the loss the ends are there twice, in blocks one is there and the next one in that buffer. What is not
    sharded is only copied. Cast weights go with their block."""
    b, gathered = 2 if config.parallel.bf16 else 4, weights.gathered
    alike = {
        "at_last": 0,
        "at_copy": 0,
        "at_loss": gathered,
        "in_blocks": gathered,
        "in_next": gathered,
        "in_first": gathered,
    }
    if tuned.in_4_bits is not None or layout.pp > 1:
        return alike
    if not layout.has_fsdp:
        # Under recompute only a block in its backward pass has its cast weights; at the loss none has. The output
        # matrix's cast goes with the loss, which makes its gradient.
        replayed = b * share.block if config.parallel.recompute_granularity != "none" else 0
        in_blocks = max(0, gathered - b * share.ends)
        first = min(in_blocks, b * share.block)
        return alike | {
            "at_loss": max(0, gathered - replayed),
            "in_blocks": in_blocks,
            "in_next": in_blocks,
            "in_first": first,
        }
    ends, times = b * share.ends, 2 if weights.sharing > 1 else 1
    accumulates = has_several_micro_batches(config, layout)
    if config.parallel.data_parallel_sharding_strategy != "optim_grads_params":
        # nothing is gathered from the second micro-batch on, which has gradients of the first
        only = _until_backward(config, layout, share, gathered, (times - 1) * b, b)
        if not accumulates:
            return alike | only
        # Of adapters they are small: then the first one's forward pass, which gathers, needs more.
        gathering = {name: only[name] for name in ("at_last", "at_copy", "at_loss") if weights.partly}
        return alike | _from_the_second_on(config, layout, share, weights, b) | gathering
    experts, sharing = b * share.experts * (layout.ep > 1), layout.expert_shard > 1
    dense = b * share.block - experts
    blocks = times * dense + (1 + sharing) * experts
    # No next block is gathered ahead of the first one's backward pass; experts are freed before their reduction begins.
    first = dense + experts
    next_block = (blocks if len(share.blocks) > 2 else first) - sharing * experts
    if share.mtp:  # the ends are the root's, and stay
        # Shards are cast before a gather.
        cast = (4 // b - 1) / weights.sharing
        ends += int((1 + cast) * b * share.block)
        return alike | {"at_loss": ends, "in_blocks": blocks, "in_next": next_block, "in_first": first}
    # A matrix that the embedding has, too, was gathered first; the buffer is the last block's.
    at_loss = ends + (times - 1) * (dense if _used_at_both_ends(config, layout, share) else ends)
    return alike | {"at_loss": at_loss, "in_blocks": blocks, "in_next": next_block, "in_first": first}


def _until_backward(config: Config, layout: Layout, share: Share, gathered: int, buffer: int, b: int) -> dict[str, int]:
    """Bytes of weights that stay until their backward pass, the only one of a step; ``buffer`` bytes per element of
    what was gathered last: the output matrix, or where the embedding's unit has it, which comes first, a block."""
    at_both_ends = _used_at_both_ends(config, layout, share) > 0
    in_blocks = gathered if at_both_ends else gathered - b * share.ends
    last = share.blocks[-1] if share.blocks else 0
    # The buffer of the block before is there until then; experts that are cut within a matrix are joined first.
    cut = layout.expert_shard
    experts = (config.model.num_experts or 0) // layout.ep
    joined = b * share.experts if cut > 1 and experts % cut else 0
    return {
        "at_last": in_blocks + buffer * last,
        "at_copy": (in_blocks + 2 * buffer * last + joined) * (buffer > 0),
        "at_loss": gathered + buffer * (share.block if at_both_ends else share.ends),
        "in_blocks": in_blocks,
        "in_next": in_blocks - b * share.blocks[-1],
        "in_first": in_blocks - b * sum(share.blocks[1:]),
    }


def _from_the_second_on(config: Config, layout: Layout, share: Share, weights: Weights, b: int) -> dict[str, int]:
    """Bytes of weights that stay for all of a step's micro-batches. The last one's backward pass frees them block by
    block. Of two, the first one's has them all, and no gradients of an earlier one."""
    gathered, last = weights.gathered, b * share.blocks[-1] if share.blocks else 0
    if config.parallel.data_parallel_sharding_strategy == "optim":  # nothing is reduced before the last
        return {"in_next": gathered - last, "in_first": gathered - b * sum(share.blocks[1:])}
    if count_micro_batches(config.data, layout.data_parallel) > 2:
        return {}
    return {"in_next": gathered - min(last, weights.gradients)}


def gradients_at_moments(
    config: Config, layout: Layout, share: Share, tuned: Tuned, weights: Weights
) -> dict[str, int]:
    """Bytes of gradients that are whole, and of all. A pipeline adds them up in fp32 until its step ends; FSDP has one
    unit's on its way to its reduction, in fp32, while the next one's comes in compute precision."""
    b, partly = 2 if config.parallel.bf16 else 4, weights.partly
    gradients, sharing = weights.gradients, weights.sharing
    block = weights.adapters // max(1, len(share.layers)) if partly else share.block
    vocabulary, ends = (0, 0) if partly else (share.vocabulary, share.ends if share.mtp else share.vocabulary)
    found = {"gradients": gradients, "waiting": gradients, "head_gradient": 0, "before_last": 0, "before": 0, "late": 0}
    last = of_each_block(config.model, share.layers, lambda block: _last_product(block, layout))
    found |= {"own": b * block, "own_first": 0 if partly else b * max(last, default=0), "tied": 0, "experts": 0}
    if layout.pp > 1:
        # A stage's gradients are reduced before its weights are freed: what is sent, and what comes.
        sent = _with_share(4 * max(block, ends), sharing)
        return found | {"head": 0, "block": 0, "ends": weights.gathered + sent}
    at_the_end = vocabulary * config.model.untie_embeddings_and_output_weights
    if (both := _used_at_both_ends(config, layout, share)) > 0:
        at_the_end = ends
        freed = config.parallel.data_parallel_sharding_strategy == "optim_grads_params" and not tuned.in_4_bits
        found["tied"] = b * (both * freed + ends)
    if not has_several_micro_batches(config, layout):
        # In addition to two gathered blocks, the gradients of two are still to come; experts' unit is reduced early.
        two, uncut = share.layers[: 2 if sharing > 1 else 1], replace(layout, ep=1, etp=None)
        come = [p for i in two for p in block_parameters(config.model, i) if i == two[0] or not _is_apart(p, layout)]
        first = elements(come, uncut)
        matrix = vocabulary * config.model.untie_embeddings_and_output_weights if layout.has_fsdp else vocabulary
        found |= {"head_gradient": 4 * matrix // sharing, "before_last": 4 * block // sharing}
        found |= {"waiting": 0, "late": 0 if partly else 4 * (first + at_the_end) // sharing}
    elif layout.has_fsdp and config.parallel.data_parallel_sharding_strategy != "optim":
        found["before"] = 4 * ends
    elif layout.has_fsdp:
        # A block's whole gradients are freed when its reduction has copied them.
        found |= {"late": 4 * block, "before_last": -4 * block}
    if not layout.has_fsdp:
        # A gradient is cast, and added to what is there. Autograd adds both gradients of a tied matrix into a third
        # before. The head's is added before a block's backward pass, which the loss outweighs.
        added = 4 * vocabulary if has_several_micro_batches(config, layout) else 0
        tied = 0 if config.model.untie_embeddings_and_output_weights else b * vocabulary
        ends = (b % 4) * vocabulary + max(added, tied)
        return found | {"head": 0, "block": 0, "tied": tied, "ends": ends}
    own = 0 if partly or layout.ep == 1 else share.experts
    found["experts"] = (b + 4) * own
    reduced = {"head": 0 if both else 4 * ends, "block": 4 * (block - own), "ends": (b + 4) * max(vocabulary, ends)}
    return found | reduced


def _is_apart(parameter: Parameter, layout: Layout) -> bool:
    """Whether it is in a unit of experts alone."""
    return parameter.chosen is not None and layout.ep > 1


def _last_product(block: Iterable[Parameter], layout: Layout) -> int:
    """Elements of the MLP's, or the experts', last weight."""
    return elements((p for p in block if p.module.endswith("down")), layout)


@dataclass(frozen=True)
class PartBytes:
    """Bytes of one part's weights in a pipeline.

    Attributes:
        gradients: of its weights, whole; ``reduced``: after their reduction.
        first: of them that come when its backward pass reaches its first block: of that block, and of the embedding.
        gathered: its weights in compute precision, where they stay gathered between its passes; else 0.
        sent: what comes and goes while they are reduced.
        made: gradients of its blocks in compute precision, which a weight part has until it adds them to their sums.
    """

    gradients: int
    reduced: int
    first: int
    gathered: int
    sent: int
    made: int


def bytes_of_parts(config: Config, layout: Layout, share: Share, weights: Weights) -> list[PartBytes]:
    """:class:`PartBytes` of each part of a pipeline's process."""
    found = []
    for part in share.parts:
        own = Share.of(config.model, layout, [part])
        # A matrix that two parts share is counted with the head, whose gradient is there first.
        tied = share.head and not part.head and not config.model.untie_embeddings_and_output_weights
        counted = own.elements - own.vocabulary * tied
        gathered = 0 if config.parallel.pipeline_reshard else weights.gathered * counted // share.elements
        gradients, first = 4 * counted, 4 * (own.blocks[:1] or [0])[0]
        made = 2 * sum(own.blocks) if config.parallel.bf16 and not weights.partly else 0
        if part.embedding and not tied:
            first += 4 * own.vocabulary
        sent = _sent(layout, own, weights.sharing)
        if weights.partly:
            layers = max(1, len(share.layers))
            gradients, first = weights.gradients * len(own.layers) // layers, 0
            sent = _with_share(4 * weights.adapters // layers, weights.sharing)
        found.append(PartBytes(gradients, gradients // weights.sharing, first, gathered, sent, made))
    return found


def _sent(layout: Layout, part: Share, sharing: int) -> int:
    """Bytes that come while a part's gradients are reduced, unit by unit: what is sent, and the share that arrives,
    less the whole gradients that units before it have freed. Units go in the order of their use: an embedding is first,
    an output matrix last."""
    own = part.experts * (layout.ep > 1)
    # A unit of several weights frees most of what it has sent before the share arrives.
    unit, vocabulary = 4 * max(part.block - own, own), _with_share(4 * part.vocabulary, sharing)
    blocks, ends = (4 * size - 4 * size // sharing for size in (sum(part.blocks), part.vocabulary))
    if any(one.embedding for one in part.parts):
        return max(vocabulary, unit - ends)
    return max(unit, vocabulary - blocks)


def _with_share(size: int, sharing: int) -> int:
    return size + size // sharing if sharing > 1 else size


def _used_at_both_ends(config: Config, layout: Layout, share: Share) -> int:
    """Elements of FSDP's root unit, of a whole model that uses its embedding at the loss, too: it is gathered until the
    embedding's gradient is there, and its gradients are reduced then."""
    tied = not config.model.untie_embeddings_and_output_weights
    return share.ends if layout.has_fsdp and layout.pp == 1 and (tied or share.mtp) else 0
