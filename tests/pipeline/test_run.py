"""The runner with stages of arithmetic: messages reach whom they are for, and a lost rank is named."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from smp.parallel.links import Links, _lane
from smp.pipeline import run as run_module
from smp.pipeline.actions import SEND, Action, Schedule
from smp.pipeline.run import Runner
from smp.pipeline.schedules import SCHEDULES, build_schedule
from tests.distributed import run_distributed

MICRO_BATCHES = 8


class Affine:
    """Stage s turns x into 2 x + s + micro-batch; its gradient is twice what comes in, weight parts are counted."""

    def __init__(self, stages: int) -> None:
        self.stages, self.outputs, self.inputs = stages, dict[int, float](), dict[int, float]()
        self.calls: list[tuple[str, int]] = []

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        hidden = torch.ones(3) if hidden is None else hidden
        output = 2 * hidden + stage + micro_batch
        if stage < self.stages - 1:
            return output
        self.outputs[micro_batch] = output[0].item()
        return None

    def backward_input(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        result = 2 * (torch.full((3,), float(micro_batch)) if gradient is None else gradient)
        if stage > 0:
            return result
        self.inputs[micro_batch] = result[0].item()
        return None

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self.calls.append(("weight", stage))

    def backward(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self.backward_weight(stage, micro_batch)
        return self.backward_input(stage, micro_batch, gradient)

    def unshard(self, stage: int) -> None:
        self.calls.append(("unshard", stage))

    def reshard(self, stage: int) -> None:
        self.calls.append(("reshard", stage))

    def reduce(self, stage: int) -> None:
        self.calls.append(("reduce", stage))


def runner(ranks: int, timeout: float = 60) -> Runner:
    ring = [(rank, (rank + step) % ranks) for rank in range(ranks) for step in (1, -1)]
    links = Links(init_device_mesh("cpu", (ranks,)), ring, timedelta(seconds=timeout))
    return Runner(links, (3,), torch.float32, torch.device("cpu"))


def schedules(ranks: int) -> list[Schedule]:
    training = [build_schedule(name, ranks, MICRO_BATCHES) for name in SCHEDULES]
    freeing = [build_schedule(name, ranks, MICRO_BATCHES, reshard_after_use=True) for name in SCHEDULES]
    return training + freeing + [build_schedule(name, ranks, MICRO_BATCHES, evaluation=True) for name in SCHEDULES]


def run_all(rank: int, ranks: int) -> list[Affine]:
    run, done = runner(ranks), []
    for schedule in schedules(ranks):
        done.append(Affine(schedule.stages))
        run.run(schedule, done[-1])
    return done


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_computes_what_its_stages_say(ranks: int) -> None:
    done = run_distributed(run_all, ranks)
    for number, schedule in enumerate(schedules(ranks)):
        first, last = (done[schedule.rank_of(stage)][number] for stage in (0, schedule.stages - 1))
        for micro_batch in range(MICRO_BATCHES):
            x = 1.0
            for stage in range(schedule.stages):
                x = 2 * x + stage + micro_batch
            assert last.outputs[micro_batch] == x, schedule.name
            if not schedule.forward_only:
                assert first.inputs[micro_batch] == micro_batch * 2.0**schedule.stages
        for rank in range(ranks):
            calls = done[rank][number].calls
            for stage in schedule.stages_of(rank):
                assert calls.count(("unshard", stage)) == calls.count(("reshard", stage)) >= 1
                assert calls.count(("reduce", stage)) == (0 if schedule.forward_only else 1)
                assert calls.count(("weight", stage)) == (0 if schedule.forward_only else MICRO_BATCHES)


def most_messages(rank: int, ranks: int) -> int:
    """That a rank keeps at once of a step of 32 micro-batches."""
    kept = []

    class Counting(run_module._Step):
        def _send(self, action: Action) -> None:
            super()._send(action)
            kept.append(len(self.sent))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "_Step", Counting)
        runner(ranks).run(build_schedule("1f1b", ranks, 32), Affine(ranks))
    return max(kept)


def test_messages_that_have_arrived_are_let_go_of() -> None:
    """gloo's own work never says that it is completed."""
    assert max(run_distributed(most_messages, 3)) <= 6


class Dying(Affine):
    """Rank 1 is gone when it should compute its third forward."""

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        if (stage, micro_batch) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(stage, micro_batch, hidden)


def lose_a_rank(rank: int, ranks: int) -> None:
    runner(ranks).run(build_schedule("1f1b", ranks, MICRO_BATCHES), Dying(ranks))


def test_a_killed_rank_ends_the_others_with_the_stage_in_the_message() -> None:
    """Both others name the stage and the rank at the other end; rank 1 alone says nothing."""
    with pytest.raises(RuntimeError, match="ranks without an answer: \\[1\\]") as caught:
        run_distributed(lose_a_rank, 3)
    errors = [line for line in str(caught.value).splitlines() if "PipelineError: " in line]
    assert len(errors) == 2
    for rank, error in zip((0, 2), errors, strict=True):
        assert re.search(
            rf"PipelineError: pipeline rank {rank}: (send|receive)_[a-z]+\(stage {rank}, micro-batch \d\) (to|from) "
            r"stage 1 on pipeline rank 1 \(rank 1\) failed: .*; rank 1 is lost, or says what it waits for itself$",
            error,
        ), error


class Sleeping(Affine):
    """Rank 1 never gets through its first forward."""

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        if stage == 1:
            signal.pause()
        return super().forward(stage, micro_batch, hidden)


def wait_for_a_rank(rank: int, ranks: int) -> None:
    runner(ranks, timeout=2).run(build_schedule("1f1b", ranks, MICRO_BATCHES), Sleeping(ranks))


def test_a_hanging_rank_ends_the_others_within_the_timeout() -> None:
    message = (
        r"pipeline rank 0: receive_gradient\(stage 0, micro-batch 0\) from stage 1 on pipeline rank 1 \(rank 1\) fa"
    )
    with pytest.raises(RuntimeError, match=message):
        run_distributed(wait_for_a_rank, 2)


class Reducing(Affine):
    """To reduce a stage is to sum something over all ranks, twice. Rank 1 is killed after the first time, when all its
    messages have arrived."""

    def reduce(self, stage: int) -> None:
        dist.all_reduce(torch.ones(3))
        if stage == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(3))


def lose_a_rank_of_a_collective(rank: int, ranks: int) -> None:
    runner(ranks).run(build_schedule("gpipe", ranks, 2), Reducing(ranks))


def test_a_collective_that_fails_names_the_action() -> None:
    with pytest.raises(RuntimeError, match=r"PipelineError: pipeline rank 0: reduce\(stage 0\) failed: .*nothing"):
        run_distributed(lose_a_rank_of_a_collective, 2)


class Wrong(Affine):
    """A bug: an error that has nothing to do with other ranks."""

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        return torch.ones(3) @ torch.ones(4)


def run_a_bug(rank: int, ranks: int) -> None:
    runner(ranks).run(build_schedule("1f1b", ranks, 2), Wrong(ranks))


def test_a_bug_in_a_stage_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="rank 0:\n(.*\n)*RuntimeError: inconsistent tensor size") as caught:
        run_distributed(run_a_bug, 2)
    assert "in forward" in str(caught.value)


@given(st.integers(2, 17))
def test_no_two_channels_of_a_rank_share_a_group(ranks: int) -> None:
    channels = {(r, (r + step) % ranks) for r in range(ranks) for step in (1, -1)}
    for rank in range(ranks):
        own = [channel for channel in channels if rank in channel]
        assert len({_lane(channel, ranks) for channel in own}) == len(own)
    assert len({_lane(channel, ranks) for channel in channels}) <= 6


def test_links_are_between_neighbours() -> None:
    with pytest.raises(ValueError, match="ranks 0 and 2 are no neighbours on a ring of 4"):
        _lane((0, 2), 4)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 8), st.integers(1, 12))
def test_every_schedule_sends_around_the_ring(name: str, ranks: int, micro_batches: int) -> None:
    try:
        schedule = build_schedule(name, ranks, micro_batches)
    except ValueError:  # sizes that the schedule does not take
        return
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op in SEND:
                _lane((rank, schedule.peer(action)), ranks)
