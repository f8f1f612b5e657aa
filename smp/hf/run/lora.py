"""LoRA adapters on linear layers of a transformers model that a run trains.

The factors are those of ``smp.layers.adapters.lora``, under the layer's name in Hugging Face's model, and lie as its
weight:

====================  ============================  =======================================
layer                 A (rank, in)                  B (out, rank)
====================  ============================  =======================================
colwise               on every rank; summed         rows, as W
rowwise               columns, as W                 on every rank
others                as W                          as W
====================  ============================  =======================================

A reads what the layer reads, after the point where gradients of that are summed over the ranks (``Boundary`` of
``smp.hf.modules``). So the gradient of A in a column-cut layer is a part of a sum, which ``summed_over`` makes whole.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from smp.config import ConfigError
from smp.hf.modules import Cut, summed_over
from smp.hf.planning.rows import LATENT
from smp.hf.products import take_product
from smp.hf.sources import source_of
from smp.kernels.matmul import linear
from smp.layers.adapters.dora import begin_magnitudes, matrix_of, row_norms
from smp.layers.adapters.lora import Lora
from smp.layers.parameter import REPLICATE, local, tp_parameter
from smp.models.foreign import blocks_of
from smp.parallel.collectives import (
    Group,
    copy_to_group,
    gather_features,
    reduce_from_group,
    reduce_scatter_tokens,
    split_features,
)
from smp.parallel.dtensor_region import local_part

KNOWN = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input", "replicate", LATENT)


@dataclass
class TokenNumbers:
    """Keys for adapter dropout in a model whose layers do not know which tokens they get.

    Attributes:
        index: int64 (batch, length), of the micro-batch that trains, until the next one does: recomputation asks for it
            again.
    """

    index: torch.Tensor | None = None

    def of(self, x: torch.Tensor, name: str, group: Group | None) -> torch.Tensor:
        """Token numbers (tokens,) of the rows of a layer's input (..., channels), which has all tokens or this rank's
        part.

        Raises:
            ConfigError: it has neither.
        """
        assert self.index is not None, "set by the forward pass of the model"
        index, count = self.index, math.prod(x.shape[:-1])
        # Sequence parallelism: the rank's slice of the sequence.
        if group is not None and count * group.size == index.numel():
            index = index.chunk(group.size, 1)[group.rank]
        if count != index.numel():
            raise ConfigError(
                f"--lora-dropout: {name} reads {count} rows, which are not the {index.numel()} tokens: masks would "
                "depend on the layout; give 0, or leave that layer out of --lora-target-modules"
            )
        return index.reshape(-1)


def offer(module: Any, tp: DeviceMesh, numbers: TokenNumbers) -> None:
    """Let every linear layer of the decoder's blocks take an adapter and 4-bit weights, except for those whose weight
    is read outside of their forward pass: an adapter there would do nothing. A weight to whose dtype its input is cast
    stays wide: packed weights have another dtype (T5's ``wo``, which transformers does not quantize either)."""
    for _, block in blocks_of(module):
        for name, layer in block.named_modules():
            owner, _, own = name.rpartition(".")
            kind: Any = type(block.get_submodule(owner))
            if type(layer) is nn.Linear and own not in _named_by(kind, _READ):
                layer.takes_adapter = partial(_attach, layer, tp, numbers)  # type: ignore[assignment]
                layer.product = "dense"  # type: ignore[assignment]
                if own not in _named_by(kind, _CAST_TO):
                    layer.take_product = partial(take_product, layer)  # type: ignore[assignment]


@cache
def _named_by(owner: type, use: re.Pattern[str]) -> frozenset[str]:
    """Names of a class's layers that its own code uses in this way."""
    found: set[str] = set()
    for kind in (kind for kind in owner.__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module):
        try:
            found |= set(use.findall(source_of(kind)))
        except (OSError, TypeError):  # a class without a file
            continue
    return frozenset(found)


_READ = re.compile(r"(?<!isinstance\()\bself\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device|shape)\b|\[)")
"""Reads a weight or bias, for a fused kernel (``out_proj`` and ``x_proj`` of Mamba) or for a product of its own
(``dt_proj`` of Mamba, Gemma 3n's coefficients); but for slices: Bloom reads those of some layers only where it is told
to round as its training did."""
_CAST_TO = re.compile(r"\.to\((?:dtype=)?self\.(\w+)\.weight\.dtype\)")
"""Casts to the dtype of a weight."""


def _attach(
    layer: Any,
    tp: DeviceMesh,
    numbers: TokenNumbers,
    name: str,
    rank: int,
    alpha: float,
    *,
    dora: bool,
    dropout: float,
    key: int,
) -> None:
    """Give ``layer`` an adapter; called by ``smp.layers.adapters.lora.attach``."""
    style = _style(layer)
    if style not in KNOWN or (dora and style == LATENT):
        what = "no adapter with --use-dora" if style in KNOWN else "no adapter"
        raise ConfigError(f"--lora-target-modules: {name} is cut as {style}, which takes {what}; leave it out")
    weight, placement = layer.weight, cast(Placement, REPLICATE)
    if isinstance(weight, DTensor):
        [placement] = weight.placements
    with torch.device("meta"):
        like = tp_parameter(tuple(weight.shape), placement, tp)
    # Lora needs only the shape and placement of a weight.
    shapes: Any = SimpleNamespace(weight=like)
    layer.lora = Lora(shapes, rank, alpha, dropout, key, dora=dora)
    layer.token_numbers = partial(numbers.of, name=name)
    # A cut layer's forward is an instance attribute, a whole one's the class's.
    layer.without_adapter = vars(layer).get("forward") or MethodType(type(layer).forward, layer)
    layer.forward = MethodType(_forward, layer)


def _style(layer: Any) -> str:
    cut: Cut | None = vars(layer).get("smp_cut")
    return "replicate" if cut is None else cut.step.style


def _forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """(..., in) -> (..., out), with the input and output layout of the layer itself."""
    y: torch.Tensor = layer.without_adapter(input)
    if not layer.lora.enabled:
        return y
    style = _style(layer)
    if style.startswith("colwise"):
        added = _of_columns(layer, input, y.dtype)
    elif style.startswith("rowwise"):
        added = _of_rows(layer, input, y.dtype)
    else:
        added = _of_whole(layer, input, y.dtype)
    return y + added if layer.lora.magnitude is None else _scaled(layer, y, added)


def _scaled(layer: Any, y: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The output of layer and adapter scaled by DoRA's trained row norms (arXiv 2402.09353); the bias is not scaled
    (:mod:`smp.layers.adapters.dora`)."""
    cut: Cut | None = vars(layer).get("smp_cut")
    adapter, style, dtype = layer.lora, _style(layer), y.dtype
    heads = cut.step.heads if cut is not None and style.startswith("colwise") else None
    by_rows = cut is not None and style.startswith("rowwise")
    summed = None if cut is None else summed_over(layer)
    # Ranks that use some rows, or have some tokens, each have a part of these gradients.
    if cut is not None and (heads or (by_rows and cut.tokens and layer.training)):
        summed = cut.group
    magnitude, b = (local(x, dtype, summed_over=summed) for x in (adapter.magnitude, adapter.b))
    weight = local_part(layer.weight.detach())
    bias = None if layer.bias is None else _frozen(layer.bias, dtype)
    if heads:
        magnitude, b, weight = (x.narrow(0, *heads) for x in (magnitude, b, weight))
        bias = None if bias is None else bias.narrow(0, *heads)
    weight = matrix_of(layer, weight, dtype)
    # A row-parallel weight has a part of each row: squares are summed over the ranks.
    over = (cut.group,) if cut is not None and by_rows else ()
    norms = row_norms(weight.to(dtype), local(adapter.a, dtype), b, adapter.scale, over)
    ratio = magnitude.to(norms.dtype) / torch.where(norms > 0, norms, 1.0)  # a row of zeros stays one
    if style == "colwise_gather_output" and cut is not None:
        ratio = gather_features(ratio, cut.group)
        bias = None if bias is None else gather_features(bias, cut.group)
    bias = y.new_zeros(()) if bias is None else bias
    return ((y - bias + added).to(norms.dtype) * ratio).to(dtype) + bias


def _frozen(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of a parameter that adapters do not train."""
    found = parameter.detach()
    return local(found, dtype) if isinstance(found, DTensor) else found


def begin_norms(model: nn.Module) -> None:
    """Initialize DoRA's magnitudes with the row norms after weights are loaded. Every rank calls it."""
    layers = {id(m): m for m in model.modules() if "without_adapter" in vars(m)}.values()
    groups = ((layer, vars(layer).get("smp_cut")) for layer in layers)
    begin_magnitudes(
        SimpleNamespace(lora=layer.lora, weight=layer.weight, product=layer.product, group=cut.group if cut else None)
        for layer, cut in groups
    )


def _down(layer: Any, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """(..., in) -> (..., rank), for the tokens that ``x`` has."""
    adapter = layer.lora
    if not (adapter.dropout and layer.training):
        low: torch.Tensor = adapter.down(x, a, None)
        return low
    cut: Cut | None = vars(layer).get("smp_cut")
    index = layer.token_numbers(x, group=None if cut is None or not cut.tokens else cut.group)
    flat: torch.Tensor = adapter.down(x.flatten(0, -2), a, index)
    return flat.unflatten(0, x.shape[:-1])


def _of_columns(layer: Any, input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cut, adapter = layer.smp_cut, layer.lora
    # The copy that the layer itself made: one all-reduce of the input's gradient for both.
    x = cut.inside.copied(input, cut.group).to(dtype)
    # A is whole on every rank, but its output goes to this rank's columns: the gradient is a part
    # of a sum.
    low = _down(layer, x, local(adapter.a, dtype, summed_over=cut.group))  # (..., rank)
    b = local(adapter.b, dtype, summed_over=cut.group if cut.step.heads else None)
    if cut.step.heads:
        b = b.narrow(0, *cut.step.heads)
    out = linear(low, b)
    return out if cut.step.style == "colwise" else gather_features(out, cut.group)


def _of_rows(layer: Any, input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cut, adapter = layer.smp_cut, layer.lora
    x = split_features(input, cut.group) if cut.step.style == "rowwise_split_input" else input
    low = _down(layer, x.to(dtype), local(adapter.a, dtype))  # (..., rank), a part of the sum
    scattered = cut.tokens and layer.training
    if scattered:
        low = reduce_scatter_tokens(low.transpose(0, 1), cut.group).transpose(0, 1)  # (batch, n/tp, rank)
    else:
        # Summed at the adapter's rank, which is far below the output's width.
        low = reduce_from_group(low, cut.group)
    return linear(low, local(adapter.b, dtype, summed_over=cut.group if scattered else None))


def _of_whole(layer: Any, input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cut: Cut | None = vars(layer).get("smp_cut")
    over: Group | None = None if cut is None else summed_over(layer)
    adapter = layer.lora
    low = _down(layer, input.to(dtype), local(adapter.a, dtype, summed_over=over))
    out = linear(low, local(adapter.b, dtype, summed_over=over))
    if cut is None or cut.step.style != LATENT:
        return out
    latent, rope = out.tensor_split((-cut.step.summed,), -1)
    # The rotary part is used by every rank's heads: its gradient is summed, as in smp.hf.modules.
    return torch.cat((latent, copy_to_group(rope, cut.group)), -1)
