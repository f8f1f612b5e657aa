"""Documents packed into one sequence train like the same documents in sequences of their own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from tests.fake_group import fake_context
from tests.layers.whole import load_all
from tests.models.test_gpt import GPT2, LLAMA, build, draw_tokens

LENGTHS = (5, 1, 6, 4)
FACTORS = " ".join(str(1 + n) for n in range(LLAMA.rotary_channels // 2))
LONG = replace(LLAMA, use_rope_scaling=True, rope_scaling_type="longrope", rope_original_max_position=5)
MODELS = {
    "rope": LLAMA,
    "learned positions": GPT2,
    "window": replace(LLAMA, window_size=3),
    "chunks": replace(LLAMA, attention_chunk_size=4, no_rope_freq="2", attn_temperature_tuning=True, floor_scale=2),
    "LongRoPE": replace(LONG, longrope_short_factor=FACTORS.replace("1", "2"), longrope_long_factor=FACTORS),
    "dynamic NTK": replace(LONG, rope_scaling_type="dynamic", rope_scaling_factor=3.0),
    "recurrence": replace(
        LLAMA,
        **{"linear_attention_type": "gated_delta_net", "linear_attention_freq": "2", "norm_epsilon": 1e-2},
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 5,
        },
    ),
    "recurrence whose channels fade apart": replace(
        LLAMA,
        **{"linear_attention_type": "kda", "linear_attention_freq": "2", "norm_epsilon": 1e-2},
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 6, "linear_value_head_dim": 6},
    ),
    "Mamba-2 alone in a layer": replace(
        LLAMA,
        **{"hybrid_layer_pattern": "M*-", "num_layers": 3, "norm_epsilon": 1e-2, "mamba_num_heads": 4},
        **{"mamba_num_groups": 2, "mamba_head_dim": 6, "mamba_state_dim": 5},
    ),
    "query and key norms": replace(LLAMA, qk_layernorm=True, num_query_groups=1),
}


def gradients(model: GPT, batches: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the losses of all tokens, and its gradients."""
    model.zero_grad()
    total = 0.0
    for micro_batch in batches:
        loss = model(micro_batch).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_separate(name: str) -> None:
    rows = [draw_tokens(length + 1, seed=length) for length in LENGTHS]
    separate = [MicroBatch(row[None, :-1], row[None, 1:], torch.ones(1, len(row) - 1)) for row in rows]
    tokens, labels = (torch.cat([getattr(b, name) for b in separate], dim=1) for name in ("input_ids", "labels"))
    lengths = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))[None]
    whole = MicroBatch(tokens, labels, torch.ones(tokens.shape), sequence_lengths=lengths)
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with fake_context() as context:
        model = build(context, MODELS[name])
        load_all(model, scale=0.2)  # of a trained model's size: larger ones amplify roundings, differently on each CPU
        expected_loss, expected = gradients(model, separate)
        loss, found = gradients(model, [replace(whole, document_ids=documents, position_ids=positions)])
        unmasked, _ = gradients(model, [replace(whole, position_ids=positions)])
        uncounted, _ = gradients(model, [replace(whole, document_ids=documents)])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for parameter, gradient in expected.items():
        layer = [g.norm().item() for other, g in expected.items() if other.split(".")[:2] == parameter.split(".")[:2]]
        assert (found[parameter] - gradient).norm() <= 1e-6 * math.hypot(*layer), parameter
    assert unmasked != pytest.approx(expected_loss, rel=1e-4)
    # rotations are relative: within a document it does not matter where it begins, learned positions are absolute
    relative = MODELS[name].position_embedding_type == "rope"
    assert (uncounted == pytest.approx(expected_loss, rel=1e-5)) is relative
