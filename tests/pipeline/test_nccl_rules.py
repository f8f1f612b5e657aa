"""No schedule hangs where the first message between two ranks stops their hosts, as NCCL's does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from smp.config import ConfigError
from smp.parallel import links
from smp.parallel.links import Links
from smp.pipeline.run import Runner
from smp.pipeline.schedules import build_schedule
from smp.sharding import tied as tied_module
from smp.sharding.tied import TiedMatrix
from smp.training.pipelined import message_channels
from tests.pipeline.strategies import sizes
from tests.pipeline.test_run import Affine
from tests.pipeline.wire import HangError, Wire


class Sharded(torch.Tensor):
    """Takes the place of a DTensor."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def step_of_all(name: str, ranks: int, micro_batches: int, chunks: int, tied: bool, reshard: bool) -> list[str]:
    """What the ranks raise who make links, train a step and evaluate; every number that comes out is checked (20 stages
    are exact in fp32)."""
    training, evaluation = (
        build_schedule(name, ranks, micro_batches, chunks, reshard_after_use=reshard, evaluation=evaluated)
        for evaluated in (False, True)
    )
    ends = training.rank_of(0), training.rank_of(training.stages - 1)
    tied = tied and ends[0] != ends[1]
    plan = SimpleNamespace(training=training, evaluation=evaluation)
    channels = message_channels([plan], ends if tied else None)  # type: ignore[list-item]
    wire = Wire(ranks)

    def body(rank: int) -> None:
        own = Links(wire.mesh(rank), channels)
        runner = Runner(own, (3,), torch.float32, torch.device("cpu"))
        stages = Affine(training.stages)
        runner.run(training, stages)
        weight = torch.zeros(2)
        weight.grad = torch.full((2,), 1.0 + rank)
        matrix = SimpleNamespace(grad=weight.grad.as_subclass(Sharded))
        model = SimpleNamespace(embedding_matrix=lambda: matrix)
        if tied:
            TiedMatrix(model, own, ends).sum_gradients()  # type: ignore[arg-type]
        runner.run(evaluation, stages)
        if rank in ends and tied:
            assert weight.grad[0] == 2 + sum(ends)
        for i, output in stages.outputs.items():
            x = 1.0
            for stage in range(training.stages):
                x = 2 * x + stage + i
            assert output == x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "dist", wire)
        patch.setattr(tied_module, "DTensor", Sharded)
        return [f"{type(error).__name__}: {error}" for error in wire.run(body)]


def test_each_group_and_each_channel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """To who ends a process that stands still: every one of them may wait for as long as the timeout."""
    wire, told = Wire(3), list[int]()
    monkeypatch.setattr(links, "dist", wire)
    around = {(0, 1), (1, 2), (2, 0)}
    errors = wire.run(lambda rank: Links(wire.mesh(rank), around, progress=lambda: told.append(rank)) and None)
    assert errors == [] and sorted(told) == sorted([0, 1, 2] * (3 + 3))


@given(sizes(most_ranks=5, most_micro_batches=9), st.booleans(), st.booleans())
def test_no_schedule_hangs(of: tuple[str, int, int, int], tied: bool, reshard: bool) -> None:
    assume(of[1] > 1)
    try:
        errors = step_of_all(*of, tied, reshard)
    except ConfigError:  # sizes that the schedule does not take
        assume(False)
    assert errors == []


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "tied", "where"),
    [
        (2, 1, False, "rank 0 waits for the other end of 1 -> 0 to connect"),
        (3, 1, False, "to connect"),
        (3, 6, True, "rank 0 waits for the other end of 0 -> 2 to connect"),
    ],
)
def test_links_that_are_not_connected_first_hang(
    monkeypatch: pytest.MonkeyPatch, ranks: int, micro_batches: int, tied: bool, where: str
) -> None:
    """The control: a pipeline of 2 with one micro-batch receives first on both ends, a tied matrix is sent first."""
    monkeypatch.setattr(Links, "_connect", lambda self, channels, element: None)
    errors = step_of_all("1f1b", ranks, micro_batches, 1, tied, False)
    assert errors and all(error.startswith(HangError.__name__) for error in errors)
    assert any(where in error for error in errors)


def test_connecting_in_another_order_on_one_rank_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Links._connect
    turned = lambda self, channels, element: connect(self, channels[:: -1 if self.rank else 1], element)  # noqa: E731
    monkeypatch.setattr(Links, "_connect", turned)
    assert all(error.startswith("Hang") for error in step_of_all("1f1b", 2, 4, 1, False, False))
