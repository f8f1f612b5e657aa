"""Compiled experts on several ranks: one graph for any routing, the numbers of rows being sizes that it reads."""

from __future__ import annotations

from typing import Any

import torch

from smp.config import Layout, ParallelConfig
from smp.layers import init_weights
from smp.layers.mlp import MLP
from smp.layers.moe import Experts, MoE, Router
from smp.parallel.context import build_context
from smp.sharding.parallelize import _wrapped
from tests.distributed import run_distributed
from tests.layers.moe.test_moe import EXPERTS, FFN, HIDDEN
from tests.layers.whole import error

BACKEND = "aot_eager"  # traces and differentiates as the default does, and generates no code
TOKENS = 12


def routed_to(moe: MoE, experts: tuple[int, int]) -> None:
    """Every token of ones has these experts."""
    with torch.no_grad():
        weight: Any = moe.router.weight
        weight.to_local().zero_()[list(experts)] = 1.0


def step(run: Any, moe: MoE, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs and all gradients."""
    x = x.clone().requires_grad_()
    moe.zero_grad()
    y, _ = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.to_local().clone() for p in moe.parameters())]  # type: ignore


def compare(rank: int, world: int) -> tuple[list[float], int]:
    """The largest errors of steps with any routing and with all tokens to one rank or the other, and the number of
    graphs."""
    torch.manual_seed(rank)
    context = build_context(Layout(dp_shard=world, ep=world), "cpu")
    router, experts = Router(HIDDEN, EXPERTS, 2, context), Experts(EXPERTS, HIDDEN, FFN, context)
    moe = MoE(router, experts, context, shared=MLP(HIDDEN, 10, context, bias=False))
    init_weights(moe, seed=3)
    compiler = torch.compile
    graphs = torch._dynamo.testing.CompileCounterWithBackend(BACKEND)
    torch.compile = lambda run, **options: compiler(run, **options, backend=graphs)  # type: ignore
    compiled = _wrapped(moe.forward, ParallelConfig(1, compile=True), eager_rounding=False)  # type: ignore[arg-type]
    worst = []
    for ones, chosen in ((False, None), (False, None), (True, (0, 1)), (True, (EXPERTS - 2, EXPERTS - 1))):
        if chosen is not None:
            routed_to(moe, chosen)
        x = torch.ones(TOKENS, HIDDEN) if ones else torch.randn(TOKENS, HIDDEN)
        plain, found = step(moe.forward, moe, x), step(compiled, moe, x)
        worst.append(max(error(f, p) for f, p in zip(found, plain, strict=True)))
    return worst, graphs.frame_count


def test_any_routing_computes_the_same_in_one_compiled_graph() -> None:
    for worst, graphs in run_distributed(compare, 2):
        assert max(worst) < 1e-6, worst
        assert graphs == 1
