"""How tokens are chosen, of logits on one rank and of logits that ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.generation.sampling import Sampled, Sampling, choose
from smp.layers import VocabShard
from smp.parallel.collectives import Group
from smp.parallel.context import build_context
from tests.distributed import run_distributed

ALONE = Group("alone", 1, 0)
LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def drawn(logits: torch.Tensor, sampling: Sampling, count: int) -> torch.Tensor:
    """Tokens at many positions, of equal logits (vocab,)."""
    shard = VocabShard.of(ALONE, len(logits), len(logits))
    keys = sampling.key(5, 1) + torch.arange(count)
    return choose(logits.expand(count, -1), shard, sampling, keys).ids


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=0), {0}),
        (Sampling(temperature=1.0, top_k=0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_k=0, top_p=0.5), {0}),
        (Sampling(temperature=1.0, top_k=0, top_p=0.6), {0, 1}),
        (Sampling(temperature=0.01, top_k=0), {0}),
        (Sampling(temperature=1e-40, top_k=0), {0}),
        (Sampling(temperature=1e-40, top_k=3), {0}),
        (Sampling(temperature=1.0, top_k=3, top_p=0.8), {0, 1}),
    ],
)
def test_what_can_be_chosen(sampling: Sampling, possible: set[int]) -> None:
    assert set(drawn(LOGITS, sampling, 400).tolist()) == possible


def test_choices_follow_the_probabilities() -> None:
    """Of few tokens, and of some in several blocks; of the likeliest of all, which top-p finds behind many others."""
    logits = torch.randn(1300, generator=torch.Generator().manual_seed(0)) * 2
    for given, sampling in ((LOGITS, Sampling(1.0, 0)), (logits, Sampling(0.7, 0)), (logits, Sampling(1.0, 0, 0.97))):
        wanted = (given / sampling.temperature).softmax(0)
        order = wanted.sort(descending=True)
        before = order.values.cumsum(0) - order.values
        wanted[order.indices[before >= sampling.top_p]] = 0
        wanted /= wanted.sum()
        shares = drawn(given, sampling, 20000).bincount(minlength=len(given)) / 20000
        assert not shares[wanted == 0].any()
        assert (shares - wanted).abs().max() < 0.012
        assert (shares - wanted).square().sum() < 1.5e-4  # 1 / 20000 is expected


SHARED = [Sampling(0), Sampling(1.0, 0), Sampling(0.6, 20), Sampling(1.4, 7, 0.8), Sampling(1.0, 0, 0.9)]
VOCAB, ROWS = 1000, 40


def logits_of(dtype: torch.dtype) -> torch.Tensor:
    """In bf16 many are equal."""
    return (torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


def shared(rank: int, world: int) -> list[Sampled]:
    """Of every sampling and dtype: padding is NaN, and the last rank has almost nothing else."""
    group = build_context(Layout(tp=world), "cpu").tp_group
    rows = 250 * 4 // (world - 1) if world > 1 else VOCAB
    shard = VocabShard.of(group, rows, VOCAB)
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.nn.functional.pad(logits_of(dtype), (0, rows * world - VOCAB), value=torch.nan)
        own = whole[:, shard.start :][:, :rows]
        out += [choose(own, shard, s, s.key(0, 0) + torch.arange(ROWS)) for s in SHARED]
    return out


def test_ranks_choose_what_one_rank_chooses() -> None:
    (alone,), results = run_distributed(shared, 1), run_distributed(shared, 4)
    for number, one in enumerate(alone):
        sampling = SHARED[number % len(SHARED)]
        logits = logits_of(torch.float32 if number < len(SHARED) else torch.bfloat16).float()
        exact = (logits / (sampling.temperature or 1.0)).log_softmax(-1).gather(1, one.ids[:, None])[:, 0]
        assert torch.allclose(one.log_probs, exact, atol=3e-6, rtol=0)
        if sampling.temperature == 0:
            assert torch.equal(one.ids, logits.argmax(1))
        for rank in results:
            assert torch.equal(rank[number].ids, one.ids)
            assert torch.allclose(rank[number].log_probs, exact, atol=3e-6, rtol=0)


NAN = float("nan")
WRONG: list[dict[str, float]] = [{"temperature": -1.0}, {"temperature": NAN}, {"top_k": -1}, {"top_p": 0.0}]
WRONG += [{"top_p": 1.1}, {"top_p": NAN}, {"seed": 1 << 64}]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Sampling(**wrong)


def test_texts_have_draws_of_their_own() -> None:
    keys = {Sampling(seed=s).key(prompt, n) for s in range(3) for prompt in range(40) for n in range(40)}
    assert len(keys) == 4800
    assert len(set(drawn(torch.zeros(500), Sampling(1.0, 0), 300).tolist())) > 200
