"""--dry-run: what a command line resolves to, as a recipe whose comments say what follows from it."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from smp.config import Config, Layout, to_yaml
from smp.convert.adapters import TENSORS
from smp.layers.head import CHUNK_BYTES
from smp.layers.lora import matching
from smp.models.arithmetic import count_parameters, training_flops_per_token
from smp.models.inventory import inventory
from smp.parallel.context import MESH_DIMS
from smp.pipeline.plan import Plan, describe_plan, plan_pipeline
from smp.pipeline.validate import peak_activations, peak_losses
from smp.training.memory import MemoryEstimate, Tuned, estimate_memory


def describe(config: Config, world_size: int) -> str:
    """Settings, mesh, parameters and memory.

    Text that --config reads back: what is no setting is a comment, and the recipe trains.
    """
    layout = Layout.from_config(config.parallel, world_size)
    vocab, length = config.model.vocab_size, config.data.seq_length
    assert vocab is not None and length is not None
    count = count_parameters(config.model, vocab)
    plan = plan_pipeline(config, layout) if layout.pp > 1 else None
    tuned = _tuned(config, layout)
    memory = _largest(config, layout, plan, tuned)
    tflop = training_flops_per_token(config.model, length, vocab) / 1e12
    recipe = to_yaml(replace(config, training=replace(config.training, dry_run=False)))
    lines = [
        f"mesh: {_mesh(layout)}",
        f"parameters: {count.total:,} (vocabulary and positions {count.embedding:,}, "
        f"{config.model.num_layers} blocks of {count.per_layer:,})",
        *([] if plan is None else describe_plan(plan, config)),
        *([] if config.objective is not None else [f"parameters per rank: {memory.parameters // 4:,}"]),
        f"training: {tflop:.6f} TFLOP per token, {(config.data.global_batch_size or 0) * length:,} tokens per step",
        "memory per rank, estimated:" if plan is None else "memory of the rank that needs most, estimated:",
        *(f"  {f.name.replace('_', ' '):18s}{getattr(memory, f.name) / 2**30:10.3f} GiB" for f in fields(memory)),
        f"  {'total':18s}{memory.total / 2**30:10.3f} GiB",
    ]
    return "\n".join([recipe, *(f"# {line}" for line in lines)])


def _mesh(layout: Layout) -> str:
    """The dimensions that there are; neighbours in the last one have neighbouring ranks."""
    sizes = [f"{name} {size}" for name in MESH_DIMS if (size := getattr(layout, name)) > 1]
    order = f", {sizes[-1].split()[0]} fastest" if len(sizes) > 1 else ""
    return f"{' x '.join(sizes)} = {layout.world_size} processes{order}" if sizes else "1 process"


def _largest(config: Config, layout: Layout, plan: Plan | None, tuned: Tuned) -> MemoryEstimate:
    """Of the pipeline rank that needs most memory."""
    if plan is None:
        return estimate_memory(config, layout, CHUNK_BYTES["cuda"], tuned=tuned)
    held, losses = peak_activations(plan.training), peak_losses(plan.training)
    ranks = (
        estimate_memory(
            config, layout, CHUNK_BYTES["cuda"], list(plan.stages_of(rank).values()), held[rank], losses, tuned
        )
        for rank in range(layout.pp)
    )
    return max(ranks, key=lambda estimate: estimate.total)


def _tuned(config: Config, layout: Layout) -> Tuned:
    copies = config.objective is not None and config.objective.dpo_reference == "copy"
    return Tuned(adapter_elements(config, layout), rows=1 + config.has_pairs, copies=int(copies))


def adapter_elements(config: Config, layout: Layout) -> int:
    """Elements of all adapters on one process. Those of a file are taken to be fp32, and not shared."""
    lora = config.lora
    if lora is None:
        return 0
    if lora.load_adapter is not None:
        path = Path(lora.load_adapter) / TENSORS
        return path.stat().st_size // 4 if path.is_file() else 0
    if lora.lora_rank is None:
        return 0
    assert lora.lora_target_modules is not None, "filled in before"
    weights = {p.module: p for p in inventory(config.model) if p.linear}
    targets = [target.strip() for target in lora.lora_target_modules.split(",")]
    chosen = {name for target in targets for name in matching(list(weights), target)}
    # A (rank, in) and B (out, rank) are cut as the weight (out, in) is
    return lora.lora_rank * sum(sum(weights[name].local_shape(layout)) for name in chosen)
