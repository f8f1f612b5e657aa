"""The operators as graphs see them: schemas, fake outputs, fullgraph compilation, recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from smp.kernels import norm, rope, swiglu
from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.experts import permute, router
from smp.kernels.quick_geglu import QuickGeglu
from smp.kernels.token_layout import TokenLayout
from smp.layers.heads.cross_entropy import VocabShard, vocab_parallel_cross_entropy
from smp.layers.linear_functions import Linear, row_parallel_function
from smp.parallel.collectives import Group
from tests.graphs import Outputs

ops = torch.ops.smp
X, W, DY, BIAS = torch.randn(6, 8), torch.randn(8), torch.randn(6, 8), torch.randn(8)
Q, K, COS, SIN = torch.randn(6, 2, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
MEAN, SCALE, COLUMNS = torch.randn(6), torch.rand(6), torch.arange(6)
COUNTS, ORDER = torch.tensor([4, 0, 2]), torch.tensor([3, 0, 5, 1, 4, 2])
CALLS = {
    "softmax_stats": (X, COLUMNS, 7, "torch"),
    "logits_to_gradient_": (X, torch.randn(3, 6), COLUMNS, 7, SCALE, "torch"),
    "norm": (X, DY, W, W, 1e-5, "torch"),
    "norm (plain)": (X, None, W, None, 1e-5, "torch"),
    "norm_backward": (DY, X, X, W, MEAN, SCALE, True, "torch"),
    "norm_backward (plain)": (DY, None, X, W, torch.empty(0), SCALE, False, "torch"),
    "swiglu": (X, DY, "torch"),
    "swiglu_backward": (DY, X, X, True, "torch"),
    "rope": (Q, K, COS, COS, True, "torch"),
    "rope_": (Q, K, COS, COS, False, "torch"),
    "choose_experts": (X, None, W, 3, "sigmoid", 2.0, "torch"),
    "choose_experts (compared)": (X, DY, None, 3, "softmax", 1.0, "torch"),
    "choose_experts_backward": (torch.randn(6, 2), X, torch.arange(12).view(6, 2) % 8, "pre_softmax", 1.0, "torch"),
    "grouped_product": (X, torch.randn(3, 4, 8), COUNTS, "torch"),
    "grouped_input_gradient": ([torch.randn(6, 4)] * 2, [torch.randn(3, 4, 8)] * 2, COUNTS, "torch"),
    "gather_rows": (X, torch.tensor([3, 11, 0]), 2, "torch"),
    "combine_rows": (X, torch.rand(3, 2), torch.tensor([[3, 1], [0, 2], [5, 4]]), "torch"),
    "combine_rows (of weights 1)": (X, None, torch.tensor([[3, 1], [0, 2], [5, 4]]), "torch"),
    "combine_rows_backward": (torch.randn(3, 8), X, torch.rand(3, 2), torch.arange(6), torch.arange(6), "torch"),
    "grouped_weight_gradient": (torch.randn(6, 4), X, COUNTS, "torch"),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    arguments = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in CALLS[name])
    torch.library.opcheck(getattr(ops, name.split()[0]).default, arguments)


SHARD, FLASH = VocabShard.of(Group("", 1, 0), 7, 7), FusedAttention()
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "norm": (lambda x, w: norm._Norm.apply(x, None, w, None, 1e-5, "torch")[0], [X, W]),
    "add_norm": (lambda x, a, w, b: sum(norm._Norm.apply(x, a, w, b, 1e-5, "torch")), [X, DY, W, BIAS]),
    "swiglu": (lambda g, u: swiglu._Swiglu.apply(g, u, "torch"), [X, DY]),
    "rope": (lambda q, k: sum(y.sum() for y in rope._Rope.apply(q, k, COS, SIN, 4, False, "torch")), [Q, K]),
    "router": (lambda z: router._ChooseExperts.apply(z, None, W, 3, "sigmoid", 2.0, "torch")[1], [X]),
    "permute": (lambda x: permute.permute_rows(x, torch.arange(5, -1, -1), torch.arange(5, -1, -1)), [X]),
    "quick_geglu": (QuickGeglu(clamp=0.8, offset=1.0), [X, DY]),
    "sinks": (lambda q, k, v, s: FLASH(q, k, v, TokenLayout(1, 6), AttentionSpec(), sinks=s)[0], [Q, K, COS, W[:2]]),
    "repeat": (lambda x: permute.repeat_rows(x, ORDER, ORDER.argsort(), 2), [X[:3]]),
    "combine": (lambda r, w: permute.combine_rows(r, w, torch.arange(6), torch.arange(6)), [X, torch.rand(3, 2)]),
    "cross_entropy": (lambda z: vocab_parallel_cross_entropy(z, COLUMNS, SHARD), [X]),
}


def gradients(run: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad((out * out).sum(), leaves)]


def compiles_right(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    torch._dynamo.reset()
    graphs = Outputs()
    compiled = gradients(torch.compile(function, fullgraph=True, backend=graphs), inputs)
    for got, want in zip(compiled, gradients(function, inputs), strict=True):
        torch.testing.assert_close(got, want)
    assert graphs.functions >= 1 and graphs.shared == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_as_one_graph(name: str) -> None:
    compiles_right(name)


@pytest.mark.parametrize("name", ["repeat", "combine"])
def test_what_a_gpu_compiles_has_the_same_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There rows are summed by operators of PyTorch's."""
    monkeypatch.setattr(permute, "_of_operators", lambda x: True)
    compiles_right(name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_recompute_gives_the_same_bits(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    again = gradients(lambda *x: checkpoint(lambda *y: function(*(t * 1 for t in y)), *x, use_reentrant=False), inputs)
    for got, want in zip(again, gradients(function, inputs), strict=True):
        assert torch.equal(got, want)


def test_the_swiglu_of_a_row_parallel_layer_keeps_no_activation() -> None:
    """gate, up and the weight are all that is kept; the gradients are those of the plain formula."""
    linear, fused = Linear(Group("", 1, 0), False), swiglu.FusedSwiglu("torch")

    gate, up, weight = (torch.randn(5, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True), torch.randn(3, 8))
    weight.requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = row_parallel_function((gate, up), weight, linear, fused)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (gate, up, weight)}
    got = torch.autograd.grad(y.square().sum(), (gate, up, weight))
    want = torch.autograd.grad(F.linear(F.silu(gate) * up, weight).square().sum(), (gate, up, weight))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    frozen = row_parallel_function((gate, up), weight.detach(), linear, fused)
    torch.testing.assert_close(torch.autograd.grad(frozen.square().sum(), gate)[0], want[0])
