"""--dry-run: what a command line resolves to."""

from __future__ import annotations

from dataclasses import fields

from smp.config import Config, Layout, to_yaml
from smp.layers.head import CHUNK_BYTES
from smp.models.arithmetic import MemoryEstimate, count_parameters, estimate_memory, training_flops_per_token
from smp.parallel.mesh import MESH_DIMS
from smp.pipeline.plan import Plan, describe_plan, plan_pipeline
from smp.pipeline.validate import peak_activations, peak_losses


def describe(config: Config, world_size: int, tree: object | None = None) -> str:
    """Settings, mesh, parameters and memory, as text; ``tree`` is shown as the settings when it is more than
    ``config``."""
    layout = Layout.from_config(config.parallel, world_size)
    vocab, length = config.model.vocab_size, config.data.seq_length
    assert vocab is not None and length is not None
    count = count_parameters(config.model, vocab)
    plan = plan_pipeline(config, layout) if layout.pp > 1 else None
    memory = _largest(config, layout, plan)
    mesh = " x ".join(f"{name} {getattr(layout, name)}" for name in MESH_DIMS)
    tflop = training_flops_per_token(config.model, length, vocab) / 1e12
    lines = [
        to_yaml(config if tree is None else tree).rstrip(),
        "",
        f"mesh: {mesh} = {layout.world_size} processes, tp fastest",
        f"parameters: {count.total:,} (vocabulary and positions {count.embedding:,}, "
        f"{config.model.num_layers} blocks of {count.per_layer:,})",
        *([] if plan is None else describe_plan(plan, config)),
        f"parameters per rank: {memory.parameters // 4:,}",
        f"training: {tflop:.6f} TFLOP per token, {(config.data.global_batch_size or 0) * length:,} tokens per step",
        "memory per rank, estimated:" if plan is None else "memory of the rank that needs most, estimated:",
        *(f"  {f.name.replace('_', ' '):18s}{getattr(memory, f.name) / 2**30:10.3f} GiB" for f in fields(memory)),
        f"  {'total':18s}{memory.total / 2**30:10.3f} GiB",
    ]
    return "\n".join(lines)


def _largest(config: Config, layout: Layout, plan: Plan | None) -> MemoryEstimate:
    """Of the pipeline rank that needs most memory."""
    if plan is None:
        return estimate_memory(config, layout, CHUNK_BYTES["cuda"])
    held, losses = peak_activations(plan.training), peak_losses(plan.training)
    ranks = (
        estimate_memory(config, layout, CHUNK_BYTES["cuda"], list(plan.stages_of(rank).values()), held[rank], losses)
        for rank in range(layout.pp)
    )
    return max(ranks, key=lambda estimate: estimate.total)
