"""Layouts in which a model can be trained on some devices, with their memory and step time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from smp.config import Config, ConfigError, Layout, ParallelConfig, resolve
from smp.config.command_line.fields import flag_of
from smp.layers.heads.head import CHUNK_BYTES
from smp.pipeline.stage_plan import Plan, plan_pipeline
from smp.planner.devices import Device
from smp.planner.seconds import StepTime
from smp.planner.step_time import StepModel
from smp.training.cost.memory import MemoryEstimate, largest_memory

FREE = 0.08
"""Share of a device's memory that stays free: the CUDA context, NCCL's buffers, fragments."""
FREE_IN_PIPELINE = 0.12
"""Share that stays free with a pipeline, for which the memory formula is less exact: of 22 random layouts two needed
more than 8 % above it, both with a pipeline and a vocabulary of 256,000 (tests/planner/formula_sample.py)."""
RECOMPUTE = ("none", "selective", "full")
SCHEDULES: tuple[tuple[Any, int | None], ...] = (("1f1b", None), ("interleaved", 2), ("zb-h1", None), ("zb-v", None))
LONG_SEQUENCE = 32768
"""Sequence length from which context parallelism is tried by itself."""
LONGEST_PIPELINE = 16
"""Largest number of pipeline ranks tried by itself."""


@dataclass(frozen=True)
class Candidate:
    """A layout that can be started.

    Attributes:
        config: resolved.
        layout: degrees of the mesh.
        flags: what says it on a command line, besides what was asked for.
        memory: bytes on the process that needs most.
        time: of a step; None where memory does not suffice.
    """

    config: Config
    layout: Layout
    flags: str
    memory: MemoryEstimate
    time: StepTime | None

    def tokens_per_second(self) -> float:
        """Tokens per second of one device."""
        data = self.config.data
        assert self.time is not None and data.global_batch_size is not None and data.seq_length is not None
        return data.global_batch_size * data.seq_length / self.time.total / self.layout.world_size


def candidates(
    asked: Config, world_size: int, device: Device, decided: Collection[str] = (), why: list[ConfigError] | None = None
) -> Iterator[Candidate]:
    """All layouts that work with ``asked``; those that do not fit into memory have no time.

    Args:
        asked: unresolved.
        world_size: number of devices.
        device: what they are.
        decided: names of settings that stay as they are.
        why: gets the reason why a combination does not work, of each that does not.
    """
    for config in _configs(asked, world_size, device, decided):
        try:
            # resolve() checks everything that a run would: what is listed can be started.
            resolved = resolve(config, world_size)
            layout = Layout.from_config(resolved.parallel, world_size)
            # A schedule of hundreds of micro-batches takes long to simulate, and says the same.
            plan = plan_pipeline(shortened(resolved, layout), layout) if layout.pp > 1 else None
        except ConfigError as error:
            if why is not None:
                why.append(error)
            continue
        memory = largest_memory(resolved, layout, CHUNK_BYTES["cuda"], _whole(plan, resolved, layout))
        # A layout that does not fit is listed all the same, so that the table shows what it would need.
        fits = memory.total <= device.memory * (1 - (FREE_IN_PIPELINE if layout.pp > 1 else FREE))
        time = StepModel(resolved, layout, device, plan).predict() if fits else None
        yield Candidate(resolved, layout, _flags(resolved, asked), memory, time)


def ranked(found: list[Candidate]) -> list[Candidate]:
    """Candidates that fit, fastest first; of equally fast ones the one with less memory first."""
    # i breaks ties: candidates do not compare.
    fitting = [(c.time.total, c.memory.total, i) for i, c in enumerate(found) if c.time is not None]
    return [found[i] for _, _, i in sorted(fitting)]


def shortened(config: Config, layout: Layout) -> Config:
    """The config with only as many micro-batches as the pipeline needs to become steady: more are slow to simulate and
    cost the same each."""
    each, data = config.data.micro_batch_size * layout.data_parallel, config.data
    assert data.global_batch_size is not None, "resolved before"
    # 3 x pp micro-batches: fill, steady part and drain.
    return replace(config, data=replace(data, global_batch_size=min(data.global_batch_size, 3 * layout.pp * each)))


def _whole(plan: Plan | None, config: Config, layout: Layout) -> Plan | None:
    """The plan that gives the step's memory: GPipe holds all micro-batches, so there the short plan is not enough."""
    return plan_pipeline(config, layout) if config.parallel.pipeline_schedule == "gpipe" and layout.pp > 1 else plan


class _Given:
    """The decided value of a setting, or all options where nothing was decided."""

    def __init__(self, decided: Collection[str]) -> None:
        self._decided = decided

    def __call__(self, name: str, value: Any, options: Sequence[Any]) -> Sequence[Any]:
        return [value] if name in self._decided else options


def _configs(asked: Config, world_size: int, device: Device, decided: Collection[str]) -> Iterator[Config]:
    """Combinations to try, unresolved; resolve() sorts out those that cannot work."""
    parallel, given = asked.parallel, _Given(decided)
    # Tensor parallelism stays within a node: every collective of it is waited for.
    within_node = [n for n in _divisors(world_size) if device.connected % n == 0]
    tensor = given("tensor_model_parallel_size", parallel.tensor_model_parallel_size, within_node)
    # No stage is empty, and a pipeline has an upper limit.
    stages = [n for n in _divisors(world_size) if n <= min(asked.model.num_layers, LONGEST_PIPELINE)]
    pipeline = given("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, stages)
    is_long = (asked.data.seq_length or 0) >= LONG_SEQUENCE
    context = given("context_parallel_size", parallel.context_parallel_size, [1, 2, 4, 8] if is_long else [1])
    recompute = given("recompute_granularity", parallel.recompute_granularity, RECOMPUTE)
    rows = given("micro_batch_size", asked.data.micro_batch_size, [1, 2, 4, 8])
    spread = [n for n in _divisors(asked.model.num_experts or 1) if n <= world_size]
    experts = given("expert_model_parallel_size", parallel.expert_model_parallel_size, spread)
    for tp, pp, cp, ep, again, row in product(tensor, pipeline, context, experts, recompute, rows):
        degrees = replace(
            parallel,
            tensor_model_parallel_size=tp,
            # Always with TP: less memory for the same traffic.
            sequence_parallel=parallel.sequence_parallel if "sequence_parallel" in decided else tp > 1,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            recompute_granularity=again,
        )
        data = replace(asked.data, micro_batch_size=row)
        batch, each = data.global_batch_size, row * (world_size // (tp * pp * cp) or 1)
        if row > 1 and batch is not None and batch % each and "micro_batch_size" not in decided:
            continue  # it would be padded with rows of weight 0
        # Under a pipeline weights are gathered as the schedule says; without one the strategy decides.
        options = (
            _schedules(degrees, given)
            if pp > 1
            else _sharding(degrees, world_size // (tp * cp), device, tp * cp, given)
        )
        for option in options:
            yield replace(asked, parallel=option, data=data)


def _schedules(parallel: ParallelConfig, given: _Given) -> Iterator[ParallelConfig]:
    for name, chunks in given("pipeline_schedule", (parallel.pipeline_schedule, None), SCHEDULES):
        stages = parallel.num_virtual_stages_per_pipeline_rank or chunks
        yield replace(parallel, pipeline_schedule=name, num_virtual_stages_per_pipeline_rank=stages)


def _sharding(
    parallel: ParallelConfig, data_ranks: int, device: Device, stride: int, given: _Given
) -> Iterator[ParallelConfig]:
    """Shards over all data-parallel ranks or those of an NVLink domain; gathered per micro-batch or once per step."""
    # As many ranks of an NVLink domain, besides those that tensor and context parallelism take, as make whole groups:
    # of a rack of 72 GPUs 64, where a job has 128.
    inside = max((n for n in _divisors(data_ranks) if n * stride <= device.connected), default=1)
    # 0: all data-parallel ranks.
    degrees = [0, *([inside] if 1 < inside < data_ranks else [])]
    for degree in given("hybrid_shard_degree", parallel.hybrid_shard_degree, degrees):
        strategies = ["optim_grads_params", *(["optim_grads", "optim"] if data_ranks > 1 else [])]
        for strategy in given("data_parallel_sharding_strategy", parallel.data_parallel_sharding_strategy, strategies):
            yield replace(parallel, hybrid_shard_degree=degree, data_parallel_sharding_strategy=strategy)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _flags(config: Config, asked: Config) -> str:
    """Flags of what differs from ``asked``."""
    words = []
    # Only flags that the search varies.
    for group, names in (("parallel", _PARALLEL), ("data", ("micro_batch_size",))):
        for name in names:
            value = getattr(getattr(config, group), name)
            if value != getattr(getattr(asked, group), name):
                words.append(
                    flag_of(name) if value is True else f"{flag_of(name)} {value}"
                )  # a switch that differs is on
    return " ".join(words)


_PARALLEL = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size",
    "expert_model_parallel_size",
    "hybrid_shard_degree",
    "data_parallel_sharding_strategy",
    "recompute_granularity",
)
