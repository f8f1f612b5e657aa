"""Steps of this machine's processor are the sum of what they call; what is called is recorded once, with its shapes."""

from __future__ import annotations

import math
import pickle
import re
import shlex
from pathlib import Path

import pytest
import torch

from smp.config import Layout
from smp.models.presets import PRESETS
from smp.pipeline.actions import COMPUTE, RECEIVE, SEND, Op, Schedule
from smp.planner import machine, operands
from smp.planner.devices import DEVICES
from smp.planner.machine import (
    MachineTimes,
    StepSeconds,
    Timed,
    alike,
    host_time,
    is_free,
    kind_of,
    machine_times,
    time_calls,
    timed_calls,
    wait_time,
)
from smp.planner.measured import ERRORS, Recorded, _part, step_time
from smp.planner.processors import play
from smp.planner.record import Calls, CallSite, Collective, Operator, TensorLike, like
from smp.planner.step_time import StepModel
from smp.planner.uncertainty import SURE
from smp.training.settings import read_settings
from tests.distributed import run_distributed

SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 2 --seq-length 16 --vocab-size 60 "
    "--mock-data --train-iters 1 --global-batch-size 4 "
)
FORWARD, BACKWARD = CallSite("forward"), CallSite("backward")


def recorded(flags: str, world: int) -> Recorded:
    config = read_settings(shlex.split(SMALL + flags), PRESETS, world)
    return Recorded.of(config, Layout.from_config(config.parallel, world))


def plan_of(flags: str, world: int) -> Schedule:
    plan = recorded(flags, world).plan
    assert plan is not None
    return plan.training


def products(calls: Calls, place: CallSite | None = None) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """Calls of aten.mm by the shapes of their operands, without the head's, which have an ``out``."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for (where, call), times in calls.items():
        if isinstance(call, Operator) and call.name == "aten.mm.default" and place in (None, where):
            shapes = call.arguments[0].shape, call.arguments[1].shape
            found[shapes] = found.get(shapes, 0) + times
    return found


def all_one(*steps: Recorded) -> MachineTimes:
    """Every call takes a second, and the host none."""
    calls = dict.fromkeys(timed_calls([rank for one in steps for rank in one.ranks]), 1.0)
    return MachineTimes(calls, dict.fromkeys(("alone", "sharded", "tensor"), 0.0))


def test_calls_are_those_of_every_block_and_micro_batch() -> None:
    """Four micro-batches, of which three are run; two blocks with seven products each."""
    found = products(recorded("", 1).ranks[0], FORWARD)
    assert found[(16, 32), (32, 32)] == 4 * 2 * 4  # query, key, value and output
    assert found[(16, 32), (32, 48)] == 4 * 2 * 2 and found[(16, 48), (48, 32)] == 4 * 2
    wide = products(recorded("--micro-batch-size 4", 1).ranks[0], FORWARD)
    assert wide == {((64, *a[1:]), b): times // 4 for (a, b), times in found.items()}


def test_collectives_are_recorded_with_their_bytes() -> None:
    calls = recorded("--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4", 2).ranks[0]
    found = {(place, call): times for (place, call), times in calls.items() if isinstance(call, Collective)}
    gathers = Collective("tp", "all-gather", 2, 64 * 32 * 4)
    assert found[FORWARD, gathers] == 2 * 2 + 1  # two for each block, and the head's
    assert found[FORWARD, Collective("tp", "reduce-scatter", 2, 64 * 32 * 4)] == 2 * 2 + 1  # and the embedding's
    assert found[BACKWARD, Collective("tp", "all-reduce", 2, 2 * 32 * 4)] == 2  # gradients of a block's norms together
    assert found[BACKWARD, Collective("tp", "all-reduce", 2, 32 * 4)] == 1  # and of the last one


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--hybrid-layer-pattern M*-E --num-layers 4 --num-experts 4 --moe-router-topk 2 --mamba-num-groups 2", 4),
        ("--linear-attention-type mamba2 --linear-attention-parallel --mamba-num-groups 2", 2 * 3),
        ("", 2 * 2),
    ],
)
def test_the_formula_counts_the_collectives_of_a_run(flags: str, parts: int) -> None:
    """Of layers of one part, of two mixers and an MLP, and of one mixer and an MLP."""
    words = f"{SMALL} {flags} --mamba-head-dim 8 --mamba-state-dim 4" if "mamba" in flags else f"{SMALL} {flags}"
    words += " --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4"
    config = read_settings(shlex.split(words), PRESETS, 2)
    layout, whole = Layout.from_config(config.parallel, 2), 64 * 32 * 4
    calls = Recorded.of(config, layout).ranks[0]
    for kind in ("all-gather", "reduce-scatter"):  # and the head's, and the embedding's
        assert calls[FORWARD, Collective("tp", kind, 2, whole)] == parts + 1
    model, device = StepModel(config, layout, DEVICES["h100"]), DEVICES["h100"]
    once = device.fabric.ring(whole, 2, 1)
    assert model.forward.tensor * config.model.num_layers == pytest.approx(2 * parts * once)


def test_a_step_is_the_sum_of_its_calls_and_of_the_host_between_them() -> None:
    one = recorded("", 1)
    free = sum(times for (_, call), times in one.ranks[0].items() if is_free(call))
    count = sum(one.ranks[0].values())
    times = all_one(one)
    step = step_time(one, times)
    assert step.total == pytest.approx(count - free) and step.bubble == step.data == step.tensor == step.host == 0
    assert step.attention == 2 * 4 * 2  # both passes
    late = step_time(one, MachineTimes(times.calls, {"alone": 0.5}))
    assert late.host == pytest.approx(count / 2) and late.total == pytest.approx(step.total + count / 2)


def test_the_host_takes_what_the_calls_do_not() -> None:
    calls: dict[Timed, float] = {Operator("aten.mm.default", (), ()): 2.0}
    step: Calls = {(FORWARD, *calls): 3, (BACKWARD, Operator("aten.view.default", (), ())): 5}  # type: ignore[dict-item]
    assert host_time(step, calls, 10.0) == pytest.approx((10.0 - 3 * 2.0) / 8)
    assert host_time(step, calls, 5.0) == 0.0


def test_a_pipeline_is_simulated_with_the_times_of_its_actions() -> None:
    pipeline = recorded("--pipeline-model-parallel-size 2", 2)
    ops = {place.op for calls in pipeline.ranks for place, _ in calls}
    assert {Op.FORWARD, Op.BACKWARD, None} <= ops
    times = all_one(pipeline)
    step, link = step_time(pipeline, times), 0.0
    free = {call: 0.0 if isinstance(call, Collective) and call.kind == "send" else 1.0 for call in times.calls}
    without = step_time(pipeline, MachineTimes(free, times.host))
    assert step.bubble > without.bubble > link and step.products == without.products
    # the slower rank waits at least for the other's first and last pass
    busy = [sum(n for (p, c), n in calls.items() if p.op in COMPUTE and not is_free(c)) for calls in pipeline.ranks]
    assert without.bubble >= min(busy) / 4


def test_layouts_that_do_more_take_longer() -> None:
    layouts = [recorded(flags, 1) for flags in ("--micro-batch-size 4", "", "--recompute-granularity full")]
    times = all_one(*layouts)
    steps = [step_time(one, times).total for one in layouts]
    assert steps == sorted(steps) and steps[0] < steps[1] < steps[2]


def test_kinds_of_layouts() -> None:
    assert [kind_of(layout) for layout in (Layout(), Layout(tp=2), Layout(dp_shard=2), Layout(pp=2), Layout(cp=2))] == [
        "alone",
        "tensor",
        "sharded",
        "sharded",
        "sharded",
    ]


def test_waits_are_of_collectives_and_the_hosts_time_is_the_processors() -> None:
    """Asleep at a collective is no time between operators: a layout with more collectives waits more."""
    one = recorded("--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4", 2)
    times = all_one(one)
    collectives = sum(n for (_, call), n in one.ranks[0].items() if isinstance(call, Collective))
    assert wait_time(one.ranks[0], collectives * 0.25) == 0.25 and wait_time(one.ranks[0], -1.0) == 0.0
    assert wait_time(recorded("", 1).ranks[0], 1.0) == 0.0
    waiting = MachineTimes(times.calls, times.host, waits={"tensor": 0.25})
    assert step_time(one, waiting).total == pytest.approx(step_time(one, times).total + collectives * 0.25)
    calls, seconds = one.ranks[0], StepSeconds(clock=9.0, processor=5.0)
    known = machine_times(1, 1, dict.fromkeys(times.calls, 0.0), {"tensor": (calls, seconds)})
    assert known.host["tensor"] == pytest.approx(5.0 / sum(calls.values()))
    assert known.waits["tensor"] == pytest.approx(4.0 / collectives)
    many = machine_times(1 << 12, 1, dict.fromkeys(times.calls, 0.0), {"tensor": (calls, seconds)})
    assert many.host == known.host and not many.waits


def _times(rank: int, world: int, wanted: list[Timed]) -> list[float]:
    machine.PATIENCE = 0.0
    return list(time_calls(wanted).values())


def test_every_call_of_a_step_can_be_timed() -> None:
    flags = ["--bf16 --tensor-model-parallel-size 2 --sequence-parallel", "--optimizer sgd --global-batch-size 2"]
    flags += ["--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --micro-batch-size 2"]
    wanted = timed_calls([rank for line in flags for rank in recorded(line, 2).ranks])
    kinds = {call.kind for call in wanted if isinstance(call, Collective)}
    assert {"all-gather", "reduce-scatter", "all-reduce", "send"} <= kinds
    for times in run_distributed(_times, 2, wanted):
        assert len(times) == len(wanted) and min(times) > 0


def test_an_argument_is_made_as_it_was() -> None:
    made = operands._made(TensorLike((3, 4), (1, 3), torch.bfloat16))
    assert made.shape == (3, 4) and made.stride() == (1, 3) and made.dtype is torch.bfloat16 and (made == 1).all()
    spread = operands._made(TensorLike((3, 4), (0, 1), torch.int64))
    assert spread.stride() == (0, 1) and (spread == 0).all()


def test_counts_add_up_to_the_size_that_is_given_with_them() -> None:
    counts = TensorLike((3,), (1,), torch.int64)
    arguments, keywords = operands._inputs(Operator("aten.repeat_interleave.Tensor", (counts,), (("output_size", 8),)))
    assert len(torch.ops.aten.repeat_interleave.Tensor(*arguments, **keywords)) == 8


def test_weights_of_a_large_step_are_far_and_what_was_just_computed_is_near() -> None:
    """Of a step that touches more than caches hold the products read their weights from memory; a small step's stay."""
    flags = "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --seq-length 64 --micro-batch-size 4"
    for words, expected in ((flags, True), ("", False)):
        calls = recorded(words, 1).ranks[0]
        linear = [call for place, call in calls if getattr(call, "name", "") == "aten.mm.default" and place == FORWARD]
        linear += [call for place, call in calls if getattr(call, "name", "") == "smp.linear.default"]
        first, second = linear[1].arguments[:2]  # the second: the first one's input waited for its embedding
        assert (first.far, second.far) == (False, expected), words


def test_far_arguments_come_from_memory_that_was_not_used_before() -> None:
    far = operands.FarMemory()
    value = TensorLike((1024, 1024), (1024, 1), torch.float32, far=True)
    call = Operator("aten.add.Tensor", (value, TensorLike((1024, 1024), (1024, 1), torch.float32)), ())
    made = operands.Operands(call, far)
    places = [made.of(turn % made.turns)[0] for turn in range(6)]
    assert len({one.data_ptr() for one, _ in places}) == 6 and len({one.data_ptr() for _, one in places}) == made.turns
    assert all((one == 1).all() for pair in places for one in pair)


def test_a_step_goes_on_when_its_slowest_rank_has_come() -> None:
    one, two = Operator("aten.mm.default", (), ()), Operator("aten.add.Tensor", (), ())
    assert machine.slowest([{one: 1.0, two: 2.0}, {one: 1.5, two: 0.5}]) == {one: 1.5, two: 2.0}


def test_more_processes_than_processors_take_turns() -> None:
    """Without a pipeline all of them compute; with one the others go on while a rank waits."""
    plain, pipeline = recorded("", 4), recorded("--pipeline-model-parallel-size 2 --micro-batch-size 1", 4)
    times = all_one(plain, pipeline)
    shared = MachineTimes(times.calls, times.host, cores=2)
    assert step_time(plain, shared).total == pytest.approx(2 * step_time(plain, times).total)
    alone, turns = step_time(pipeline, times).total, step_time(pipeline, shared).total
    assert alone < turns < 2 * alone


def test_a_schedule_is_played_with_what_ranks_do_themselves() -> None:
    """Ranks that run alone are twice as fast as two at a time, and copy their messages themselves."""
    schedule = plan_of("--pipeline-model-parallel-size 2 --micro-batch-size 4", 2)
    costs = {(op, stage): 1.0 for op in (Op.FORWARD, Op.BACKWARD) for stage in (0, 1)}
    assert play(schedule, costs, lambda ranks: 1.0) == pytest.approx(4)
    assert play(schedule, costs, lambda ranks: 1 / ranks) == pytest.approx(4)
    messages = {(op, stage): 0.25 for op in SEND | RECEIVE for stage in (0, 1)}
    assert play(schedule, costs | messages, lambda ranks: 1.0) == pytest.approx(4 + 4 * 0.25)
    two = plan_of("--pipeline-model-parallel-size 2 --micro-batch-size 2", 2)
    # Forward passes of rank 0 and rank 1 overlap once, backward passes as well: 1F1B's 2 x (2 + 1) of a unit each.
    assert play(two, costs, lambda ranks: 1.0) == pytest.approx(6)
    assert play(two, costs, lambda ranks: 1 / ranks) == pytest.approx(8)


def test_the_interval_is_that_of_the_published_table() -> None:
    text = (Path(__file__).parents[2] / "benchmarks/results/planner_cpu.txt").read_text(encoding="utf-8")
    rows = [(float(a), float(b)) for a, b in re.findall(r"\| +([\d.]+) \| +([\d.]+) \|", text)]
    logs = [math.log(seconds / predicted) for predicted, seconds in rows]
    assert len(rows) == 24
    assert math.sqrt(sum(x * x for x in logs) / len(logs)) == pytest.approx(ERRORS.formula, abs=0.005)
    inside = sum(abs(b / a - 1) <= SURE * ERRORS.formula for a, b in rows)
    said = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    assert f"{inside} of the 24 are within it" in said


def test_nan_is_found_again_after_it_came_from_another_process() -> None:
    times = {like(float("nan")): 1.0}
    assert times[pickle.loads(pickle.dumps(like(float("nan"))))] == 1.0 and math.isnan(operands._made(like(math.nan)))


def test_groups_are_alike() -> None:
    assert alike(Collective("tp", "send", 2, 8)) == alike(Collective("cp", "send", 2, 8))


def test_results_that_are_kept_go_to_far_memory_and_those_that_replace_others_do_not() -> None:
    """Gate and up stay for the backward pass, in memory of an earlier micro-batch; a small step is in caches."""
    flags = "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --seq-length 64 --micro-batch-size 4"
    for words, expected in ((flags, True), ("", False)):
        calls = recorded(words, 1).ranks[0]
        found = {call.writes_far for _, call in calls if isinstance(call, Operator) and call.name.startswith("smp.lin")}
        found |= {c.writes_far for _, c in calls if isinstance(c, Operator) and c.name == "aten.mm.default"}
        assert (True in found) == expected, words


def test_results_on_far_memory_are_written_where_nothing_was_for_long() -> None:
    value = TensorLike((1024, 1024), (1024, 1), torch.float32)
    run, call = torch.ops.aten.neg.default, Operator("aten.neg.default", (value,), (), writes_far=True)
    arguments = operands.Operands(call, operands.FarMemory())
    for far, number in ((True, operands.FIELD // (4 << 20)), (False, arguments.turns)):
        kept = operands.kept_results(run, arguments, far=far)
        assert len(kept) == number and len({one.data_ptr() for one in kept}) == number


def test_products_of_experts_are_one_call_with_rows_for_each() -> None:
    """A loop over experts, timed as a whole: 32 rows of two choices each, which all four experts get some of."""
    calls = recorded("--num-experts 4 --moe-router-topk 2 --micro-batch-size 2", 1).ranks[0]
    grouped = [call for _, call in calls if getattr(call, "name", "").startswith("smp.grouped_")]
    assert {call.name.split(".")[1] for call in grouped} == {
        "grouped_product",
        "grouped_input_gradient",
        "grouped_weight_gradient",
    }
    for call in grouped:
        arguments, _ = operands._inputs(call)
        assert arguments[2].sum() == 2 * 32 and arguments[2].shape == (4,)


def test_indices_are_not_all_one_row() -> None:
    """Each call is one that runs, and reads or adds to many rows."""
    table, rows = TensorLike((60, 8), (8, 1), torch.float32), TensorLike((64,), (1,), torch.int64)
    grad, bags = TensorLike((64, 8), (8, 1), torch.float32), TensorLike((32,), (1,), torch.int64)
    calls = [
        ("aten.embedding_dense_backward.default", (grad, rows, 60, -1, False), 1),
        ("aten.embedding.default", (table, rows), 1),
        ("aten.index_select.default", (table, 0, rows), 2),
        ("aten.embedding_bag.padding_idx", (table, rows, bags, False, 0, False, None, False, None), 1),
    ]
    for name, arguments, place in calls:
        made, _ = operands._inputs(Operator(name, arguments, ()))
        assert made[place].shape == (64,) and made[place].min() >= 0 and 8 < len(made[place].unique()) <= 60
        namespace, operator, overload = name.split(".")
        getattr(getattr(getattr(torch.ops, namespace), operator), overload)(*made)
    assert made[2].tolist() == list(range(0, 64, 2))


def test_attention_of_either_kernel_is_attention() -> None:
    for name in ("smp.cpp_attention_backward", "aten._scaled_dot_product_flash_attention_for_cpu"):
        assert _part(FORWARD, Operator(f"{name}.default", (), ())) == "attention"
