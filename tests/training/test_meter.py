"""What a meter counts of operations on fake tensors, and what it leaves out."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

from smp.config import Layout
from smp.parallel.collectives import Group, start_all_gather, wait
from smp.training.cost.meter import Meter
from tests.fake_group import fake_context

KIB = 1024


def test_a_collective_has_one_result() -> None:
    """What is waited for is what was begun, as on a device."""
    with fake_context(Layout(tp=2)) as context, FakeTensorMode(), (meter := Meter({})).counting():
        group = Group.of(context.tp)
        x = torch.empty(256)
        with meter.phase("forward"):
            gathered = wait(start_all_gather(x, group), group)
        assert gathered.nbytes == 2 * KIB
        assert meter.held == meter.peaks["forward"] == 3 * KIB


def test_what_dtensor_only_tries_is_not_there() -> None:
    """The sum of two dtypes is new to it: it would be tried on tensors of four times the size."""
    with fake_context(Layout(tp=4)) as context:
        with FakeTensorMode(), (meter := Meter({})).counting():
            wide, narrow = torch.empty(256), torch.empty(256, dtype=torch.bfloat16)
            total, more = (DTensor.from_local(x, context.tp, [Shard(0)]) for x in (wide, narrow))
            before = meter.held
            assert before == 256 * (4 + 2)
            with meter.phase("forward"):
                total += more
            assert meter.peaks["forward"] == meter.held == before
