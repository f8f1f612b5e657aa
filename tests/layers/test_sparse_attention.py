"""DeepSeek's sparse attention against transformers' in fp64 and dense attention, its kernels against autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from smp.kernels.sparse_attention import blocks
from smp.kernels.sparse_attention.blocks import Pairs
from smp.kernels.sparse_attention.indexer import best, choose_keys, chosen_loss_op, dense_loss_op, scores_of
from smp.kernels.sparse_attention.selected import head_sums_op, masked
from smp.kernels.token_layout import TokenLayout
from smp.layers.indexer import LOSS_WEIGHTS, SeenKeysNeed
from smp.layers.latent_attention import LatentAttention
from smp.layers.sparse_attention import IndexerOptions, SparseLatentAttention, _Selected
from smp.layers.token_needs import RopeTable
from tests.fake_group import fake_context
from tests.layers.whole import draw, error, gradient, leaf, load_all

HIDDEN, HEADS, BATCH, LENGTH = 20, 4, 2, 17
TOKENS = BATCH * LENGTH
TABLE = RopeTable(100.0, 6)
SIZES: dict[str, Any] = {"kv_lora_rank": 10, "q_lora_rank": 14, "qk_head_dim": 8, "rope_dim": 6, "v_head_dim": 7}
SIZES |= {"norm_eps": 1e-6, "rope": TABLE.key, "needs": (TABLE,)}
INDEXER: dict[str, Any] = {"heads": 12, "head_dim": 8}


def layout_of(documents: torch.Tensor | None = None, weights: torch.Tensor | None = None, padding: int = 0) -> Any:
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    if documents is not None:
        positions = torch.stack([torch.arange(LENGTH) - (row[:, None] > row).sum(1) for row in documents])
    positions = torch.nn.functional.pad(positions.flatten(), (0, padding))
    layout = TokenLayout(BATCH, LENGTH, padding, position_ids=positions, document_ids=documents)
    made = {need.key: need.prepare(layout, lambda: torch.zeros(0)) for need in (TABLE, SeenKeysNeed())}
    made = {key: tuple(t.double() for t in x) if key == TABLE.key else x for key, x in made.items()}
    made |= {} if weights is None else {LOSS_WEIGHTS: weights}
    return replace(layout, prepared=made)


def sparse(context: Any, topk: int, **options: Any) -> SparseLatentAttention:
    options = INDEXER | {"topk": topk} | options
    module = SparseLatentAttention(HIDDEN, HEADS, context, indexer=IndexerOptions(**options), **SIZES).double()
    load_all(module, seed=3)
    return module


NAMES = {
    "query_down": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "key_value_down": "kv_a_proj_with_mqa",
    "key_value_norm": "kv_a_layernorm",
    "key_value_up": "kv_b_proj",
    "output": "o_proj",
    "indexer.queries": "indexer.wq_b",
    "indexer.keys": "indexer.wk",
    "indexer.weights": "indexer.weights_proj",
    "indexer.key_norm": "indexer.k_norm",
}


def theirs(kind: str, topk: int) -> tuple[Any, Any, Any]:
    modeling = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    import transformers

    name = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[kind]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=1,
        **{"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 7},
        **{"index_topk": topk, "index_n_heads": 12, "index_head_dim": 8, "rms_norm_eps": 1e-6},
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    config._attn_implementation = "eager"
    return getattr(modeling, f"{name}Attention")(config, 0).double(), config, modeling


def their_output(module: Any, x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = torch.arange(LENGTH)[:, None].double() * 100.0 ** (-torch.arange(0, 6, 2).double() / 6)
    angles = torch.cat((half, half), -1)[None].expand(BATCH, -1, -1)
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill_(
        torch.ones(LENGTH, LENGTH).triu(1).bool(), torch.finfo(torch.float64).min
    )
    found = module(x.view(BATCH, LENGTH, HIDDEN), (angles.cos(), angles.sin()), mask.expand(BATCH, -1, -1, -1))
    return found[0].flatten(0, 1)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("topk", [5, 17])
def test_it_is_transformers_sparse_attention(kind: str, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient of a language loss, in fp64: theirs casts to fp32 inside, which is left out here."""
    module, _, _ = theirs(kind, topk)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    interleaved = kind == "glm_moe_dsa"
    with fake_context() as context:
        mixer = sparse(context, topk, interleaved=interleaved)
        own = {name: p.to_local() for name, p in mixer.named_parameters()}  # type: ignore[attr-defined]
        named = {name: (name.rpartition(".")[0], name.rpartition(".")[2]) for name in own}
        module.load_state_dict({f"{NAMES[m]}.{last}": own[name] for name, (m, last) in named.items()})
        x, target = leaf(draw(TOKENS, HIDDEN, seed=1).double()), draw(TOKENS, HIDDEN, seed=2).double()
        y, loss = mixer(x, layout_of())
        assert loss is None
        y.backward(target)
        their_x = leaf(x.detach())
        their_y = their_output(module, their_x, interleaved)
        their_y.backward(target)
        assert error(y, their_y) <= 1e-9 and x.grad is not None and error(x.grad, their_x.grad) <= 1e-9
        found = {f"{NAMES[m]}.{last}": p.grad for (m, last), p in zip(named.values(), mixer.parameters(), strict=True)}
        for name, parameter in module.named_parameters():
            if name.startswith("indexer."):
                assert found[name] is None and parameter.grad is None, f"the language loss moves {name}"
                continue
            got = gradient(dict(zip(found, mixer.parameters(), strict=True))[name])
            assert error(got, parameter.grad) <= 1e-9, name
            assert got.norm() > 1e-6, f"{name} says nothing"


def test_with_as_many_keys_as_tokens_it_is_latent_attention() -> None:
    """To the bit, in the warm-up and where nothing is left out."""
    with fake_context() as context:
        for options in ({"topk": LENGTH}, {"topk": 3, "stage": "warm-up"}):
            mixer = sparse(context, **options)
            plain = LatentAttention(HIDDEN, HEADS, context, **SIZES).double()
            plain.load_state_dict({n: p for n, p in mixer.state_dict().items() if "indexer" not in n})
            x = draw(TOKENS, HIDDEN, seed=1).double()
            assert torch.equal(mixer(x, layout_of())[0], plain(x, layout_of()))


@pytest.mark.parametrize("stage", ["sparse loss", "dense loss", "warm-up"])
def test_packed_documents_are_separate_ones(stage: str) -> None:
    """Outputs, and the loss of the indexer, which is a sum over tokens."""
    ends = ((0, 3), (3, 4), (4, 17))
    documents = torch.tensor([[0] * 3 + [1] + [2] * 13, [0] * 17])
    weights = draw(TOKENS, seed=5).abs()
    with fake_context() as context:
        mixer = sparse(context, 4, stage=stage)
        x = draw(TOKENS, HIDDEN, seed=1).double()
        packed, whole = mixer(x, layout_of(documents, weights))
        parts = []
        for start, end in (*ends, (17, 34)):
            row = TokenLayout(1, end - start, position_ids=torch.arange(end - start))
            made = {need.key: need.prepare(row, lambda: torch.zeros(0)) for need in (TABLE, SeenKeysNeed())}
            made[TABLE.key] = tuple(t.double() for t in made[TABLE.key])
            alone = TokenLayout(1, end - start, prepared={**made, LOSS_WEIGHTS: weights[start:end]})
            y, loss = mixer(x[start:end], alone)
            assert error(packed[start:end], y) <= 1e-12
            parts.append(loss)
        assert abs(whole - sum(parts)) <= 1e-6 * abs(whole) and whole > 1e-3  # the sums are handed on in fp32


def index_of(seed: int = 0, heads: int = 3, rows: int = TOKENS) -> tuple[torch.Tensor, ...]:
    shapes: tuple[tuple[int, ...], ...] = (rows, heads, 4), (rows, 4), (rows, heads)
    return tuple(leaf(draw(*shape, seed=seed + i).double()) for i, shape in enumerate(shapes))


def causal() -> tuple[torch.Tensor, torch.Tensor, Pairs]:
    seen = layout_of().prepared[SeenKeysNeed().key]
    return seen.first, seen.last, seen.pairs


@pytest.mark.parametrize("size", [64 * 2**20, 600])
def test_attention_to_chosen_keys_is_attention_by_a_mask(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of any size; with a last row that sees nothing, as padding."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
    q, k, w = index_of()
    first, last, pairs = causal()
    indices, counts = choose_keys(q, k, w, first, last, 5, pairs)
    assert counts.tolist() == [min(i + 1, 5) for i in range(LENGTH)] * BATCH
    queries, table = leaf(draw(TOKENS, 2, 9, seed=7).double()), leaf(draw(TOKENS, 9, seed=8).double())
    target = draw(TOKENS, 2, 6, seed=9).double()
    results = []
    for run in (_Selected.apply, masked):
        out, sums = run(queries, table, indices, counts, 0.7, 6)
        results.append((out, sums, *torch.autograd.grad(out, (queries, table), target)))
    for got, want in zip(*results, strict=True):
        assert error(got, want) <= 1e-12
    blind = torch.zeros_like(counts)
    out, sums = _Selected.apply(queries, table, indices, blind, 0.7, 6)
    assert not out.any() and not sums.any()


@pytest.mark.parametrize("size", [64 * 2**20, 600])
def test_the_loss_is_the_divergence_and_its_gradients_autograds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", size)
    q, k, w = index_of()
    first, last, pairs = causal()
    indices, counts = choose_keys(q, k, w, first, last, 5, pairs)
    weights = draw(TOKENS, seed=4).abs().double()
    number = torch.arange(TOKENS)
    seen = (number >= first[:, None]) & (number <= last[:, None])
    kept = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for row in range(TOKENS):
        kept[row, indices[row, : counts[row]].long()] = True
    where = pairs.batch, pairs.length, pairs.keys, pairs.start, pairs.aligned
    table, queries = draw(TOKENS, 9, seed=8).double(), draw(TOKENS, 2, 9, seed=7).double()
    for visible in (seen, kept):
        logits = (queries @ table.t() * 0.7).masked_fill(~visible[:, None], -torch.inf)
        sums = logits.softmax(-1).sum(1)
        target = sums / 2
        scores = scores_of(q, k, w)[0].masked_fill(~visible, -torch.inf)
        kl = (torch.xlogy(target, target) - torch.where(visible, target * scores.log_softmax(-1), 0.0)).sum(-1)
        want = torch.autograd.grad((kl * weights).sum(), (q, k, w))
        if visible is seen:
            turn = torch.linalg.qr(draw(6, 6, seed=6).double())[0][:, None].expand(-1, 2, -1)  # there and back
            plain = torch.einsum("thr,rhd->thd", queries[..., :6], turn)
            found = head_sums_op(plain, queries[..., 6:], turn, table, first, last, 0.7, *where)
            own = torch.stack([sums[row, row // LENGTH * LENGTH :][:LENGTH] for row in range(TOKENS)])
            assert error(found, own) <= 1e-12
            loss, *got = dense_loss_op(q.detach(), k.detach(), w.detach(), first, last, own / 2, weights, *where)
        else:
            beside = target.gather(1, indices.long()) * (torch.arange(5) < counts[:, None])
            loss, *got = chosen_loss_op(q.detach(), k.detach(), w.detach(), indices, counts, beside, weights)
        assert abs(loss - (kl * weights).sum()) <= 1e-12
        for gradient_of, wanted in zip(got, want, strict=True):
            assert error(gradient_of, wanted) <= 1e-9 and wanted.norm() > 1e-3


def test_of_equal_scores_the_nearest_keys_count() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, -1.0, 0.0], [-1.0, -1.0, -1.0, 9.0, 9.0, 9.0]])
    seen = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]).bool()
    assert best(scores, seen, 3).tolist() == [[False, True, True, True, False, False], [True] * 3 + [False] * 3]


def test_the_language_loss_and_the_indexers_do_not_meet() -> None:
    """The indexer's loss has no gradient by the layer's input or the model, and falls along its own."""
    weights = torch.full((TOKENS,), 1 / TOKENS)
    with fake_context() as context:
        for stage in ("warm-up", "dense loss", "sparse loss"):
            mixer = sparse(context, 5, stage=stage)
            x = leaf(draw(TOKENS, HIDDEN, seed=1).double())
            before = mixer(x, layout_of(weights=weights))[1]
            before.backward()
            moved = {name for name, p in mixer.named_parameters() if p.grad is not None}
            assert x.grad is None and moved == {n for n, _ in mixer.named_parameters() if n.startswith("indexer.")}
            with torch.no_grad():
                for parameter in mixer.indexer.parameters():
                    parameter -= 0.01 * parameter.grad  # type: ignore[operator]
            mixer.requires_grad_(True)
            assert mixer(x, layout_of(weights=weights))[1] < before
            mixer.indexer.requires_grad_(False)
            assert mixer(x, layout_of(weights=weights))[1] is None
