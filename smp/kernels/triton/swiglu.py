"""See :mod:`smp.kernels.swiglu`: one program per block of a row, 8 elements (16 bytes in bf16) a thread."""

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4


@triton.jit
def forward_kernel(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    # int64: a row times a stride may be more than 2^31.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    # Rows have strides of their own: gate and up may be halves of one tensor.
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    a = g * tl.sigmoid(g) * u
    tl.store(out + row * width + column, a.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    da,
    gate,
    up,
    dgate,
    dup,
    again,
    da_stride,
    gate_stride,
    up_stride,
    width,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    d = tl.load(da + row * da_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    # The results are contiguous, whatever the strides of the inputs.
    offsets = row * width + column
    tl.store(dgate + offsets, (d * u * s * (1 + g * (1 - s))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + offsets, (d * silu).to(dup.dtype.element_ty), mask=inside)
    # The same expression as in the forward kernel, in the same order: the same bits.
    if AGAIN:
        tl.store(again + offsets, (silu * u).to(again.dtype.element_ty), mask=inside)


def _grid(x: torch.Tensor) -> tuple[int, int]:
    return x.shape[0], triton.cdiv(x.shape[1], BLOCK)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See :func:`smp.kernels.swiglu.forward_reference`."""
    out = gate.new_empty(gate.shape)
    if out.numel():
        forward_kernel[_grid(gate)](
            gate, up, out, gate.stride(0), up.stride(0), gate.shape[1], BLOCK=BLOCK, num_warps=WARPS
        )
    return out


def backward(da: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, again: bool) -> tuple[torch.Tensor, ...]:
    """See :func:`smp.kernels.swiglu.backward_reference`."""
    dgate, dup, a = gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape if again else 0)
    if dgate.numel():
        backward_kernel[_grid(gate)](
            da,
            gate,
            up,
            dgate,
            dup,
            a,
            da.stride(0),
            gate.stride(0),
            up.stride(0),
            gate.shape[1],
            AGAIN=again,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return dgate, dup, a
