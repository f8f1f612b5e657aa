"""Kimi delta attention (Kimi Team 2025, arXiv 2510.26692), split over the TP ranks by heads: a gated delta net in which
each channel of a state's keys fades for itself.

With x_t the input of a token, and for each head:

    q, k, v = SiLU(short causal convolution of W x)     q and k divided by their length, q by sqrt(head_dim) too
    b       = sigmoid(W_b x)                            how much of a value is written
    g       = -exp(A) softplus(W_a' W_a x + c)          log of what the state keeps, for each channel
    o       = gated delta rule of q, k, v, g, b         smp.kernels.recurrences.delta_rule
    y       = W_o (RMSNorm(o) sigmoid(W_z' W_z x))      the norm is of each head

W_a and W_z are narrow, head_dim rows for all heads: every rank has all of both and computes them of its own tokens, as
latent attention does its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.registry import accumulation_dtype
from smp.kernels.token_layout import TokenLayout
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.norm import RMSNorm
from smp.layers.parameter import SHARD_ROWS, LogUniform, StepUniform, local, tp_parameter
from smp.layers.recurrences.delta_net import DeltaRuleMixer
from smp.layers.recurrences.mixer import Tokens
from smp.parallel.context import ParallelContext


class KimiDeltaAttention(DeltaRuleMixer):
    """Projections, convolution, gated delta rule, gated norm and the output projection.

    Args:
        hidden_size: width of the residual stream.
        heads: global; must be divisible by the mesh size.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` input and output are
            split along dim 0.
        head_dim: channels of a head's queries, keys and values.
        conv: tokens that the convolution sees, with the token itself.
        norm_eps: of the norm of each head's output.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what computes the norm, and which exchange context-parallel ranks have.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for heads that do not split over the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        head_dim: int,
        conv: int = 4,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        context, width = ParallelContext.of(parallel), heads * head_dim
        if heads % context.tp.size():  # nor is a single one every rank's
            raise ValueError(f"{heads} heads do not split over {context.tp.size()} ranks")
        super().__init__(
            context,
            key_heads=heads,
            value_heads=heads,
            key_dim=head_dim,
            value_dim=head_dim,
            conv=conv,
            conv_bias=False,
            kernels=kernels,
        )

        def projection(out: int, inputs: int = hidden_size, *, every_output: bool = False) -> ColumnParallelLinear:
            return ColumnParallelLinear(inputs, out, context, bias=False, init_std=init_std, every_output=every_output)

        self.query, self.key, self.value = projection(width), projection(width), projection(width)
        self.beta = projection(heads)
        # Narrow, so every rank has them whole; the up projections are cut by heads.
        self.decay_down, self.gate_down = (projection(head_dim, every_output=True) for _ in range(2))
        self.decay_up, self.gate_up = projection(width, head_dim), projection(width, head_dim)
        self.decay_log = tp_parameter((heads,), SHARD_ROWS, context.tp)
        self.decay_bias = tp_parameter((width,), SHARD_ROWS, context.tp)
        self.norm = RMSNorm(head_dim, context, eps=norm_eps, split_input=True, kernels=kernels)
        self.output = RowParallelLinear(width, hidden_size, context, bias=False, init_std=output_std)
        self.initializers |= {"decay_log": LogUniform(1.0, 16.0), "decay_bias": StepUniform(0.001, 0.1)}

    def _projected(self, x: torch.Tensor, layout: TokenLayout) -> tuple[Tokens, torch.Tensor]:
        index = layout.local_token_index
        # Two calls, because their outputs are cut in different ways.
        *mixed, beta = column_parallel(x, [self.query, self.key, self.value, self.beta], index)
        decay, gate = column_parallel(x, [self.decay_down, self.gate_down], index)
        rows = [self._rows(y, layout) for y in (torch.cat(mixed, 1), beta, self.decay_up(decay, index))]
        rate = rows[1].to(accumulation_dtype(beta.dtype)).sigmoid()
        return Tokens(rows[0], self._decays(rows[2]), rate), self.gate_up(gate, index)

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = self.norm(out).flatten(1)  # (tokens, heads/p x head_dim)
        wide = accumulation_dtype(gate.dtype)
        return (out.to(wide) * gate.to(wide).sigmoid()).to(gate.dtype)

    def _decay(self, g: torch.Tensor) -> torch.Tensor:
        # (rows, length, heads/p, key_dim)
        return g.unflatten(2, (-1, self.key_dim))

    def _decays(self, x: torch.Tensor) -> torch.Tensor:
        """g, (batch, length, heads/p x head_dim), in the precision of sums."""
        wide = accumulation_dtype(x.dtype)
        # Rounded as FSDP would round them, then wide again.
        log, bias = (local(p, x.dtype).to(wide) for p in (self.decay_log, self.decay_bias))
        steps = F.softplus(x.to(wide) + bias).unflatten(2, (-1, self.key_dim))
        # One decay rate for each head, times a step for each of its channels.
        return (-log.exp()[:, None] * steps).flatten(2)
