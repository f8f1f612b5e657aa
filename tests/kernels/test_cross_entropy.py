"""The chunked loss against torch in fp64 where it goes in many pieces: blocks of rows, chunks of tokens, or none."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from smp.kernels import cross_entropy as kernel
from smp.layers import VocabShard, linear_cross_entropy, vocab_parallel_cross_entropy
from smp.parallel.collectives import Group
from tests.layers.whole import draw
from tests.operations import recorded

ROWS, VOCAB, TOKENS, HIDDEN = 80, 77, 61, 16  # 3 rows are padding
SHARD = VocabShard.of(Group("", 1, 0), ROWS, VOCAB)
SCALE = 2.0  # of the loss: the incoming gradient is not 1


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, output matrix, labels and weights; every seventh token does not count."""
    hidden, weight = 0.5 * draw(TOKENS, HIDDEN, seed=0), draw(ROWS, HIDDEN, seed=1)
    weight[VOCAB:] = 0
    generator = torch.Generator().manual_seed(2)
    labels, weights = torch.randint(0, VOCAB, (TOKENS,), generator=generator), torch.rand(TOKENS, generator=generator)
    weights[::7], labels[::14] = 0, -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, weights / TOKENS


def relative(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    assert got is not None and want is not None
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("block", [1 << 20, 10 * ROWS, 1])  # all rows at once, ten, one
@pytest.mark.parametrize("chunk", [TOKENS, 17, 1])  # one chunk, four of which the last is short, one per token
# in bf16 the logits, the gradient by them and each product are rounded, by 2^-9 at most
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-7), (torch.bfloat16, 2.0**-7)])
def test_pieces_make_the_whole(
    dtype: torch.dtype, bound: float, chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernel.BLOCK_ELEMENTS, "cpu", block)
    hidden, weight, labels, weights = inputs(dtype)
    loss = linear_cross_entropy(hidden, weight, labels, weights, SHARD, chunk_tokens=chunk)
    (SCALE * loss).backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight[:VOCAB]))
    want = (F.cross_entropy(h @ w.t(), labels, reduction="none") * weights).sum()
    (SCALE * want).backward()
    assert abs(loss.item() / want.item() - 1) < bound
    assert relative(hidden.grad, h.grad) < bound and relative(weight.grad[:VOCAB], w.grad) < bound  # type: ignore[index]
    assert not weight.grad[VOCAB:].any()  # type: ignore[index]


@pytest.mark.parametrize("block", [1 << 20, 10 * ROWS, 1])
def test_losses_of_tokens_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernel.BLOCK_ELEMENTS, "cpu", block)
    _, _, labels, weights = inputs(torch.float32)
    logits = 3 * draw(TOKENS, ROWS, seed=3)
    mine, exact = logits.clone().requires_grad_(), logits[:, :VOCAB].double().requires_grad_()
    got = vocab_parallel_cross_entropy(mine, labels, SHARD)
    want = F.cross_entropy(exact, labels, reduction="none")
    (got @ weights).backward()
    (want @ weights.double()).backward()
    assert relative(got.detach(), want.detach()) < 5e-7
    assert relative(mine.grad[:, :VOCAB], exact.grad) < 5e-7  # type: ignore[index]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4, 1e5])
def test_what_all_logits_have_in_common_does_not_show(offset: float, ranks: int) -> None:
    """As good as torch's own, which subtracts the largest logit from the target's, too."""
    logits = 3 * draw(TOKENS, 3 * VOCAB, seed=3) + offset
    labels = torch.randint(0, 3 * VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    exact, theirs = logits.double().requires_grad_(), logits.clone().requires_grad_()
    for leaf in (exact, theirs):
        F.cross_entropy(leaf, labels).backward()
    width = 3 * VOCAB // ranks
    shards = [(logits[:, i : i + width].clone(), labels - i) for i in range(0, 3 * VOCAB, width)]
    stats = kernel.combine_stats(torch.stack([kernel.softmax_stats(z, y, width) for z, y in shards]))
    weights = torch.full((TOKENS,), 1 / TOKENS)
    mine = torch.cat([kernel.logits_to_gradient(z, stats, y, width, weights) for z, y in shards], dim=1)
    assert exact.grad is not None
    assert relative(mine, exact.grad) <= max(1.5 * relative(theirs.grad, exact.grad), 1e-7)
    loss = (stats[1] - (stats[2] - stats[0])).mean()
    assert relative(loss, F.cross_entropy(exact.detach(), labels)) < 2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_leave_no_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch may be empty, memory that was used before never is."""
    empty = torch.empty

    def used(*args: Any, **options: Any) -> torch.Tensor:
        return empty(*args, **options).fill_(7.0)

    monkeypatch.setattr(torch, "empty", used)
    weight = draw(ROWS, HIDDEN, seed=1, dtype=dtype).requires_grad_()
    hidden = torch.zeros(0, HIDDEN, dtype=dtype, requires_grad=True)
    labels, weights = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    loss = linear_cross_entropy(hidden, weight, labels, weights, SHARD, chunk_tokens=4)
    loss.backward()
    assert loss == 0 and hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("label", [-1, VOCAB, ROWS, ROWS + 5])
def test_a_label_that_does_not_exist_shows_where_it_counts(label: int) -> None:
    hidden, weight, labels, weights = inputs(torch.float32)
    labels[[0, 1]] = label
    alone = vocab_parallel_cross_entropy(hidden @ weight.t(), labels, SHARD)
    assert alone.isnan().nonzero().flatten().tolist() == [0, 1]
    assert linear_cross_entropy(hidden, weight, labels, weights, SHARD, chunk_tokens=17).isnan()
    weights[[0, 1]] = 0
    assert linear_cross_entropy(hidden, weight, labels, weights, SHARD, chunk_tokens=17).isfinite()


def test_a_cpu_widens_logits_in_one_place() -> None:
    """Beside the block that they are widened in, statistics of rows and no second copy."""
    logits, columns = torch.randn(512, 256).bfloat16(), torch.arange(512) % 250
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        kernel.softmax_stats_reference(logits, columns, 250)
    events = [event for event in recorded(profile) if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    block = 512 * 250 * 4
    assert block <= max(held) < 1.1 * block
