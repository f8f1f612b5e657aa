"""Documents packed into one sequence train like the same documents in sequences of their own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from smp.models.gpt import GPT
from tests.fake_group import fake_mesh
from tests.models.test_gpt import GPT2, LLAMA, build, draw_tokens

LENGTHS = (5, 1, 6, 4)
MODELS = {
    "rope": LLAMA,
    "learned positions": GPT2,
    "window": replace(LLAMA, window_size=3),
    "query and key norms": replace(LLAMA, qk_layernorm=True, num_query_groups=1),
}


def gradients(model: GPT, batches: list[tuple[torch.Tensor, ...]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the losses of all tokens, and its gradients."""
    model.zero_grad()
    total = 0.0
    for tokens, labels, *packing in batches:
        loss = model(tokens, labels, torch.ones(tokens.shape), None, *packing)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_separate(name: str) -> None:
    rows = [draw_tokens(length + 1, seed=length) for length in LENGTHS]
    separate = [(row[None, :-1], row[None, 1:]) for row in rows]
    tokens, labels = (torch.cat([pair[i] for pair in separate], dim=1) for i in range(2))
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with fake_mesh() as mesh:
        model = build(mesh, MODELS[name])
        expected_loss, expected = gradients(model, separate)
        loss, found = gradients(model, [(tokens, labels, documents, positions)])
        unmasked, _ = gradients(model, [(tokens, labels, None, positions)])
        uncounted, _ = gradients(model, [(tokens, labels, documents, None)])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for parameter, gradient in expected.items():
        layer = [g.norm().item() for other, g in expected.items() if other.split(".")[:2] == parameter.split(".")[:2]]
        assert (found[parameter] - gradient).norm() <= 1e-6 * math.hypot(*layer), parameter
    assert unmasked != pytest.approx(expected_loss, rel=1e-4)
    # rotations are relative: within a document it does not matter where it begins, learned positions are absolute
    relative = MODELS[name].position_embedding_type == "rope"
    assert (uncounted == pytest.approx(expected_loss, rel=1e-5)) is relative
