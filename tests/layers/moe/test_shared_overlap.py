"""Shared experts compute while rows travel to the experts, forward and backward."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smp.config import Layout
from smp.layers import init_weights
from smp.layers.mlp import MLP
from smp.layers.moe import Experts, MoE, Router
from smp.parallel.context import build_context
from tests.distributed import run_distributed
from tests.layers.moe.test_moe import EXPERTS, FFN, HIDDEN

WIDTH = 10  # of the shared experts, and of nothing else


class Calls(TorchDispatchMode):
    """Exchanges of rows, waits, and products of experts and of shared experts, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "exchange_rows":
            self.log.append("send")
        elif name == "wait_tensor":
            self.log.append("wait")
        elif name.startswith("grouped_"):
            self.log.append("experts")
        elif name == "mm" and WIDTH in (*args[0].shape, *args[1].shape):
            self.log.append("shared")
        return func(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        """Those since the last time, neighbours of a kind as one."""
        taken = [name for name, _ in groupby(self.log)]
        self.log.clear()
        return taken


def step(rank: int, world: int) -> tuple[list[str], list[str]]:
    """The calls of a forward and of a backward pass."""
    torch.manual_seed(rank)
    context = build_context(Layout(dp_shard=world, ep=world), "cpu")
    router, experts = Router(HIDDEN, EXPERTS, 2, context), Experts(EXPERTS, HIDDEN, FFN, context)
    moe = MoE(router, experts, context, shared=MLP(HIDDEN, WIDTH, context, bias=False))
    init_weights(moe, seed=3)
    with Calls() as calls:
        y, _ = moe(torch.randn(12, HIDDEN).requires_grad_())
        forward = calls.take()
        y.square().sum().backward()
        return forward, calls.take()


def test_shared_experts_compute_while_rows_travel() -> None:
    for forward, backward in run_distributed(step, 2):
        counted, *forward = forward  # numbers of rows
        assert counted == "wait"
        assert forward == ["send", "shared", "wait", "experts", "send", "wait"]
        assert backward == ["send", "wait", "experts", "send", "shared", "wait"]
