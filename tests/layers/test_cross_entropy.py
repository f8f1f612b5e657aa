"""Vocabulary-parallel cross-entropy against torch's on the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import run_distributed

TOKENS, HIDDEN, ROWS = 11, 6, 8


def _capped(shard: Any, hidden: Any, weight: Any, mine: Any, labels: Any, counts: Any, rank: int) -> dict[str, float]:
    """The same of logits within +-20, which are up to 100 and more here."""
    from smp.layers import linear_cross_entropy
    from smp.layers.heads.cross_entropy import linear_token_losses
    from smp.parallel.collectives import copy_to_group

    cap = 20.0
    shard = replace(shard, softcap=cap)
    exact, matrix = hidden.double().requires_grad_(), weight.double().requires_grad_()
    want = F.cross_entropy(cap * torch.tanh(exact @ matrix.t() / cap), labels, reduction="none")
    (want * counts).sum().backward()
    assert exact.grad is not None and matrix.grad is not None
    x, mine = hidden.clone().requires_grad_(), mine.clone().requires_grad_()
    linear_cross_entropy(copy_to_group(x, shard.group), mine, labels, counts, shard, chunk_tokens=4).backward()
    grad = F.pad(matrix.grad, (0, 0, 0, 64))[rank * ROWS : (rank + 1) * ROWS]
    found, entropy = linear_token_losses(hidden, mine.detach(), labels, shard, chunk_tokens=4, with_entropy=True)
    valid, log_p = counts > 0, (cap * torch.tanh(exact @ matrix.t() / cap)).log_softmax(1).detach()
    assert entropy is not None
    return {
        "dx, capped": ((x.grad - exact.grad).norm() / exact.grad.norm()).item(),
        "dw, capped": ((mine.grad - grad).norm() / matrix.grad.norm()).item(),
        "losses, capped": ((found - want)[valid].norm() / want[valid].norm()).item(),
        "entropies, capped": (entropy + (log_p.exp() * log_p).sum(1)).abs().max().item(),
    }


def compare(rank: int, world: int, vocab: int) -> dict[str, float]:
    """Largest errors of losses and gradients."""
    from smp.config import Layout
    from smp.layers import IGNORE_INDEX, VocabShard, linear_cross_entropy, vocab_parallel_cross_entropy
    from smp.parallel.collectives import Group, copy_to_group
    from smp.parallel.context import build_context

    group = Group.of(build_context(Layout(tp=world), "cpu").tp)
    shard = VocabShard.of(group, ROWS, vocab)
    generator = torch.Generator().manual_seed(0)
    hidden = (30 * torch.randn(TOKENS, HIDDEN, generator=generator)).requires_grad_()
    weight = torch.randn(vocab, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(0, vocab, (TOKENS,), generator=generator)
    labels[3] = IGNORE_INDEX
    counts = (labels != IGNORE_INDEX).float() / (TOKENS - 1)
    want = F.cross_entropy(hidden @ weight.t(), labels, reduction="none", ignore_index=IGNORE_INDEX)
    (want * counts).sum().backward()
    assert hidden.grad is not None and weight.grad is not None

    padded = F.pad(weight.detach(), (0, 0, 0, world * ROWS - vocab))
    mine: Any = padded[rank * ROWS : (rank + 1) * ROWS].clone().requires_grad_()
    grad = F.pad(weight.grad, (0, 0, 0, world * ROWS - vocab))[rank * ROWS : (rank + 1) * ROWS]
    errors = {}
    for chunk in (1, 4, TOKENS):
        x: Any = hidden.detach().clone().requires_grad_()
        mine.grad = None
        loss = linear_cross_entropy(copy_to_group(x, group), mine, labels, counts, shard, chunk_tokens=chunk)
        loss.backward()
        errors[f"loss, chunks of {chunk}"] = abs(loss.item() / (want * counts).sum().item() - 1)
        errors[f"dx, chunks of {chunk}"] = ((x.grad - hidden.grad).norm() / hidden.grad.norm()).item()
        errors[f"dw, chunks of {chunk}"] = ((mine.grad - grad).norm() / weight.grad.norm()).item()
    for overwrite in (False, True):
        x, mine.grad = hidden.detach().clone().requires_grad_(), None
        logits = copy_to_group(x, group) @ mine.t()
        per_token = vocab_parallel_cross_entropy(logits, labels, shard, overwrite=overwrite)
        (per_token * counts).sum().backward()
        how = ", overwritten" * overwrite
        errors["per token" + how] = ((per_token - want).norm() / want.norm()).item()
        errors["dx per token" + how] = ((x.grad - hidden.grad).norm() / hidden.grad.norm()).item()
        errors["dw per token" + how] = ((mine.grad - grad).norm() / weight.grad.norm()).item()
    errors |= _capped(shard, hidden.detach(), weight.detach(), mine.detach(), labels, counts, rank)
    for offset in (1e3, -1e4, 1e5):
        whole = torch.randn(TOKENS, vocab, generator=generator) + offset
        exact, part = whole.double().requires_grad_(), slice(rank * ROWS, rank * ROWS + shard.valid)
        F.cross_entropy(exact, labels, ignore_index=IGNORE_INDEX).backward()
        z: Any = F.pad(whole[:, part], (0, ROWS - shard.valid)).requires_grad_()
        (vocab_parallel_cross_entropy(z, labels, shard) * counts).sum().backward()
        assert exact.grad is not None
        difference = z.grad[:, : shard.valid] - exact.grad[:, part]
        errors[f"dz at {offset:g}"] = (100 * difference.norm() / exact.grad.norm()).item()  # held to 1e-7
    return errors


@pytest.mark.parametrize(
    ("world", "vocab"), [(1, 7), (2, 15), (3, 24), (3, 17), (3, 13), (4, 30)]
)  # 13: the last rank holds padding only
def test_equals_cross_entropy_of_the_whole_vocabulary(world: int, vocab: int) -> None:
    for errors in run_distributed(compare, world, vocab):
        assert {name: e for name, e in errors.items() if e > 1e-5} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_capped_as_in_one_piece(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, block of rows by block of rows, with the derivative or without it."""
    from smp.layers import VocabShard
    from smp.layers.heads import cross_entropy
    from smp.parallel.collectives import Group

    monkeypatch.setattr(cross_entropy, "CAPPED_LOGITS", 1000)  # 3 rows
    logits = (40 * torch.randn(37, 333)).to(dtype)
    shard = VocabShard(0, 333, cast(Group, None), 333, 30.0)
    capped, alone = logits.clone(), logits.clone()
    slope = shard.cap_(capped, with_slope=True)
    tanh = (logits.float() / 30).tanh()
    assert slope is not None and torch.equal(slope, (1 - tanh.square()).to(dtype))
    assert torch.equal(capped, (30 * tanh).to(dtype)) and torch.equal(capped, shard.capped(logits))
    assert shard.cap_(alone, with_slope=False) is None and torch.equal(alone, capped)
