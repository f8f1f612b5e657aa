"""Zero-bubble schedules leave the experts' weight gradients to the action that is for weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smp.config import Layout
from smp.kernels import TORCH
from smp.pipeline.actions import Action, Op
from smp.pipeline.stage_plan import plan_pipeline
from smp.training.build import RunSetup, build_forward_backward, build_model
from smp.training.objectives.next_token import NextToken
from smp.training.pipelined import Pipelined
from tests.fake_group import fake_context
from tests.parity.cases import Case, Problem, Spread, config_of
from tests.parity.data import share

PRODUCTS = ("grouped_weight_gradient", "grouped_scaled_weight_gradient")


class Products(TorchDispatchMode):
    """Counts products for weight gradients of experts by the kind of action in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self._op = Counter[Op](), Op.FORWARD

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "smp" and name in PRODUCTS:
            self.counts[self._op] += 1
        return func(*args, **(kwargs or {}))

    def posted(self, receive: Action) -> None:
        pass

    def arrived(self, receive: Action) -> None:
        pass

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        self._op = action.op
        yield


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("fp8", [None, "tensorwise"])
def test_experts_weight_gradients_wait_for_their_action(schedule: str, fp8: str | None) -> None:
    """Of the first rank, which gets messages without meaning."""
    layers, micro_batches = 4, 4
    spread = Spread(pp=2, schedule=schedule, accumulation=micro_batches)
    problem = Problem(micro_batches=micro_batches, layers=layers, experts="mixtral", length=16, fp8=fp8)
    config, device = config_of(Case(problem, spread)), torch.device("cpu")
    layout = Layout.from_config(config.parallel, spread.world_size)
    with fake_context(layout) as context, Products() as products:
        setup = RunSetup(context, device, TORCH, plan_pipeline(config, layout))
        passes = build_forward_backward(config, setup, build_model(config, setup))
        assert isinstance(passes, Pipelined)
        passes.watched_by(products)
        passes.train(NextToken(device).micro_batches(share(problem, spread, 0, 0), 1))
    whole = 3 * layers // 2 * micro_batches  # gate, up and down
    assert products.counts == {Op.BACKWARD if schedule == "1f1b" else Op.BACKWARD_WEIGHT: whole}
