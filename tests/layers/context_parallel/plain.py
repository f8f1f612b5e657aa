"""Attention over cut sequences beside attention over whole ones, without the package's own code for the cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.sequence_cut import SequenceCut, cut_sequences
from smp.kernels.token_layout import TokenLayout
from tests.layers.whole import draw

CPU = torch.device("cpu")
KEY = torch.tensor(123456789)
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """Whole sequences and a layer."""

    length: int
    heads: int
    groups: int
    documents: torch.Tensor | None = None
    window: int | None = None
    dropout: float = 0.0
    causal: bool = True
    batch: int = 2
    width: int = 16

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.causal, self.window, dropout=self.dropout, first_head=2)

    @property
    def key(self) -> torch.Tensor | None:
        return KEY if self.dropout else None

    def cut(self, ranks: int) -> SequenceCut:
        return cut_sequences(self.batch, self.length, ranks, self.documents)

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """q, k, v and the gradient of out; those of fp32 rounded, also in fp64."""
        heads = (self.heads, self.groups, self.groups, self.heads)
        rows = self.batch * self.length
        return [draw(rows, n * self.width, seed=i).view(rows, n, self.width).to(dtype) for i, n in enumerate(heads)]

    def whole(self, core: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        """Results of one rank."""
        layout = TokenLayout(self.batch, self.length, document_ids=self.documents, token_index=self.numbers())
        return results(core, self.tensors(dtype), layout, self.spec, self.key)

    def exact(self) -> list[torch.Tensor]:
        """Results of every step by itself in fp64."""
        return self.whole(MathAttention(), torch.float64)

    def numbers(self) -> torch.Tensor:
        return torch.arange(self.batch * self.length) + 1000

    def rows(self, cut: SequenceCut, rank: int) -> torch.Tensor:
        """Which rows of whole sequences the rank holds."""
        return (cut.index(rank) + torch.arange(self.batch)[:, None] * self.length).flatten()

    def part(self, core: Any, dtype: torch.dtype, rank: int, ranks: int, padding: int = 0) -> list[torch.Tensor]:
        """Results of one of several ranks; padding holds large numbers, which must show nowhere."""
        cut = self.cut(ranks)
        rows = self.rows(cut, rank)
        *given, grad = (
            torch.cat((x[rows], torch.full((padding, *x.shape[1:]), fill, dtype=dtype)))
            for x, fill in zip(self.tensors(dtype), (1e3, 1e3, 1e3, 0.0), strict=True)
        )
        index = torch.cat((self.numbers()[rows], torch.zeros(padding, dtype=torch.int64)))
        layout = TokenLayout(self.batch, self.length // ranks, padding, token_index=index, cut=cut)
        found = results(core, [*given, grad], layout, self.spec, self.key)
        if padding:
            assert not any(x[len(rows) :].any() for x in (found[0], *found[2:]))
            assert found[1][len(rows) :].isneginf().all()
        return [x[: len(rows)] for x in found]


def results(
    core: Any, tensors: list[torch.Tensor], layout: TokenLayout, spec: AttentionSpec, key: torch.Tensor | None
) -> list[torch.Tensor]:
    """out, lse (tokens, heads) and the gradients of q, k and v."""
    *given, grad = tensors
    leaves = [x.clone().requires_grad_() for x in given]
    layout = core.prepare(layout, [spec], grad.dtype, CPU)
    out, lse = core(*leaves, layout, spec, key)
    assert out.dtype == grad.dtype and not lse.requires_grad
    return [out.detach(), lse.t(), *torch.autograd.grad(out, leaves, grad)]


DOCUMENTS = torch.tensor([[0] * 40 + [1] * 7 + [2] * 30 + [3] * 19, [0] * 24 + [1] * 48 + [2] * 24])
"""The second row's documents end where chunks of 2 and 4 ranks do."""

PLAIN = Case(96, 12, 12)
CASES = {
    "plain": PLAIN,
    "GQA": replace(PLAIN, groups=4),
    "MQA": replace(PLAIN, groups=1),
    "window": replace(PLAIN, groups=4, window=9),
    "window of a chunk": replace(PLAIN, groups=4, window=24),
    "documents": replace(PLAIN, groups=4, documents=DOCUMENTS),
    "documents and a window": replace(PLAIN, groups=2, documents=DOCUMENTS, window=11),
    "dropout": replace(PLAIN, groups=4, dropout=0.3),
    "dropout, documents and a window": replace(PLAIN, groups=4, documents=DOCUMENTS, window=11, dropout=0.3),
    "not causal": replace(PLAIN, groups=4, causal=False, documents=DOCUMENTS),
}
