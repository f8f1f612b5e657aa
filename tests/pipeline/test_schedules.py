import importlib
import pickle
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.config import ConfigError
from smp.pipeline.actions import COMPUTE, Op, Schedule
from smp.pipeline.schedules import SCHEDULES, build_schedule
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.timeline import Timeline
from smp.pipeline.validate_schedule import peak_activations, validate
from tests.pipeline import formulas
from tests.pipeline.strategies import Sizes, sizes, times
from tools.plot_pipeline import to_text


def test_the_hash_stays_in_its_process() -> None:
    """Those of strings differ between processes, so a sent schedule would not be found among equal ones."""
    schedule = build_schedule("1f1b", 2, 4)
    hash(schedule)
    sent = pickle.loads(pickle.dumps(schedule))
    assert sent == schedule and hash(sent) == hash(schedule)
    assert "_hash" in vars(schedule) and "_hash" not in vars(pickle.loads(pickle.dumps(schedule)))


def equal(schedule: Schedule, forward: float = 1, backward_input: float = 1, backward_weight: float = 1) -> Timeline:
    """The timeline with equal stages and free messages, of times of all a rank's layers."""
    costs = StageCosts(*(Fraction(time, schedule.chunks) for time in (forward, backward_input, backward_weight)))
    return simulate(schedule, [costs] * schedule.stages)


@settings(max_examples=100, deadline=None)
@given(sizes(), st.integers(0, 3), st.booleans())
def test_every_schedule_is_valid(size: Sizes, prefetch: int, reshard_after_use: bool) -> None:
    schedule = build_schedule(*size, prefetch=prefetch, reshard_after_use=reshard_after_use)
    validate(schedule)
    reductions = [action for actions in schedule.actions for action in actions if action.op is Op.REDUCE]
    assert len(reductions) == schedule.stages


@settings(max_examples=50, deadline=None)
@given(sizes(), st.integers(0, 3), st.booleans())
def test_every_evaluation_is_valid_and_places_stages_as_training_does(
    size: Sizes, prefetch: int, reshard_after_use: bool
) -> None:
    schedule = build_schedule(*size, prefetch=prefetch, reshard_after_use=reshard_after_use, evaluation=True)
    validate(schedule)
    training = build_schedule(*size)
    stages = range(schedule.stages)
    assert [schedule.rank_of(stage) for stage in stages] == [training.rank_of(stage) for stage in stages]


@pytest.mark.parametrize(
    ("name", "numbers", "step_time"),
    [("1f1b", (4, 7, 1), 7 + 3), ("interleaved", (4, 11, 3), 3 * 11 + 3), ("zb-v", (4, 7, 2), 2 * 7 + 6)],
)
def test_evaluation_only_waits_for_the_way_through_the_ranks(
    name: str, numbers: tuple[int, int, int], step_time: int
) -> None:
    schedule = build_schedule(name, *numbers, evaluation=True)
    assert simulate(schedule, [StageCosts()] * schedule.stages).step_time == step_time


def test_evaluation_of_several_chunks_goes_by_groups() -> None:
    """As few results as possible wait for the next chunk."""
    forward = build_schedule("interleaved", 2, 4, evaluation=True).actions[0]
    order = [(action.stage, action.micro_batch) for action in forward if action.op is Op.FORWARD]
    assert order == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]


@settings(max_examples=100, deadline=None)
@given(sizes(), times, times, times)
def test_step_time_is_the_formula(size: Sizes, forward: int, backward_input: int, backward_weight: int) -> None:
    schedule = build_schedule(*size)
    costs = StageCosts(forward, backward_input, backward_weight)
    expected = formulas.step_time(*size, forward, backward_input, backward_weight)
    if expected is not None:
        assert simulate(schedule, [costs] * schedule.stages).step_time == expected


@settings(max_examples=100, deadline=None)
@given(sizes())
def test_peak_activations_are_the_formula(size: Sizes) -> None:
    expected = formulas.peak_activations(*size)
    if expected is not None:
        assert peak_activations(build_schedule(*size)) == expected


@pytest.mark.parametrize(
    ("name", "step_time", "peak"),
    [
        ("gpipe", 33, (8, 8, 8, 8)),
        ("1f1b", 33, (4, 3, 2, 1)),
        ("interleaved", Fraction(57, 2), (11, 9, 7, 5)),
        ("zb-h1", 27, (4, 4, 4, 4)),
        ("zb-v", Fraction(51, 2), (8, 8, 8, 8)),
    ],
)
def test_four_ranks_eight_micro_batches(name: str, step_time: float, peak: tuple[int, ...]) -> None:
    """Worked out by hand from the papers: 24 of work, bubbles of 9, 9, 9/2, 3 and 3/2."""
    schedule = build_schedule(name, 4, 8)
    assert equal(schedule).step_time == step_time
    assert set(equal(schedule).work) == {24}
    assert peak_activations(schedule) == peak


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 8), st.integers(0, 20))
def test_bubbles_are_ordered(ranks: int, more: int) -> None:
    """With F = I = W and a full pipeline ZB-H1 has a third and ZB-V a sixth of 1F1B's bubble, in 1F1B's memory."""
    micro_batches = 2 * ranks - 1 + more
    bubble, peak = {}, {}
    for name in SCHEDULES:
        schedule = build_schedule(name, ranks, micro_batches)
        bubble[name] = equal(schedule).bubble[0]
        peak[name] = Fraction(max(peak_activations(schedule)), schedule.chunks)
    assert bubble["gpipe"] == bubble["1f1b"] == 2 * bubble["interleaved"] == 3 * bubble["zb-h1"] == 6 * bubble["zb-v"]
    assert peak["1f1b"] == peak["zb-h1"] == peak["zb-v"] == ranks


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 10), st.integers(1, 30), times, times, times)
def test_zero_bubble_is_never_behind_1f1b(
    ranks: int, micro_batches: int, forward: int, backward_input: int, backward_weight: int
) -> None:
    def step_time(name: str) -> float:
        schedule = build_schedule(name, ranks, micro_batches)
        return equal(schedule, forward, backward_input, backward_weight).step_time

    assert step_time("zb-h1") < step_time("1f1b")
    if max(forward, backward_weight) <= backward_input:
        assert step_time("zb-v") < step_time("1f1b")


@settings(max_examples=60, deadline=None)
@given(sizes(most_ranks=8, most_micro_batches=24))
def test_gradients_are_reduced_as_early_as_possible(size: Sizes) -> None:
    for actions in build_schedule(*size).actions:
        for index, action in enumerate(actions):
            if action.op is Op.REDUCE:
                last = next(before for before in reversed(actions[:index]) if before.op in COMPUTE)
                assert last.stage == action.stage and last.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)


def test_parameters_stay_unsharded_or_not() -> None:
    def unshards(reshard_after_use: bool) -> int:
        actions = build_schedule("1f1b", 4, 8, reshard_after_use=reshard_after_use).actions[0]
        return sum(action.op is Op.UNSHARD for action in actions)

    assert unshards(False) == 1
    assert unshards(True) == 16  # 8 forwards and 8 backwards


def test_prefetch_hides_messages() -> None:
    def step_time(prefetch: int) -> float:
        schedule = build_schedule("gpipe", 4, 8, prefetch=prefetch)
        return simulate(schedule, [StageCosts()] * 4, link=1).step_time

    assert step_time(1) == 33 + 3 + 3  # only the way in and the way out
    assert step_time(0) > step_time(1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("1f1b", 0, 8, 1), "--pipeline-model-parallel-size"),
        (("1f1b", 4, 0, 1), "--global-batch-size"),
        (("gpipe", 4, 8, 2), "--num-virtual-stages-per-pipeline-rank 1, not 2"),
        (("1f1b", 4, 8, 2), "--num-virtual-stages-per-pipeline-rank 1, not 2"),
        (("zb-h1", 4, 8, 3), "--num-virtual-stages-per-pipeline-rank 1, not 3"),
        (("interleaved", 4, 8, 1), "--num-virtual-stages-per-pipeline-rank at least 2, not 1"),
        (("zb-v", 4, 8, 1), "--num-virtual-stages-per-pipeline-rank 2, not 1"),
        (("zb-v", 4, 8, 4), "--num-virtual-stages-per-pipeline-rank 2, not 4"),
        (("dualpipe", 4, 8, 2), "gpipe, 1f1b, interleaved, zb-h1, zb-v"),
    ],
)
def test_impossible_sizes_are_one_line(sizes: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_schedule(*sizes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_negative_prefetch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, not -1"):
        build_schedule("1f1b", 2, 4, prefetch=-1)


@pytest.mark.parametrize(
    ("module", "name", "numbers"),
    [
        ("gpipe", "gpipe", (3, 4, 1)),
        ("one_f_one_b", "1f1b", (3, 4, 1)),
        ("interleaved", "interleaved", (2, 4, 2)),
        ("zb_h1", "zb-h1", (3, 4, 1)),
        ("zb_v", "zb-v", (3, 5, 2)),
        ("evaluation", "1f1b", (3, 4, 1)),
    ],
)
def test_the_picture_in_each_file_is_the_simulated_one(module: str, name: str, numbers: tuple[int, int, int]) -> None:
    schedule = build_schedule(name, *numbers, evaluation=module == "evaluation")
    picture = to_text(simulate(schedule, [StageCosts()] * schedule.stages))
    header = importlib.import_module(f"smp.pipeline.schedules.{module}").__doc__ or ""
    assert picture in "\n".join(line.strip() for line in header.splitlines())
