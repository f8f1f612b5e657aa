"""FSDP2's gathers of weights and reductions of gradients by hierarchical schedules, through its custom communication.

FSDP2 calls these objects by keyword where it would call torch.distributed (read in torch 2.11 and 2.13; the classes it
describes them by are not exported). A gather runs on a thread of its own and returns a ``Work``, which FSDP2 waits for
where a unit's weights are used: with ``prefetch`` transfers go on while a CPU computes. A gradient's sum is read in the
next line, so it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from smp.parallel.collectives import all_gather_flat
from smp.parallel.network.choose import NetworkCollectives
from smp.parallel.network.group import NetworkGroup
from smp.parallel.network.quantize import Quantization

# The name in torch 2.11 is deprecated in 2.13.
_flat_reduce: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Allocates:
    def __init__(self, network: NetworkGroup, quantization: Quantization | None = None) -> None:
        self._network, self._quantization = network, quantization

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class GatherWeights(_Allocates):
    """All-gather of one unit's weights, (n) -> (n x ranks)."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        coded = self._quantization is not None
        way = self._network.way_quantized(input_tensor) if coded else self._network.way("all-gather", output_tensor)
        if way.route is None:
            return all_gather_flat(output_tensor, input_tensor, group=group, async_op=async_op)
        if self._quantization is None:
            return self._network.all_gather(output_tensor, input_tensor, way).work(output_tensor)
        if not input_tensor.is_floating_point():
            raise ValueError(f"weights of {input_tensor.dtype} cannot be quantized; leave --zero-quantized-weights out")
        return self._network.all_gather_quantized(output_tensor, input_tensor, way, self._quantization)


class ReduceGradients(_Allocates):
    """Reduce-scatter of one unit's gradients, (n x ranks) -> (n)."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"hierarchical collectives add gradients up; FSDP was told to take {op}")
        way = self._network.way("reduce-scatter", input_tensor)
        if way.route is None:
            _flat_reduce(output_tensor, input_tensor, op, group=group)
        else:
            self._network.reduce_scatter(output_tensor, input_tensor, way, self._quantization).finish()


def communicate_by(modules: Iterable[nn.Module], mesh: DeviceMesh, collectives: NetworkCollectives) -> None:
    """Let the FSDP units among ``modules``, sharded over the last dimension of ``mesh``, gather and reduce as was
    chosen for that group."""
    network = collectives.of(mesh.get_group(mesh.ndim - 1))
    if network is None:
        return
    coded = collectives.quantization
    weights = coded if coded is not None and coded.weights else None
    gradients = coded if coded is not None and coded.gradients else None
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(GatherWeights(network, weights))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ReduceGradients(network, gradients))  # type: ignore[arg-type]
