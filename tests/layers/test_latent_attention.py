"""Latent attention on several ranks against one, with adapters on every projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.kernels.token_layout import TokenLayout
from smp.layers import add_adapters
from smp.layers.latent_attention import LatentAttention
from smp.layers.rope import rope_frequencies, rope_table
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.whole import draw, error, gradient, leaf, load_all, part

BATCH, LENGTH, HIDDEN, ROPE = 2, 6, 12, 4
TOKENS = BATCH * LENGTH


def attention_of(context: Any, queries: int | None) -> LatentAttention:
    sizes: dict[str, Any] = {"kv_lora_rank": 5, "qk_head_dim": 3, "rope_dim": ROPE, "v_head_dim": 6}
    return LatentAttention(HIDDEN, 4, context, q_lora_rank=queries, norm_eps=1e-5, **sizes)


def token_layout() -> TokenLayout:
    positions = torch.arange(LENGTH).repeat(BATCH)
    freqs = rope_frequencies(ROPE, 100.0, None, torch.device("cpu"))
    return TokenLayout(BATCH, LENGTH, position_ids=positions, prepared={"rope": rope_table(positions, freqs)})


def results(rank: int, world: int, sp: bool, queries: int | None) -> dict[str, torch.Tensor]:
    """Output and gradients, whole, of sum(y * target)."""
    mesh = build_context(Layout(tp=world), "cpu").tp
    layer = attention_of(ParallelContext.of(mesh, sequence_parallel=sp), queries)
    add_adapters(layer, ["*"], 2, 3.0)
    layer.requires_grad_(True)
    load_all(layer, seed=3)
    x, target = leaf(part(draw(TOKENS, HIDDEN, seed=1), mesh, split=sp)), draw(TOKENS, HIDDEN, seed=2)
    y = layer(x, token_layout())
    y.backward(part(target, mesh, split=sp))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {name: gradient(p) for name, p in layer.named_parameters()}


@pytest.mark.parametrize(("sp", "queries"), [(False, 7), (True, 7), (True, None)])
def test_every_layout_computes_the_same_and_its_gradients(sp: bool, queries: int | None) -> None:
    one, ranks = run_distributed(results, 1, False, queries)[0], run_distributed(results, 2, sp, queries)
    names = [name.removesuffix(".lora.a") for name in one if name.endswith(".lora.a")]
    down = ["query"] if queries is None else ["query_down", "query_up"]
    assert sorted(names) == sorted([*down, "key_value_down", "key_value_up", "output"])
    for name, want in one.items():
        for rank, got in enumerate(ranks):
            mine = want.chunk(2)[rank] if sp and name in ("y", "dx") else want
            assert error(got[name], mine) <= 1e-6, name
            assert want.abs().max() > 1e-3, f"{name} says nothing"


def test_ranks_that_do_not_divide_the_heads_are_an_error() -> None:
    with fake_context(Layout(tp=8)) as context, pytest.raises(ValueError, match="4 heads do not split over 8 ranks"):
        attention_of(context.tp, None)
