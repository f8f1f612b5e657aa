"""The inventory: every parameter of a model, from the specs of its layers. No torch, so that it runs on a login node.

A new kind of mixer has one row in ``MIXER_PARAMETERS``. Converters, adapters, parameter counts, FLOPs and memory read
the inventory, and the model that ``smp.models.gpt`` builds is tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeVar

from smp.config import Layout, ModelConfig
from smp.config.layer_specs import (
    AttentionMixer,
    DeltaNetMixer,
    ExpertsSpec,
    IndexerSpec,
    KimiDeltaMixer,
    LatentMixer,
    LayerSpec,
    MambaMixer,
    MLPSpec,
    NormSpec,
    ParallelMixer,
)
from smp.config.layers import layer_specs, norm_of
from smp.config.rules.mtp import mtp_layers
from smp.models.part import ModelPart, whole

T = TypeVar("T")

EXPERT_BIAS = "expert_bias"
"""Last name of a router's buffer that is never cast with the weights: small differences of it decide the routing."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model, and how a mesh cuts it."""

    name: str  # in the model and in checkpoints
    shape: tuple[int, ...]  # global, without padding of the vocabulary
    shard_dim: int | None = None  # the dimension that is cut; None: every rank holds all of it
    group: Literal["tp"] = "tp"  # the dimension of the mesh that cuts it
    heads: int | None = None  # key/value heads are not cut: with fewer than ranks, every rank holds all of them
    pad_to: int = 1  # the rows of a rank are padded to a multiple of this (vocabulary)
    linear: bool = False  # the weight of a linear layer, which can have an adapter
    flops: int = 0  # per token, of its product in a forward pass; norms, biases and positions have none
    chosen: int | None = None  # of experts, dimension 0, which ep cuts: how many a token gets; None: it is of no expert

    @property
    def module(self) -> str:
        """Name of the layer that it belongs to."""
        return self.name.rpartition(".")[0]

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return math.prod(self.shape)

    @property
    def active(self) -> int:
        """Elements that one token uses."""
        return self.numel if self.chosen is None else self.numel // self.shape[0] * self.chosen

    def placement(self, layout: Layout) -> int | None:
        """The dimension that ``layout`` cuts; None: it is replicated."""
        # A key/value head is never cut: with fewer heads than ranks neighbours share one, and all hold the whole
        # matrix.
        replicated = self.heads is not None and self.heads < getattr(layout, self.group)
        return None if replicated else self.shard_dim

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape on one rank of ``group`` (for experts, of ep and etp), padding included, before FSDP."""
        dim, shape, ranks = self.placement(layout), list(self.shape), getattr(layout, self.group)
        if self.chosen is not None:
            # Experts are cut evenly by ep, and inside each one its width by etp, which may differ from tp.
            shape[0] //= layout.ep
            ranks = layout.expert_tp
        if dim is not None:
            # Rounded up for each rank: ranks hold equal shares, the last of which may be padding.
            shape[dim] = -(-shape[dim] // (self.pad_to * ranks)) * self.pad_to
        return tuple(shape)


def inventory(model: ModelConfig, parts: Sequence[ModelPart] | None = None) -> Iterator[Parameter]:
    """Every parameter of a resolved model, or of some of its parts on one process. A tied matrix is there once: as the
    embedding's, also where only the head is. Layers of multi-token prediction are the head's, and use the embedding."""
    parts = (whole(model.num_layers),) if parts is None else parts
    if model.is_foreign:
        yield from _foreign(model).of(parts)
        return
    first, last = any(p.embedding for p in parts), any(p.head for p in parts)
    tied = not model.untie_embeddings_and_output_weights
    # Both ends of a pipeline hold a matrix that both use, so both count it.
    if first or (last and (tied or model.mtp_num_layers is not None)):
        yield vocabulary_matrix(model, "embedding", has_product=tied)
    if first and model.position_embedding_type == "learned_absolute":
        rows = model.position_embedding_offset + model.max_position_embeddings
        yield Parameter("positions.weight", (rows, model.hidden_size))
    if first and model.embedding_layernorm:
        yield from _norm(norm_of(model), model.hidden_size, "embedding_norm")
    specs = layer_specs(model)
    for part in parts:
        for layer in part.layers:
            yield from layer_parameters(specs[layer], model.hidden_size, layer)
    if last:
        # The part that has the head also has the layers of multi-token prediction, with blocks of their own.
        for number, layer in enumerate(mtp_layers(model)):
            yield from prediction_parameters(model, number)
            yield from layer_parameters(specs[layer], model.hidden_size, layer)
        yield from _norm(norm_of(model), model.hidden_size, "final_norm")
    if last and model.scalar_head:
        # A reward model's head of scores: one row, on every rank.
        yield Parameter("head.weight", (1, model.hidden_size), flops=2 * model.hidden_size)
    elif last and not tied:
        yield vocabulary_matrix(model, "head", has_product=True)


def weights_of(model: ModelConfig) -> Iterator[Parameter]:
    """Everything that a model computes with: its parameters, and the expert biases, which no gradient trains."""
    yield from inventory(model)
    if model.is_foreign:
        yield from _foreign(model).buffers
        return
    for layer, spec in enumerate(layer_specs(model)):
        experts = spec.feed_forward
        if isinstance(experts, ExpertsSpec) and experts.bias_update_rate is not None:
            yield Parameter(f"layers.{layer}.mlp.router.{EXPERT_BIAS}", (experts.count,))


def _foreign(model: ModelConfig) -> Any:
    """The :class:`smp.models.foreign.Parts` of a model that transformers computes."""
    # By its name: it imports torch, which what is read on a login node must not need.
    return import_module("smp.models.foreign").parts_of(model.transformers_config, scores=model.scalar_head)


def vocabulary_matrix(model: ModelConfig, module: str, has_product: bool) -> Parameter:
    """Token embedding or output matrix; a lookup is no product."""
    rows, hidden, pad_to = model.vocab_size, model.hidden_size, model.make_vocab_size_divisible_by
    assert rows is not None, "resolved before"
    return Parameter(f"{module}.weight", (rows, hidden), 0, pad_to=pad_to, flops=2 * rows * hidden * has_product)


def prediction_parameters(model: ModelConfig, number: int) -> Iterator[Parameter]:
    """Parameters of a layer of multi-token prediction that are not its block's."""
    name, hidden = f"predictions.{number}", model.hidden_size
    for norm in ("embedding_norm", "hidden_norm", "norm"):
        yield from _norm(norm_of(model), hidden, f"{name}.{norm}")
    yield from linear(f"{name}.projection", 2 * hidden, hidden, None, False)


def block_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    """The parameters of one block."""
    if model.is_foreign:
        return iter(_foreign(model).blocks[layer])
    return layer_parameters(layer_specs(model)[layer], model.hidden_size, layer)


def layer_parameters(spec: LayerSpec, hidden: int, layer: int) -> Iterator[Parameter]:
    """Parameters of a layer, by its spec, the width of the residual stream and its number."""
    attention, mlp, forward = f"layers.{layer}.attention", f"layers.{layer}.mlp", spec.feed_forward
    if spec.mixer is not None:
        if spec.norm_before:
            yield from _norm(spec.norm, hidden, f"{attention}_norm")
        yield from MIXER_PARAMETERS[type(spec.mixer)](spec.mixer, hidden, attention)
    if spec.norm_before and not spec.shared_norm and forward is not None:
        yield from _norm(spec.norm, hidden, f"{mlp}_norm")
    if spec.norm_after:
        for name, part in ((attention, spec.mixer), (mlp, forward)):
            yield from _norm(spec.norm, hidden, f"{name}_post_norm") if part is not None else ()
    if forward is not None:
        yield from _experts(forward, hidden, mlp) if isinstance(forward, ExpertsSpec) else _mlp(forward, hidden, mlp)


def of_each_block(model: ModelConfig, layers: Iterable[int], measure: Callable[[Iterator[Parameter]], T]) -> list[T]:
    """``measure(parameters)`` of each of these layers. Each kind of layer is measured once: a planner asks for hundreds
    of layouts."""
    if model.is_foreign:
        return [measure(iter(_foreign(model).blocks[layer])) for layer in layers]
    specs = layer_specs(model)
    layers = list(layers)
    # Specs are frozen dataclasses: equal ones are one key.
    kinds = {specs[layer]: layer for layer in layers}
    measured = {kind: measure(layer_parameters(kind, model.hidden_size, layer)) for kind, layer in kinds.items()}
    return [measured[specs[layer]] for layer in layers]


def _attention(mixer: AttentionMixer, hidden: int, name: str) -> Iterator[Parameter]:
    q, kv = mixer.heads * mixer.head_dim, mixer.groups * mixer.head_dim
    if mixer.norm == "all heads":
        # One norm over all heads: its weight is cut where the heads are.
        yield Parameter(f"{name}.query_norm.weight", (q,), 0)
        yield Parameter(f"{name}.key_norm.weight", (kv,), 0)
    elif mixer.norm == "per head":
        yield Parameter(f"{name}.query_norm.weight", (mixer.head_dim,))
        yield Parameter(f"{name}.key_norm.weight", (mixer.head_dim,))
    yield from linear(f"{name}.query", hidden, q, 0, mixer.qkv_bias)
    yield from linear(f"{name}.key", hidden, kv, 0, mixer.qkv_bias, mixer.groups)
    yield from linear(f"{name}.value", hidden, kv, 0, mixer.qkv_bias, mixer.groups)
    if mixer.gate:
        yield from linear(f"{name}.gate", hidden, q, 0, False)
    # Row-parallel: it reads the heads of each rank and its result is summed.
    yield from linear(f"{name}.output", q, hidden, 1, mixer.bias)
    if mixer.sinks:
        yield Parameter(f"{name}.sinks", (mixer.heads,), 0)


def _latent_attention(mixer: LatentMixer, hidden: int, name: str) -> Iterator[Parameter]:
    """Parameters of latent attention. Down projections and the norms after them are replicated."""
    heads, low, latent = mixer.heads, mixer.q_rank, mixer.kv_rank
    queries = heads * (mixer.plain_dim + mixer.rope_dim)
    if low is None:
        yield from linear(f"{name}.query", hidden, queries, 0, False)
    else:
        yield from linear(f"{name}.query_down", hidden, low, None, False)
        yield from linear(f"{name}.query_up", low, queries, 0, False)
    # The rotated key channels are one head that all heads share; they come out of the same projection.
    yield from linear(f"{name}.key_value_down", hidden, latent + mixer.rope_dim, None, False)
    yield from linear(f"{name}.key_value_up", latent, heads * (mixer.plain_dim + mixer.value_dim), 0, False)
    yield from linear(f"{name}.output", heads * mixer.value_dim, hidden, 1, False)
    if mixer.norm:
        yield Parameter(f"{name}.key_value_norm.weight", (latent,))
        if low is not None:
            yield Parameter(f"{name}.query_norm.weight", (low,))
    if mixer.indexer is not None:
        # The indexer's queries are made of the latent of the queries (DeepSeek-V3.2).
        assert low is not None, "resolved: dsa needs --q-lora-rank"
        yield from _indexer(mixer.indexer, hidden, low, f"{name}.indexer")


def _indexer(spec: IndexerSpec, hidden: int, low: int, name: str) -> Iterator[Parameter]:
    """Parameters of an indexer. They are not linear layers, to which adapters could be added: the choice has no
    gradient."""
    for part, shape in {
        "queries": (spec.heads * spec.head_dim, low),
        "keys": (spec.head_dim, hidden),
        "weights": (spec.heads, hidden),
    }.items():
        yield Parameter(f"{name}.{part}.weight", shape, flops=2 * math.prod(shape))
    yield from (Parameter(f"{name}.key_norm.{part}", (spec.head_dim,)) for part in ("weight", "bias"))


def _delta_net(mixer: DeltaNetMixer, hidden: int, name: str) -> Iterator[Parameter]:
    keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    widths = {"query": keys, "key": keys, "value": values}
    others = {"gate": values, "beta": mixer.value_heads, "decay": mixer.value_heads}
    for part, width in (widths | others).items():
        yield from linear(f"{name}.{part}", hidden, width, 0, False)
    for part, width in widths.items():
        yield Parameter(f"{name}.{part}_conv", (width, mixer.conv), 0, flops=2 * mixer.conv * width)
    yield Parameter(f"{name}.decay_log", (mixer.value_heads,), 0)
    yield Parameter(f"{name}.decay_bias", (mixer.value_heads,), 0)
    # One weight for all heads, so every rank has it.
    yield Parameter(f"{name}.norm.weight", (mixer.value_dim,))
    yield from linear(f"{name}.output", values, hidden, 1, False)


def _kimi_delta(mixer: KimiDeltaMixer, hidden: int, name: str) -> Iterator[Parameter]:
    """Parameters of Kimi delta attention. Down projections are replicated."""
    heads, low, width = mixer.value_heads, mixer.value_dim, mixer.value_heads * mixer.value_dim
    for part in ("query", "key", "value"):
        yield from linear(f"{name}.{part}", hidden, width, 0, False)
        yield Parameter(f"{name}.{part}_conv", (width, mixer.conv), 0, flops=2 * mixer.conv * width)
    yield from linear(f"{name}.beta", hidden, heads, 0, False)
    for part in ("decay", "gate"):
        yield from linear(f"{name}.{part}_down", hidden, low, None, False)
        yield from linear(f"{name}.{part}_up", low, width, 0, False)
    yield Parameter(f"{name}.decay_log", (heads,), 0)
    # A bias for each channel: unlike in the gated delta net a head's channels decay at rates of their own.
    yield Parameter(f"{name}.decay_bias", (width,), 0)
    yield Parameter(f"{name}.norm.weight", (low,))
    yield from linear(f"{name}.output", width, hidden, 1, False)


def _mamba(mixer: MambaMixer, hidden: int, name: str) -> Iterator[Parameter]:
    """Parameters of Mamba-2. Queries and keys of a single group are replicated."""
    groups, heads = mixer.key_heads, mixer.value_heads
    keys, values = groups * mixer.key_dim, heads * mixer.value_dim
    # ``heads=groups``: with fewer groups than TP ranks every rank has all of them (see ``placement``).
    widths = {"query": (keys, groups), "key": (keys, groups), "value": (values, None)}
    for part, (width, shared) in {**widths, "gate": (values, None), "step": (heads, None)}.items():
        yield from linear(f"{name}.{part}", hidden, width, 0, False, shared)
    for part, (width, shared) in widths.items():
        yield Parameter(f"{name}.{part}_conv", (width, mixer.conv), 0, heads=shared, flops=2 * mixer.conv * width)
        yield Parameter(f"{name}.{part}_conv_bias", (width,), 0, heads=shared)
    for part in ("decay_log", "step_bias", "skip"):
        yield Parameter(f"{name}.{part}", (heads,), 0)
    if mixer.norm:
        yield Parameter(f"{name}.norm.weight", (values,), 0)
    yield from linear(f"{name}.output", values, hidden, 1, False)


def _parallel(mixer: ParallelMixer, hidden: int, name: str) -> Iterator[Parameter]:
    for branch in mixer.branches:
        yield from MIXER_PARAMETERS[type(branch.mixer)](branch.mixer, hidden, f"{name}.{branch.name}")


MixerParameters = Callable[[Any, int, str], Iterator[Parameter]]
MIXER_PARAMETERS: dict[type, MixerParameters] = {
    AttentionMixer: _attention,
    LatentMixer: _latent_attention,
    DeltaNetMixer: _delta_net,
    KimiDeltaMixer: _kimi_delta,
    MambaMixer: _mamba,
    ParallelMixer: _parallel,
}
"""(spec of a mixer, width of the residual stream, name of the module) -> its parameters, by the spec's type;
:func:`smp.models.mixers.register_mixer` adds one."""


def _mlp(spec: MLPSpec, hidden: int, name: str) -> Iterator[Parameter]:
    if spec.activation.gated:
        yield from linear(f"{name}.gate", hidden, spec.width, 0, spec.bias)
    yield from linear(f"{name}.up", hidden, spec.width, 0, spec.bias)
    yield from linear(f"{name}.down", spec.width, hidden, 1, spec.bias)


def _experts(spec: ExpertsSpec, hidden: int, name: str) -> Iterator[Parameter]:
    """Parameters of a mixture of experts: the router, the experts' stacked projections, and the shared experts."""
    count, k, ffn, bias = spec.count, spec.topk, spec.expert.width, spec.expert.bias
    # Every rank scores all experts of its tokens, so every rank has the whole router.
    yield Parameter(f"{name}.router.weight", (count, hidden), flops=2 * count * hidden)
    flops = 2 * k * hidden * ffn
    if bias:
        yield Parameter(f"{name}.router.bias", (count,))
    # (experts, out, in): gate and up are column-parallel (dimension 1), down is row-parallel (2).
    for projection, shape, dim in (
        *((("gate", (ffn, hidden), 1),) if spec.expert.activation.gated else ()),
        ("up", (ffn, hidden), 1),
        ("down", (hidden, ffn), 2),
    ):
        yield Parameter(f"{name}.experts.{projection}.weight", (count, *shape), dim, flops=flops, chosen=k)
        if bias:
            yield Parameter(f"{name}.experts.{projection}.bias", (count, shape[0]), 1, chosen=k)
    if spec.shared is not None:
        yield from _mlp(spec.shared, hidden, f"{name}.shared_experts")
        if spec.shared_gate:
            yield Parameter(f"{name}.shared_expert_gate.weight", (1, hidden), flops=2 * hidden)


def _norm(spec: NormSpec, hidden: int, name: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (hidden,))
    if spec.bias:
        yield Parameter(f"{name}.bias", (hidden,))


def linear(
    name: str, in_features: int, out_features: int, shard_dim: int | None, bias: bool, heads: int | None = None
) -> Iterator[Parameter]:
    """Column-parallel when dimension 0 of the weight (out, in) is cut, row-parallel when dimension 1 is; with None
    every rank has all of it."""
    shape = (out_features, in_features)
    yield Parameter(f"{name}.weight", shape, shard_dim, heads=heads, linear=True, flops=2 * math.prod(shape))
    if bias:  # a row-parallel layer adds it after the sum, so every rank has all of it
        yield Parameter(f"{name}.bias", shape[:1], 0 if shard_dim == 0 else None, heads=heads)
