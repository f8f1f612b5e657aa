"""Parameters and FLOPs of a model by formula, from its inventory. No torch, so that it runs on a login node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from smp.config import ModelConfig, resolve_model
from smp.config.layer_pattern import layer_attention, layer_attentions
from smp.config.mtp import further_layers
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
    """FLOPs per token of a forward pass. Of experts those count that a token gets."""

    layers: tuple[float, ...]
    embedding: float  # it copies and adds
    head: float  # with the loss, and so with that of each layer of multi-token prediction
    further: float = 0.0  # blocks of those layers
    around: float = 0.0  # what stands around them

    @property
    def layer(self) -> float:
        """Of a block, on average."""
        return sum(self.layers) / len(self.layers)


def forward_flops(model: ModelConfig, seq_length: int) -> ForwardFlops:
    """Where a resolved model's FLOPs are; see :func:`training_flops_per_token` for what counts."""
    seen = [(layer.window, layer.chunk) for layer in layer_attentions(model)]
    # Layers that see alike are counted once.
    attention = {of: _pair_flops(model) * int(visible_pairs(seq_length, *of)) / seq_length for of in set(seen)}
    ends = inventory(replace(model, mtp_num_layers=None), [ModelPart(0, 0, embedding=True, head=True)])
    products = of_each_block(model, range(model.num_layers), lambda block: sum(p.flops for p in block))
    blocks = [one + attention[of] for one, of in zip(products, seen, strict=True)]
    head, number = sum(p.flops for p in ends), len(further_layers(model))
    around = sum(p.flops for p in prediction_parameters(model, 0))
    return ForwardFlops(
        layers=tuple(blocks),
        embedding=2 * model.hidden_size,
        head=(1 + number) * head,
        further=number * blocks[-1],  # they are made as the last one
        around=number * around,
    )


def _pair_flops(model: ModelConfig) -> int:
    """Of a layer's attention, for each token that a token sees: a score, and its share of the weighted sum."""
    assert model.kv_channels is not None, "resolved before"
    if model.multi_latent_attention:
        return 2 * model.num_attention_heads * (model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim)
    return 4 * model.num_attention_heads * model.kv_channels


def training_flops_per_token(model: ModelConfig, seq_length: int, vocab_size: int) -> float:
    """Model FLOPs of one training step divided by its tokens; what MFU is measured in (PaLM, arXiv 2204.02311, app. B).

    Forward per token: 2 x elements of all matrices (a multiply and an add), output matrix included, of experts those
    that a token gets, and per layer 4 q x tokens seen (scores, then the weighted sum; q is heads x head width). A token
    i sees min(i + 1, window) tokens, or those before it in its chunk, so (s + 1) / 2 on average without either:
    half of what full attention computes. The backward pass is twice the forward. Norms, biases, activations, softmax
    and lookups are left out, and so is everything that is computed again under recompute.

    Args:
        model: resolved or not.
        seq_length: tokens per sequence, each a document of its own.
        vocab_size: number of token ids, whatever ``model`` says.

    Raises:
        ConfigError: the model's sizes do not fit together.
    """
    flops = forward_flops(resolve_model(replace(model, vocab_size=vocab_size)), seq_length)
    return 3 * (sum(flops.layers) + flops.head + flops.further + flops.around)


def pair_training_flops(model: ModelConfig) -> int:
    """Model FLOPs of a training step for each pair of a token and a token that it sees in one layer of a resolved
    model."""
    return 3 * _pair_flops(model)


def visible_pairs_of_layers(lengths: npt.ArrayLike, model: ModelConfig) -> int:
    """:func:`visible_pairs` of all these documents in all layers of a resolved model."""
    layers = (*range(model.num_layers), *further_layers(model))
    attentions = [layer_attention(model, layer) for layer in layers]
    seen = [(attention.window, attention.chunk) for attention in attentions]
    return sum(seen.count(of) * int(visible_pairs(lengths, *of).sum()) for of in set(seen))


def visible_pairs(lengths: npt.ArrayLike, window: int | None, chunk: int | None = None) -> npt.NDArray[np.int64]:
    """Pairs (token, token it sees) of causal documents of these lengths, each: the first tokens see 1, 2, ..., the rest
    see ``window``. With ``chunk`` each so many tokens are as a document."""
    length = np.asarray(lengths, dtype=np.int64)
    if chunk is not None:
        # Whole chunks, and the rest of the last one.
        return length // chunk * visible_pairs(chunk, window) + visible_pairs(length % chunk, window)
    w = length if window is None else np.minimum(window, length)
    return w * (w + 1) // 2 + (length - w) * w
