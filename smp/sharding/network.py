"""FSDP2's gathers of weights and reductions of gradients by hierarchical schedules, through its custom communication.

FSDP2 calls these objects by keyword where it would call torch.distributed (read in torch 2.11 and 2.13; the classes it
describes them by are not exported). A gather runs on a thread of its own and returns a ``Work``, which FSDP2 waits for
where a unit's weights are used: with ``prefetch`` transfers go on while a CPU computes. A gradient's sum is read in the
next line, so it is waited for.

With secondary shards (hpZ) a gather in a backward pass comes from ranks of the node alone. torch has
``fully_shard(reshard_after_forward=size)`` for that, but not for DTensors, which all weights here are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from smp.parallel.collectives import all_gather_flat
from smp.parallel.network.cost import FLAT
from smp.parallel.network.group import NetworkGroup
from smp.parallel.network.quantize import Quantization
from smp.parallel.network.secondary import SecondaryShard
from smp.parallel.network.select_collectives import NetworkCollectives

# The name in torch 2.11 is deprecated in 2.13.
_flat_reduce: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Allocates:
    """Allocation, which FSDP2 asks of its communication besides the call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class GatherWeights(Allocates):
    """All-gather of one unit's weights, (n) -> (n x ranks).

    Args:
        network: of the group; None: flat.
        quantization: of what crosses uplinks.
        secondary: what backward passes gather from.
    """

    def __init__(
        self,
        network: NetworkGroup | None,
        quantization: Quantization | None = None,
        secondary: SecondaryShard | None = None,
    ) -> None:
        self._network, self._quantization, self._secondary = network, quantization, secondary

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        secondary = self._secondary
        if secondary is None:
            return self._gather(output_tensor, input_tensor, group, async_op, _nothing)
        # Before the first forward pass there is no copy yet.
        if secondary.own is not None and _in_backward():
            return secondary.gather(output_tensor, async_op=async_op)
        # Waited for: the copies that stay on the node are taken from what arrived.
        return self._gather(output_tensor, input_tensor, group, False, lambda: secondary.keep(output_tensor))

    def _gather(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
        then: Callable[[], None],
    ) -> dist.Work | None:
        """Gather over all ranks of the group, then call ``then``. Without ``async_op`` a flat gather has ended on
        return."""
        network, quantization = self._network, self._quantization
        if network is None:
            way = FLAT
        elif quantization is None:
            way = network.way("all-gather", output)
        else:
            way = network.way_quantized(given)
        if network is None or way.route is None:
            work: dist.Work | None = all_gather_flat(output, given, group=group, async_op=async_op)
            then()
            return work
        if quantization is None:
            return network.all_gather(output, given, way).work(output, then)
        if not given.is_floating_point():
            raise ValueError(f"weights of {given.dtype} cannot be quantized; leave --zero-quantized-weights out")
        return network.all_gather_quantized(output, given, way, quantization, then)


def _nothing() -> None:
    pass


def _in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread, as FSDP2 and torch.utils.checkpoint ask it."""
    return torch._C._current_graph_task_id() >= 0


class ReduceGradients(Allocates):
    """Reduce-scatter of one unit's gradients, (n x ranks) -> (n)."""

    def __init__(self, network: NetworkGroup, quantization: Quantization | None) -> None:
        self._network, self._quantization = network, quantization

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
        # The same on all ranks: it is chosen from the size alone.
        way = self._network.way("reduce-scatter", input_tensor)
        if way.route is None:
            _flat_reduce(output_tensor, input_tensor, op, group=group)
        else:
            self._network.reduce_scatter(output_tensor, input_tensor, way, self._quantization).finish()


def communicate_by(
    modules: Iterable[nn.Module],
    mesh: DeviceMesh,
    collectives: NetworkCollectives,
    gathered_again: Container[nn.Module] = (),
) -> None:
    """Set the collectives that were chosen for the last dimension of ``mesh`` on the FSDP units among ``modules``.
    Units in ``gathered_again``, which the backward pass gathers a second time, get secondary shards where the group has
    them."""
    # Only this group is asked for: sums over replicas (``dp_replicate``) stay FSDP2's own
    # all-reduce.
    group = mesh.get_group(mesh.ndim - 1)
    network, secondary = collectives.of(group), collectives.secondary.get(group.group_name)
    coded = collectives.quantization
    weights = coded if coded is not None and coded.weights else None
    gradients = coded if coded is not None and coded.gradients else None
    for module in modules:
        if not isinstance(module, FSDPModule):
            continue
        # Only units that a backward pass gathers again have a use for a second copy of their weights.
        kept = secondary.of_a_unit() if secondary is not None and module in gathered_again else None
        if network is not None or kept is not None:
            module.set_custom_all_gather(GatherWeights(network, weights, kept))  # type: ignore[arg-type]
        if network is not None:
            module.set_custom_reduce_scatter(ReduceGradients(network, gradients))  # type: ignore[arg-type]
