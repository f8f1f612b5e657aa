"""What devices can do: data sheets, and the shares of them that good kernels reach. Imports no torch.

Peaks are vendors' figures for dense bf16 (H100: 989 TFLOP/s; the 1,979 that are often quoted are with sparsity). The
shares are assumptions, the same for all models: they were taken from public measurements of the kernels and not fitted
to the whole runs of ``docs/planning-errors.md``, except for what the 300s of Blackwell do more than the 200s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from smp.parallel.network.fabric import Fabric

GB = 1e9
GIB = 2**30


@dataclass(frozen=True)
class ShareErrors:
    """Relative standard deviations of a device's shares, and of a step where they fit. The defaults, for devices that
    were not measured, are those of the factors that fit published runs (published/fit.yaml): the root mean square of
    their logarithms over trainers and kinds of GPU. The host's is an assumption.

    Attributes:
        formula: what is left of a step's error when the shares fit, each layout's own. Two thirds of the published runs
            used for fitting are within it (docs/planning-errors.md).
    """

    product: float = 0.41
    attention: float = 0.38
    memory: float = 0.25
    link: float = 0.14
    host: float = 0.5
    formula: float = 0.08


@dataclass(frozen=True)
class Device:
    """One kind of device and its links.

    Attributes:
        peak: FLOP/s of dense bf16 matrix products.
        memory: bytes that a program sees, less than the name says.
        bandwidth: bytes/s of its memory.
        local_link: bytes/s that a device can send to the others of its node.
        node_link: bytes/s that a device can send to other nodes.
        devices_per_node: devices of a host.
        domain: devices that ``local_link`` connects; 0: those of a host.
        leaf: devices below one leaf of the network, on all rails; 0: all.
        oversubscription: of the spine between leaves.
        contention: of the spine, by other jobs: they leave 1 / contention of it.
        watts: that a device may take, by its data sheet; 0: nobody said.
        errors: of its shares.
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
        family: generation, by which published runs are compared.
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
    family: str = "hopper"
    domain: int = 0
    leaf: int = 0
    oversubscription: float = 1.0
    contention: float = 1.0
    watts: float = 700.0
    errors: ShareErrors = ShareErrors()

    def peak_of(self, *, bf16: bool) -> float:
        """FLOP/s of dense products in bf16, or of fp32 numbers, which take TF32 and half of that."""
        return self.peak if bf16 else self.peak / 2

    @property
    def connected(self) -> int:
        """Number of devices that ``local_link`` connects."""
        return self.domain or self.devices_per_node

    @cached_property
    def fabric(self) -> Fabric:
        """The links, as collectives of large tensors see them."""
        # Bytes/s that a collective reaches, not the data sheet's.
        local, card = self.local_link * self.link_share, self.node_link * self.link_share
        return Fabric(self.connected, local, card, self.latency, self.leaf, self.oversubscription, self.contention)


def _blackwell(
    peak: float, memory: float, domain: int, watts: float, node_link: float = 50e9, product_share: float = 0.68
) -> Device:
    """A Blackwell GPU. A host of GB200 or GB300 has four, and NVLink connects a rack of 72. The 300s have the 200s'
    peak and more power: mixtures train 1.15 times as fast on GB300 as on GB200 (median of three published runs)."""
    # Products, attention and FP8 alike.
    more = product_share / 0.68
    # Positional: peak, memory, bandwidth, local_link (NVLink 5), node_link, devices_per_node.
    return Device(
        peak,
        memory,
        8000e9,
        900e9,
        node_link,
        8 if domain == 8 else 4,
        tiles=148,
        product_share=product_share,
        attention_share=0.35 * more,
        fp8_peak=2 * peak,
        fp8_share=0.62 * more,
        domain=domain,
        family="blackwell",
        watts=watts,
    )


DEVICES = {
    # FlashAttention 2 was written for the A100 and reaches a larger share there than on Hopper.
    "a100-40gb": Device(
        312e12,
        39.4 * GIB,
        1555e9,
        300e9,
        25e9,
        tiles=108,
        product_share=0.82,
        attention_share=0.6,
        host_link=25e9,
        family="ampere",
        watts=400.0,
    ),
    "a100": Device(
        312e12,
        79.1 * GIB,
        2039e9,
        300e9,
        25e9,
        tiles=108,
        product_share=0.82,
        attention_share=0.6,
        host_link=25e9,
        family="ampere",
        watts=400.0,
    ),
    # Peak, memory and bandwidth of data sheets; 450 GB/s are NVLink 4, 50 GB/s one 400 Gb/s card
    # per GPU.
    "h100": Device(989e12, 79.1 * GIB, 3350e9, 450e9, 50e9, fp8_peak=1979e12),
    "h200": Device(989e12, 139.8 * GIB, 4800e9, 450e9, 50e9, fp8_peak=1979e12),
    "h100-500w": Device(989e12, 94.0 * GIB, 2400e9, 450e9, 50e9, fp8_peak=1979e12, watts=500.0),
    "b200": _blackwell(2250e12, 178.3 * GIB, 8, 1000.0),
    "b300": _blackwell(2250e12, 267.7 * GIB, 8, 1100.0, node_link=100e9, product_share=0.78),
    "gb200": _blackwell(2500e12, 184.0 * GIB, 72, 1200.0),
    "gb300": _blackwell(2500e12, 276.0 * GIB, 72, 1400.0, node_link=100e9, product_share=0.78),
    "l40s": Device(
        362e12,
        44.4 * GIB,
        864e9,
        32e9,
        12.5e9,
        tiles=142,
        product_share=0.65,
        fp8_peak=733e12,
        host_link=25e9,
        family="ampere",
        watts=400.0,
    ),
}
"""By the name that --gpu takes."""
