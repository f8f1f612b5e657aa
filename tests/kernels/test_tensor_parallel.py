"""Fused kernels under tensor and sequence parallelism, in Triton's interpreter, beside PyTorch's own operations."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from smp.config import Layout, ModelConfig
from smp.kernels import TORCH, Kernels
from tests.distributed import run_distributed
from tests.kernels.interpreter import needs_interpreter

FUSED = Kernels(cross_entropy="triton", norm="triton", swiglu="triton", rope="triton")
SIZES = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
MODEL = ModelConfig(**SIZES, kv_channels=4, vocab_size=50, make_vocab_size_divisible_by=4, init_method_std=0.3)  # type: ignore[arg-type]


def gradients(mesh: Any, kernels: Kernels, sp: bool) -> dict[str, torch.Tensor]:
    """Loss and gradients of a model on tokens whose number two ranks do not divide, one of which does not count."""
    from smp.layers import init_weights
    from smp.models.gpt import GPT
    from smp.models.micro_batch import MicroBatch
    from smp.parallel.context import ParallelContext

    model = GPT(MODEL, ParallelContext.of(mesh, sequence_parallel=sp), device="cpu", kernels=kernels)
    init_weights(model, seed=0)
    tokens = torch.arange(7).view(1, 7) * 7
    weights = torch.full((1, 7), 1 / 6)
    weights[0, 2] = 0.0
    loss = model(MicroBatch(tokens, (tokens + 11) % 50, weights)).loss
    loss.backward()
    out = {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    return out | {"loss": loss.detach()}


def errors(rank: int, world: int) -> dict[str, float]:
    from smp.parallel.context import build_context

    assert "triton" not in sys.modules, "TRITON_INTERPRET counts when triton is imported"
    out = {}
    for tp, sp in ((1, False), (2, False), (2, True)):
        mesh = build_context(Layout(dp_replicate=world // tp, tp=tp), "cpu").tp
        fused, plain = gradients(mesh, FUSED, sp), gradients(mesh, TORCH, sp)
        assert fused.keys() == plain.keys() and len(plain) == 13
        for name, want in plain.items():
            out[f"tp {tp}{', sp' * sp}: {name}"] = ((fused[name] - want).norm() / want.norm()).item()
    return out


@needs_interpreter
def test_fused_layers_have_the_gradients_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for found in run_distributed(errors, 2, preloaded=False):
        assert len(found) == 3 * 13
        assert {name: e for name, e in found.items() if not e < 1e-5} == {}
