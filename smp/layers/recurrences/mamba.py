"""A Mamba-2 mixer (Dao & Gu 2024, arXiv 2405.21060), split over the TP ranks by heads.

With x_t the input of a token, for each head of values and the group of heads that it is in:

    q, k, v = SiLU(short causal convolution of W x + bias)      C, B and x of the paper; q and k are a group's
    s       = softplus(W_s x + c), within limits                dt: the step
    g       = -exp(A) s                                         log of what the state keeps
    o       = recurrence of q, k, v, g, s + D v                 smp.kernels.recurrences.state_space
    y       = W_o (RMSNorm(o SiLU(W_z x)))                      the norm is of each group, or there is none

A state is state_dim x head_dim numbers for each head, however long the text. Groups are split over the ranks as heads
are. A single group is every rank's: then its queries and keys are computed by all, and the norm's sums cross links.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.recurrences.chunks import Inputs, Pair
from smp.kernels.recurrences.state_space import state_space
from smp.kernels.registry import accumulation_dtype
from smp.kernels.token_layout import TokenLayout
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.norm import SplitRMSNorm
from smp.layers.parameter import SHARD_ROWS, Constant, LogUniform, StepUniform, local, tp_parameter
from smp.layers.recurrences.mixer import Ended, RecurrentMixer, StatesBefore, Tokens, of_rank, times
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext


class Mamba2(RecurrentMixer):
    """Projections, convolution, recurrence, gated norm and the output projection.

    Args:
        hidden_size: width of the residual stream.
        heads, groups: global; groups divide heads. Heads must be divisible by the mesh size, and so must groups, unless
            there is one.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` input and output are
            split along dim 0.
        head_dim, state_dim: a head's state has state_dim x head_dim numbers.
        conv: tokens that the convolution sees, with the token itself.
        step_limits: the least and the largest step.
        norm_eps: of the norm of each group's output; None: there is no norm.
        multipliers: of gates, values, keys, queries and steps, as projections give them (Falcon-H1).
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: which exchange context-parallel ranks have.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for heads and groups that do not fit together, or do not split over the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        groups: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        head_dim: int,
        state_dim: int,
        conv: int = 4,
        step_limits: tuple[float, float] = (0.0, torch.inf),
        norm_eps: float | None = 1e-5,
        multipliers: Sequence[float] = (1.0,) * 5,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        context = ParallelContext.of(parallel)
        super().__init__(
            context,
            key_heads=groups,
            value_heads=heads,
            key_dim=state_dim,
            value_dim=head_dim,
            conv=conv,
            conv_bias=True,
            kernels=kernels,
        )
        self.step_limits = step_limits
        # The convolution has no bias in front of it, so its weights can be multiplied instead of what it reads.
        self.gate_multiplier, value, key, query, self.step_multiplier = multipliers
        self.conv_multipliers = query, key, value
        keys, values = groups * state_dim, heads * head_dim

        def projection(width: int, parts: int | None = None) -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden_size, width, context, bias=False, parts=parts, init_std=init_std)

        # ``parts``: a single group is computed by every rank, several are cut as heads are.
        self.query, self.key, self.value = projection(keys, groups), projection(keys, groups), projection(values)
        self.gate, self.step = projection(values), projection(heads)
        self.decay_log, self.step_bias, self.skip = (tp_parameter((heads,), SHARD_ROWS, context.tp) for _ in range(3))
        self.norm = None if norm_eps is None else SplitRMSNorm(values, context, eps=norm_eps, groups=groups)
        self.output = RowParallelLinear(values, hidden_size, context, bias=False, init_std=output_std)
        self.initializers |= {"decay_log": LogUniform(1.0, 16.0), "step_bias": StepUniform(0.001, 0.1)}
        self.initializers |= {"skip": Constant(1.0)}

    def _projected(self, x: torch.Tensor, layout: TokenLayout) -> tuple[Tokens, torch.Tensor]:
        layers = [self.query, self.key, self.value, self.gate, self.step]
        # One gather of the input for all, and one reduction of its gradient.
        *mixed, gate, step = column_parallel(x, layers, layout.local_token_index)
        rows, wide = self._rows(step, layout), accumulation_dtype(step.dtype)
        # Rounded as FSDP would round them, then wide again.
        log, bias = (local(p, step.dtype).to(wide) for p in (self.decay_log, self.step_bias))
        steps = F.softplus(times(rows.to(wide), self.step_multiplier) + bias).clamp(*self.step_limits)
        return Tokens(self._rows(torch.cat(mixed, 1), layout), -log.exp() * steps, steps), gate

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """RMSNorm(out SiLU(gate)), (tokens, heads/p x head_dim), of ``out`` (tokens, heads/p, head_dim) and the gate
        (tokens, heads/p x head_dim)."""
        wide = accumulation_dtype(gate.dtype)
        # (tokens, heads/p x head_dim)
        gated = out.flatten(1).to(wide) * F.silu(times(gate.to(wide), self.gate_multiplier))
        return gated.to(gate.dtype) if self.norm is None else self.norm(gated, gate.dtype)

    def _read(self, x: Inputs, state: torch.Tensor | None) -> Pair:
        return state_space(x, state)

    def _of_pieces(self, x: Inputs, states_before: StatesBefore) -> Ended:
        """Outputs of pieces. What comes from before a piece only fades: by a number for each token and head, 0 after a
        border."""
        out, added = state_space(x)
        # In fp64: exponents of long pieces are large sums of small numbers, and errors of exp grow with them.
        total = x.g.double().cumsum(1)
        if x.begins is not None:
            total = total.masked_fill(x.begins.cumsum(1)[..., None] > 0, -torch.inf)
        kept = total.exp().to(x.g.dtype)  # (rows, length, heads)
        # ``kept`` at the last token is what the whole piece leaves of the state before it: M, a number.
        states = states_before(added, kept[:, -1, :, None, None])

        def ended() -> torch.Tensor:
            before = states()  # (rows, heads, state_dim, head_dim)
            by_group = before.unflatten(1, (x.q.shape[2], -1)).transpose(2, 3).flatten(3)  # (rows, groups, ...)
            # All heads of a group in one product: they share q.
            read = (x.q.to(before.dtype).transpose(1, 2) @ by_group).transpose(1, 2).flatten(2).view_as(x.v)
            return out + kept[..., None] * read

        return ended

    def _skipped(self, out: torch.Tensor, v: torch.Tensor, heads: Group | None) -> torch.Tensor:
        """``out`` with D v added."""
        factor = local(self.skip, v.dtype)
        factor = factor if heads is None else of_rank(factor, heads)
        return torch.addcmul(out, v, factor[:, None].to(v.dtype))
