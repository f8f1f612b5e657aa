"""int8 numbers with a scale per block, for what crosses uplinks (ZeRO++, Wang et al., arXiv 2306.10209: qwZ and qgZ).

A block of ``BLOCK`` numbers becomes int8 codes and one fp32 scale, its largest magnitude / 127: 1 + 4 / BLOCK bytes per
number. Weights are coded once, by their owner, and every rank decodes all of them, its own as well, so that all ranks
compute with the same weights. Gradients are added up within a node first, then that sum is coded, and the owner adds
decoded sums in fp32.

    |decoded - x| <= largest of x's block / 254     (and the rounding of the result's dtype)

A sum over n nodes has this error once for each of the n - 1 node sums that are sent. A block with a NaN or an infinity
decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch

from smp.parallel.network.run import Posted, Transport

BLOCK = 128
"""Numbers that share a scale."""
_LARGEST = 127
_LARGEST_SCALE = 2.6793878e36  # below the largest number / 127, which rounded up would decode to infinity
What = Literal["weights", "gradients"]
NAMES: dict[What, str] = {"weights": "weight quantization error", "gradients": "gradient quantization error"}
"""Names of metrics: norm of the quantization error / norm of the quantized numbers, since the step before."""


def coded_bytes(count: int) -> int:
    """Bytes of ``count`` numbers."""
    return count + 4 * _blocks(count)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers (n) -> bytes (:func:`coded_bytes`), codes before scales."""
    count, blocks = x.numel(), _blocks(x.numel())
    # Filled up with zeros, which change no block's largest number.
    rows = torch.zeros(blocks * BLOCK)
    rows[:count] = x
    rows = rows.view(blocks, BLOCK)
    scales = rows.abs().amax(1) / _LARGEST
    scales = scales.where(scales.isinf(), scales.clamp_max(_LARGEST_SCALE))
    # A block of zeros has the scale 0: its codes are 0 under any other.
    codes = (rows / scales.where(scales != 0, 1).unsqueeze(1)).round_()
    # A cast of NaN to int8 is undefined; the scale, NaN or infinite, makes the whole block NaN when decoded.
    codes = codes.nan_to_num_().clamp_(-_LARGEST, _LARGEST).to(torch.int8).view(-1)[:count]
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)))


def decode(coded: torch.Tensor, into: torch.Tensor) -> None:
    """Undo :func:`encode`, into n numbers of any floating-point dtype."""
    count, blocks = into.numel(), _blocks(into.numel())
    rows = torch.zeros(blocks * BLOCK)
    rows[:count] = coded[:count].view(torch.int8)
    scales = coded[count:].clone().view(torch.float32)  # a copy: where they begin is no multiple of four
    into.copy_((rows.view(blocks, BLOCK) * scales.unsqueeze(1)).view(-1)[:count])


@dataclass
class Quantization:
    """Which messages between nodes are quantized, and the error on this rank since :meth:`taken` was called last.

    Attributes:
        weights: in gathers.
        gradients: in reductions.
    """

    weights: bool = False
    gradients: bool = False
    _sums: torch.Tensor = field(default_factory=lambda: torch.zeros(2, 2, dtype=torch.float64), repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what :meth:`taken` measures."""
        return tuple(NAMES[what] for what in self._coded())

    def _coded(self) -> list[What]:
        return [what for what in NAMES if getattr(self, what)]

    def encoded(self, x: torch.Tensor, what: What) -> torch.Tensor:
        """:func:`encode`, and note the error."""
        coded, back = encode(x), torch.empty(x.numel())
        decode(coded, back)
        # fp64: squares of fp32 numbers overflow and underflow, and the error would read 0.
        norms = [torch.linalg.vector_norm(y, dtype=torch.float64) for y in (back - x, x)]
        self._sums[list(NAMES).index(what)] += torch.stack(norms).square()
        return coded

    def taken(self) -> torch.Tensor:
        """(2 per name) fp64: squares of errors and of numbers, which may be summed over ranks. Resets them."""
        found = torch.stack([self._sums[list(NAMES).index(what)] for what in self._coded()])
        self._sums.zero_()
        return found.view(-1)

    @staticmethod
    def relative(taken: torch.Tensor) -> torch.Tensor:
        """Relative errors from the result of :meth:`taken`, fp32 (1 per name); 0 where nothing was coded."""
        errors, numbers = taken.view(-1, 2).unbind(1)
        return (errors / numbers.clamp_min(torch.finfo(taken.dtype).tiny)).sqrt().float()


@dataclass(frozen=True)
class CodedBetweenNodes:
    """A transport whose messages to and from other nodes are codes; what comes is decoded when it is waited for."""

    transport: Transport
    other_nodes: frozenset[int]
    quantization: Quantization

    def send(self, tensor: torch.Tensor, to: int) -> Posted:
        # Inside of a node messages are exact.
        if to not in self.other_nodes:
            return self.transport.send(tensor, to)
        coded = self.quantization.encoded(tensor, "gradients")
        return _Coded(self.transport.send(coded, to), coded, lambda: None)

    def receive(self, into: torch.Tensor, source: int) -> Posted:
        if source not in self.other_nodes:
            return self.transport.receive(into, source)
        coded = torch.empty(coded_bytes(into.numel()), dtype=torch.uint8)
        return _Coded(self.transport.receive(coded, source), coded, lambda: decode(coded, into))


@dataclass(frozen=True)
class _Coded:
    posted: Posted
    coded: torch.Tensor  # alive until the message has left
    then: Callable[[], None]

    def wait(self, timeout: timedelta) -> None:
        self.posted.wait(timeout)
        self.then()
