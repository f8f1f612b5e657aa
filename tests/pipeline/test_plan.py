"""From settings to a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smp.config import Config, ConfigError, DataConfig, Layout, ModelConfig, ParallelConfig, TrainingConfig, resolve
from smp.models.arithmetic import forward_flops
from smp.pipeline import stage_plan as planning
from smp.pipeline.actions import Schedule
from smp.pipeline.schedules import build_schedule
from smp.pipeline.simulate_schedule import StageCosts
from smp.pipeline.stage_plan import describe_plan, plan_pipeline
from smp.pipeline.validate_schedule import ScheduleError, validate

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
    assert plan.costs[1].total > plan.costs[0].total > 0


def test_the_head_does_all_of_its_work_in_its_forward_pass_and_layers_are_replayed_under_full_recompute() -> None:
    one = replace(CONFIG, model=replace(CONFIG.model, num_layers=2))
    plans = {
        recompute: plan_pipeline(
            resolve(replace(one, parallel=replace(one.parallel, recompute_granularity=recompute)), 4),  # type: ignore[arg-type]
            Layout(pp=2, dp_shard=2),
        )
        for recompute in ("none", "full")
    }
    flops = forward_flops(resolve(one, 4).model, 64)
    layer, embedding, head = (64 * cost for cost in (flops.layer, flops.embedding, flops.head))  # of a micro-batch
    first, last = plans["none"].costs
    assert first == StageCosts(layer + embedding, layer + embedding, layer + embedding)
    assert last == StageCosts(layer + 3 * head, layer, layer)
    assert plans["full"].costs[1] == StageCosts(layer + 3 * head, 2 * layer, layer)
    assert plans["none"].predicted().work == (4 * first.total, 4 * last.total)


def test_balance_counts_what_full_recompute_adds() -> None:
    """A head of 6 layers' FLOPs: it costs 18 forward passes of a layer, and a layer 3, or 4 when it is replayed. Of 12
    layers, 9 of 27 then face 3 and the head of 27; replayed, 8 of 32 face 4 and the head of 34."""
    flops = forward_flops(resolved().model, 64)
    vocab = round(6 * flops.layer / (flops.head / 1000))
    large = replace(CONFIG, model=replace(CONFIG.model, num_layers=12, vocab_size=vocab))
    for recompute, counts in (("none", [9, 3]), ("full", [8, 4])):
        config = replace(large, parallel=replace(large.parallel, recompute_granularity=recompute))  # type: ignore[arg-type]
        plan = plan_pipeline(resolve(config, 4), Layout(pp=2, dp_shard=2))
        assert [part.count for part in plan.parts] == counts, recompute


def test_stages_that_nothing_is_left_for_are_refused_unless_placed_by_hand() -> None:
    sizes = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 6}
    with pytest.raises(ConfigError, match="is 12 stages, more than 9 layers .* embedding and head"):
        plan_pipeline(resolved(**sizes), Layout(pp=2, dp_shard=2))
    by_hand = resolved(**sizes, pipeline_model_parallel_layout="Et*9" + "|" * 11 + "L")
    assert len(plan_pipeline(by_hand, Layout(pp=2, dp_shard=2)).parts) == 12
    sizes["num_virtual_stages_per_pipeline_rank"] = 5
    assert plan_pipeline(resolved(**sizes), Layout(pp=2, dp_shard=2)).parts[-1].count <= 1


def test_a_schedule_that_is_wrong_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_its_last_action(*sizes: object, **options: object) -> Schedule:
        schedule = build_schedule(*sizes, **options)  # type: ignore[arg-type]
        return replace(schedule, actions=(schedule.actions[0][:-1], *schedule.actions[1:]))

    monkeypatch.setattr("smp.pipeline.stage_plan.build_schedule", without_its_last_action)
    monkeypatch.setattr("smp.pipeline.stage_plan._schedule", planning._schedule.__wrapped__)  # no cache
    with pytest.raises(ScheduleError, match="stage 0 is still unsharded"):
        plan_pipeline(resolved(), Layout(pp=2, dp_shard=2))


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
