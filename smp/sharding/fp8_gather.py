"""FSDP's gathers of FP8 layers' weights as 8-bit numbers (--fp8-param-gather), through FSDP2's custom communication.

A weight that a layer quantises under one scale can be quantised before it is gathered: the same numbers, 1 byte instead
of 2, or of 4 in fp32. Each rank rounds its own part under the scale of the whole tensor, and what arrives is written as
the numbers that it stands for: a layer that quantises these again finds them representable and changes none. Masters
stay fp32, and so do parts that the optimizer sees. Norms, biases and weights of other layers travel as they are.

The order of a unit's parameters in the buffer is read from FSDP2's own list of them, which is private (as in torch 2.11
and 2.13). Private functions that do something are called in ``stages`` alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp.kernels.precision.fp8 import E4M3, Quantised, dequantise, quantise
from smp.layers.fp8.layer_scaling import LayerScaling, scales_of_parts
from smp.parallel.collectives import all_gather_flat
from smp.sharding.network import Allocates

_ALIGNED = 8
"""Bytes; parts of other dtypes begin at multiples of their elements."""


@dataclass(frozen=True)
class Part:
    """A parameter's range in a unit's buffer, in elements, and its layer's FP8 scaling; None: it is gathered
    unquantised."""

    start: int
    end: int
    scaling: LayerScaling | None


class GatherFp8(Allocates):
    """All-gather of one unit's weights, (n) -> (n x ranks), as FSDP2 calls it."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._scaled = [part for part in parts if part.scaling is not None]
        self._plain = [part for part in parts if part.scaling is None]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        scaled = [input_tensor[part.start : part.end] for part in self._scaled]
        scales = scales_of_parts([part.scaling for part in self._scaled if part.scaling is not None], scaled)
        if scales is None:
            return all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)
        sent = [input_tensor[part.start : part.end].view(torch.uint8) for part in self._plain]
        # Plain parts come first, and each rank's row is padded to a multiple of 8 bytes: what is
        # viewed as a wider dtype below then begins at a multiple of its element.
        sent += [
            quantise(x[None], scale, E4M3).data.view(torch.uint8)[0] for x, scale in zip(scaled, scales, strict=True)
        ]
        sizes = [part.numel() for part in sent]
        rest = -sum(sizes) % _ALIGNED
        coded = torch.cat([*sent, input_tensor.new_zeros(rest, dtype=torch.uint8)])
        gathered = coded.new_empty(group.size() * coded.numel())
        # Waited for, whatever ``async_op`` says: what arrives is written as numbers in the next
        # lines.
        all_gather_flat(gathered, coded, group=group)
        out, columns = output_tensor.view(group.size(), -1), gathered.view(group.size(), -1).split([*sizes, rest], 1)
        for part, found in zip(self._plain, columns, strict=False):
            out[:, part.start : part.end] = found.view(output_tensor.dtype)
        for part, found, scale in zip(self._scaled, columns[len(self._plain) :], scales, strict=False):
            out[:, part.start : part.end] = dequantise(Quantised(found.view(E4M3), scale), output_tensor.dtype)
        return None


def gather_in_fp8(model: nn.Module) -> None:
    """Let the FSDP units of ``model`` that have FP8 layers gather their weights as 8-bit numbers."""
    for unit in model.modules():
        parts = _parts_of(unit) if isinstance(unit, FSDPModule) else []
        scaled = [part.scaling for part in parts if part.scaling is not None]
        for scaling in scaled:
            scaling.gathered = True
        if scaled:
            unit.set_custom_all_gather(GatherFp8(parts))  # type: ignore[operator]


def _parts_of(unit: FSDPModule) -> list[Part]:
    """Where the parameters lie that a unit gathers, in their order; none of a unit that is not cut: FSDP then calls no
    gather, and its layers have to note the maxima of their weights themselves."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    if group is None or group._all_gather_process_group.size() == 1:
        return []
    params: Iterable[Any] = group.fsdp_params
    sized = [(param._sharded_param_data.numel(), _scaling_of(param._module_info)) for param in params]
    ends = list(itertools.accumulate(size for size, _ in sized))
    return [Part(end - size, end, scaling) for end, (size, scaling) in zip(ends, sized, strict=True)]


def _scaling_of(info: Any) -> LayerScaling | None:
    """The FP8 scaling of a parameter, found by its module and its name there; None: it is gathered unquantised."""
    scaling = getattr(info.module, "scaling", None) if info.param_name == "weight" else None
    return scaling if isinstance(scaling, LayerScaling) else None
