"""A gated delta net (Yang et al. 2024, arXiv 2412.06464) as Qwen3-Next has it, split over the TP ranks by heads.

With x_t the input of a token, and for each head of keys and those of values that it serves:

    q, k, v = SiLU(short causal convolution of W x)     q and k divided by their length, q by sqrt(key_dim) too
    b       = sigmoid(W_b x)                            how much of a value is written
    g       = -exp(A) softplus(W_a x + c)               log of what the state keeps
    o       = gated delta rule of q, k, v, g, b         smp.kernels.recurrences.delta_rule
    y       = W_o (RMSNorm(o) SiLU(W_z x))              the norm is of each head

A state is key_dim x value_dim numbers for each head of values, however long the text: that, and the last tokens that
the convolution sees, is what generation keeps instead of keys and values. A document begins with an empty one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.recurrences.chunks import Inputs, Pair
from smp.kernels.recurrences.delta_rule import gated_delta_rule
from smp.kernels.registry import accumulation_dtype
from smp.kernels.token_layout import TokenLayout
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.norm import RMSNorm
from smp.layers.parameter import SHARD_ROWS, Constant, LogUniform, local, tp_parameter
from smp.layers.recurrences.mixer import Ended, RecurrentMixer, StatesBefore, Tokens
from smp.parallel.context import ParallelContext

_EPS = 1e-6
"""Under the root of a query's or key's length, squared."""


class DeltaRuleMixer(RecurrentMixer):
    """Base of mixers whose states follow the gated delta rule.

    Attributes:
        backend: what computes it.
    """

    backend = "torch"

    def _read(self, x: Inputs, state: torch.Tensor | None) -> Pair:
        return gated_delta_rule(x._replace(g=self._decay(x.g)), state, self.backend)

    def _of_pieces(self, x: Inputs, states_before: StatesBefore) -> Ended:
        """Outputs of pieces. One pass gives what a piece adds to the state before it and what it multiplies that state
        with: the first state is [0 | 1] and zeros follow the values, so the factor is in the columns after the sum."""
        # (rows, heads, key_dim, value_dim + key_dim): [0 | 1]
        unit = torch.eye(self.key_dim, dtype=x.v.dtype, device=x.v.device)
        first = F.pad(unit, (self.value_dim, 0)).expand(x.v.shape[0], x.v.shape[2], -1, -1)
        x = x._replace(v=F.pad(x.v, (0, self.key_dim)), g=self._decay(x.g))
        # Not by flash-linear-attention, whose kernels round to 16 bits.
        # (rows, length, heads, value_dim + key_dim) and (rows, heads, key_dim, value_dim + key_dim)
        both, maps = gated_delta_rule(x, first)
        widths = self.value_dim, self.key_dim
        before = states_before(*maps.split(widths, dim=3))

        def ended() -> torch.Tensor:
            out, factor = both.split(widths, dim=3)
            # (rows, heads, length, key_dim) @ (rows, heads, key_dim, value_dim)
            return out + (factor.transpose(1, 2) @ before()).transpose(1, 2)

        return ended

    def _normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _unit(q) * self.key_dim**-0.5, _unit(k)

    def _decay(self, g: torch.Tensor) -> torch.Tensor:
        """g as the rule takes it."""
        return g


class GatedDeltaNet(DeltaRuleMixer):
    """Projections, convolution, gated delta rule, gated norm and the output projection.

    Args:
        hidden_size: width of the residual stream.
        key_heads, value_heads: global; key heads must be divisible by the mesh size, and divide value heads.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` input and output are
            split along dim 0.
        key_dim, value_dim: channels of a head.
        conv: tokens that the convolution sees, with the token itself.
        norm_eps: of the norm of each head's output.
        negative: rates go up to 2 instead of 1.
        init_std, output_std: standard deviations of the initial weights, inner and last.
        kernels: what computes the rule and the norm.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: for heads that do not fit together, or do not split over the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        key_heads: int,
        value_heads: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        key_dim: int,
        value_dim: int,
        conv: int = 4,
        norm_eps: float = 1e-6,
        negative: bool = False,
        init_std: float = 0.02,
        output_std: float = 0.02,
        kernels: Kernels = TORCH,
    ) -> None:
        context = ParallelContext.of(parallel)
        super().__init__(
            context,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv=conv,
            conv_bias=False,
            kernels=kernels,
        )
        self.backend, self.negative = kernels.delta_rule, negative
        keys, values = key_heads * key_dim, value_heads * value_dim

        def projection(width: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden_size, width, context, bias=False, init_std=init_std)

        self.query, self.key, self.value = projection(keys), projection(keys), projection(values)
        self.gate, self.beta, self.decay = projection(values), projection(value_heads), projection(value_heads)
        self.decay_log, self.decay_bias = (tp_parameter((value_heads,), SHARD_ROWS, context.tp) for _ in range(2))
        # One weight for all heads, used by each rank on heads of its own: its gradient is summed over TP.
        self.norm = RMSNorm(value_dim, context, eps=norm_eps, split_input=True, kernels=kernels)
        self.output = RowParallelLinear(values, hidden_size, context, bias=False, init_std=output_std)
        self.initializers |= {"decay_log": LogUniform(0.01, 16.0), "decay_bias": Constant(1.0)}

    def _projected(self, x: torch.Tensor, layout: TokenLayout) -> tuple[Tokens, torch.Tensor]:
        layers = [self.query, self.key, self.value, self.gate, self.beta, self.decay]
        # One gather of the input for all, and one reduction of its gradient.
        *mixed, gate, beta, decay = column_parallel(x, layers, layout.local_token_index)
        rows = [self._rows(y, layout) for y in (torch.cat(mixed, 1), beta, decay)]
        rate = rows[1].to(accumulation_dtype(beta.dtype)).sigmoid()
        # A rate up to 2 lets 1 - b k k^T have negative eigenvalues (arXiv 2411.12537).
        return Tokens(rows[0], self._decays(rows[2]), 2 * rate if self.negative else rate), gate

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = self.norm(out).flatten(1)  # (tokens, heads/p x value_dim)
        wide = accumulation_dtype(gate.dtype)
        return (out.to(wide) * F.silu(gate.to(wide))).to(gate.dtype)

    def _decays(self, x: torch.Tensor) -> torch.Tensor:
        """g, in the precision of sums."""
        wide = accumulation_dtype(x.dtype)
        # Rounded as FSDP would round them, then wide again.
        log, bias = (local(p, x.dtype).to(wide) for p in (self.decay_log, self.decay_bias))
        return -log.exp() * F.softplus(x.to(wide) + bias)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 in the direction of ``x``, over the last dimension; the arithmetic is fp32 inside."""
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)).to(x.dtype)
