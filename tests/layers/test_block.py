"""A block's parts agree, and its dropout is there or an error. (Its values are tested with the whole model.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.layers import MLP, AttentionSpec, RMSNorm, SelfAttention, TokenLayout, TransformerBlock, init_weights
from smp.parallel.context import ParallelContext
from tests.fake_group import fake_context
from tests.layers.whole import draw

HIDDEN, TOKENS = 8, 6
NUMBERS, KEYS = torch.arange(TOKENS), torch.arange(3)


def build(mesh: Any, *, hidden: float = 0.0, attention: float = 0.0, sp: bool = False) -> TransformerBlock:
    context = ParallelContext.of(mesh, sequence_parallel=sp)
    norms = [RMSNorm(HIDDEN, context) for _ in range(2)]
    spec = AttentionSpec(dropout=attention)
    parts = SelfAttention(HIDDEN, 2, context, spec=spec, init_std=1.0), MLP(HIDDEN, 8, context)
    block = TransformerBlock(*parts, *norms, dropout=hidden)
    init_weights(block, 0)
    return block


@pytest.mark.parametrize("site", ["hidden", "attention"])
def test_dropout_without_what_keys_it_is_an_error(site: str) -> None:
    rates: dict[str, Any] = {site: 0.5}
    with fake_context() as context, torch.no_grad():
        block, x = build(context.tp, **rates), draw(TOKENS, HIDDEN, seed=0)
        plain, numbered = TokenLayout(2, 3), TokenLayout(2, 3, TOKENS - 6, token_index=NUMBERS)
        for layout, keys in ((plain, KEYS), (numbered, None), (plain, None)):
            with pytest.raises(ValueError, match=r"dropout needs keys and TokenLayout\.token_index"):
                block(x, layout, keys)
        dropped = block(x, numbered, KEYS)
        assert torch.equal(dropped, block(x, TokenLayout(2, 3, token_index=NUMBERS, local_token_index=NUMBERS), KEYS))
        kept = block.eval()(x, plain)
        assert not torch.equal(dropped, kept)


def test_sequence_parallel_dropout_needs_the_numbers_of_this_ranks_tokens() -> None:
    with fake_context(Layout(tp=2)) as context, torch.no_grad():
        block, x = build(context.tp, hidden=0.5, sp=True), draw(TOKENS // 2, HIDDEN, seed=0)
        with pytest.raises(ValueError, match="under sequence parallelism local_token_index"):
            block(x, TokenLayout(2, 3, token_index=NUMBERS), KEYS)
        block(x, TokenLayout(2, 3, token_index=NUMBERS, local_token_index=NUMBERS[:3]), KEYS)


def test_parts_that_split_the_tokens_differently_are_refused() -> None:
    with fake_context(Layout(tp=2)) as context:
        for wrong in range(4):
            split = [ParallelContext.of(context.tp, sequence_parallel=i != wrong) for i in range(4)]
            parts = SelfAttention(HIDDEN, 2, split[0]), MLP(HIDDEN, 8, split[1])
            with pytest.raises(ValueError, match="differ in sequence_parallel"):
                TransformerBlock(*parts, RMSNorm(HIDDEN, split[2]), RMSNorm(HIDDEN, split[3]))
