"""A block's parts agree, and its dropout is there or an error. (Its values are tested with the whole model.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.layers import MLP, RMSNorm, SelfAttention, SequenceInfo, TransformerBlock, init_weights
from tests.fake_group import fake_mesh
from tests.layers.whole import draw

HIDDEN, TOKENS = 8, 6
NUMBERS, KEYS = torch.arange(TOKENS), torch.arange(3)


def build(mesh: Any, *, hidden: float = 0.0, attention: float = 0.0, sp: bool = False) -> TransformerBlock:
    split: dict[str, Any] = {"sequence_parallel": sp}
    norms = [RMSNorm(HIDDEN, mesh, **split) for _ in range(2)]
    parts = SelfAttention(HIDDEN, 2, mesh, dropout=attention, init_std=1.0, **split), MLP(HIDDEN, 8, mesh, **split)
    block = TransformerBlock(*parts, *norms, dropout=hidden)
    init_weights(block, 0)
    return block


@pytest.mark.parametrize("site", ["hidden", "attention"])
def test_dropout_without_what_keys_it_is_an_error(site: str) -> None:
    rates: dict[str, Any] = {site: 0.5}
    with fake_mesh() as mesh, torch.no_grad():
        block, x = build(mesh["tp"], **rates), draw(TOKENS, HIDDEN, seed=0)
        plain, numbered = SequenceInfo(2, 3, TOKENS), SequenceInfo(2, 3, TOKENS, numbers=NUMBERS)
        for info, keys in ((plain, KEYS), (numbered, None), (plain, None)):
            with pytest.raises(ValueError, match=r"dropout needs keys and SequenceInfo\.numbers"):
                block(x, info, keys)
        dropped = block(x, numbered, KEYS)
        assert torch.equal(dropped, block(x, SequenceInfo(2, 3, TOKENS, numbers=NUMBERS, local_numbers=NUMBERS), KEYS))
        kept = block.eval()(x, plain)
        assert not torch.equal(dropped, kept)


def test_sequence_parallel_dropout_needs_the_numbers_of_this_ranks_tokens() -> None:
    with fake_mesh(Layout(tp=2)) as mesh, torch.no_grad():
        block, x = build(mesh["tp"], hidden=0.5, sp=True), draw(TOKENS // 2, HIDDEN, seed=0)
        with pytest.raises(ValueError, match="under sequence parallelism local_numbers"):
            block(x, SequenceInfo(2, 3, TOKENS, numbers=NUMBERS), KEYS)
        block(x, SequenceInfo(2, 3, TOKENS, numbers=NUMBERS, local_numbers=NUMBERS[:3]), KEYS)


def test_parts_that_split_the_tokens_differently_are_refused() -> None:
    with fake_mesh(Layout(tp=2)) as mesh:
        tp = mesh["tp"]
        for wrong in range(4):
            split: list[dict[str, Any]] = [{"sequence_parallel": i != wrong} for i in range(4)]
            parts = SelfAttention(HIDDEN, 2, tp, **split[0]), MLP(HIDDEN, 8, tp, **split[1])
            with pytest.raises(ValueError, match="differ in sequence_parallel"):
                TransformerBlock(*parts, RMSNorm(HIDDEN, tp, **split[2]), RMSNorm(HIDDEN, tp, **split[3]))
