"""What a device can do: data sheets, and the share of them that good kernels reach. No torch.

Peaks are vendors' figures for dense bf16 (H100: 989 TFLOP/s; the 1,979 that are often quoted are with sparsity). The
shares are assumptions, the same for all models: they were taken from public measurements of the kernels and not fitted
to the whole runs that ``docs/planning.md`` compares with.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One kind of device and the links that it comes with.

    Attributes:
        peak: FLOP/s of dense bf16 matrix products.
        memory: bytes that a program sees, less than the name says.
        bandwidth: bytes/s of its memory.
        local_link: bytes/s that a device can send to the others of its node.
        node_link: bytes/s that a device can send to other nodes.
        devices_per_node: devices that ``local_link`` connects.
        tiles: output tiles of a matrix product that run at once: its multiprocessors.
        product_share: of ``peak``, by a large product.
        attention_share: of ``peak``, by FlashAttention, forward; the backward pass reaches 0.85 of that.
        memory_share: of ``bandwidth``, by norms and activations.
        link_share: of a link, by a collective of a large tensor.
        latency: seconds of a collective of nothing, per rank that it passes.
        launch: seconds that the host needs to issue an operation.
        fp8_peak: FLOP/s of dense products of 8-bit numbers; 0: it has none.
        fp8_share: of ``fp8_peak``, by a large product.
        host_link: bytes/s between the device and the host's memory, each way.
    """

    peak: float
    memory: float
    bandwidth: float
    local_link: float
    node_link: float
    devices_per_node: int = 8
    tiles: int = 132
    product_share: float = 0.72
    attention_share: float = 0.42
    memory_share: float = 0.8
    link_share: float = 0.75
    latency: float = 3e-6
    launch: float = 6e-6
    fp8_peak: float = 0.0
    fp8_share: float = 0.62
    host_link: float = 55e9


DEVICES = {
    # a100: FlashAttention 2 was written for it and reaches a larger share than on Hopper
    "a100-40gb": Device(
        312e12, 39.4 * GIB, 1555e9, 300e9, 25e9, tiles=108, product_share=0.82, attention_share=0.6, host_link=25e9
    ),
    "a100": Device(
        312e12, 79.1 * GIB, 2039e9, 300e9, 25e9, tiles=108, product_share=0.82, attention_share=0.6, host_link=25e9
    ),
    "h100": Device(989e12, 79.1 * GIB, 3350e9, 450e9, 50e9, fp8_peak=1979e12),
    "h200": Device(989e12, 139.8 * GIB, 4800e9, 450e9, 50e9, fp8_peak=1979e12),
    "b200": Device(
        2250e12, 178.3 * GIB, 8000e9, 900e9, 50e9, tiles=148, product_share=0.68, attention_share=0.35, fp8_peak=4500e12
    ),
    "l40s": Device(
        362e12, 44.4 * GIB, 864e9, 32e9, 12.5e9, tiles=142, product_share=0.65, fp8_peak=733e12, host_link=25e9
    ),
}
"""By the name that --gpu takes."""
