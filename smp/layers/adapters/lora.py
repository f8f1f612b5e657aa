"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) on column- and row-parallel linear layers. Those of
experts are in ``smp.layers.moe.lora``.

A linear layer with an adapter computes ``x W^T + (alpha / rank) x A^T B^T``; W stays as it is, A (rank, in) and B (out,
rank) are trained. Where A and B lie follows from where W lies:

=============  ======================  ======================  ============================================
layer          A                       B                       the low-rank activations u = x A^T
=============  ======================  ======================  ============================================
column         on every rank           rows, as W              this rank's tokens; gathered under SP
row            columns, as W           on every rank           a partial sum; all-reduced, or reduce-scattered
=============  ======================  ======================  ============================================

So the adapter's collectives move (tokens, rank), never (tokens, hidden). Under sequence parallelism the factor that
every rank holds is used on different tokens by each, so its gradient is summed over the ranks; without it all ranks
compute the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.kernels.dropout import keyed_dropout
from smp.kernels.matmul import linear
from smp.layers.adapters.dora import matrix_of, with_magnitude
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, linear_layers
from smp.layers.moe.experts import ExpertLinear, expert_layers
from smp.layers.moe.lora import ExpertLora, LoraExpertLinear
from smp.layers.parameter import REPLICATE, SHARD_COLUMNS, Constant, Initializer, Normal, local, tp_parameter
from smp.parallel.collectives import (
    copy_to_group,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)
from smp.parallel.dtensor_region import local_region
from smp.parallel.rng import dropout_key


class Lora(nn.Module):
    """The two factors of one layer's adapter.

    Args:
        layer: A and B lie on its mesh and device.
        rank: of B A.
        alpha: B A is scaled by alpha / rank.
        dropout: on the input of A, not on that of W.
        key: of the dropout's masks, see ``smp.parallel.rng``.
        dora: train the norms of the weight's rows, too, see ``smp.layers.adapters.dora``; they are cut as B is.

    A starts as N(0, 1 / (3 in)), the variance of the usual uniform start, and B as 0: the layer starts as it was.
    Both are fp32 whatever the layer's weight is.
    """

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        key: int = 0,
        *,
        dora: bool = False,
    ) -> None:
        super().__init__()
        weight = cast(DTensor, layer.weight)
        (out_features, in_features), [placement] = weight.shape, weight.placements
        # A lies as the columns of W lie and B as its rows: so x A^T and u B^T need no more than W itself does.
        self.by_columns = placement == SHARD_COLUMNS
        of_a, of_b = (SHARD_COLUMNS, REPLICATE) if self.by_columns else (REPLICATE, placement)
        with torch.device(weight.device):
            self.a = tp_parameter((rank, in_features), of_a, weight.device_mesh)
            self.b = tp_parameter((out_features, rank), of_b, weight.device_mesh)
            self.magnitude = tp_parameter((out_features,), of_b, weight.device_mesh) if dora else None
        self.initializers: dict[str, Initializer] = {"a": Normal((3 * in_features) ** -0.5), "b": Constant(0.0)}
        self.initializers["magnitude"] = Constant(math.nan)  # of the weight: begin_magnitudes
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        # A tensor: compiled code would be made anew for each adapter's number. On the host, where a kernel reads it
        # without a copy to its device; no buffer, which to_empty would lose.
        self.key = torch.tensor(key, device="cpu")
        # Of this rank's columns: dropout is keyed by the channel's number in the whole input.
        self.first_channel = local_region(weight).offsets[1]
        self.enabled = True

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank."""
        return self.alpha / self.rank

    def down(self, x: torch.Tensor, a: torch.Tensor, token_index: torch.Tensor | None) -> torch.Tensor:
        """``(alpha / rank) dropout(x) A^T``: (tokens, ..., in) -> (tokens, ..., rank)."""
        if self.dropout > 0.0 and self.training:
            if token_index is None:
                raise ValueError("dropout of adapters needs token_index: its masks are keyed by the token's number")
            x = keyed_dropout(x, self.key, token_index, self.dropout, first_channel=self.first_channel)
        return linear(x, a) * self.scale


class LoraColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel layer with an adapter ``lora``; made of a plain one by :func:`attach`."""

    lora: Lora

    @staticmethod
    def add_low_rank(
        x: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        layers: Sequence[ColumnParallelLinear],
        token_index: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """``outputs`` of layers with one input, plus what the adapters of some of them add.

        Args:
            x: (tokens [/p], ..., in), the input of all.
            outputs: (tokens, ..., this rank's outputs) of each.
            layers: with or without adapters. Those with share one collective in each direction.
            token_index: int64 (tokens [/p],), global numbers of the tokens in ``x``; needed for dropout.
        """
        # With adapters off, such as for a reference model's log-probabilities, the layer is a plain one.
        adapters = [m.lora if isinstance(m, LoraColumnParallelLinear) and m.lora.enabled else None for m in layers]
        used = [adapter for adapter in adapters if adapter is not None]
        if not used:
            return list(outputs)
        group, split = layers[0].group, layers[0].sequence_parallel
        # A lies whole on every rank; under sequence parallelism each uses it on its own tokens, so gradients are summed
        factors = [local(m.a, x.dtype, summed_over=layers[0].shared_by) for m in used]
        # All adapters' activations side by side: one collective for all of them.
        # (tokens [/p], ..., sum of ranks)
        low = torch.cat([m.down(x, a, token_index) for m, a in zip(used, factors, strict=True)], dim=-1)
        low = gather_tokens(low, group) if split else copy_to_group(low, group)  # (tokens, ..., sum of ranks)
        # Taken one by one below, in the order of the layers, by those that have an adapter.
        parts = iter(zip(factors, low.split([m.rank for m in used], dim=-1), strict=True))
        return [
            y if m is None else _added_to_column(y, layer, m, *next(parts))
            for y, m, layer in zip(outputs, adapters, layers, strict=True)
        ]


def _added_to_column(
    y: torch.Tensor, layer: ColumnParallelLinear, adapter: Lora, a: torch.Tensor, low: torch.Tensor
) -> torch.Tensor:
    """``y`` of a column-parallel layer plus its adapter's product; ``a`` is A, ``low`` the low-rank activations."""
    # B is cut as W is, also where ranks share a key/value head: the layer knows which rows it uses.
    b = layer.own_rows(adapter.b, y.dtype)
    y = y + linear(low, b)
    if adapter.magnitude is None:
        return y
    weight = matrix_of(layer, layer.own_rows(layer.weight, y.dtype), y.dtype)
    return with_magnitude(y, layer.own_rows(adapter.magnitude, y.dtype), weight, (a, b), adapter.scale)


class LoraRowParallelLinear(RowParallelLinear):
    """A row-parallel layer with an adapter ``lora``; made of a plain one by :func:`attach`."""

    lora: Lora

    def add_low_rank(self, x: torch.Tensor, output: torch.Tensor, token_index: torch.Tensor | None) -> torch.Tensor:
        """``output`` plus what the adapter adds.

        Args:
            x: (tokens, ..., in / p), the layer's input.
            output: (tokens [/p], ..., out).
            token_index: int64 (tokens,), global numbers of the tokens; needed for dropout.
        """
        if not self.lora.enabled:
            return output
        # Columns of A: each rank multiplies its own part of the input, so no gradient is summed.
        a = local(self.lora.a, x.dtype)
        low = self.lora.down(x, a, token_index)  # (tokens, ..., rank), a part of the sum
        reduce = reduce_scatter_tokens if self.sequence_parallel else reduce_from_group
        # Whole on every rank; under sequence parallelism each multiplies its own tokens.
        b = local(self.lora.b, output.dtype, summed_over=self.shared_by)
        # Summed before B, when it is (tokens, rank).
        y = output + linear(reduce(low, self.group), b)
        if self.lora.magnitude is None:
            return y
        weight = matrix_of(self, local(self.weight, output.dtype), output.dtype)
        # Whole on every rank, like B, and used on different tokens under sequence parallelism.
        magnitude = local(self.lora.magnitude, output.dtype, summed_over=self.shared_by)
        return with_magnitude(y, magnitude, weight, (a, b), self.lora.scale, (self.group,))


def add_adapters(
    model: nn.Module, targets: Sequence[str], rank: int, alpha: float, *, dropout: float = 0.0, seed: int = 0
) -> dict[str, list[str]]:
    """Give linear layers of ``model`` adapters, and freeze everything else. Before ``fully_shard``.

    Args:
        model: with layers of this package.
        targets: shell patterns; a layer is chosen when one of them matches its whole name in ``model`` or the last
            part of it, as ``query`` and ``layers.1?.mlp.*`` do. Experts are chosen by patterns that name them, as
            ``*.experts.*`` does.
        rank, alpha, dropout: see :class:`Lora`.
        seed: keys dropout.

    Returns:
        Names of the chosen layers, by pattern.
    """
    chosen = choose(model, targets)
    sizes = {name: (rank, alpha) for names in chosen.values() for name in names}
    attach(model, sizes, dropout=dropout, seed=seed)
    return chosen


def choose(model: nn.Module, targets: Sequence[str]) -> dict[str, list[str]]:
    """Names of the linear layers that each pattern chooses; see :func:`add_adapters`."""
    names, experts = list(adaptable(model)), list(expert_layers(model))
    return {target: matching(names, experts, target) for target in targets}


def adaptable(model: nn.Module) -> dict[str, Any]:
    """Linear layers that take an adapter, by name: those of this package, and others with a method ``takes_adapter``,
    (name, rank, alpha, and by name dora, dropout, key), which puts one on the layer as its attribute ``lora``."""
    # An attribute of the instance: set on layers of transformers, whose classes are not this project's.
    others = {name: module for name, module in model.named_modules() if "takes_adapter" in vars(module)}
    return {**linear_layers(model), **others}


def matching(names: Sequence[str], experts: Sequence[str], target: str) -> list[str]:
    """Names of layers that a pattern matches, whole or in their last part, and of experts where it names them and
    matches them whole."""
    found = [name for name in names if fnmatchcase(name, target) or fnmatchcase(name.rpartition(".")[2], target)]
    return [*found, *(name for name in experts if "experts" in target and fnmatchcase(name, target))]


def attach(
    model: nn.Module,
    sizes: Mapping[str, tuple[int, float]],
    *,
    dropout: float = 0.0,
    seed: int = 0,
    dora: bool = False,
) -> None:
    """Put an adapter of the given (rank, alpha) on each named layer, and freeze everything else. Names of layers that
    this part of a model does not have are passed over.

    A layer becomes one of the adapted class in place, as a module becomes an ``FSDPModule`` under ``fully_shard``: it
    keeps its parameters and their names, and the adapter's are ``<layer>.lora.a`` and ``.b``, with ``dora`` also
    ``.magnitude``, which ``smp.layers.adapters.dora.begin_magnitudes`` fills when there are weights.

    Raises:
        ValueError: a layer has an adapter already, or its class is a subclass that cannot be replaced; dropout or
            ``dora`` for experts.
    """
    # First, so that only what is added below is trained.
    model.requires_grad_(False)
    for name, experts in expert_layers(model).items():
        if name in sizes:
            # ``type(...) is``: a layer that has an adapter is a subclass.
            if type(experts) is not ExpertLinear or dropout or dora:
                raise ValueError(f"{name}: adapters go on plain experts, once, without dropout and DoRA")
            experts.__class__ = LoraExpertLinear
            cast(LoraExpertLinear, experts).lora = ExpertLora(experts, *sizes[name])
    for name, layer in linear_layers(model).items():
        if name in sizes:
            if type(layer) not in (ColumnParallelLinear, RowParallelLinear):
                raise ValueError(f"{name} is a {type(layer).__name__}: adapters go on plain layers, once")
            column = isinstance(layer, ColumnParallelLinear)
            # In place: whatever holds the layer (lists of projections, FSDP units made later) sees the adapter.
            layer.__class__ = LoraColumnParallelLinear if column else LoraRowParallelLinear
            # By the layer's name, so that every layout drops the same.
            layer.lora = Lora(layer, *sizes[name], dropout, dropout_key(seed, f"{name}.lora"), dora=dora)
    for name, layer in adaptable(model).items():
        if name in sizes and "takes_adapter" in vars(layer):
            key = dropout_key(seed, f"{name}.lora")
            layer.takes_adapter(name, *sizes[name], dora=dora, dropout=dropout, key=key)


def adapters_of(model: nn.Module) -> dict[str, Lora | ExpertLora]:
    """Adapters by the name of their layer, those of experts last."""
    layers = {**adaptable(model), **expert_layers(model)}
    return {name: layer.lora for name, layer in layers.items() if "lora" in layer._modules}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context manager: inside it the model computes without its adapters."""
    adapters = adapters_of(model).values()
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True
