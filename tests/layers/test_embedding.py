"""Embedding, learned positions and output layer with a split vocabulary, against whole tables."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from smp.config import Layout
from smp.layers import PositionEmbedding, VocabParallelEmbedding
from smp.layers.embedding import padded_vocab_size
from smp.layers.heads.head import VocabParallelHead
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.whole import beyond, draw, error, gradient, leaf, load, part

TOKENS, HIDDEN = 22, 6
VOCABULARIES = {16: 4, 13: 4, 5: 8}  # ids and what the rows per rank are padded to; of 5 the second rank holds padding


def draw_ids(vocab: int, *shape: int) -> torch.Tensor:
    """Every id occurs."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count, generator=torch.Generator().manual_seed(0)) % vocab).view(shape)


def pad_rows(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, like.shape[0] - x.shape[0]))


def embedding_errors(mesh: Any, vocab: int, sp: bool, lead: tuple[int, ...], dtype: torch.dtype) -> dict[str, float]:
    context = ParallelContext.of(mesh, sequence_parallel=sp)
    layer = VocabParallelEmbedding(vocab, HIDDEN, context, divisible_by=VOCABULARIES[vocab]).to(dtype)
    ids, w = draw_ids(vocab, TOKENS, *lead), leaf(draw(vocab, HIDDEN, seed=1, dtype=dtype))
    target = draw(TOKENS, *lead, HIDDEN, seed=2, dtype=dtype)
    load(layer.weight, w.detach())
    want = F.embedding(ids, w)
    want.backward(target)
    got = layer(ids)
    got.backward(part(target, mesh, split=sp))
    assert w.grad is not None
    dw = gradient(layer.weight)
    return {"y": error(got, part(want, mesh, split=sp)), "dw": error(dw, pad_rows(w.grad, dw))}


def position_errors(mesh: Any, sp: bool) -> dict[str, float]:
    layer = PositionEmbedding(9, HIDDEN, ParallelContext.of(mesh, sequence_parallel=sp))
    ids, w, target = draw_ids(7, TOKENS), leaf(draw(9, HIDDEN, seed=1)), draw(TOKENS, HIDDEN, seed=2)
    load(layer.weight, w.detach())
    want = F.embedding(ids, w)
    want.backward(target)
    got = layer(ids)
    got.backward(part(target, mesh, split=sp))
    return {"y": error(got, part(want, mesh, split=sp)), "dw": error(gradient(layer.weight), w.grad)}


def head_errors(mesh: Any, vocab: int, sp: bool, tied: bool) -> dict[str, float]:
    """The head's weighted loss, its gradients, and logits."""
    context, multiple = ParallelContext.of(mesh, sequence_parallel=sp), VOCABULARIES[vocab]
    table = VocabParallelEmbedding(vocab, HIDDEN, context, divisible_by=multiple)
    layer = VocabParallelHead(vocab, HIDDEN, context, tied=tied, divisible_by=multiple)
    assert (layer.weight is None) == tied
    weight = table.weight if layer.weight is None else layer.weight
    x, w = leaf(draw(TOKENS, HIDDEN, seed=3)), leaf(draw(vocab, HIDDEN, seed=1))
    labels, loss_weights = draw_ids(vocab, TOKENS), torch.arange(TOKENS) / 100.0  # the first counts 0
    load(weight, w.detach())
    want = (F.cross_entropy(x @ w.t(), labels, reduction="none") * loss_weights).sum()
    want.backward()
    mine = leaf(part(x, mesh, split=sp))
    got = layer(mine, labels, loss_weights, table.table() if tied else None).loss
    (1.0 * got).backward()
    assert x.grad is not None and w.grad is not None
    dw = gradient(weight)
    errors = {"loss": error(got, want), "dw": error(dw, pad_rows(w.grad, dw))}
    errors["dx"] = error(mine.grad, part(x.grad, mesh, split=sp))
    return errors | logits_errors(layer, mine, x, w, table.table if tied else None)


def logits_errors(layer: Any, mine: torch.Tensor, x: torch.Tensor, w: torch.Tensor, table: Any) -> dict[str, float]:
    """Logits on every rank, and the gradients of a loss of them that each rank computes alike."""
    exact, weight = leaf(x.detach().double()), leaf(w.detach().double())
    target = draw(TOKENS, len(w), seed=4)
    (exact @ weight.t()).backward(target.double())
    mine.grad = None
    tensor = layer.weight
    if tensor is not None:
        tensor.grad = None
    got = layer(mine, tied_weight=None if table is None else table()).logits
    got.backward(target)
    assert exact.grad is not None and weight.grad is not None
    split = layer.group.size if layer.sequence_parallel else 1
    rows = TOKENS // split
    first = layer.group.rank * rows if layer.sequence_parallel else 0
    errors = {"logits": error(got, (x @ w.t())), "logits: dx": error(mine.grad, exact.grad[first : first + rows])}
    if tensor is not None:
        dw = gradient(tensor)
        errors["logits: dw"] = error(dw, pad_rows(weight.grad, dw))
    return errors


def measure(rank: int, world: int) -> dict[str, float]:
    out = {}
    for tp, sp in itertools.product((1, 2), (False, True)):
        context, name = build_context(Layout(dp_replicate=world // tp, tp=tp), "cpu").tp, f"tp {tp}{', sp' * sp}"
        out |= {f"{name}, positions, {k}": e for k, e in position_errors(context, sp).items()}
        for vocab in VOCABULARIES:
            for lead, dtype in itertools.product(((), (3,)), (torch.float32, torch.bfloat16)):
                errors = embedding_errors(context, vocab, sp, lead, dtype)
                out |= {f"{name}, {vocab} ids, {len(lead)} more dims, {dtype}, {k}": e for k, e in errors.items()}
            for tied in (False, True):
                errors = head_errors(context, vocab, sp, tied)
                out |= {f"{name}, head of {vocab} ids, {'tied' if tied else 'own'}, {k}": e for k, e in errors.items()}
    return out


def test_values_losses_and_gradients_are_those_of_the_whole_table() -> None:
    for errors in run_distributed(measure, 2):
        rows = {name: e for name, e in errors.items() if name.endswith(", y")}
        assert len(rows) == 4 * (3 * 4 + 1)
        assert beyond(rows, 0.0) == {}  # one rank adds to zeros: exact in any precision
        assert beyond(errors, 1e-6) == {}


@given(st.integers(1, 10**6), st.integers(1, 256), st.integers(1, 16))
def test_padding_is_the_least_that_gives_every_rank_whole_multiples(vocab: int, multiple: int, tp: int) -> None:
    rows = padded_vocab_size(vocab, multiple, tp)
    assert rows % tp == 0
    assert rows // tp % multiple == 0
    assert vocab <= rows < vocab + multiple * tp


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("unknown", [-1, 5, 7, 8, 99])  # below, padding, the last padding, past it, far away
def test_an_unknown_id_is_an_error_in_every_layout(unknown: int, tp: int) -> None:
    for rank in range(tp):
        with fake_context(Layout(tp=tp), rank) as context, torch.no_grad():
            layer = VocabParallelEmbedding(5, HIDDEN, context.tp, divisible_by=8 // tp)
            layer(torch.arange(5))
            with pytest.raises(IndexError):
                layer(torch.tensor([0, unknown]))
