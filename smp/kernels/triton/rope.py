"""See :mod:`smp.kernels.rope`: a program turns a few heads of one token; those of q come first, then those of k."""

import torch
import triton
import triton.language as tl

HEADS, WARPS = 16, 4
Pair = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def rotate_heads(source, out, cos, sin, head, heads, half, rest, head_dim, HALF: tl.constexpr, REST: tl.constexpr):
    """Rotate some heads of one token: ``source`` and ``out`` point at its first head. REST is 0 when the channels that
    are not rotated need no copy."""
    channel = tl.arange(0, HALF)
    inside = (head[:, None] < heads) & (channel[None, :] < half)
    # a is loaded before anything is stored: in place both halves are overwritten.
    first = head[:, None] * head_dim + channel[None, :]
    a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + first + half, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        channel = tl.arange(0, REST)
        inside = (head[:, None] < heads) & (channel[None, :] < rest)
        passed = head[:, None] * head_dim + 2 * half + channel[None, :]
        tl.store(out + passed, tl.load(source + passed, mask=inside, other=0.0), mask=inside)


@triton.jit
def rope_kernel(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    q_heads,
    k_heads,
    half,
    rest,
    head_dim,
    q_blocks,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    channel = tl.arange(0, HALF)
    # Both halves of the table are equal; the first is enough.
    angle = token * 2 * half + channel
    c = tl.load(cos + angle, mask=channel < half, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=channel < half, other=0.0)[None, :]
    if INVERSE:
        s = -s
    if block < q_blocks:
        # 64 bits: tokens x width may be more than 2^31.
        start = token * q_heads * head_dim
        head = block * HEADS + tl.arange(0, HEADS)
        rotate_heads(q + start, q_out + start, c, s, head, q_heads, half, rest, head_dim, HALF, REST)
    else:
        start = token * k_heads * head_dim
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        rotate_heads(k + start, k_out + start, c, s, head, k_heads, half, rest, head_dim, HALF, REST)


def rotate_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> None:
    """Rotate q and k in place, otherwise as :func:`rotate`."""
    rotate(q, k, cos, sin, inverse, (q, k))


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, out: Pair | None = None
) -> Pair:
    """Rotate q and k, (tokens, heads, head_dim) and contiguous, into ``out``, by default new tensors."""
    assert q.is_contiguous() and k.is_contiguous(), "the kernel walks over whole tokens"
    (tokens, q_heads, head_dim), k_heads, half = q.shape, k.shape[1], cos.shape[-1] // 2
    # The same for q and k: one kernel handles both, with one shape of tile.
    heads = min(HEADS, triton.next_power_of_2(max(q_heads, k_heads)))
    q_blocks, k_blocks, rest = triton.cdiv(q_heads, heads), triton.cdiv(k_heads, heads), head_dim - 2 * half
    q_out, k_out = (q.new_empty(q.shape), k.new_empty(k.shape)) if out is None else out
    # In place the other channels are where they should be.
    copied = rest > 0 and q_out is not q
    if tokens:
        rope_kernel[(tokens, q_blocks + k_blocks)](
            q,
            k,
            q_out,
            k_out,
            cos.contiguous(),
            sin.contiguous(),
            q_heads,
            k_heads,
            half,
            rest,
            head_dim,
            q_blocks,
            INVERSE=inverse,
            HEADS=heads,
            HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(rest) if copied else 0,
            num_warps=WARPS,
        )
    return q_out, k_out
