"""Documents and windows as spans for FlashAttention's variable-length kernel: the same model as with a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.utils import _to_kwargs

from smp.config import ParallelConfig
from smp.data.loader import RankBatch
from smp.kernels import TORCH, Kernels
from smp.kernels.attention_cores.varlen import VarlenAttention
from smp.kernels.token_layout import TokenLayout
from smp.layers.attention import SelfAttention
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.sharding.parallelize import parallelize
from smp.training.micro_batches import token_micro_batch
from tests.fake_group import fake_context
from tests.layers.whole import draw, error, load_all
from tests.models.test_gpt import LLAMA, draw_tokens
from tests.plain_varlen import plain_varlen

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
MODEL = replace(LLAMA, init_method_std=0.3)
KERNELS = {False: TORCH, True: Kernels(attention=VarlenAttention())}
"""Whether documents are spans for the variable-length kernel."""


def test_fsdp_leaves_documents_on_the_host() -> None:
    """On a GPU its root moves every tensor among the arguments of a model, by this function of torch's."""
    tokens = torch.zeros(1, 2, 10, dtype=torch.long)
    batch = RankBatch(tokens, tokens, tokens[..., 0], document_ids=DOCUMENTS[None])
    ((moved, micro_batch),), _ = _to_kwargs(
        (tokens, token_micro_batch(batch, 0, 20, CPU)), {}, torch.device("meta"), False
    )
    assert moved.is_meta and torch.equal(micro_batch.document_ids, DOCUMENTS)


def loss_and_gradients(
    context: Any, config: Any, documents: torch.Tensor | None, *, spans: bool, parallel: ParallelConfig | None = None
) -> dict[str, torch.Tensor]:
    model = GPT(config, context.tp, seed=1, device="cpu", kernels=KERNELS[spans])
    load_all(model)
    if parallel is not None:
        parallelize(model, context, parallel)
    tokens = draw_tokens(2, 10)
    loss = model(MicroBatch(tokens, draw_tokens(2, 10, seed=1), torch.rand(2, 10), document_ids=documents)).loss
    loss.backward()
    grads = {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **{name: g.clone() for name, g in grads.items() if g is not None}}


@pytest.mark.parametrize(
    ("hidden", "documents", "spans"),
    [
        ({}, DOCUMENTS, 8),
        ({"window_size": 3}, DOCUMENTS, 8),
        ({"window_size": 3}, None, 2),
        ({"attention_chunk_size": 3}, DOCUMENTS, 16),  # 5 documents are 9 chunks, their number a power of two
        ({"attention_chunk_size": 4}, None, 8),
    ],
)
def test_spans_equal_a_mask(hidden: dict[str, int], documents: torch.Tensor | None, spans: int) -> None:
    config = replace(MODEL, **hidden)
    with fake_context() as context, plain_varlen() as calls:
        torch.manual_seed(0)
        masked = loss_and_gradients(context, config, documents, spans=False)
        assert calls == []
        torch.manual_seed(0)
        found = loss_and_gradients(context, config, documents, spans=True)
    assert calls == [spans] * config.num_layers
    assert {name: e for name, want in masked.items() if not (e := error(found[name], want)) < 2e-6} == {}
    torch.manual_seed(0)
    with fake_context() as context:
        plain = loss_and_gradients(context, MODEL, None, spans=True)
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
    with fake_context() as context, plain_varlen() as calls:
        torch.manual_seed(0)
        want = loss_and_gradients(context, MODEL, DOCUMENTS, spans=True)
        calls.clear()
        torch.manual_seed(0)
        found = loss_and_gradients(context, MODEL, DOCUMENTS, spans=True, parallel=parallel)
    replayed = 2 if parallel.recompute_granularity == "full" else 1
    assert calls == [8] * MODEL.num_layers * replayed
    assert {name: e for name, w in want.items() if not (e := error(found[name], w)) < 2e-6} == {}


def test_rows_of_padding_stay_outside_of_spans() -> None:
    """Sequence parallelism pads tokens to what the ranks share evenly: 23 rows for 20 tokens, of 4 + 2 heads."""
    results = {}
    with fake_context() as context, plain_varlen():
        for spans, kernels in KERNELS.items():
            layer = SelfAttention(16, 4, context.tp, num_groups=2, head_dim=8, kernels=kernels)
            load_all(layer)
            x = draw(23, 16, seed=0).requires_grad_()
            layout = TokenLayout(2, 10, padding=3, document_ids=DOCUMENTS)
            y = layer(x, kernels.attention.prepare(layout, [layer.spec], torch.float32, CPU))
            results[spans] = [y.detach(), *torch.autograd.grad(y.square().sum(), x)]
    assert not results[True][0][20:].any() and not results[True][1][20:].any()
    for got, want in zip(results[True], results[False], strict=True):
        assert error(got, want) < 2e-6
