"""The inventory: every parameter of a model, from its ``ModelConfig``. No torch, so that it runs on a login node.

A new kind of layer is described here once: converters, adapters, parameter counts, FLOPs and memory read the inventory,
and the model that ``smp.models.gpt`` builds is tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from smp.config import Layout, ModelConfig
from smp.config.moe import has_experts
from smp.config.mtp import further_layers
from smp.models.part import ModelPart, whole

T = TypeVar("T")

EXPERT_BIAS = "expert_bias"
"""Last name of a router's buffer that stays as it is, whatever weights are converted to: small differences decide."""


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
        """What one rank of ``group`` (of experts, of ep and etp) holds, padding included, before FSDP."""
        dim, shape, ranks = self.placement(layout), list(self.shape), getattr(layout, self.group)
        if self.chosen is not None:
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
    first, last = any(p.embedding for p in parts), any(p.head for p in parts)
    tied = not model.untie_embeddings_and_output_weights
    # Both ends of a pipeline hold a matrix that both use, so both count it.
    if first or (last and (tied or model.mtp_num_layers is not None)):
        yield vocabulary_matrix(model, "embedding", has_product=tied)
    if first and model.position_embedding_type == "learned_absolute":
        rows = model.position_embedding_offset + model.max_position_embeddings
        yield Parameter("positions.weight", (rows, model.hidden_size))
    if first and model.embedding_layernorm:
        yield from _norm(model, "embedding_norm")
    for part in parts:
        for layer in part.layers:
            yield from block_parameters(model, layer)
    if last:
        for number, layer in enumerate(further_layers(model)):
            yield from prediction_parameters(model, number)
            yield from block_parameters(model, layer)
        yield from _norm(model, "final_norm")
    if last and model.scalar_head:
        yield Parameter("head.weight", (1, model.hidden_size), flops=2 * model.hidden_size)
    elif last and not tied:
        yield vocabulary_matrix(model, "head", has_product=True)


def weights_of(model: ModelConfig) -> Iterator[Parameter]:
    """Everything that a model computes with: its parameters, and the expert biases, which no gradient trains."""
    yield from inventory(model)
    if model.moe_router_enable_expert_bias:
        assert model.num_experts is not None, "checked before"
        for layer in (*range(model.num_layers), *further_layers(model)):
            if has_experts(model, layer):
                yield Parameter(f"layers.{layer}.mlp.router.{EXPERT_BIAS}", (model.num_experts,))


def vocabulary_matrix(model: ModelConfig, module: str, has_product: bool) -> Parameter:
    """Token embedding or output matrix; a lookup is no product."""
    rows, hidden, pad_to = model.vocab_size, model.hidden_size, model.make_vocab_size_divisible_by
    assert rows is not None, "resolved before"
    return Parameter(f"{module}.weight", (rows, hidden), 0, pad_to=pad_to, flops=2 * rows * hidden * has_product)


def prediction_parameters(model: ModelConfig, number: int) -> Iterator[Parameter]:
    """Of a layer of multi-token prediction what is not its block."""
    name, hidden = f"predictions.{number}", model.hidden_size
    for norm in ("embedding_norm", "hidden_norm", "norm"):
        yield from _norm(model, f"{name}.{norm}")
    yield from _linear(f"{name}.projection", 2 * hidden, hidden, None, False)


def block_parameters(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    """The parameters of one block."""
    hidden, ffn, mlp = model.hidden_size, model.ffn_hidden_size, f"layers.{layer}.mlp"
    assert ffn is not None, "resolved before"
    attention = f"layers.{layer}.attention"
    before, behind = (model.norm_placement in kinds for kinds in (("pre", "sandwich"), ("post", "sandwich")))
    if before:
        yield from _norm(model, f"{attention}_norm")
    yield from (_latent_attention if model.multi_latent_attention else _attention)(model, attention)
    if before and not model.parallel_residual_shared_norm:
        yield from _norm(model, f"{mlp}_norm")
    if behind:
        yield from _norm(model, f"{attention}_post_norm")
        yield from _norm(model, f"{mlp}_post_norm")
    if not has_experts(model, layer):
        yield from _mlp(model, mlp, ffn)
        return
    yield from _experts(model, mlp)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _mlp(model, f"{mlp}.shared_experts", model.moe_shared_expert_intermediate_size)
        if model.moe_shared_expert_gate:
            yield Parameter(f"{mlp}.shared_expert_gate.weight", (1, hidden), flops=2 * hidden)


def of_each_block(model: ModelConfig, layers: Iterable[int], measure: Callable[[Iterator[Parameter]], T]) -> list[T]:
    """``measure(parameters)`` of each of these layers. Blocks differ in whether they have experts, so that each kind is
    measured once: a planner asks for hundreds of layouts."""
    layers = list(layers)
    kinds = {has_experts(model, layer): layer for layer in layers}
    measured = {kind: measure(block_parameters(model, layer)) for kind, layer in kinds.items()}
    return [measured[has_experts(model, layer)] for layer in layers]


def _attention(model: ModelConfig, attention: str) -> Iterator[Parameter]:
    hidden, groups, head_dim = model.hidden_size, model.num_query_groups, model.kv_channels
    assert groups is not None and head_dim is not None, "resolved before"
    q, kv = model.num_attention_heads * head_dim, groups * head_dim
    bias = not model.disable_bias_linear
    qkv_bias = bias or model.add_qkv_bias
    if model.qk_layernorm_across_heads:
        yield Parameter(f"{attention}.query_norm.weight", (q,), 0)
        yield Parameter(f"{attention}.key_norm.weight", (kv,), 0)
    elif model.qk_layernorm:
        yield Parameter(f"{attention}.query_norm.weight", (head_dim,))
        yield Parameter(f"{attention}.key_norm.weight", (head_dim,))
    yield from _linear(f"{attention}.query", hidden, q, 0, qkv_bias)
    yield from _linear(f"{attention}.key", hidden, kv, 0, qkv_bias, groups)
    yield from _linear(f"{attention}.value", hidden, kv, 0, qkv_bias, groups)
    yield from _linear(f"{attention}.output", q, hidden, 1, bias)
    if model.softmax_type == "learnable":
        yield Parameter(f"{attention}.sinks", (model.num_attention_heads,), 0)


def _latent_attention(model: ModelConfig, attention: str) -> Iterator[Parameter]:
    """Every rank has all of the down projections and of the norms behind them."""
    hidden, heads, low, latent = model.hidden_size, model.num_attention_heads, model.q_lora_rank, model.kv_lora_rank
    queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    if low is None:
        yield from _linear(f"{attention}.query", hidden, queries, 0, False)
    else:
        yield from _linear(f"{attention}.query_down", hidden, low, None, False)
        yield from _linear(f"{attention}.query_up", low, queries, 0, False)
    yield from _linear(f"{attention}.key_value_down", hidden, latent + model.qk_pos_emb_head_dim, None, False)
    yield from _linear(f"{attention}.key_value_up", latent, heads * (model.qk_head_dim + model.v_head_dim), 0, False)
    yield from _linear(f"{attention}.output", heads * model.v_head_dim, hidden, 1, False)
    if model.qk_layernorm:
        yield Parameter(f"{attention}.key_value_norm.weight", (latent,))
        if low is not None:
            yield Parameter(f"{attention}.query_norm.weight", (low,))


def _mlp(model: ModelConfig, name: str, ffn: int) -> Iterator[Parameter]:
    bias = not model.disable_bias_linear
    if model.gated:
        yield from _linear(f"{name}.gate", model.hidden_size, ffn, 0, bias)
    yield from _linear(f"{name}.up", model.hidden_size, ffn, 0, bias)
    yield from _linear(f"{name}.down", ffn, model.hidden_size, 1, bias)


def _experts(model: ModelConfig, name: str) -> Iterator[Parameter]:
    """The router, and each projection of all experts in one."""
    count, k, hidden, ffn = model.num_experts, model.moe_router_topk, model.hidden_size, model.moe_ffn_hidden_size
    assert count is not None and ffn is not None, "resolved before"
    # Every rank scores all experts of its tokens, so the router is cut by nobody.
    yield Parameter(f"{name}.router.weight", (count, hidden), flops=2 * count * hidden)
    bias, flops = not model.disable_bias_linear, 2 * k * hidden * ffn
    if bias:
        yield Parameter(f"{name}.router.bias", (count,))
    for projection, shape, dim in (
        *((("gate", (ffn, hidden), 1),) if model.gated else ()),
        ("up", (ffn, hidden), 1),
        ("down", (hidden, ffn), 2),
    ):
        yield Parameter(f"{name}.experts.{projection}.weight", (count, *shape), dim, flops=flops, chosen=k)
        if bias:
            yield Parameter(f"{name}.experts.{projection}.bias", (count, shape[0]), 1, chosen=k)


def _norm(model: ModelConfig, name: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (model.hidden_size,))
    if model.normalization == "LayerNorm" and model.layernorm_bias:
        yield Parameter(f"{name}.bias", (model.hidden_size,))


def _linear(
    name: str, in_features: int, out_features: int, shard_dim: int | None, bias: bool, heads: int | None = None
) -> Iterator[Parameter]:
    """Column-parallel when dimension 0 of the weight (out, in) is cut, row-parallel when dimension 1 is; with None
    every rank has all of it."""
    shape = (out_features, in_features)
    yield Parameter(f"{name}.weight", shape, shard_dim, heads=heads, linear=True, flops=2 * math.prod(shape))
    if bias:  # a row-parallel layer adds it after the sum, so every rank has all of it
        yield Parameter(f"{name}.bias", shape[:1], 0 if shard_dim == 0 else None, heads=heads)
