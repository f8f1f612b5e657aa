"""Likelihood of a text: log-probabilities of its tokens, each given those before it in a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from smp.layers.heads.head import VocabParallelHead
from smp.layers.kv_cache import CacheView, KVCache
from smp.models.micro_batch import MicroBatch
from smp.models.protocol import Model
from smp.parallel.collectives import gather_features

PIECE = 512
"""Tokens of a window that go through the model at a time: the logits of all of them would be gigabytes."""


class Window(NamedTuple):
    """Tokens ``begin`` to ``end`` are read, and those from ``scored`` on are scored."""

    begin: int
    scored: int
    end: int


def windows(count: int, length: int, stride: int) -> Iterator[Window]:
    """Windows in which each of the tokens 1 to ``count`` - 1 is scored once: the first ``length`` tokens, and then
    ``stride`` more at a time, each window as many before them as fit.

    Args:
        count: tokens of the text; the first is only read.
        length: tokens that are predicted in one window at most.
        stride: from 1 to ``length``; with ``length`` windows do not overlap, and tokens at their beginnings are
            predicted from little.
    """
    scored = 1
    while scored < count:
        end = min(count, scored + (length if scored == 1 else stride))
        # As much context as fits, whatever the stride is.
        # ``length`` tokens are inputs, and the last one is only predicted: one more is read.
        yield Window(max(0, end - 1 - length), scored, end)
        scored = end


@torch.no_grad()
def token_scores(
    model: Model, ids: Sequence[int], length: int, stride: int, first: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, fp64; whether each is the likeliest, bool) of the tokens from number ``first`` on.

    Args:
        model: whole, in evaluation mode, without sequence parallelism; every rank of its mesh calls this alike.
        ids: at least ``first`` + 1 token ids.
        length: longest window, at most the model's longest sequence.
        stride: see :func:`windows`.
        first: at least 1.

    Raises:
        ValueError: ids outside of the vocabulary, or logits that are no numbers.
    """
    vocab, longest = model.config.vocab_size, model.config.max_position_embeddings
    assert vocab is not None and 0 < length <= longest and 0 < stride <= length
    if min(ids) < 0 or max(ids) >= vocab:
        raise ValueError(f"token ids {min(ids)}..{max(ids)} are outside of the model's vocabulary of {vocab}")
    found = [_window(model, ids[w.begin : w.end], w.scored - w.begin) for w in windows(len(ids), length, stride)]
    # Windows score token 1 and all after it: token number n is at n - 1.
    log_probs, likeliest = (torch.cat(parts)[first - 1 :] for parts in zip(*found, strict=True))
    return log_probs, likeliest


def _window(model: Model, ids: Sequence[int], scored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two results of :func:`token_scores` for one window, from its token ``scored`` on. The logits of ``PIECE``
    tokens exist at a time."""
    device = next(model.parameters()).device
    inputs, targets = torch.tensor(ids[:-1], device=device), torch.tensor(ids[1:], device=device)
    log_probs, likeliest = [], []
    for piece, wanted in zip(_logits(model, inputs), targets.split(PIECE), strict=True):
        logits = piece.double()  # fp64: log-probabilities of long texts are added up.
        if not bool(logits.isfinite().all()):
            raise ValueError("the model's logits are not finite: its weights are damaged, or too large")
        log_probs.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].cpu())
        likeliest.append((logits.argmax(-1) == wanted).cpu())
    return torch.cat(log_probs)[scored - 1 :], torch.cat(likeliest)[scored - 1 :]


def _logits(model: Model, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    """(tokens, vocab) of a window's tokens, a piece at a time."""
    if "own cache" in model.capabilities:  # not every architecture continues with several tokens: all at once
        yield from model(MicroBatch(inputs[None])).logits[0].split(PIECE)
        return
    device, cache, head = inputs.device, KVCache(1, inputs.device), model.head
    assert isinstance(head, VocabParallelHead) and not head.sequence_parallel
    for at in range(0, len(inputs), PIECE):
        new = inputs[at : at + PIECE]
        # Pieces continue from each other through the cache, so a token is read once in its window.
        position_ids = torch.arange(at, at + len(new), device=device)[None]
        cache.reserve(at + len(new))
        # Logits of all new tokens, unlike in generation, which wants the last one's.
        every = torch.arange(len(new), device=device)
        view = CacheView(cache, 0, position_ids, at + len(new) if at else 0, every)
        # Of the whole window, not of the piece: LongRoPE chooses its factors by it.
        lengths = torch.full_like(position_ids, len(inputs))
        piece = MicroBatch(new[None], position_ids=position_ids, sequence_lengths=lengths, cache=view)
        # (tokens, vocab / tp) of each rank -> (tokens, vocab), without the vocabulary's padding.
        yield gather_features(model(piece).logits, head.group)[:, : head.vocab_size]
