"""Divergences from a teacher: values and gradients against formulas in fp64, also with the vocabulary cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.layers.heads.cross_entropy import VocabShard
from smp.layers.heads.distillation import (
    Distilled,
    TeacherHead,
    TeacherStates,
    TopLogits,
    linear_divergence,
    top_log_probs,
)
from smp.parallel.collectives import Group
from tests.distributed import run_distributed

TOKENS, HIDDEN, VOCAB, TEACHER = 7, 12, 61, 20
CASES = [(beta, temperature) for beta in (0.0, 0.1, 0.5, 1.0) for temperature in (1.0, 0.7)]


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    return {
        "hidden": draw(TOKENS, HIDDEN),
        "weight": draw(VOCAB, HIDDEN) * 0.5,
        "states": draw(TOKENS, TEACHER),
        "matrix": draw(VOCAB, TEACHER) * 0.5,
        "labels": torch.arange(TOKENS) * 8 % VOCAB,
        "weights": torch.tensor([0.3, 0.0, 0.1, 0.2, 0.0, 0.5, 0.4]),
    }


def _expected(
    x: dict[str, torch.Tensor], beta: float, temperature: float, alpha: float, cap: float | None, k: int = VOCAB
) -> list[torch.Tensor]:
    """(loss, gradients by hidden and weight) in fp64, by autograd; of the k likeliest tokens and one for the rest."""
    hidden, weight = (x[n].double().requires_grad_() for n in ("hidden", "weight"))
    logits = hidden @ weight.t()
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    log_q = (logits / temperature).log_softmax(1)
    log_p = (x["states"].double() @ x["matrix"].double().t() / temperature).log_softmax(1)
    if k < VOCAB:
        order = log_p.argsort(1, descending=True)
        log_q, log_p = (part.gather(1, order) for part in (log_q, log_p))
        log_q, log_p = (torch.cat([x[:, :k], x[:, k:].logsumexp(1, keepdim=True)], 1) for x in (log_q, log_p))
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        values = (p * (log_p - log_q)).sum(1)
    elif beta == 1:
        values = (q * (log_q - log_p)).sum(1)
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        values = (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(1)
    entropy = torch.nn.functional.cross_entropy(logits, x["labels"], reduction="none")
    loss = ((alpha * values + (1 - alpha) * entropy) * x["weights"]).sum()
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def _computed(
    x: dict[str, torch.Tensor], loss: Distilled, shard: VocabShard, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of this rank's rows, in fp32."""
    rows = slice(shard.start, shard.start + x["weight"].shape[0] // shard.group.size)
    hidden, weight = x["hidden"].clone().requires_grad_(), x["weight"][rows].clone().requires_grad_()
    value = linear_divergence(hidden, weight, x["labels"], x["weights"], shard, loss, chunk_tokens=chunk)
    value.backward()
    assert hidden.grad is not None and weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


def _close(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)


ALONE = Group("", 1, 0)


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
@pytest.mark.parametrize(("beta", "temperature"), CASES)
def test_divergence_from_states(beta: float, temperature: float, alpha: float, chunk: int) -> None:
    x, cap = _inputs(), 3.0 if beta == 0.5 else None
    shard = VocabShard.of(ALONE, VOCAB, VOCAB, cap)
    teacher = TeacherStates(TeacherHead(x["matrix"], VocabShard.of(ALONE, VOCAB, VOCAB), None), x["states"])
    got = _computed(x, Distilled(teacher, beta, temperature, alpha), shard, chunk)
    _close(got, _expected(x, beta, temperature, alpha, cap))


@pytest.mark.parametrize("k", [1, 5, VOCAB])
@pytest.mark.parametrize(("beta", "temperature"), CASES)
def test_divergence_from_likeliest_tokens(beta: float, temperature: float, k: int) -> None:
    """With all tokens it is the full divergence."""
    x = _inputs()
    shard = VocabShard.of(ALONE, VOCAB, VOCAB)
    head = TeacherHead(x["matrix"], shard, None)
    top = top_log_probs(x["states"], head, k, temperature, chunk_tokens=4)
    got = _computed(x, Distilled(top, beta, temperature), shard, 3)
    _close(got, _expected(x, beta, temperature, 1.0, None, k))


@pytest.mark.parametrize("k", [None, 4, VOCAB])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_teacher_like_the_model_teaches_nothing(beta: float, k: int | None) -> None:
    x = _inputs()
    shard = VocabShard.of(ALONE, VOCAB, VOCAB)
    head, teacher = TeacherHead(x["weight"], shard, None), None
    if k is not None:
        teacher = top_log_probs(x["hidden"], head, k, 1.0, chunk_tokens=4)
    got = _computed(x, Distilled(teacher or TeacherStates(head, x["hidden"]), beta, 1.0), shard, 3)
    for value in got:
        assert value.abs().max() < 1e-6


def test_vocabularies_padded_to_other_sizes() -> None:
    """Ids that the teacher does not have count on neither side."""
    x = _inputs()
    fewer = VOCAB - 4
    shard = VocabShard.of(ALONE, VOCAB, VOCAB)
    head = TeacherHead(x["matrix"][:fewer], VocabShard.of(ALONE, fewer, fewer), None).aligned(shard)
    x["labels"] %= fewer
    got = _computed(x, Distilled(TeacherStates(head, x["states"]), 0.5, 1.0), shard, 3)
    less = x | {"weight": x["weight"][:fewer], "matrix": x["matrix"][:fewer]}
    value, by_hidden, by_weight = _expected(less, 0.5, 1.0, 1.0, None)
    padded = torch.nn.functional.pad(by_weight, (0, 0, 0, VOCAB - fewer))
    _close(got, (value, by_hidden, padded))


def test_likeliest_tokens_of_a_larger_vocabulary() -> None:
    """What the model has no id for counts among the others; with all kept it is the full divergence."""
    x, more = _inputs(), torch.randn(5, TEACHER, generator=torch.Generator().manual_seed(2))
    shard = VocabShard.of(ALONE, VOCAB, VOCAB)
    larger = torch.cat([x["matrix"], more])
    head = TeacherHead(larger, VocabShard.of(ALONE, VOCAB + 5, VOCAB + 5), None)
    for k in (3, VOCAB + 5):
        top = top_log_probs(x["states"], head, k, 1.0, chunk_tokens=4)
        value, by_hidden, _ = _computed(x, Distilled(top, 0.0, 1.0), shard, 3)
        p = (x["states"].double() @ larger.double().t()).softmax(1)
        q = (x["hidden"].double() @ x["weight"].double().t()).softmax(1)
        kept = p.topk(k).indices
        known = torch.zeros_like(p, dtype=torch.bool).scatter_(1, kept, True)[:, :VOCAB]
        inside = torch.where(known, p[:, :VOCAB] * (p[:, :VOCAB] / q).log(), 0.0).sum(1)
        rest_p = 1 - torch.where(known, p[:, :VOCAB], 0.0).sum(1)
        rest_q = torch.where(known, 0.0, q).sum(1)
        if k == 3:
            inside += rest_p * (rest_p / rest_q).log()
        torch.testing.assert_close(value.double(), (inside * x["weights"]).sum(), rtol=1e-6, atol=1e-6)
        assert by_hidden.isfinite().all()


def _cut(rank: int, world_size: int) -> None:
    from smp.config import Layout
    from smp.parallel.context import build_context

    group = Group.of(build_context(Layout(tp=world_size), "cpu").tp)
    x, rows = _inputs(), 40  # padded: 61 ids in two times 40 rows
    for name in ("weight", "matrix"):
        x[name] = torch.nn.functional.pad(x[name], (0, 0, 0, rows * world_size - VOCAB))
    shard = VocabShard.of(group, rows, VOCAB)
    own = slice(rank * rows, (rank + 1) * rows)
    head = TeacherHead(x["matrix"][own], shard, None).aligned(shard)
    sources: list[tuple[TeacherStates | TopLogits, int]] = [(TeacherStates(head, x["states"]), VOCAB)]
    sources += [(top_log_probs(x["states"], head, k, 0.7, chunk_tokens=4), k) for k in (5, 50, VOCAB)]
    for beta in (0.0, 0.5, 1.0):
        for source, k in sources:
            value, by_hidden, by_weight = _computed(x, Distilled(source, beta, 0.7, 0.8), shard, 3)
            torch.distributed.all_reduce(by_hidden)  # each rank has its columns' part
            whole = _expected(_inputs(), beta, 0.7, 0.8, None, k)
            mine = torch.nn.functional.pad(whole[2], (0, 0, 0, rows * world_size - VOCAB))[own]
            _close((value, by_hidden, by_weight), (*whole[:2], mine))


def test_vocabulary_cut_over_ranks() -> None:
    run_distributed(_cut, 2)
