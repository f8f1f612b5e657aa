"""Compiled code computes what uncompiled code does, with a gradient and without: evaluation runs the same blocks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from smp import layers
from smp.config import Layout, ModelConfig, ParallelConfig
from smp.models.gpt import GPT
from smp.parallel.context import build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.whole import draw, error
from tests.sharding.model import MODEL, build, loss_of

BACKEND = "aot_eager"  # traces and differentiates as the default does, and generates no code
GPT2 = replace(
    MODEL,
    normalization="LayerNorm",
    swiglu=False,
    disable_bias_linear=False,
    position_embedding_type="learned_absolute",
)
WIDTH, VOCAB, TOKENS = 16, 30, 12


def run(model: GPT) -> dict[str, torch.Tensor]:
    """Loss and gradients of training, then the loss of evaluation, and that of a frozen model in training mode."""
    out = {}
    loss = loss_of(model)
    loss.backward()
    out["loss"] = loss.detach()
    out |= {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    with torch.no_grad():
        out["without a gradient"] = loss_of(model)
        out["evaluation"] = loss_of(model.eval())
    out["frozen"] = loss_of(model.requires_grad_(False).train())
    return out


def compare_models(rank: int, world: int, config: ModelConfig, sp: bool) -> dict[str, float]:
    torch.compile = functools.partial(torch.compile, backend=BACKEND)  # type: ignore[assignment]
    context, parallel = build_context(Layout(tp=world), "cpu"), ParallelConfig(world, sequence_parallel=sp)
    plain, compiled = (run(build(context, config, replace(parallel, compile=c))) for c in (False, True))
    return {name: error(compiled[name], x) for name, x in plain.items()}


@pytest.mark.parametrize(
    ("config", "sp"), [(MODEL, True), pytest.param(GPT2, False, marks=pytest.mark.slow)], ids=["llama, sp", "gpt2"]
)
def test_a_compiled_model_trains_and_evaluates_like_an_uncompiled_one(config: ModelConfig, sp: bool) -> None:
    for errors in run_distributed(compare_models, 2, config, sp):
        assert {"loss", "evaluation", "frozen"} < errors.keys()
        assert {name: e for name, e in errors.items() if not e < 1e-6} == {}


def all_layers(mesh: Any, sp: bool) -> dict[str, tuple[Any, tuple[torch.Tensor, ...]]]:
    """A call of every public layer, alone."""
    context = layers.ParallelContext.of(mesh, sequence_parallel=sp)
    ids, x = torch.arange(TOKENS), draw(TOKENS // 2 if sp else TOKENS, WIDTH, seed=0)
    head = layers.VocabParallelHead(VOCAB, WIDTH, context, divisible_by=1)  # padded, torch refuses an out=
    shard, weights = head.shard, torch.ones(TOKENS)
    logits = draw(TOKENS, VOCAB // 2, seed=1).requires_grad_()
    calls: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        "embedding": (layers.VocabParallelEmbedding(VOCAB, WIDTH, context), (ids,)),
        "positions": (layers.PositionEmbedding(TOKENS, WIDTH, context), (ids,)),
        "RMSNorm": (layers.RMSNorm(WIDTH, context), (x,)),
        "LayerNorm": (layers.LayerNorm(WIDTH, context), (x,)),
        "column": (layers.ColumnParallelLinear(WIDTH, 8, context), (x,)),
        "shared column": (layers.ColumnParallelLinear(WIDTH, 8, context, parts=1), (x,)),
        "row": (layers.RowParallelLinear(WIDTH, 8, context), (draw(TOKENS, WIDTH // 2, seed=2),)),
        "MLP": (layers.MLP(WIDTH, 32, context), (x,)),
        "head": (head, (x, ids, weights)),
        "cross-entropy": (lambda z, y: layers.vocab_parallel_cross_entropy(z, y, shard), (logits, ids)),
    }
    for module, _ in calls.values():
        if isinstance(module, torch.nn.Module):
            layers.init_weights(module, 0)
    return calls


def tensor_of(output: Any) -> torch.Tensor:
    return output.loss if isinstance(output, layers.ModelOutput) else output


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_layer_compiles_as_one_graph_with_a_gradient_and_without(sp: bool) -> None:
    with fake_context(Layout(tp=2)) as context:
        for name, (layer, inputs) in all_layers(context.tp, sp).items():
            torch._dynamo.reset()
            compiled = torch.compile(layer, fullgraph=True, backend="eager")
            with torch.no_grad():
                assert not tensor_of(compiled(*inputs)).requires_grad, name
            tensor_of(compiled(*inputs)).sum().backward()
