"""From settings to a pipeline: which layers each stage holds, the schedules to run, and what to expect of them.

No torch: a command line that cannot work is refused before torch is imported, and --dry-run shows the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from smp.config import Config, ConfigError, Layout, ModelConfig, ParallelConfig
from smp.config.batch import BatchSizes, count_micro_batches
from smp.models.arithmetic import ForwardFlops, count_part, forward_flops
from smp.models.part import ModelPart
from smp.pipeline.actions import Op, Schedule
from smp.pipeline.placement import FLAG, balance, parse_layout
from smp.pipeline.schedules import build_schedule
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.timeline import Timeline
from smp.pipeline.validate_schedule import validate


@dataclass(frozen=True)
class Plan:
    """A pipeline for one run.

    Attributes:
        parts: the part of the model that each stage holds.
        training, evaluation: what every rank does in a step, and to evaluate.
        costs: FLOPs of each stage for one micro-batch.
    """

    parts: tuple[ModelPart, ...]
    training: Schedule
    evaluation: Schedule
    costs: tuple[StageCosts, ...]

    @property
    def split_backward(self) -> bool:
        """Whether the schedule splits backward passes into input and weight gradients."""
        return any(action.op is Op.BACKWARD_WEIGHT for rank in self.training.actions for action in rank)

    def stages_of(self, rank: int) -> dict[int, ModelPart]:
        """Stage number -> part, of one pipeline rank."""
        return {stage: self.parts[stage] for stage in self.training.stages_of(rank)}

    def predicted(self) -> Timeline:
        """The step, simulated with messages that take no time; the unit is one FLOP's."""
        return simulate(self.training, self.costs)


def plan_pipeline(config: Config, layout: Layout) -> Plan:
    """The pipeline that ``config`` (resolved) asks for.

    Raises:
        ConfigError: the schedule cannot take these sizes, or the given layout does not fit the model.
    """
    parallel, data, model = config.parallel, config.data, config.model
    name, chunks = parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank
    assert name is not None and chunks is not None and data.global_batch_size is not None, "resolved before"
    micro_batches = count_micro_batches(data, layout.data_parallel)
    sizes = (name, layout.pp, micro_batches, chunks, parallel.pipeline_reshard)
    training, evaluation = _schedule(*sizes, evaluation=False), _schedule(*sizes, evaluation=True)
    flops, replays = forward_flops(model, data.seq_length or 1), _replays(parallel)
    parts = _place(model, parallel, training.stages, flops, replays)
    tokens = data.micro_batch_size * (data.seq_length or 1)
    return Plan(parts, training, evaluation, tuple(_costs(part, flops, replays, tokens) for part in parts))


@lru_cache(maxsize=128)  # a planner asks for the same ones with many models' parts
def _schedule(name: str, ranks: int, micro_batches: int, chunks: int, reshard: bool, *, evaluation: bool) -> Schedule:
    schedule = build_schedule(name, ranks, micro_batches, chunks, reshard_after_use=reshard, evaluation=evaluation)
    validate(schedule)
    return schedule


def _place(
    model: ModelConfig, parallel: ParallelConfig, stages: int, flops: ForwardFlops, replays: int
) -> tuple[ModelPart, ...]:
    """The part of each stage: the layout of the user, or balanced by the FLOPs of a whole step."""
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout, model.num_layers, stages)
    # More stages than layers, embedding and head cannot all have something to compute.
    if stages > model.num_layers + 2:
        raise ConfigError(
            f"--pipeline-model-parallel-size x --num-virtual-stages-per-pipeline-rank is {stages} stages, more than "
            f"{model.num_layers} layers (--num-layers), embedding and head: name the empty ones with {FLAG}, or take "
            "fewer"
        )
    # A backward pass costs two forward passes.
    blocks = 1 + replays / 3  # a step is 3 forward passes long, or 4
    layers = tuple(layer * blocks for layer in flops.layers)
    return _balance(layers, stages, flops.embedding, flops.head + flops.mtp * blocks + flops.around)


_balance = lru_cache(maxsize=128)(balance)  # as above


def _replays(parallel: ParallelConfig) -> int:
    """Number of additional forward passes of a layer: 1 with full recompute, else 0."""
    return 1 if parallel.recompute_granularity == "full" else 0


def _costs(part: ModelPart, flops: ForwardFlops, replays: int, tokens: int) -> StageCosts:
    """A layer's forward pass costs as much as either part of its backward pass; the input part begins with the replay
    of the forward pass, if there is one. The output layer computes its gradients in its forward pass."""
    layers = sum(flops.layers[i] for i in part.layers) * tokens
    # Multi-token predictions are computed by layers of their own, which lie next to the head.
    layers += part.head * flops.mtp * tokens
    both = layers + (part.embedding * flops.embedding + part.head * flops.around) * tokens
    # The fused loss computes the output matrix's product and both its gradients in the forward
    # pass.
    head = part.head * flops.head * tokens
    return StageCosts(both + 3 * head, both + replays * layers, both)


def plans_by_size(config: Config, layout: Layout) -> dict[int, Plan]:
    """The plan for each number of micro-batches that a step of the run has: one, or one for each size of its schedule.

    Raises:
        ConfigError: the schedule cannot take one of these sizes.
    """
    data = config.data
    counts = {count_micro_batches(data, layout.data_parallel, size): size for size in BatchSizes.of(data).ahead()}
    return {
        count: plan_pipeline(replace(config, data=replace(data, global_batch_size=size)), layout)
        for count, size in counts.items()
    }


def describe_plan(plan: Plan, config: Config) -> list[str]:
    """The plan as lines: stage, its rank, layers, parameters and time."""
    schedule, times = plan.training, [cost.total for cost in plan.costs]
    predicted = plan.predicted()
    lines = [
        f"pipeline: {schedule.name}, {schedule.ranks} ranks x {schedule.chunks} stages, {schedule.micro_batches} "
        f"micro-batches; predicted bubble {100 * predicted.bubble_fraction:.1f} % of the step"
    ]
    for stage, (part, time) in enumerate(zip(plan.parts, times, strict=True)):
        parameters = count_part(config.model, part)
        lines.append(
            f"  stage {stage}  rank {schedule.rank_of(stage)}  {parameters:>14,} parameters  "
            # 1.00 is a stage that takes the mean time of all stages: what is above it makes the others wait.
            f"time {time * len(times) / sum(times):5.2f} of the mean  {part}"
        )
    return lines
