"""The parameters of pipeline stages under FSDP2: gathered, freed and reduced when a schedule says so.

FSDP2 by itself gathers a unit around its forward and its backward pass and reduces its gradients after each backward
pass. A pipeline has many micro-batches in flight, and may compute weight gradients long after the backward pass, so
here FSDP2's own triggers are switched off and its work is called by hand:

    unshard, reshard    FSDPModule.unshard() and reshard()
    reduce              FSDPParamGroup.post_backward(), once per step, when the last gradient is there
    finish              the final callback that FSDP2 otherwise queues at the end of a backward pass

The last two are private functions of torch (read in 2.11 and 2.13; torch.distributed.pipelining calls the same). No
other file calls private functions of FSDP2; ``fp8_gather`` reads its private list of a unit's parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from smp.layers.linear import linear_layers
from smp.layers.linear_functions import WeightGradients
from smp.layers.moe.experts import expert_layers
from smp.models.part import ModelPart
from smp.models.protocol import StagedModel
from smp.parallel.dtensor_region import placed_like
from smp.sharding.parallelize import with_experts


class ShardedStages:
    """The FSDP2 units of one rank's stages.

    Args:
        model: after ``parallelize``. From now on it is gathered and reduced only through this object.
        stages: number of each stage of this rank -> its part of ``model``.
        split_backward: let backward passes leave the gradients of linear layers' and experts' weights for
            :meth:`backward_weight`.
    """

    def __init__(self, model: StagedModel, stages: Mapping[int, ModelPart], *, split_backward: bool = False) -> None:
        assert isinstance(model, FSDPModule)
        self.model: Any = model
        self._units = {stage: _units(model, part) for stage, part in stages.items()}
        self._held: Counter[Any] = Counter()  # unit -> stages that want it gathered
        self._arriving: dict[Any, Any] = {}  # unit -> handle of the gathering under way
        self._reduced: Counter[Any] = Counter()  # unit -> stages that are done with its gradients
        self._users = Counter(unit for units in self._units.values() for unit in units)
        self._pending: list[WeightGradients] = []
        # From here on nothing is gathered, freed or reduced unless the schedule says so. Left alone FSDP2 would reduce
        # after each micro-batch's backward pass: once per micro-batch, and with a split backward pass (Qi et al. 2023,
        # arXiv 2401.10241) before there are weight gradients, which then would never be summed, without an error.
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])  # itself: gathered already, so nothing
        deferred = linear_layers(model) | expert_layers(model) if split_backward else {}
        for layer in deferred.values():
            if layer.weight.requires_grad:  # frozen ones leave nothing for later
                layer.sink = self._pending.append

    def unshard(self, stage: int) -> None:
        """Begin to gather the parameters of a stage."""
        for unit in self._units[stage]:
            self._held[unit] += 1
            # Two stages of a rank may share a unit, a tied matrix: it is gathered for the first
            # and freed after the last.
            if self._held[unit] == 1:
                self._arriving[unit] = unit.unshard(async_op=True)

    def gathered(self, stage: int) -> None:
        """Wait until the parameters of a stage are there."""
        for unit in self._units[stage]:
            # Popped: only the first use waits.
            if (arriving := self._arriving.pop(unit, None)) is not None:
                arriving.wait()

    def reshard(self, stage: int) -> None:
        """Free the gathered parameters of a stage. Their gradients stay whole until :meth:`reduce`."""
        for unit in self._units[stage]:
            self._held[unit] -= 1
            if self._held[unit] == 0:
                unit.reshard()

    def take_pending(self) -> list[WeightGradients]:
        """The weight gradients that the backward pass of a stage, just ended, has left for later."""
        pending = self._pending[:]
        self._pending.clear()
        return pending

    @torch.no_grad()
    def backward_weight(self, stage: int, pending: list[WeightGradients]) -> None:
        """Compute deferred weight gradients of a stage, whose weights are gathered, and accumulate them."""
        # In the order in which the backward pass left them, and popped: a block's inputs and gradients of results are
        # freed before the next block's gradients are made.
        pending.reverse()
        while pending:
            for layer, gradient in pending.pop()():
                _add_gradient(layer.weight, gradient)
        for unit in self._units[stage]:
            for group in _groups(unit):
                group.post_backward()  # under bf16 it moves the gradient to where sums are kept in fp32

    def reduce(self, stage: int) -> None:
        """Begin to sum the gradients of a stage over the data-parallel ranks. A unit that two stages use (a tied
        matrix) waits for the second."""
        for unit in self._units[stage]:
            self._reduced[unit] += 1
            if self._reduced[unit] < self._users[unit]:
                continue
            # ``post_backward`` reduces only while this is set; other units are not to be reduced yet.
            unit.set_requires_gradient_sync(True, recurse=False)
            for group in _groups(unit):
                group.post_backward()
            unit.set_requires_gradient_sync(False, recurse=False)

    def finish(self) -> None:
        """Wait for all reductions of the step: the gradients are then those of the sharded parameters."""
        # ``+`` leaves counts above 0.
        assert not self._pending and not +self._held, "a schedule ends with everything done and resharded"
        self._reduced.clear()
        # The callback waits for reductions only after a last backward pass. It is told so for this call alone.
        self.model.set_is_last_backward(True)
        fully_shard.state(self.model)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        self.model.set_is_last_backward(False)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within, the parameters of ``model`` are whole, or those of its tensor-parallel shards: for many forward passes
    without gradients, each of which would gather all of them. Every rank that shares parameters enters, and leaves it.
    Without FSDP nothing is done."""
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        yield
        return
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]  # as the first forward pass would
    # The list exists only after the lazy initialization above.
    groups = [group for unit in units for group in _groups(unit)]
    policies = [group.post_forward_mesh_info for group in groups]
    try:
        for unit in units:
            unit.unshard()
        for group in groups:
            group.post_forward_mesh_info = None  # freed after no forward pass
        yield
    finally:
        for group, policy in zip(groups, policies, strict=True):
            group.post_forward_mesh_info = policy
            # What a backward pass would prefetch by: the order of forward passes, of which there were thousands.
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()
        for unit in units:
            unit.reshard()


def _units(model: StagedModel, part: ModelPart) -> list[Any]:
    """FSDP2 units that hold parameters of ``part``, as ``parallelize`` made them, in the order of their use."""
    return [module for unit in model.stage_units(part) for module in with_experts(unit)]


def _groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's own groups of parameters; torch 2.11 has at most one per unit."""
    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def _add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Accumulate into ``parameter.grad`` of a gathered parameter, as autograd would."""
    assert isinstance(parameter, DTensor)
    if isinstance(parameter.grad, DTensor):
        # In place: FSDP2 finds the gradient by the parameter, and other micro-batches add to the same one.
        parameter.grad.to_local().add_(gradient)
        return
    parameter.grad = placed_like(parameter, gradient)
