"""The recurrence of Mamba-2 (Dao & Gu 2024, arXiv 2405.21060: state-space duality), a memory that fades.

For each head a state S (state_dim, head_dim), and for each token, with its step t >= 0 and g = t A <= 0,

    S <- exp(g) S + t k v^T              fade, and write
    o  = S^T q                           read

k and q (B and C of the paper) are shared by the heads of a group. A token that begins a document forgets all.
:func:`step_by_step` is that, and the oracle. :func:`chunked` computes C tokens at a time with matrix products, with the
decays of :mod:`smp.kernels.recurrences.chunks`:

    o = before q S + (q k^T * within * t^T) v
    S <- whole S + k^T (to_end t v)

Products with a state are those of all heads of a group at once. FLOPs of a forward pass per token and head: 4 state_dim
head_dim + 2 C head_dim, and per group 2 C state_dim. Kept for the backward pass besides the inputs: a state for each
chunk. Sums are in fp32, those of g in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smp.kernels.recurrences.chunks import (
    CHUNK,
    Decays,
    Inputs,
    Pair,
    as_tokens,
    by_chunk,
    decay_gradient,
    gradients_fake,
)
from smp.kernels.registry import accumulation_dtype, define, first_derivative_only


def step_by_step(x: Inputs, state: torch.Tensor | None = None) -> Pair:
    """The recurrence by its definition, a token after the other. Arguments and results as of :func:`chunked`."""
    dtype, wide, begins = x.v.dtype, accumulation_dtype(x.v.dtype), x.begins
    served = x.v.shape[2] // x.q.shape[2]
    # (rows, length, heads, state_dim): each group's for its heads
    q, k = (y.to(wide).repeat_interleave(served, dim=2) for y in (x.q, x.k))
    v, g, step = (y.to(wide) for y in (x.v, x.g, x.rate))
    state = x.empty_state() if state is None else state
    outs = []
    for t in range(v.shape[1]):
        if begins is not None:
            state = state.masked_fill(begins[:, t, None, None, None], 0.0)
        written = step[:, t, :, None] * v[:, t]
        # S <- exp(g) S + k (t v)^T, (rows, heads, state_dim, head_dim)
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * written[:, :, None]
        outs.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(outs, 1).to(dtype), state


def chunked(x: Inputs, state: torch.Tensor | None = None) -> Pair:
    """The recurrence, a chunk of tokens after the other.

    Args:
        x: the tokens; key heads are groups, the rate is the step.
        state: (rows, heads, state_dim, head_dim) in the precision of sums, before the first token; None: zeros.

    Returns:
        The output, (rows, length, heads, head_dim), and the state after the last token.
    """
    state = x.empty_state() if state is None else state
    return _Chunked.apply(*x, state)


def state_space(x: Inputs, state: torch.Tensor | None = None) -> Pair:
    """The recurrence by :func:`chunked`, or, for a single token during generation, by :func:`step_by_step`, which is
    then faster."""
    # ``by_chunk`` pads a single token to a chunk of 64.
    alone = x.v.shape[1] == 1 and not torch.is_grad_enabled()
    return (step_by_step if alone else chunked)(x, state)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs_and_state: Any) -> Pair:
        *inputs, state = inputs_and_state
        out, states = _forward_op(*inputs, state)
        ctx.save_for_backward(*inputs, states)
        return out, _by_head(states[-1:], state.shape[0], state.shape[1])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: torch.Tensor, dlast: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk, dv, dg, dstep, dstate = _backward_op(dout, dlast, *ctx.saved_tensors)
        return dq, dk, dv, dg, dstep, None, dstate


@dataclass
class _Chunks:
    """The inputs by chunks, in the precision of sums: n chunks of C tokens, B = rows x groups, r heads in each group.

    Attributes:
        q, k: (n, B, C, state_dim).
        v: (n, B, r, C, head_dim).
        step: (n, B, r, C, 1).
        decays: with dimensions B and r instead of rows x heads.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    step: torch.Tensor
    decays: Decays

    @staticmethod
    def of(x: Inputs) -> _Chunks:
        # (rows x groups, heads of a group): q and k exist once for each group
        both = x.q.shape[0] * x.q.shape[2], x.v.shape[2] // x.q.shape[2]
        d = Decays.of(x.g, x.begins, accumulation_dtype(x.v.dtype))
        decays = Decays(*(y.unflatten(1, both) for y in (d.within, d.before, d.to_end, d.whole)))
        # Heads of a group are neighbours, so rows x heads is rows x groups x heads of a group.
        v, step = (y.unflatten(1, both) for y in (by_chunk(x.v), by_chunk(x.rate[..., None])))
        return _Chunks(by_chunk(x.q), by_chunk(x.k), v, step, decays)

    def faded(self) -> torch.Tensor:
        """Weight of token j's write in the state at token i: within * step, (n, B, r, C, C)."""
        return self.decays.within * self.step.transpose(3, 4)

    def kept(self) -> torch.Tensor:
        """Weight of a token's write in the state after the chunk, (n, B, r, C, 1)."""
        return self.decays.to_end * self.step


def _joined(x: torch.Tensor) -> torch.Tensor:
    """(n, B, r, C, channels) -> (n, B, C, r x channels)."""
    return x.transpose(2, 3).flatten(3)


def _apart(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of :func:`_joined`."""
    return x.unflatten(3, (heads, -1)).transpose(2, 3)


def _by_group(state: torch.Tensor, groups: int) -> torch.Tensor:
    """(rows, heads, state_dim, head_dim) -> (1, rows x groups, state_dim, heads of a group x head_dim)."""
    return state.unflatten(1, (groups, -1)).flatten(0, 1).transpose(1, 2).flatten(2)[None]


def _by_head(states: torch.Tensor, rows: int, heads: int) -> torch.Tensor:
    """The inverse of :func:`_by_group`, a tensor of its own."""
    served = rows * heads // states.shape[1]
    apart = states[0].unflatten(2, (served, -1)).transpose(1, 2)
    return apart.reshape(rows, heads, states.shape[2], -1).clone()


def _forward(*inputs_and_state: Any) -> Pair:
    """Output; the states before each chunk and after the last, (n + 1, B, state_dim, r x head_dim)."""
    *inputs, state = inputs_and_state
    x = Inputs(*inputs)
    c = _Chunks.of(x)
    heads = c.v.shape[2]
    # (n, B, state_dim, r x head_dim): what each chunk adds to the state
    written = c.k.transpose(2, 3) @ _joined(c.v * c.kept())
    states = _states(written, _by_group(state, x.q.shape[2]), c.decays.whole)
    # q k^T is one matrix for all heads of a group, decays are of each head.
    out = (c.faded().mul_((c.q @ c.k.transpose(2, 3))[:, :, None])) @ c.v
    out.addcmul_(_apart(c.q @ states[:-1], heads), c.decays.before)
    return as_tokens(out.flatten(1, 2), x.v), states


def _states(written: torch.Tensor, first: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The first state and that after each chunk, one after the other, from what each chunk writes."""
    states = torch.cat((first, written))
    factor = _for_channels(whole, written)
    for i in range(len(written)):
        # The one loop over chunks: an elementwise step of each state.
        states[i + 1].addcmul_(states[i], factor[i])
    return states


def _for_channels(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(n, B, r, 1, 1) -> (n, B, 1, r x head_dim): each head's number for its channels."""
    channels = like.shape[3] // whole.shape[2]
    return whole[..., 0, 0].repeat_interleave(channels, 2)[:, :, None]


def _backward(dout: torch.Tensor, dlast: torch.Tensor, *saved: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g, step and of the first state.

    From the last chunk to the first the state's gradient is carried; all else follows for all chunks at once.
    """
    *inputs, states = saved
    x = Inputs(*inputs)
    c, heads = _Chunks.of(x), x.v.shape[2] // x.q.shape[2]
    d, known = c.decays, states[:-1]
    dout = by_chunk(dout).view_as(c.v)
    # (n, B, C, r x head_dim)
    dread = _joined(dout * d.before)
    # (n + 1, B, state_dim, r x head_dim): from each chunk's outputs, and from the last state.
    dstates = torch.cat((c.q.transpose(2, 3) @ dread, _by_group(dlast, x.q.shape[2])))
    factor = _for_channels(d.whole, dstates)
    for i in reversed(range(len(factor))):
        # The same from the last chunk to the first.
        dstates[i].addcmul_(dstates[i + 1], factor[i])
    # What goes after the chunk, and what comes from before it.
    kept = c.kept()
    dkept = _apart(c.k @ dstates[1:], heads)
    of_kept = (dkept * c.v).sum(4, keepdim=True)
    dstep = of_kept * d.to_end
    # Through the states; what is within the chunk follows below.
    dk = _joined(c.v * kept) @ dstates[1:].transpose(2, 3)
    dq = dread @ known.transpose(2, 3)
    # Gradients by the logarithms of decays: a product times its gradient, summed over the channels.
    of_before = (_apart(c.q @ known, heads) * dout).sum(4, keepdim=True) * d.before
    of_whole = (known * dstates[1:]).unflatten(3, (heads, -1)).sum((2, 4))[..., None, None] * d.whole
    # Within the chunk.
    # (n, B, 1, C, C) for all heads of a group, and (n, B, r, C, C)
    scores, faded = (c.q @ c.k.transpose(2, 3))[:, :, None], c.faded()
    dv = (faded * scores).transpose(3, 4) @ dout
    dv.addcmul_(dkept, kept)
    dmatrix = dout @ c.v.transpose(3, 4)
    # Summed over the heads of a group, which share q and k.
    dscores = faded.mul_(dmatrix).sum(2)
    dq += dscores @ c.k
    dk += dscores.transpose(2, 3) @ c.q
    within = dmatrix.mul_(scores).mul_(d.within)  # without the steps, which may be 0
    dstep += within.sum(3)[..., None]
    within.mul_(c.step.transpose(3, 4))
    dg = decay_gradient(within, of_before, of_kept * kept, of_whole)
    of_tokens = (as_tokens(dx, like) for dx, like in ((dq, x.q), (dk, x.k), (dv.flatten(1, 2), x.v)))
    numbers = (as_tokens(dx.flatten(1, 2), y[..., None]).squeeze(3) for dx, y in ((dg, x.g), (dstep, x.rate)))
    return *of_tokens, *numbers, _by_head(dstates[:1], x.v.shape[0], x.v.shape[2])


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Pair:
    wide, count = accumulation_dtype(v.dtype), (v.shape[1] + CHUNK - 1) // CHUNK
    shape = count + 1, q.shape[0] * q.shape[2], q.shape[3], v.shape[2] // q.shape[2] * v.shape[3]
    return v.new_empty(v.shape), v.new_empty(shape, dtype=wide)


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor step, Tensor? begins"
_forward_op = define(
    f"state_space({_ARGUMENTS}, Tensor state) -> (Tensor, Tensor)", _forward_fake, CompositeExplicitAutograd=_forward
)
_backward_op = define(
    f"state_space_backward(Tensor dout, Tensor dlast, {_ARGUMENTS}, Tensor states) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    gradients_fake,
    CompositeExplicitAutograd=_backward,
)
