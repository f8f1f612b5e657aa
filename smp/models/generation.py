"""Text from a decoder, token by token: each token goes through the model once, keys and values are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from smp.config import ModelConfig
from smp.layers.attention import KeyValueCache, SelfAttention
from smp.layers.latent_attention import LatentAttention
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch

PIECE = 512
"""Tokens of a prompt that go through the model at a time: it computes the logits of them all."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_k: choose among so many likeliest tokens; 0: all.
        top_p: choose among the fewest likeliest tokens whose probabilities add up to this (Holtzman et al. 2020).
        seed: of the choices.

    Raises:
        ValueError: a value outside of its range.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError("temperature and top-k must not be negative, top-p must be above 0 and at most 1")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError("the seed must be an integer of 64 bits")


@contextmanager
def cached(model: GPT, length: int) -> Iterator[None]:
    """Within, the model's attention layers keep keys and values of up to ``length`` tokens."""
    layers = [module for module in model.modules() if isinstance(module, SelfAttention | LatentAttention)]
    for layer in layers:
        layer.cache = KeyValueCache(length)
    try:
        yield
    finally:
        for layer in layers:
            layer.cache = None


def _forget(model: GPT) -> None:
    """Empty the caches."""
    for module in model.modules():
        if isinstance(module, SelfAttention | LatentAttention) and module.cache is not None:
            module.cache.filled = 0


def generate(model: GPT, prompt: Sequence[int], count: int, sampling: Sampling, ends: Sequence[int]) -> Iterator[int]:
    """Up to ``count`` token ids after ``prompt``, one by one. Ends before any id of ``ends``, and where the model's
    longest sequence ends.

    Args:
        model: whole, in evaluation mode, without sequence parallelism; every rank of its mesh calls this alike.
        prompt: token ids, at least one.
        count: most new ids.
        sampling: how each is chosen.
        ends: ids that end the text.

    Raises:
        ValueError: no prompt, one that is longer than the model allows, or ids outside of its vocabulary; a negative
            count. While it writes: logits that are no numbers.
    """
    longest, vocab = model.config.max_position_embeddings, model.config.vocab_size
    assert vocab is not None and not model.sequence_parallel
    if count < 0:
        raise ValueError(f"{count} new tokens cannot be: give 0 or more")
    if not 0 < len(prompt) <= longest:
        raise ValueError(f"the prompt has {len(prompt)} tokens, this model takes 1 to {longest}")
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise ValueError(f"token ids {min(prompt)}..{max(prompt)} are outside of the model's vocabulary of {vocab}")
    return _tokens(model, prompt, min(len(prompt) + count, longest), sampling, ends)


@torch.no_grad()
def _tokens(model: GPT, prompt: Sequence[int], total: int, sampling: Sampling, ends: Sequence[int]) -> Iterator[int]:
    """Up to ``total`` tokens, the prompt's included, which are not repeated."""
    device = next(model.parameters()).device
    # On the CPU, as the logits are: the same text on every device and on every rank.
    generator = torch.Generator().manual_seed(sampling.seed)
    text, done = list(prompt), 0  # all tokens, and how many of them the model has seen
    with cached(model, total):
        while len(text) < total:
            # A long prompt in pieces: the logits of all its tokens would be gigabytes.
            new = text[done : done + PIECE]
            position_ids = torch.arange(done, done + len(new), device=device)[None]
            # Of the whole text so far: LongRoPE's frequencies depend on it.
            lengths = torch.full_like(position_ids, len(text))
            ids = torch.tensor([new], device=device)
            logits = model(MicroBatch(ids, position_ids=position_ids, sequence_lengths=lengths)).logits
            done += len(new)
            # Of the prompt's earlier pieces only keys and values are wanted.
            if done < len(text):
                continue
            choice = choose(logits[0, -1].float().cpu(), sampling, generator)
            if choice in ends:
                return
            yield choice
            text.append(choice)
            if len(text) == _other_rope_from(model.config):
                _forget(model)  # keys were rotated by the frequencies of shorter texts
                done = 0


def _other_rope_from(config: ModelConfig) -> int | None:
    """The length from which on a text has other frequencies of RoPE."""
    long = config.use_rope_scaling and config.rope_scaling_type == "longrope"
    return config.rope_original_max_position + 1 if long else None


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token by its logit, fp32 (vocab,).

    Raises:
        ValueError: a logit is no number.
    """
    if not bool(logits.isfinite().all()):
        raise ValueError("the model's logits are not finite: its weights are damaged, or too large for this dtype")
    if sampling.temperature == 0:
        return int(logits.argmax())
    best = logits.topk(min(sampling.top_k or logits.numel(), logits.numel()))
    weights = ((best.values - best.values[0]) / sampling.temperature).softmax(dim=0)
    if sampling.top_p < 1:
        # The likeliest token is always kept: nothing is before it.
        before = weights.cumsum(dim=0) - weights  # of all that are likelier
        weights = weights.masked_fill(before >= sampling.top_p, 0.0)
    return int(best.indices[torch.multinomial(weights, 1, generator=generator)])
