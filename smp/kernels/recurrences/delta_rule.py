"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): a memory of keys and values that forgets and corrects.

For each head a state S (key_dim, value_dim), and for each token, with its decay a = exp(g) and its rate b,

    S <- a S                             forget
    S <- S + k (b (v - S^T k))^T         write what the memory does not know of k yet
    o  = S^T q                           read

A token that begins a document forgets all. g is a number for each head, or, as in Kimi delta attention (Kimi Team 2025,
arXiv 2510.26692), one for each channel of its keys: rows of S fade apart. :func:`step_by_step` is that, and the oracle.
:func:`chunked` computes C tokens at a time with matrix products. With G the sum of g in the chunk up to each token, e =
exp(G), D_ij = exp(G_i - G_j) for i >= j in one document, else 0, and T = (1 + strict lower part of (b_i k_i.k_j
D_ij))^-1:

    V = T (b (v - e k S))                what each token writes
    o = e q S + (q k^T * D) V
    S <- exp(G_C) S + (exp(G_C - G) k)^T V

FLOPs of a forward pass per token and head: 6 key_dim value_dim + C (4 key_dim + 4 value_dim) + C^2. Kept for the
backward pass besides the inputs: a state for each chunk, key_dim value_dim / C a token, and C of T. Sums are in fp32,
those of g in fp64. With a decay for each channel D is in the sum over channels, of q k^T as of k k^T: log2(C)
products instead of one (:mod:`smp.kernels.recurrences.channel_decays`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels.recurrences.channel_decays import ChannelDecays
from smp.kernels.recurrences.chunks import CHUNK, Decays, Inputs, Pair, as_tokens, by_chunk, gradients_fake
from smp.kernels.registry import accumulation_dtype, define, first_derivative_only


def step_by_step(x: Inputs, state: torch.Tensor | None = None) -> Pair:
    """The rule by its definition, a token after the other. Arguments and results as of :func:`chunked`."""
    dtype, wide, begins = x.v.dtype, accumulation_dtype(x.v.dtype), x.begins
    q, k, v, g, beta = (y.to(wide) for y in (_for_heads(x.q, x.v), _for_heads(x.k, x.v), x.v, x.g, x.rate))
    # (rows, length, heads, key_dim or 1)
    kept = (g if g.dim() == 4 else g[..., None]).exp()
    state = x.empty_state() if state is None else state
    outs = []
    for t in range(v.shape[1]):
        if begins is not None:
            state = state.masked_fill(begins[:, t, None, None, None], 0.0)
        state = state * kept[:, t, ..., None]
        written = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(2))
        state = state + k[:, t, :, :, None] * written[:, :, None]
        outs.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(outs, 1).to(dtype), state


def chunked(x: Inputs, state: torch.Tensor | None = None) -> Pair:
    """The rule, a chunk of tokens after the other.

    Args:
        x: the tokens.
        state: (rows, heads, key_dim, value_dim) in the precision of sums, before the first token; None: zeros.

    Returns:
        The output, (rows, length, heads, value_dim), and the state after the last token.
    """
    state = x.empty_state() if state is None else state
    return _Chunked.apply(_for_heads(x.q, x.v), _for_heads(x.k, x.v), *x[2:], state)


def gated_delta_rule(x: Inputs, state: torch.Tensor | None = None, backend: str = "torch") -> Pair:
    """The rule by ``backend``: torch, or fla for the Triton kernels of flash-linear-attention, which take q, k and v of
    one dtype with 16 bits, and g of heads, not of channels; other dtypes are computed in chunks. Arguments and results
    as of :func:`chunked`."""
    if x.v.shape[1] == 1 and not torch.is_grad_enabled():  # a token of each text that is being written
        return step_by_step(x, state)
    if backend == "fla" and x.q.dtype == x.k.dtype == x.v.dtype and x.v.dtype.itemsize == 2:
        return _by_fla(x, state)
    return chunked(x, state)


def _by_fla(x: Inputs, state: torch.Tensor | None) -> Pair:
    """flash-linear-attention takes documents of several lengths as one row, whose ends it is told."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    v, begins, ends, starting = x.v, x.begins, None, state
    tensors = [_for_heads(x.q, v), _for_heads(x.k, v), v, x.g, x.rate]
    if begins is not None:
        rows, length = begins.shape
        first = begins.clone()
        # Rows are put one after the other, so each has to begin a document for the kernel.
        first[:, 0] = True
        ends = F.pad(first.flatten().nonzero().flatten(), (0, 1), value=rows * length)
        tensors = [tensor.flatten(0, 1)[None] for tensor in tensors]
        if state is not None:  # of the first document of each row, unless it begins there
            number = first.flatten().cumsum(0).view(rows, length)[:, 0] - 1
            starting = state.new_zeros(len(ends) - 1, *state.shape[1:])
            starting = starting.index_copy(0, number, state.masked_fill(begins[:, 0, None, None, None], 0.0))
    out, last = chunk_gated_delta_rule(
        *tensors, scale=1.0, initial_state=starting, output_final_state=True, cu_seqlens=ends
    )
    if ends is not None and begins is not None:
        last = last[(ends[1:] % begins.shape[1] == 0).nonzero().flatten()]  # documents that end rows
        out = out.view_as(v)
    return out, last


def _for_heads(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A query or key for each head of ``v``."""
    return x if x.shape[2] == v.shape[2] else x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs_and_state: Any) -> Pair:
        *inputs, state = inputs_and_state
        out, states, inverse = _forward_op(*inputs, state)
        ctx.save_for_backward(*inputs, states, inverse)
        # A copy: what is kept for the backward pass is not handed out.
        return out, states[-1].view_as(state).clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: torch.Tensor, dlast: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk, dv, dg, dbeta, dstate = _backward_op(dout, dlast, *ctx.saved_tensors)
        return dq, dk, dv, dg, dbeta, None, dstate


@dataclass
class _Chunks:
    """The inputs by chunks: (n, B, C, channels) with n chunks of C tokens and B = rows x heads, in the precision of
    sums, zeros after the last token, which change nothing; and what follows from decays and documents.

    Attributes:
        q, k, v: as they are.
        beta: (n, B, C, 1).
        decays: decay matrices, see the module docstring: D, e, exp(G_C - G) and exp(G_C), 0 where a
            document's border lies between.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    decays: Decays | ChannelDecays

    @staticmethod
    def of(x: Inputs) -> _Chunks:
        kind: type[Decays] | type[ChannelDecays] = ChannelDecays if x.g.dim() == 4 else Decays
        decays = kind.of(x.g, x.begins, accumulation_dtype(x.v.dtype))
        return _Chunks(by_chunk(x.q), by_chunk(x.k), by_chunk(x.v), by_chunk(x.rate[..., None]), decays)


def _inverse(keys: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """T, (n, B, C, C), of keys with keys and rates."""
    # (1 + strict lower part of b k.k D)^-1, by forward substitution.
    system = keys.mul_(beta)
    unit = torch.eye(CHUNK, dtype=system.dtype, device=system.device).expand_as(system)
    # It reads what is below the diagonal, and gives columns.
    return torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True).contiguous()


def _forward(*inputs_and_state: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output; the states before each chunk and after the last, (n + 1, B, key_dim, value_dim); T."""
    *inputs, state = inputs_and_state
    x = Inputs(*inputs)
    c = _Chunks.of(x)
    d = c.decays
    scores, keys = d.products(c.q, c.k)
    # Saved: the backward pass multiplies by T and by its transpose.
    inverse = _inverse(keys, c.beta)
    # Saved for the backward pass, which then needs no second forward sweep over the chunks.
    states = state.new_empty(len(c.v) + 1, *state.flatten(0, 1).shape)
    states[0], out = state.flatten(0, 1), torch.empty_like(c.v)
    # e k, exp(G_C - G) k and e q of the module docstring.
    asked, kept, read = c.k * d.before, c.k * d.to_end, c.q * d.before
    for i, s in enumerate(states[:-1]):
        # V = T (b (v - e k S))
        written = inverse[i] @ torch.baddbmm(c.v[i], asked[i], s, alpha=-1).mul_(c.beta[i])
        torch.bmm(scores[i], written, out=out[i])
        out[i].baddbmm_(read[i], s)
        # S <- exp(G_C) S + (exp(G_C - G) k)^T V
        torch.baddbmm(s * d.whole[i], kept[i].transpose(1, 2), written, out=states[i + 1])
    return as_tokens(out, x.v), states, inverse


def _backward(dout: torch.Tensor, dlast: torch.Tensor, *saved: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g, beta and of the first state.

    From the last chunk to the first the state's gradient is carried; all else follows for all chunks at once.
    """
    *inputs, states, inverse = saved
    x = Inputs(*inputs)
    c, dout = _Chunks.of(x), by_chunk(dout)
    d, known = c.decays, states[:-1]
    scores, keys = d.products(c.q, c.k)
    asked, kept, read = c.k * d.before, c.k * d.to_end, c.q * d.before
    # v - e k S of all chunks at once: the states before them are saved.
    missing = torch.baddbmm(c.v.flatten(0, 1), asked.flatten(0, 1), known.flatten(0, 1), alpha=-1)
    missing = missing.view_as(c.v)
    # (n, B, C, value_dim): V of all chunks
    written = inverse @ (missing * c.beta)
    # What each token's write and the state before each chunk get from the outputs of the chunk.
    # (n, B, C, value_dim)
    dmissing = scores.transpose(2, 3) @ dout
    dstates = torch.empty_like(states)
    dstates[-1] = dlast.flatten(0, 1)
    torch.matmul(read.transpose(2, 3), dout, out=dstates[:-1])
    dright = torch.empty_like(c.v)
    for i in reversed(range(len(c.v))):
        # What a token writes is read in its chunk and in the state after it.
        torch.bmm(inverse[i].transpose(1, 2), dmissing[i].baddbmm_(kept[i], dstates[i + 1]), out=dright[i])
        # The state before the chunk passes it, and takes part in what is written (e k S, with a minus).
        dstates[i].add_(dstates[i + 1] * d.whole[i])
        dstates[i].baddbmm_(asked[i].transpose(1, 2), dright[i] * c.beta[i], alpha=-1)
    dbeta = (dright * missing).sum(3, keepdim=True)
    # V = T (b (v - e k S)): dright is the gradient of b (v - e k S).
    dv = dright * c.beta
    # T depends on keys, rates and decays: the gradient of its inverse is - T^T dT T^T.
    dkeys = (dright @ written.transpose(2, 3)).neg_().tril_(-1)
    # T has the rates too: rows of b k.k D.
    dbeta += (dkeys * keys).sum(3, keepdim=True)
    dq, dk, of_pairs = d.products_backward(dout @ written.transpose(2, 3), dkeys.mul_(c.beta), scores, keys, c.q, c.k)
    # Gradients of e q, e k and exp(G_C - G) k, by which each of them multiplies a state or a write.
    dread, dasked = dout @ known.transpose(2, 3), (dv @ known.transpose(2, 3)).neg_()
    dkept = written @ dstates[1:].transpose(2, 3)
    of_before = d.of_numbers((dread * read).addcmul_(dasked, asked))
    of_to_end = d.of_numbers(dkept * kept)
    # Second part: gradients through what reads and asks the state before the chunk.
    dq += dread * d.before
    dk += dasked * d.before + dkept * d.to_end
    dg = d.gradient(of_pairs, of_before, of_to_end, d.of_states(known * dstates[1:]))
    tokens = (as_tokens(dx, like) for dx, like in ((dq, x.q), (dk, x.k), (dv, x.v)))
    numbers = (as_tokens(dx, y if y.dim() == 4 else y[..., None]).view_as(y) for dx, y in ((dg, x.g), (dbeta, x.rate)))
    return *tokens, *numbers, dstates[0].clone().view(x.v.shape[0], x.v.shape[2], *states.shape[2:])


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    wide, count, both = accumulation_dtype(v.dtype), (v.shape[1] + CHUNK - 1) // CHUNK, v.shape[0] * v.shape[2]
    states = v.new_empty((count + 1, both, k.shape[3], v.shape[3]), dtype=wide)
    return v.new_empty(v.shape), states, v.new_empty((count, both, CHUNK, CHUNK), dtype=wide)


_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? begins"
_forward_op = define(
    f"gated_delta_rule({_ARGUMENTS}, Tensor state) -> (Tensor, Tensor, Tensor)",
    _forward_fake,
    CompositeExplicitAutograd=_forward,
)
_backward_op = define(
    f"gated_delta_rule_backward(Tensor dout, Tensor dlast, {_ARGUMENTS}, Tensor states, Tensor inverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    gradients_fake,
    CompositeExplicitAutograd=_backward,
)
