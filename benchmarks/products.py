"""The rows of ``benchmarks/kernels.py`` whose ceiling is arithmetic: the output layer with its loss, and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp.kernels.attention import BACKENDS
from smp.layers.cross_entropy import VocabShard, linear_cross_entropy
from smp.layers.documents import Spans, document_mask
from smp.parallel.collectives import Group


def products(table: Any, fused: bool) -> None:
    """Output layer with its loss, both passes: 6 FLOPs per token, channel and vocabulary entry. Causal attention, both
    passes: 14 FLOPs per pair of tokens and channel (4 in the forward pass, 10 in the backward pass)."""
    s = table.sizes
    table.say(f"\n{'operation':34s}{'version':16s}{'us':>12s}{'TFLOP/s':>10s}{'of product':>11s}")
    hidden = table.draw((s.tokens, s.hidden))
    weight = table.draw((s.vocabulary, s.hidden)).detach().mul_(s.hidden**-0.5).requires_grad_()  # logits around 1
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
    q, k, v = (table.draw((s.tokens // s.length, s.heads, s.length, s.head_dim)) for _ in range(3))
    grad = torch.randn_like(q)
    for name, backend in BACKENDS.items():

        def attend(backend: SDPBackend = backend) -> object:
            with sdpa_kernel([backend]):
                return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

        pairs = s.tokens * s.length / 2
        if table.device == "cuda" or name in ("flash", "math"):  # a CPU has no others
            table.add_product("causal attention", name, 14 * pairs * s.heads * s.head_dim, attend)
    attention_of_documents(table)


def attention_of_documents(table: Any) -> None:
    """Eight documents in a sequence: spans of FlashAttention's variable-length kernel beside a mask. FLOPs are those of
    what a document's tokens see."""
    s, documents = table.sizes, 8
    flops = 14 * s.tokens * s.length / documents / 2 * s.heads * s.head_dim
    numbers = torch.arange(s.tokens).view(-1, s.length) // (s.length // documents)
    q, k, v = (table.draw((s.tokens, s.heads, s.head_dim)) for _ in range(3))
    if table.device == "cuda":
        spans, grad = Spans.of(numbers, None, torch.device("cuda")), torch.randn_like(q)

        def in_spans() -> object:
            return torch.autograd.grad(spans.attend(q, k, v), (q, k, v), grad)

        table.add_product("attention, 8 documents", "flash, spans", flops, in_spans)
    else:
        table.add_product("attention, 8 documents", "flash, spans", flops, None)
    mask = document_mask(numbers.to(table.device), None, s.dtype)
    q, k, v = (table.draw((s.tokens // s.length, s.heads, s.length, s.head_dim)) for _ in range(3))
    grad = torch.randn_like(q)

    def masked() -> object:
        with sdpa_kernel([BACKENDS[backend]]):
            return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), (q, k, v), grad)

    backend = "efficient" if table.device == "cuda" else "flash"
    table.add_product("attention, 8 documents", f"{backend}, mask", flops, masked)
