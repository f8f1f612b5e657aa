"""--dry-run: print the resolved settings as a recipe, with comments on mesh, parameters and memory."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

from smp.config import Config, Layout, ModelConfig, to_yaml
from smp.config.batch import BatchSizes, uneven_in_words
from smp.config.layer_pattern import with_experts
from smp.config.layers import hides_tokens, in_runs, layer_specs, scores_flag
from smp.config.rules.checks import notes_on_effects
from smp.config.schema import TrainingConfig
from smp.layers.context_parallel.cost import bytes_sent
from smp.layers.heads.head import CHUNK_BYTES
from smp.models.arithmetic import count_parameters, training_flops_per_token
from smp.models.description import describe_model
from smp.parallel.context import MESH_DIMS
from smp.parallel.network.topology import read_topology
from smp.pipeline.stage_plan import Plan, describe_plan, plan_pipeline
from smp.training.cost.memory import MemoryEstimate, largest_memory
from smp.training.cost.model_share import Tuned
from smp.training.cost.offload import describe_savings, micro_batches_under_way, trained_parameters
from smp.training.cost.predict import predicted_memory, tried_memory, tried_steps, tuned_parts
from smp.training.cost.suggest import describe_suggestions
from smp.training.eight_bit import describe_fp8
from smp.training.exchange import exchange_of, exchanged
from smp.training.faults.members import describe_layouts

if TYPE_CHECKING:
    from smp.training.cost.fake_step import StepMeasures


def describe(config: Config, world_size: int) -> str:
    """The resolved settings, and the mesh, parameters and memory of a run, as text.

    Text that --config reads back: what is no setting is a comment, and the recipe trains.
    """
    layout = Layout.from_config(config.parallel, world_size)
    if config.parallel.network_topology is not None:
        read_topology(config.parallel.network_topology, world_size)  # or it would fail on the cluster
    vocab, length = config.model.vocab_size, config.data.seq_length
    assert vocab is not None and length is not None
    count = count_parameters(config.model, vocab)
    plan = plan_pipeline(config, layout) if layout.pp > 1 else None
    tuned = tuned_parts(config, layout)
    memory, steps = largest_memory(config, layout, CHUNK_BYTES["cuda"], plan, tuned), tried_steps(config, layout, plan)
    tflop = training_flops_per_token(config.model, length, vocab) / 1e12
    # The recipe is to train when --config reads it back: without the flags that only ask.
    # Of two settings of which one follows from the other, the one that was typed is kept: both
    # would be refused.
    training = replace(config.training, dry_run=False, suggest=None)
    if training.train_samples is not None:  # from which the iterations follow
        training = replace(training, train_iters=None)
    if training.train_epochs is not None:
        training = replace(training, train_iters=None, train_samples=None)
    if training.eval_epochs is not None:
        training = replace(training, eval_interval=None)
    if training.full_validation:
        training = replace(training, eval_iters=TrainingConfig.eval_iters)
    checkpoint = config.checkpoint
    if checkpoint.save_epochs is not None:
        checkpoint = replace(checkpoint, save_interval=None)
    recipe = to_yaml(replace(config, training=training, checkpoint=checkpoint))
    lines = [
        describe_model(config.model),
        f"mesh: {_mesh(layout)}",
        f"parameters: {count.total:,} (vocabulary and positions {count.embedding:,}, "
        f"{config.model.num_layers} blocks of {count.per_layer:,})",
        *([] if config.model.is_foreign else in_runs(layer_specs(config.model)[: config.model.num_layers])),
        *_experts(config, layout, count.active),
        *([] if plan is None else describe_plan(plan, config)),
        *_exchanges(config, layout),
        *describe_fp8(config),
        *notes_on_effects(config, layout),
        *describe_layouts(config, world_size),
        *([] if config.objective is not None else [f"parameters per rank: {memory.parameters // 4:,}"]),
        f"model FLOPs (for MFU, without recompute): {tflop:.6f} TFLOP per token",
        f"tokens per step: {(config.data.global_batch_size or 0) * length:,}",
        *(sizes := BatchSizes.of(config.data)).describe(),
        *uneven_in_words(config.data, layout.data_parallel, sizes.ahead()),
        *(_estimated(memory, plan, config.model) if steps is None else [*_measured(steps), *_left_out(config)]),
        *_offload(config, layout, plan, tuned, memory),
    ]
    if config.training.suggest is not None:
        lines += describe_suggestions(
            config,
            world_size,
            tuned,
            estimate=partial(predicted_memory, world_size=world_size),
            # The run's own step has been tried already.
            measure=lambda tried: (
                max(step.peak for step in steps) if steps and tried == config else tried_memory(tried, world_size)
            ),
        )
    return "\n".join([recipe, *(f"# {line}" for line in lines)])


def _experts(config: Config, layout: Layout, active: int) -> list[str]:
    """Lines on the active parameters of a token and on a process's share of the experts; none without experts."""
    model = config.model
    if model.num_experts is None:
        return []
    layers = [i for i, experts in enumerate(with_experts(model)) if experts]
    some = "" if len(layers) == model.num_layers else f" in {len(layers)} of {model.num_layers} blocks"
    return [
        f"active parameters: {active:,} of a token, which gets {model.moe_router_topk} of {model.num_experts} experts"
        f"{some}",
        f"experts: {model.num_experts // layout.ep} of each layer on a process, shared by "
        f"{layout.expert_shard} x tensor-parallel {layout.expert_tp}",
    ]


def _measured(steps: list[StepMeasures]) -> list[str]:
    """The step of the rank that needs most memory as lines."""
    step = max(steps, key=lambda step: step.peak)
    rank = f"pipeline rank {steps.index(step)}, which needs most" if len(steps) > 1 else "each rank"
    held = {"parameters": step.parameters, "optimizer": step.optimizer, "gradients": step.gradients}
    peaks = {f"peak in {phase}": peak for phase, peak in step.peaks.items()}
    if step.secondary:
        held["secondary shards"] = step.secondary
    rows = {**held, **peaks, "total": step.peak}
    if step.host:
        rows["on the host"] = step.host
    traffic = [(key, entry) for key, entry in sorted(step.counts.traffic.items()) if entry.calls]
    # FLOPs count recomputation, and causal attention in full: they are not those that MFU divides
    # by.
    return [
        f"memory of {rank}, in a step of a GPU that was run on tensors without data:",
        *(f"  {name:18s}{size / 2**30:10.3f} GiB" for name, size in rows.items()),
        f"work of it, with recompute and without skipping masked attention: {step.counts.flops / 1e12:.3f} TFLOP in "
        f"{step.counts.kernels:,} operations; it sends{'' if traffic else ' nothing'}",
        *(
            f"  {group:13s}{kind:15s}{entry.sent / 1e9:10.3f} GB in {entry.calls:,} calls"
            for (group, kind), entry in traffic
        ),
    ]


def _left_out(config: Config) -> list[str]:
    """What the step on tensors without data leaves out, as lines."""
    documents = config.data.reset_attention_mask or config.data.packing == "best-fit"
    whole = config.parallel.attention_backend == "math" or bool(scores_flag(config.model))
    hidden = "window is" if config.model.window_size is not None else "chunks are"
    cut = config.model.attention_chunk_size is not None and config.parallel.context_parallel_size > 1
    masked = hides_tokens(config.model) and (cut or not whole)
    if config.model.reads_apart:
        return ["half of a row's tokens are its prompt's in it, the other half its answer's"]
    lines = ["documents are left out of it: its attention is over whole sequences"] if documents else []
    return lines + ([f"the {hidden} left out of it: its attention is over all tokens before"] if masked else [])


def _estimated(memory: MemoryEstimate, plan: Plan | None, model: ModelConfig) -> list[str]:
    """The formula's terms as lines."""
    of = " as if its layers were plain ones, and whole on each process," if model.is_foreign else ""
    sizes = {f.name: getattr(memory, f.name) for f in fields(memory) if f.name != "most"}
    if not memory.secondary:
        del sizes["secondary"]
    sizes["total"] = memory.total  # less than the sum: not all terms peak at once
    return [
        f"memory per rank,{of} estimated:" if plan is None else "memory of the rank that needs most, estimated:",
        *(f"  {name:18s}{size / 2**30:10.3f} GiB" for name, size in sizes.items()),
    ]


def _exchanges(config: Config, layout: Layout) -> list[str]:
    """What attention would send with each exchange that this model can use; the line of the chosen one, on a GPU, is
    marked."""
    if layout.cp == 1:
        return []
    parallel, exchange = config.parallel, exchange_of(config, "cuda")
    of = replace(exchanged(config), heads_group=exchange.heads_group)
    both = ["a2a+p2p"] if exchange.kind == "a2a+p2p" else []
    # Ulysses: each rank needs whole heads.
    heads = ["a2a"] if of.heads % of.cp == 0 else []
    lines = [f"context parallelism: {of.tokens:,} tokens of a micro-batch on each process; a layer's attention sends"]
    for kind in ["p2p", "all_gather", *heads, *both]:
        forward, backward = (n / 2**20 for n in bytes_sent(kind, of))
        chosen = f"  <- --cp-comm-type {parallel.cp_comm_type}" if kind == exchange.kind else ""
        lines.append(f"  {kind:18s}{forward:10.1f} MiB forward, {backward:10.1f} MiB backward{chosen}")
    return lines


def _offload(config: Config, layout: Layout, plan: Plan | None, tuned: Tuned, memory: MemoryEstimate) -> list[str]:
    """Lines about offload; in a pipeline, on the rank that holds most micro-batches."""
    trained = trained_parameters(config, layout, tuned, memory)
    return describe_savings(config, layout, tuned, trained, micro_batches_under_way(plan))


def _mesh(layout: Layout) -> str:
    """The mesh dimensions larger than 1; ranks that are neighbours in the last one have consecutive numbers."""
    sizes = [f"{name} {size}" for name in MESH_DIMS if (size := getattr(layout, name)) > 1]
    order = f", {sizes[-1].split()[0]} fastest" if len(sizes) > 1 else ""
    return f"{' x '.join(sizes)} = {layout.world_size} processes{order}" if sizes else "1 process"
