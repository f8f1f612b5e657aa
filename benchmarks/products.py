"""The rows of ``benchmarks/kernels.py`` whose ceiling is arithmetic: the output layer with its loss, experts, and
attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp.kernels.attention_cores.attention_core import AttentionCore, AttentionSpec
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.attention_cores.varlen import VarlenAttention
from smp.kernels.experts import grouped
from smp.kernels.token_layout import TokenLayout
from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy
from smp.parallel.collectives import Group


def products(table: Any, fused: bool) -> None:
    """Output layer with its loss, both passes: 6 FLOPs per token, channel and vocabulary entry. Causal attention, both
    passes: 14 FLOPs per pair of tokens and channel (4 in the forward pass, 10 in the backward pass)."""
    s = table.sizes
    table.say(f"\n{'operation':34s}{'version':16s}{'us':>12s}{'TFLOP/s':>10s}{'of product':>11s}")
    hidden = table.draw((s.tokens, s.hidden), s.dtype)
    weight = table.draw((s.vocabulary, s.hidden), s.dtype).detach()
    weight = weight.mul_(s.hidden**-0.5).requires_grad_()  # logits around 1
    labels = torch.randint(0, s.vocabulary, (s.tokens,), device=table.device)
    weights, shard = (
        torch.full((s.tokens,), 1 / s.tokens, device=table.device),
        VocabShard.of(Group("", 1, 0), s.vocabulary, s.vocabulary),
    )

    def chunked(backend: str) -> Callable[[], object]:
        def run() -> object:
            loss = linear_cross_entropy(hidden, weight, labels, weights, shard, chunk_tokens=2048, backend=backend)
            return torch.autograd.grad(loss, (hidden, weight))

        return run

    def whole() -> object:
        return torch.autograd.grad(F.cross_entropy((hidden @ weight.t()).float(), labels), (hidden, weight))

    flops = 6 * s.tokens * s.hidden * s.vocabulary
    runs = {"smp triton": chunked("triton") if fused else None, "smp torch": chunked("torch"), "eager": whole}
    for name, run in runs.items():
        table.add_product("linear + cross-entropy", name, flops, run)
    layout = TokenLayout(s.tokens // s.length, s.length)
    for name in ("flash", "cudnn", "efficient", "math"):
        core: AttentionCore = MathAttention() if name == "math" else FusedAttention(name)
        if table.device == "cuda" or name in ("flash", "math"):  # a CPU has no others
            flops = 14 * s.tokens * s.length / 2 * s.heads * s.head_dim
            table.add_product("causal attention", name, flops, attention(table, core, layout))
    attention_of_documents(table)
    for shape in EXPERTS[table.device]:
        products_of_experts(table, fused, *shape)
    if table.device == "cuda":
        block_of_a_ring(table)


EXPERTS = {
    "cuda": [("Mixtral", 16_384, 8, 4096, 14_336), ("Qwen3-30B-A3B", 65_536, 128, 2048, 768)],
    "cpu": [("8 experts", 512, 8, 256, 384)],
}
"""Name, rows of all experts (8,192 tokens), experts, width of tokens and of an expert."""


def products_of_experts(table: Any, fused: bool, name: str, rows: int, experts: int, hidden: int, width: int) -> None:
    """Of rows that are sorted by experts, which are drawn, so that each has another number of them: gate's product, the
    input gradient of gate and up, and a weight's gradient, by Triton's kernel, by torch's and as one product of all
    rows with one matrix."""
    dtype, device = table.sizes.dtype, table.device
    counts = torch.multinomial(torch.ones(experts), rows, replacement=True).bincount(minlength=experts).to(device)
    x, grad = (table.draw((rows, n), dtype).detach() for n in (hidden, width))
    gate, up = (table.draw((experts, width, hidden), dtype).detach() for _ in range(2))
    single = gate[0].contiguous()
    for title, times, product, of_one in (
        ("forward", 1, lambda b: grouped._forward_op(x, gate, counts, b), lambda: x @ single.t()),
        (
            "dx of gate and up",
            2,
            lambda b: grouped._input_gradient_op([grad, grad], [gate, up], counts, b),
            lambda: (grad @ single).addmm_(grad, single),
        ),
        ("dw", 1, lambda b: grouped._weight_gradient_op(grad, x, counts, b), lambda: grad.t() @ x),
    ):
        label, flops = f"{name}, {title}", 2 * times * rows * hidden * width
        table.add_product(label, "smp triton", flops, partial(product, "triton") if fused else None)
        table.add_product(label, "smp torch", flops, partial(product, "torch"))
        table.add_product(label, "one product", flops, of_one)


def attention(table: Any, core: AttentionCore, layout: TokenLayout) -> Callable[[], object]:
    """Both passes of ``core``, prepared."""
    s, spec = table.sizes, AttentionSpec()
    q, k, v = (table.draw((s.tokens, s.heads, s.head_dim), s.dtype) for _ in range(3))
    grad, prepared = torch.randn_like(q), core.prepare(layout, [spec], s.dtype, q.device)
    return lambda: torch.autograd.grad(core(q, k, v, prepared, spec)[0], (q, k, v), grad)


def attention_of_documents(table: Any) -> None:
    """Eight documents in a sequence: FlashAttention's variable-length kernel beside a mask. FLOPs are those of what a
    document's tokens see."""
    s, documents = table.sizes, 8
    flops = 14 * s.tokens * s.length / documents / 2 * s.heads * s.head_dim
    ids = torch.arange(s.tokens).view(-1, s.length) // (s.length // documents)
    layout, cuda = TokenLayout(s.tokens // s.length, s.length, document_ids=ids), table.device == "cuda"
    spans = attention(table, VarlenAttention(), layout) if cuda else None
    table.add_product("attention, 8 documents", "flash, spans", flops, spans)
    backend = "efficient" if cuda else "flash"
    masked = attention(table, FusedAttention(backend), layout)
    table.add_product("attention, 8 documents", f"{backend}, mask", flops, masked)


def block_of_a_ring(table: Any) -> None:
    """What a rank of a ring does with another rank's keys, all before its queries: our core's forward pass with its
    log-sum-exps, and its backward pass by those of all keys; beside it the same block by torch's function."""
    s, spec = table.sizes, AttentionSpec(causal=False)
    flops = 14 * s.tokens * s.length * s.heads * s.head_dim
    q, k, v = (table.draw((s.tokens, s.heads, s.head_dim), s.dtype) for _ in range(3))
    grad, layout = torch.randn_like(q), TokenLayout(s.tokens // s.length, s.length)
    for name, kind in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        core = FusedAttention(name)

        def ours(core: FusedAttention = core) -> object:
            with torch.no_grad():
                out, lse = core(q, k, v, layout, spec)
                return core.backward(grad, q, k, v, out, lse, layout, spec)

        def plain(kind: SDPBackend = kind) -> object:
            queries, keys, values, dout = (
                x.view(-1, s.length, s.heads, s.head_dim).transpose(1, 2) for x in (q, k, v, grad)
            )
            with sdpa_kernel(kind):
                return torch.autograd.grad(F.scaled_dot_product_attention(queries, keys, values), (q, k, v), dout)

        table.add_product("attention, block of a ring", f"smp, {name}", flops, ours)
        table.add_product("attention, block of a ring", f"torch, {name}", flops, plain)
