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
from smp.layers.head import VocabParallelHead
from smp.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.fake_group import fake_mesh
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
    options: dict[str, Any] = {"sequence_parallel": sp, "divisible_by": VOCABULARIES[vocab], "dtype": dtype}
    layer = VocabParallelEmbedding(vocab, HIDDEN, mesh, **options)
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
    layer = PositionEmbedding(9, HIDDEN, mesh, sequence_parallel=sp)
    ids, w, target = draw_ids(7, TOKENS), leaf(draw(9, HIDDEN, seed=1)), draw(TOKENS, HIDDEN, seed=2)
    load(layer.weight, w.detach())
    want = F.embedding(ids, w)
    want.backward(target)
    got = layer(ids)
    got.backward(part(target, mesh, split=sp))
    return {"y": error(got, part(want, mesh, split=sp)), "dw": error(gradient(layer.weight), w.grad)}


def head_errors(mesh: Any, vocab: int, sp: bool, tied: bool) -> dict[str, float]:
    """The head's weighted loss, its gradients, and logits."""
    options: dict[str, Any] = {"sequence_parallel": sp, "divisible_by": VOCABULARIES[vocab]}
    table = VocabParallelEmbedding(vocab, HIDDEN, mesh, **options)
    layer = VocabParallelHead(vocab, HIDDEN, mesh, tied=tied, **options)
    assert (layer.weight is None) == tied
    weight = table.weight if layer.weight is None else layer.weight
    x, w = leaf(draw(TOKENS, HIDDEN, seed=3)), leaf(draw(vocab, HIDDEN, seed=1))
    labels, token_weights = draw_ids(vocab, TOKENS), torch.arange(TOKENS) / 100.0  # the first counts 0
    load(weight, w.detach())
    want = (F.cross_entropy(x @ w.t(), labels, reduction="none") * token_weights).sum()
    want.backward()
    mine = leaf(part(x, mesh, split=sp))
    got = layer(mine, labels, token_weights, table.table() if tied else None)
    (1.0 * got).backward()
    assert x.grad is not None and w.grad is not None
    dw = gradient(weight)
    errors = {"loss": error(got, want), "dw": error(dw, pad_rows(w.grad, dw))}
    errors["dx"] = error(mine.grad, part(x.grad, mesh, split=sp))
    with torch.no_grad():
        errors["logits"] = error(layer(mine, tied_weight=table.table() if tied else None), x @ w.t())
    return errors


def measure(rank: int, world: int) -> dict[str, float]:
    out = {}
    for tp, sp in itertools.product((1, 2), (False, True)):
        mesh, name = build_mesh(Layout(dp_replicate=world // tp, tp=tp), "cpu")["tp"], f"tp {tp}{', sp' if sp else ''}"
        out |= {f"{name}, positions, {k}": e for k, e in position_errors(mesh, sp).items()}
        for vocab in VOCABULARIES:
            for lead, dtype in itertools.product(((), (3,)), (torch.float32, torch.bfloat16)):
                errors = embedding_errors(mesh, vocab, sp, lead, dtype)
                out |= {f"{name}, {vocab} ids, {len(lead)} more dims, {dtype}, {k}": e for k, e in errors.items()}
            for tied in (False, True):
                errors = head_errors(mesh, vocab, sp, tied)
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


def test_split_logits_have_no_gradient() -> None:
    with fake_mesh(Layout(tp=2)) as mesh:
        head = VocabParallelHead(5, HIDDEN, mesh["tp"], divisible_by=1)
        with pytest.raises(RuntimeError, match="logits of a tensor-parallel model have no gradient"):
            head(torch.zeros(2, HIDDEN))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("unknown", [-1, 5, 7, 8, 99])  # below, padding, the last padding, past it, far away
def test_an_unknown_id_is_an_error_in_every_layout(unknown: int, tp: int) -> None:
    for rank in range(tp):
        with fake_mesh(Layout(tp=tp), rank) as mesh, torch.no_grad():
            layer = VocabParallelEmbedding(5, HIDDEN, mesh["tp"], divisible_by=8 // tp)
            layer(torch.arange(5))
            with pytest.raises(IndexError):
                layer(torch.tensor([0, unknown]))
