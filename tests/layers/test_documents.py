"""Documents and windows as spans for FlashAttention's variable-length kernel: the same model as with a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from smp.config import Layout, ParallelConfig
from smp.layers.documents import Spans
from smp.models.gpt import GPT
from smp.sharding.parallelize import parallelize
from tests.fake_group import fake_mesh
from tests.layers.whole import error, load_all
from tests.models.test_gpt import LLAMA, draw_tokens
from tests.plain_varlen import plain_varlen

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
MODEL = replace(LLAMA, init_method_std=0.3)


def test_spans_say_where_documents_begin() -> None:
    spans = Spans.of(DOCUMENTS, 3, CPU)
    assert spans.starts.tolist() == [0, 3, 5, 6, 8, 10, 20, 20, 20] and spans.starts.dtype == torch.int32
    assert spans.longest == 10 and spans.window == (2, 0)  # the next power of two is more than a sequence has
    short = Spans.of(DOCUMENTS[:1], None, CPU)
    assert short.longest == 4 and short.window == (-1, 0) and len(short.starts) == 8 + 1
    with pytest.raises(ValueError, match="not next to each other"):
        Spans.of(torch.tensor([[0, 1, 0]]), None, CPU)
    with pytest.raises(ValueError, match="documents are on meta"):
        Spans.of(DOCUMENTS.to("meta"), None, CPU)


def loss_and_gradients(
    mesh: Any, config: Any, documents: torch.Tensor | None, *, spans: bool, parallel: ParallelConfig | None = None
) -> dict[str, torch.Tensor]:
    sequence_parallel = parallel is not None and parallel.sequence_parallel
    model = GPT(config, mesh["tp"], sequence_parallel=sequence_parallel, seed=1, device="cpu", spans=spans)
    load_all(model)
    if parallel is not None:
        parallelize(model, mesh, parallel)
    tokens = draw_tokens(2, 10)
    loss = model(tokens, draw_tokens(2, 10, seed=1), torch.rand(2, 10), None, documents)
    loss.backward()
    grads = {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **{name: g.clone() for name, g in grads.items() if g is not None}}


@pytest.mark.parametrize(("window", "documents"), [(None, DOCUMENTS), (3, DOCUMENTS), (3, None)])
def test_spans_equal_a_mask(window: int | None, documents: torch.Tensor | None) -> None:
    config = replace(MODEL, window_size=window)
    with fake_mesh() as mesh, plain_varlen() as calls:
        torch.manual_seed(0)
        masked = loss_and_gradients(mesh, config, documents, spans=False)
        assert calls == []
        torch.manual_seed(0)
        found = loss_and_gradients(mesh, config, documents, spans=True)
    assert calls == [2 if documents is None else 8] * config.num_layers
    assert {name: e for name, want in masked.items() if not (e := error(found[name], want)) < 2e-6} == {}
    torch.manual_seed(0)
    with fake_mesh() as mesh:
        plain = loss_and_gradients(mesh, MODEL, None, spans=True)
    assert abs(plain["loss"] - found["loss"]) > 1e-3  # without documents and window it is another model


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(recompute_granularity="selective"),
        ParallelConfig(recompute_granularity="full"),
        ParallelConfig(compile=True),
        ParallelConfig(compile=True, recompute_granularity="selective"),
    ],
)
def test_spans_go_with_recompute_and_the_compiler(parallel: ParallelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective recompute keeps what attention returned: one forward pass of it per layer."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **options: compiler(*a, **options, backend="aot_eager"))
    torch._dynamo.reset()
    with fake_mesh() as mesh, plain_varlen() as calls:
        torch.manual_seed(0)
        want = loss_and_gradients(mesh, MODEL, DOCUMENTS, spans=True)
        calls.clear()
        torch.manual_seed(0)
        found = loss_and_gradients(mesh, MODEL, DOCUMENTS, spans=True, parallel=parallel)
    replayed = 2 if parallel.recompute_granularity == "full" else 1
    assert calls == [8] * MODEL.num_layers * replayed
    assert {name: e for name, w in want.items() if not (e := error(found[name], w)) < 2e-6} == {}


def test_padding_of_sequence_parallelism_stays_outside_of_spans() -> None:
    """Three ranks get 21 rows for 20 tokens; the rank's own part of the work is the same with a mask."""
    config = replace(MODEL, num_attention_heads=3, num_query_groups=3, ffn_hidden_size=24)
    parts = {}
    for spans in (False, True):
        with fake_mesh(Layout(tp=3), rank=2) as mesh, plain_varlen():
            torch.manual_seed(0)
            parallel = ParallelConfig(3, sequence_parallel=True)
            parts[spans] = loss_and_gradients(mesh, config, DOCUMENTS, spans=spans, parallel=parallel)
    assert {name: e for name, w in parts[False].items() if not (e := error(parts[True][name], w)) < 2e-6} == {}


def test_spans_are_not_for_dropout_of_attention() -> None:
    with fake_mesh() as mesh, pytest.raises(ValueError, match="attention dropout needs a mask"):
        GPT(replace(MODEL, attention_dropout=0.1), mesh["tp"], spans=True)
