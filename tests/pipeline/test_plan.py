"""From settings to a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smp.config import Config, ConfigError, DataConfig, Layout, ModelConfig, ParallelConfig, TrainingConfig, resolve
from smp.pipeline.plan import describe_plan, plan_pipeline
from smp.pipeline.validate import validate

CONFIG = Config(
    model=ModelConfig(num_layers=9, vocab_size=1000),
    parallel=ParallelConfig(pipeline_model_parallel_size=2),
    data=DataConfig(seq_length=64, global_batch_size=8, micro_batch_size=1),
    training=TrainingConfig(dry_run=True),
)


def resolved(**parallel: object) -> Config:
    return resolve(replace(CONFIG, parallel=replace(CONFIG.parallel, **parallel)), world_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("reshard", [False, True])
def test_every_plan_is_valid_and_places_every_layer_once(schedule: str, reshard: bool) -> None:
    config = resolved(pipeline_schedule=schedule, pipeline_reshard=reshard)
    plan = plan_pipeline(config, Layout(pp=2, dp_shard=2))
    validate(plan.training)
    validate(plan.evaluation)
    assert plan.training.micro_batches == 4  # 8 samples over two data-parallel ranks
    assert [i for part in plan.parts for i in part.layers] == list(range(9))
    assert plan.split_backward == schedule.startswith("zb")
    owned = [part for rank in range(2) for part in plan.stages_of(rank).values()]
    assert sorted(map(str, owned)) == sorted(map(str, plan.parts))


def test_defaults_follow_from_the_number_of_stages() -> None:
    assert resolved().parallel.pipeline_schedule == "1f1b"
    parallel = resolved(num_virtual_stages_per_pipeline_rank=3).parallel
    assert (parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank) == ("interleaved", 3)
    assert resolved(pipeline_schedule="zb-v").parallel.num_virtual_stages_per_pipeline_rank == 2


def test_the_head_counts_when_layers_are_balanced() -> None:
    """A head of 50,000 ids costs about as much as 16 of these layers: all of the layers fit into the first stage."""
    large = replace(CONFIG, model=replace(CONFIG.model, vocab_size=50_000))
    plan = plan_pipeline(resolve(large, 4), Layout(pp=2, dp_shard=2))
    assert [part.count for part in plan.parts] == [9, 0]
    assert plan.costs[1] > plan.costs[0] > 0


def test_the_description_has_a_line_per_stage() -> None:
    config = resolved(pipeline_schedule="zb-v")
    plan = plan_pipeline(config, Layout(pp=2, dp_shard=2))
    lines = describe_plan(plan, config)
    assert lines[0].startswith("pipeline: zb-v, 2 ranks x 2 stages, 4 micro-batches; predicted bubble ")
    assert [line.split()[:4] for line in lines[1:]] == [["stage", str(s), "rank", r] for s, r in enumerate("0110")]
    assert lines[1].endswith("embedding, layers 0-1")


def test_a_layout_of_another_model_is_refused() -> None:
    config = resolved(pipeline_model_parallel_layout="Et*4|t*4L")
    with pytest.raises(ConfigError, match="names 8 layers of 9"):
        plan_pipeline(config, Layout(pp=2, dp_shard=2))
