"""Seconds of gradient clipping and of the optimizer's update."""

from __future__ import annotations

import math
from collections.abc import Iterable

from smp.config import Config, Layout
from smp.models.inventory import Parameter
from smp.planner.devices import Device
from smp.training.cost.offload import HOST_ADAM
from smp.training.cost.weight_memory import state_bytes, trained_by_muon

_WEIGHTS = 24
"""Bytes read and written per parameter in addition to the state: the gradient for its norm, scaled, and for the update;
the weight."""


def update_seconds(config: Config, layout: Layout, device: Device, owned: Iterable[tuple[Parameter, float]]) -> float:
    """Seconds of the update on a rank that updates the given number of elements of each parameter.

    The state is read and written once. With --optimizer-cpu-offload one core of the host computes while new weights
    come back. Muon orthogonalizes matrices, whose work ranks share as they share their elements, in TF32, and sends
    each element there and back.
    """
    optim, bandwidth = config.optim, device.bandwidth * device.memory_share
    seconds = 0.0
    for parameter, elements in owned:
        if optim.optimizer_cpu_offload:
            # Copies and the host's steps overlap: the slower one counts.
            seconds += max(4 * elements / device.host_link, elements / HOST_ADAM)
            continue
        seconds += elements * (_WEIGHTS + 2 * state_bytes(optim, parameter)) / bandwidth
        if trained_by_muon(optim, parameter):
            flops = elements * orthogonalizing_flops(parameter, optim.muon_num_ns_steps)
            # Half of the bf16 peak: TF32.
            seconds += flops / (device.peak_of(bf16=False) * device.product_share)
            ranks = layout.tp * layout.cp * layout.dp_shard
            if ranks > 1:
                link = device.local_link if ranks <= device.connected else device.node_link
                # fp32 elements are sent to the rank that orthogonalizes, and back.
                seconds += 2 * 4 * elements / (link * device.link_share)
    return seconds


def orthogonalizing_flops(parameter: Parameter, steps: int) -> float:
    """FLOPs per element of Newton-Schulz (Muon): x x^T, its square, and their product with x, where x is the matrix or
    its transpose, whichever has fewer rows."""
    rows, columns = sorted(parameter.shape[-2:])
    return steps * (2 * rows * rows * columns * 2 + 2 * rows**3) / math.prod((rows, columns))
