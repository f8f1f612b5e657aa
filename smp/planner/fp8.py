"""What FP8 changes in a step's time: the rate of products, the bytes of gathers, and the rounding to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smp.config import Layout, ParallelConfig
from smp.models.inventory import Parameter


def in_fp8(parameter: Parameter) -> bool:
    """Whether a parameter's products are in FP8: those of linear layers and experts, not routers'."""
    return parameter.linear or parameter.chosen is not None


@dataclass(frozen=True)
class Fp8Costs:
    """Costs of one FP8 recipe.

    Attributes:
        amax: bytes that are read of each number to know its scale, before it is rounded: delayed scaling knows it, and
            notes the maximum as it rounds.
        all_products: gradients of weights are products of 8-bit numbers, too.
    """

    amax: int
    all_products: bool

    @staticmethod
    def of(parallel: ParallelConfig) -> Fp8Costs | None:
        """The costs of a run's recipe; None: without FP8."""
        if parallel.fp8_format is None:
            return None
        # bf16 is read once more for the maximum, 2 bytes, unless the scale is known before.
        return Fp8Costs(0 if parallel.fp8_recipe == "delayed" else 2, parallel.fp8_recipe != "rowwise")

    def bytes_of_block(
        self, block: Sequence[Parameter], layout: Layout, tokens: Callable[[Parameter], float]
    ) -> tuple[float, float]:
        """Bytes that a block reads and writes to round operands, in its forward and in its backward pass.

        A number is read in bf16 and written in 8 bits; products take both operands along what they sum, so what the
        backward pass uses another way is read and written once more.

        Args:
            tokens: rows that a layer gets.
        """
        # bf16 read, 8 bits written, and what the maximum takes; a transposed copy is read and
        # written in 8 bits.
        round_, turn = 2 + 1 + self.amax, 2
        ahead = back = 0.0
        inputs: dict[tuple[str, int | None, int], float] = {}
        for p in filter(in_fp8, block):
            *_, rows, inner = p.local_shape(layout)
            # Query, key and value share their input, as do gate and up. (Experts' matrices are one parameter.)
            # A dictionary, so that matrices with one input are counted once.
            inputs[p.module.rpartition(".")[0], p.shard_dim, inner] = tokens(p) * inner
            weight = math.prod(p.local_shape(layout))
            ahead += weight * round_
            back += weight * turn + tokens(p) * rows * (round_ + (turn if self.all_products else 0))
        kept = sum(inputs.values())
        return ahead + kept * round_, back + (kept * turn if self.all_products else 0)
