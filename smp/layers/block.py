"""One transformer block: what the pipeline splits between, FSDP shards, recompute repeats and compile compiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from smp.layers.attention import SelfAttention, SequenceInfo
from smp.layers.mlp import MLP
from smp.layers.norm import Norm
from smp.parallel.rng import keyed_dropout

Run = Callable[[torch.Tensor, SequenceInfo, torch.Tensor | None], torch.Tensor]


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP with residual connections, one after the other or side by side.

    Args:
        attention, mlp: the two parts.
        attention_norm, mlp_norm: the normalizations in front of them.
        parallel_residual: both read the block's input and are added to it together (GPT-NeoX).
        dropout: on what each part adds to the residual stream.

    Shapes: (tokens [/p], hidden) -> the same.

    Raises:
        ValueError: when the parts differ in ``sequence_parallel``; on use, when dropout in training mode lacks the keys
            or the tokens' numbers.
    """

    def __init__(
        self,
        attention: SelfAttention,
        mlp: MLP,
        attention_norm: Norm,
        mlp_norm: Norm,
        *,
        parallel_residual: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        parts: dict[str, SelfAttention | MLP | Norm] = {
            "attention": attention,
            "mlp": mlp,
            "attention_norm": attention_norm,
            "mlp_norm": mlp_norm,
        }
        split = {name: part.sequence_parallel for name, part in parts.items()}
        if len(set(split.values())) > 1:
            raise ValueError(f"the parts of a block differ in sequence_parallel: {split}")
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.parallel_residual, self.dropout = parallel_residual, dropout
        self.run: Run = self._run

    def forward(self, x: torch.Tensor, info: SequenceInfo, keys: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the block; ``keys`` are its three dropout keys, int64 (3,).

        Goes through ``self.run``: recompute and compile wrap that, inside of FSDP's hooks, which stay on ``forward``.
        """
        return self.run(x, info, keys)

    def _run(self, x: torch.Tensor, info: SequenceInfo, keys: torch.Tensor | None) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x), info, None if keys is None else keys[0])
        attended = self._drop(attended, info, keys, 1)
        if self.parallel_residual:
            return x + attended + self._drop(self._feed_forward(self.mlp_norm(x), info), info, keys, 2)
        normed, x = self.mlp_norm.after_addition(x, attended)
        return x + self._drop(self._feed_forward(normed, info), info, keys, 2)

    def _feed_forward(self, x: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        return self.mlp(x, info.token_index, info.local_token_index)

    def _drop(self, x: torch.Tensor, info: SequenceInfo, keys: torch.Tensor | None, site: int) -> torch.Tensor:
        if self.dropout == 0.0 or not self.training:
            return x
        index = info.local_token_index
        if keys is None or index is None or index.shape[0] != x.shape[0]:
            raise ValueError(
                "dropout needs keys and SequenceInfo.token_index, under sequence parallelism local_token_index: "
                "its masks are keyed by them"
            )
        return keyed_dropout(x, keys[site], index, self.dropout)
