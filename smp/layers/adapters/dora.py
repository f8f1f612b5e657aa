"""Adapters that train a weight's row norms in addition to its directions (DoRA, Liu et al. 2024, arXiv 2402.09353).

With m one number for each output, and norms of rows, which are constants in the backward pass (4.3 of the paper, and
peft),

    W' = m (W + s B A) / |W + s B A|          y = m / |W + s B A| * (x W^T + s x A^T B^T)

so DoRA adds to LoRA a scale of each output. The norms are computed without a tensor of the size of W:

    |w + s b A|^2 = |w|^2 + 2 s b . (A w) + s^2 b (A A^T) b

Where ranks hold columns of W and A, each term is summed over these ranks, one number per output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels.precision.nf4 import Nf4, widen
from smp.kernels.product import PRODUCTS
from smp.kernels.registry import accumulation_dtype
from smp.parallel.collectives import Group, sum_over
from smp.parallel.dtensor_region import local_part


@torch.no_grad()
def row_norms(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, cut_over: Sequence[Group] = ()
) -> torch.Tensor:
    """|W + scale B A| of each row.

    Args:
        weight: (out, in), this rank's part.
        a, b: (rank, in) and (out, rank).
        scale: of B A.
        cut_over: groups whose ranks have parts of the rows.

    Returns:
        (out,), fp32 or wider.
    """
    wide = accumulation_dtype(weight.dtype)
    a_wide, b_wide = a.to(wide), b.to(wide)
    # Rows of W, of B A and what they have in common, each in fp32 and without a matrix of the size of W.
    of_weight = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    # (A w_i) . b_i of each row i of W; the intermediate is (out, rank).
    mixed = (F.linear(weight, a.to(weight.dtype)).to(wide) * b_wide).sum(1)
    # A A^T is (rank, rank): B A, of the size of W, is never made.
    of_adapter = ((b_wide @ (a_wide @ a_wide.t())) * b_wide).sum(1)
    # Squares are summed over ranks, not norms.
    squares = sum_over(of_weight + 2 * scale * mixed + scale**2 * of_adapter, cut_over)
    # The three terms may cancel to a little less than 0.
    return squares.clamp(min=0).sqrt()


def with_magnitude(
    y: torch.Tensor,
    magnitude: torch.Tensor,
    weight: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    cut_over: Sequence[Group] = (),
) -> torch.Tensor:
    """A layer's product and its adapter's together, (tokens, ..., out), scaled to the trained row norms (out,);
    the other arguments are those of :func:`row_norms`."""
    # Without a gradient: the paper (4.3) treats the norms as constants, which saves memory.
    norms = row_norms(weight, *factors, scale, cut_over)
    norms = torch.where(norms > 0, norms, 1.0)  # a row of zeros stays one
    # not rounded to bf16 before the product: all outputs of a row would be off alike
    return (y.to(norms.dtype) * (magnitude.to(norms.dtype) / norms)).to(y.dtype)


def matrix_of(layer: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(out, in) of a linear layer's ``weight``, which may rest in 4 bits."""
    product = PRODUCTS[layer.product]
    return widen(weight, dtype, double=product.double) if isinstance(product, Nf4) else weight


@torch.no_grad()
def begin_magnitudes(layers: Iterable[Any]) -> None:
    """Give the adapters of ``layers``, whose B is 0, the row norms that weights have. After weights are loaded; ranks
    that share a layer call this together."""
    for layer in layers:
        magnitude = layer.lora.magnitude
        if magnitude is None:
            continue
        # In fp32: the adapter begins as no change at all, so these norms have to be those of the weight.
        weight = matrix_of(layer, local_part(layer.weight), torch.float32)
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=accumulation_dtype(weight.dtype)).square()
        # Columns of a row lie on several ranks.
        norms = sum_over(squares, (layer.group,) if layer.lora.by_columns else ()).sqrt()
        local_part(magnitude).copy_(norms)
