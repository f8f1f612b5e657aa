"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2): the parts around the block of a prediction layer.

With h^0 the model's hidden states after its final norm, layer k = 1, 2, ... predicts token i + k + 1 at position i:

    x_i   = W [norm_e(embedding of token i + k); norm_h(h^{k-1}_i)]
    h^k   = norm(block_k(x))
    logits of token i + k + 1 = output matrix h^k_i

The embedding and the output matrix are the model's own. The order of the two halves, and that h^0 is taken after the
final norm, are those of DeepSeek's files and of Megatron.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from smp.layers.linear import ColumnParallelLinear
from smp.layers.norm import Norm
from smp.parallel.context import ParallelContext


class Prediction(nn.Module):
    """The modules of one prediction layer, except its block.

    Args:
        hidden_size: of the residual stream.
        context: of the run.
        make_norm: makes one of the model's norms.
        init_std: standard deviation of the initial projection.

    Every TP rank has the whole projection and computes it of its own tokens; under sequence parallelism gradients are
    summed, as those of norms are.
    """

    def __init__(
        self, hidden_size: int, context: ParallelContext, make_norm: Callable[[], Norm], *, init_std: float
    ) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = make_norm(), make_norm(), make_norm()
        # ``every_output``: the result goes to the block's residual stream, which is not cut by width.
        self.projection = ColumnParallelLinear(
            2 * hidden_size, hidden_size, context, bias=False, init_std=init_std, every_output=True
        )

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Hidden states of the layer before and embeddings of later tokens, (tokens [/p], hidden) each -> what the
        block takes."""
        return self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
