"""Parameters and FLOPs of a model by formula, from its inventory. No torch, so that it runs on a login node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from smp.config import ModelConfig, resolve_model
from smp.config.layer_specs import AttentionMixer, DeltaNetMixer, KimiDeltaMixer, LatentMixer, MambaMixer
from smp.config.layers import layer_specs
from smp.config.rules.mtp import mtp_layers
from smp.models.inventory import inventory, of_each_block, prediction_parameters
from smp.models.part import ModelPart


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters, without vocabulary padding."""

    embedding: int  # token embedding, learned positions and, unless it is tied, the output matrix
    non_embedding: int  # everything else: the blocks and the final norm
    per_layer: int  # the largest block: with experts, if some have them
    active: int  # what a token uses: of experts those that it gets

    @property
    def total(self) -> int:
        """All parameters; a tied matrix counts once."""
        return self.embedding + self.non_embedding


def count_parameters(model: ModelConfig, vocab_size: int) -> ParameterCount:
    """Parameters of the whole model.

    Args:
        model: resolved or not.
        vocab_size: number of token ids, whatever ``model`` says.

    Raises:
        ConfigError: the model's sizes do not fit together.
    """
    # The vocabulary may come from a tokenizer that the settings do not know yet.
    model = resolve_model(replace(model, vocab_size=vocab_size))
    parameters = list(inventory(model))
    if model.is_foreign:  # under names of its own: what is in no block
        embedding = sum(p.numel for p in inventory(model, [ModelPart(0, 0, embedding=True, head=True)]))
    else:
        embedding = sum(p.numel for p in parameters if p.module in ("embedding", "positions", "head"))
    return ParameterCount(
        embedding=embedding,
        non_embedding=sum(p.numel for p in parameters) - embedding,
        per_layer=max(of_each_block(model, range(model.num_layers), lambda block: sum(p.numel for p in block))),
        active=sum(p.active for p in parameters),
    )


def count_part(model: ModelConfig, part: ModelPart) -> int:
    """Parameters of a part of a resolved model. With a tied output layer both ends hold the vocabulary's matrix."""
    return sum(p.numel for p in inventory(model, [part]))


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs per token of a forward pass. Only the experts that a token is routed to count."""

    layers: tuple[float, ...]
    embedding: float  # it copies and adds
    head: float  # with the loss, and so with that of each layer of multi-token prediction
    mtp: float = 0.0  # blocks of those layers
    around: float = 0.0  # what stands around them

    @property
    def layer(self) -> float:
        """FLOPs of a block, on average."""
        return sum(self.layers) / len(self.layers)


def forward_flops(model: ModelConfig, seq_length: int) -> ForwardFlops:
    """FLOPs of a resolved model by part; see :func:`training_flops_per_token` for what counts."""
    # The specs of multi-token prediction come after these; their blocks are counted as copies of the last.
    specs = layer_specs(model)[: model.num_layers]
    # Mixers that are alike are counted once.
    mixed = {
        mixers: sum(_mixing_flops(mixer, seq_length) for mixer in mixers) for mixers in {spec.mixers for spec in specs}
    }
    ends = inventory(replace(model, mtp_num_layers=None), [ModelPart(0, 0, embedding=True, head=True)])
    # Products of weights, from the inventory; what mixers do with pairs of tokens comes on top.
    products = of_each_block(model, range(model.num_layers), lambda block: sum(p.flops for p in block))
    blocks = [one + mixed[spec.mixers] for one, spec in zip(products, specs, strict=True)]
    head, number = sum(p.flops for p in ends), len(mtp_layers(model))
    # The projection of a layer of multi-token prediction.
    around = sum(p.flops for p in prediction_parameters(model, 0))
    return ForwardFlops(
        layers=tuple(blocks),
        embedding=2 * model.hidden_size,
        # Each layer of multi-token prediction multiplies by the output matrix once more.
        head=(1 + number) * head,
        mtp=number * blocks[-1],  # they are made as the last one
        around=number * around,
    )


PAIR_FLOPS: dict[type, Callable[[Any], int]] = {
    AttentionMixer: lambda mixer: 4 * mixer.heads * mixer.head_dim,
    LatentMixer: lambda mixer: 2 * mixer.heads * (mixer.plain_dim + mixer.rope_dim + mixer.value_dim),
}
"""FLOPs by the type of a mixer's spec, for each token that a token sees: a score, and its share of the weighted sum.
Mixers that are not here have products alone, which the inventory counts."""


STATE_FLOPS: dict[type, Callable[[Any], int]] = {
    DeltaNetMixer: lambda mixer: 7 * mixer.value_heads * mixer.key_dim * mixer.value_dim,
    KimiDeltaMixer: lambda mixer: 7 * mixer.value_heads * mixer.key_dim * mixer.value_dim,
    MambaMixer: lambda mixer: 5 * mixer.value_heads * mixer.key_dim * mixer.value_dim,
}
"""FLOPs by the type of a mixer's spec, for each token: what a recurrence does with its states, a token after the other.
The delta rule forgets (1), and reads twice and writes once (2 each); Mamba-2 reads once."""


def _all_mixers(model: ModelConfig) -> list[Any]:
    return [mixer for spec in layer_specs(model) for mixer in spec.mixers]


def _pair_flops(mixer: Any) -> int:
    count = PAIR_FLOPS.get(type(mixer))
    return 0 if count is None else count(mixer)


def _mixing_flops(mixer: Any, seq_length: int) -> float:
    """FLOPs per token of a mixer's pairs or states in sequences of this length, in a forward pass."""
    if (of_states := STATE_FLOPS.get(type(mixer))) is not None:
        return float(of_states(mixer))
    if not (each := _pair_flops(mixer)):
        return 0.0
    # Pairs / tokens is the mean number of tokens that a token sees.
    return each * int(visible_pairs(seq_length, *_sees(mixer))) / seq_length + _scoring_flops(mixer, seq_length)


def _sees(mixer: Any) -> tuple[int | None, int | None]:
    """(window, chunk): limits of the number of tokens that a token sees; with an indexer the window is top-k."""
    indexer = getattr(mixer, "indexer", None)
    return (mixer.window if indexer is None else indexer.chosen), mixer.chunk


def _flops_of_score(mixer: Any) -> int:
    """FLOPs of an indexer's score of one token and one token that it could see; 0: there is no indexer."""
    indexer = getattr(mixer, "indexer", None)
    return 0 if indexer is None else 2 * indexer.heads * (indexer.head_dim + 1)


def _scoring_flops(mixer: Any, seq_length: int) -> float:
    """FLOPs per token of an indexer's scores in a forward pass. The choice that they make has no backward pass."""
    # Scores of all pairs: the choice is made among them.
    each = _flops_of_score(mixer)
    return each * int(visible_pairs(seq_length, None)) / seq_length if each else 0.0


def training_flops_per_token(model: ModelConfig, seq_length: int, vocab_size: int) -> float:
    """Model FLOPs of one training step divided by its tokens; what MFU is measured in (PaLM, arXiv 2204.02311, app. B).

    Forward per token: 2 x elements of all matrices (a multiply and an add), output matrix included, of experts those
    that a token gets, and per layer 4 q x tokens seen (scores, then the weighted sum; q is heads x head width). A token
    i sees min(i + 1, window) tokens, or those before it in its chunk, so (s + 1) / 2 on average without either:
    half of what full attention computes. With an indexer a token sees --dsa-indexer-topk at most, and the scores of all
    count once; the indexer's loss does not. The backward pass is twice the forward. Norms, biases, activations, softmax
    and lookups are left out, and so is everything that is computed again under recompute.

    Args:
        model: resolved or not.
        seq_length: tokens per sequence, each a document of its own.
        vocab_size: number of token ids, whatever ``model`` says.

    Raises:
        ConfigError: the model's sizes do not fit together.
    """
    model = resolve_model(replace(model, vocab_size=vocab_size))
    flops = forward_flops(model, seq_length)
    once = sum(_scoring_flops(mixer, seq_length) for mixer in _all_mixers(model))
    # A backward pass is two forward passes, except for the indexers' scores, which were counted in it too.
    return 3 * (sum(flops.layers) + flops.head + flops.mtp + flops.around) - 2 * once


def pair_training_flops(model: ModelConfig) -> int:
    """Model FLOPs of a training step for each pair of a token and a token that it sees in one layer of a resolved
    model: all its layers with attention have heads of one width."""
    return 3 * max(map(_pair_flops, _all_mixers(model)), default=0)


def visible_pairs_of_layers(lengths: npt.ArrayLike, model: ModelConfig) -> int:
    """:func:`visible_pairs` of all these documents in all layers of a resolved model that look at pairs. Scores of an
    indexer are a part of a pair each, by their FLOPs."""
    mixers = [mixer for mixer in _all_mixers(model) if _pair_flops(mixer)]
    pairs = sum(count * int(visible_pairs(lengths, *of).sum()) for of, count in Counter(map(_sees, mixers)).items())
    scored = sum(map(_flops_of_score, mixers))
    if not scored:
        return pairs
    # Expressed as pairs of attention, the one unit that the caller multiplies by ``pair_training_flops``.
    return pairs + round(scored / pair_training_flops(model) * int(visible_pairs(lengths, None).sum()))


def visible_pairs(lengths: npt.ArrayLike, window: int | None, chunk: int | None = None) -> npt.NDArray[np.int64]:
    """Pairs (token, token it sees) of causal documents of these lengths, each: the first tokens see 1, 2, ..., the rest
    see ``window``. With ``chunk`` each so many tokens are as a document."""
    length = np.asarray(lengths, dtype=np.int64)
    if chunk is not None:
        # Whole chunks, and the rest of the last one.
        return length // chunk * visible_pairs(chunk, window) + visible_pairs(length % chunk, window)
    w = length if window is None else np.minimum(window, length)
    # 1 + 2 + ... + w for the first w tokens.
    return w * (w + 1) // 2 + (length - w) * w
