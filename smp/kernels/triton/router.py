"""See :mod:`smp.kernels.experts.router`: a program takes all experts of a few tokens, and finds one choice after the
other."""

from typing import Any

import torch
import triton
import triton.language as tl

from smp.kernels.experts.router import FLOOR

TILE = 1024
"""Logits of a program, unless a token has more."""


@triton.jit
def _softmax(z):
    """Softmax of each row; -inf gives 0."""
    power = tl.exp(z - tl.max(z, axis=1)[:, None])
    return power / tl.sum(power, axis=1)[:, None]


@triton.jit
def forward_kernel(
    logits,
    compared,
    bias,
    experts,
    weights,
    rows,
    GIVEN: tl.constexpr,
    BIASED: tl.constexpr,
    SCORES: tl.constexpr,
    FACTOR: tl.constexpr,
    FLOOR: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    real = (row[:, None] < rows) & (column[None, :] < EXPERTS)
    offsets = row[:, None] * EXPERTS + column[None, :]
    z = tl.load(logits + offsets, mask=real, other=0.0).to(tl.float32)
    # What a bias is added to and, but for softmax, what weights are made of.
    scores = z
    if SCORES == "sigmoid":
        scores = tl.sigmoid(z)
    if SCORES == "pre_softmax":
        scores = _softmax(tl.where(column[None, :] < EXPERTS, z, float("-inf")))
    values = z
    if GIVEN:
        values = tl.load(compared + offsets, mask=real, other=0.0).to(tl.float32)
    elif BIASED:
        values = scores + tl.load(bias + column, mask=column < EXPERTS, other=0.0).to(tl.float32)[None, :]
    values = tl.where(values == values, values, float("inf"))  # NaN is the largest, as in a sort
    # ``row >= 0`` holds for all rows: it gives the mask its shape, (ROWS, BLOCK).
    left = (column[None, :] < EXPERTS) & (row[:, None] >= 0)
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    weight = tl.full((ROWS, SLOTS), 0.0, tl.float32)
    if SCORES == "softmax":
        # Slots after K have weight 0 in the softmax.
        weight = tl.full((ROWS, SLOTS), float("-inf"), tl.float32)
    for i in range(K):
        # Of the experts left, -inf or not, the first of the largest.
        largest = tl.max(tl.where(left, values, float("-inf")), axis=1)
        # The lowest number among equal values, as a stable sort has it.
        best = tl.min(tl.where(left & (values == largest[:, None]), column[None, :], BLOCK), axis=1)
        hit = column[None, :] == best[:, None]
        own = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        chosen = tl.where(slot[None, :] == i, best[:, None], chosen)
        weight = tl.where(slot[None, :] == i, own[:, None], weight)
        left = left & (column[None, :] != best[:, None])
    if SCORES == "softmax":
        weight = _softmax(weight)
    if SCORES == "sigmoid" and K > 1:
        weight = weight / (tl.sum(weight, axis=1)[:, None] + FLOOR)
    # (ROWS, SLOTS): SLOTS is K rounded up to a power of two, of which K are stored.
    out = row[:, None] * K + slot[None, :]
    inside = (row[:, None] < rows) & (slot[None, :] < K)
    tl.store(experts + out, chosen.to(tl.int64), mask=inside)
    tl.store(weights + out, (weight * FACTOR).to(weights.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dweights,
    logits,
    experts,
    dlogits,
    rows,
    SCORES: tl.constexpr,
    FACTOR: tl.constexpr,
    FLOOR: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    real = (row[:, None] < rows) & (column[None, :] < EXPERTS)
    offsets = row[:, None] * EXPERTS + column[None, :]
    z = tl.load(logits + offsets, mask=real, other=0.0).to(tl.float32)
    g = tl.zeros((ROWS, BLOCK), tl.float32)
    # A row after the last one has chosen nothing but the first expert, so that nothing is divided by 0.
    chosen = (row[:, None] >= rows) & (column[None, :] == 0)
    for i in range(K):
        expert = tl.load(experts + row * K + i, mask=row < rows, other=0).to(tl.int32)
        given = tl.load(dweights + row * K + i, mask=row < rows, other=0.0).to(tl.float32)
        hit = column[None, :] == expert[:, None]
        # Each expert is chosen once at most, so nothing is added up.
        g = tl.where(hit, FACTOR * given[:, None], g)
        chosen = chosen | hit
    if SCORES == "sigmoid":
        s = tl.where(chosen, tl.sigmoid(z), 0.0)
        # 1 - s without the cancellation near s = 1, as in the reference.
        rest = tl.sigmoid(-z)
        if K > 1:
            q = s / (tl.sum(s, axis=1)[:, None] + FLOOR)
            dz = q * (g - tl.sum(q * g, axis=1)[:, None]) * rest
        else:
            dz = s * rest * g
    else:
        if SCORES == "pre_softmax":
            p = _softmax(tl.where(column[None, :] < EXPERTS, z, float("-inf")))
        else:
            p = _softmax(tl.where(chosen, z, float("-inf")))
        dz = p * (g - tl.sum(p * g, axis=1)[:, None])
    tl.store(dlogits + offsets, dz.to(dlogits.dtype.element_ty), mask=real)


def options(experts: int, k: int) -> dict[str, Any]:
    """How a program is laid out: a warp for 256 logits, so that a thread has 8 of each."""
    block = triton.next_power_of_2(experts)
    rows = max(TILE // block, 1)
    sizes = {"EXPERTS": experts, "K": k, "ROWS": rows, "BLOCK": block, "FLOOR": FLOOR}
    return {**sizes, "num_warps": min(max(rows * block // 256, 4), 32)}


def forward(
    logits: torch.Tensor,
    compared: torch.Tensor | None,
    bias: torch.Tensor | None,
    k: int,
    scores: str,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`smp.kernels.experts.router.forward_reference`."""
    rows, count = logits.shape
    experts, weights = logits.new_empty(rows, k, dtype=torch.int64), logits.new_empty(rows, k)
    layout = options(count, k)
    if rows:
        forward_kernel[(triton.cdiv(rows, layout["ROWS"]),)](
            logits,
            # Any pointer: it is not read unless GIVEN.
            logits if compared is None else compared,
            logits if bias is None else bias,
            experts,
            weights,
            rows,
            GIVEN=compared is not None,
            BIASED=bias is not None,
            SCORES=scores,
            FACTOR=factor,
            SLOTS=triton.next_power_of_2(k),
            **layout,
        )
    return experts, weights


def backward(
    dweights: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, scores: str, factor: float
) -> torch.Tensor:
    """See :func:`smp.kernels.experts.router.backward_reference`."""
    dlogits = logits.new_empty(logits.shape)
    rows, k = experts.shape
    layout = options(logits.shape[1], k)
    if rows:
        backward_kernel[(triton.cdiv(rows, layout["ROWS"]),)](
            dweights, logits, experts, dlogits, rows, SCORES=scores, FACTOR=factor, **layout
        )
    return dlogits
