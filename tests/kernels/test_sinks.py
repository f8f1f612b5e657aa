"""Attention sinks in every core that computes all keys at once, and the activation of the same models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.attention_cores.fused_attention import DefaultAttention, FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.quick_geglu import QuickGeglu
from smp.kernels.token_layout import TokenLayout
from tests.layers.whole import error

CPU = torch.device("cpu")
CORES: dict[str, Any] = {
    "math": MathAttention(),
    "flash": FusedAttention("flash"),
    "flash, grouped": FusedAttention("flash", grouped=True),
    "default": DefaultAttention(),
}
WINDOW, SINKS = 3, torch.tensor([-2.0, 0.5, 1.0, 4.0])


def with_a_column(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Each sink as one more column of the scores, which is dropped behind the softmax. Two documents of 5 and 4."""
    documents, places = torch.tensor([0] * 5 + [1] * 4), torch.arange(9)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < WINDOW) & (documents[:, None] == documents)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = torch.cat((scores.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(4, 9, 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sink_is_one_more_column_of_the_scores(core: Any, compiled: bool) -> None:
    generator, spec = torch.Generator().manual_seed(0), AttentionSpec(window=WINDOW)
    layout = TokenLayout(1, 9, document_ids=torch.tensor([[0] * 5 + [1] * 4]))
    layout = core.prepare(layout, [spec], torch.float32, CPU)
    given = [torch.randn(9, heads, 8, generator=generator) for heads in (4, 2, 2)]
    dout = torch.randn(9, 4, 8, generator=generator)
    leaves = [x.requires_grad_() for x in (*given, SINKS.clone())]
    run = torch.compile(core, fullgraph=True) if compiled else core
    out, lse = run(*leaves[:3], layout, spec, sinks=leaves[3])
    assert not lse.requires_grad
    found = torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = with_a_column(*exact)
    assert error(out, wanted) < 2e-6
    for got, want in zip(found, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        assert error(got, want) < 2e-6


def test_the_gated_unit_has_the_gradients_of_its_formula() -> None:
    gate, up = (torch.randn(40, dtype=torch.float64, requires_grad=True) for _ in range(2))
    unit = QuickGeglu(clamp=0.8, offset=1.0)
    g, u = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
    assert torch.allclose(unit(gate, up), g * torch.sigmoid(1.702 * g) * (u + 1))
    assert (gate > 0.8).any() and (up < -0.8).any() and (up > 0.8).any()
    assert torch.autograd.gradcheck(unit, (gate, up))
    assert torch.autograd.gradcheck(QuickGeglu(), (gate, up))
