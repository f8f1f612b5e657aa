"""The output layer: hidden states to a loss, or to logits."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.layers.cross_entropy import VocabShard, linear_cross_entropy
from smp.layers.embedding import padded_vocab_size
from smp.layers.parameter import SHARD_ROWS, Initializer, Normal, local, tp_parameter
from smp.layers.preference import Preference, linear_preference
from smp.parallel.collectives import Group, copy_to_group, gather_tokens, start_all_gather, wait

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Size of one chunk of logits in fp32 (half of it in bf16): 524 tokens of 32,000 logits on a CPU. Larger chunks make
matrix products more efficient and take more memory."""


class VocabParallelHead(nn.Module):
    """Output matrix with the vocabulary split over the TP ranks, and the cross-entropy on top of it.

    Args:
        vocab_size: number of token ids, any number.
        hidden_size: width of the input.
        mesh: 1-D tensor-parallel mesh.
        tied: own no matrix; the embedding's is passed to ``forward``.
        sequence_parallel: the input is split along dim 0.
        divisible_by: rows per rank are padded to this multiple.
        init_std: standard deviation of the initial rows.
        kernels: what computes the cross-entropy.
        device, dtype: of the parameter.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        mesh: DeviceMesh,
        *,
        tied: bool = False,
        sequence_parallel: bool = False,
        divisible_by: int = 128,
        init_std: float = 0.02,
        kernels: Kernels = TORCH,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = Group.of(mesh)
        self.vocab_size, self.sequence_parallel, self.kernels = vocab_size, sequence_parallel, kernels
        rows = padded_vocab_size(vocab_size, divisible_by, self.group.size)
        self.weight = None if tied else tp_parameter((rows, hidden_size), SHARD_ROWS, mesh, device, dtype)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}
        self.logical_rows = {} if tied else {"weight": vocab_size}
        self.shard = VocabShard.of(self.group, rows // self.group.size, vocab_size)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        token_weights: torch.Tensor | None = None,
        tied_weight: torch.Tensor | None = None,
        preference: Preference | None = None,
    ) -> torch.Tensor:
        """Weighted loss sum (0-dim fp32, equal on all ranks), or without labels and weights the logits (tokens, vocab).

        Args:
            x: (tokens [/p], hidden).
            labels: int64 (tokens,).
            token_weights: fp32 (tokens,), what each token's loss counts.
            tied_weight: the embedding's ``table()`` when tied.
            preference: instead of the weighted sum, the loss of pairs of answers; tokens of weight 0 are the prompt's.

        Raises:
            ValueError: for labels without weights, or weights without labels.
        """
        weight = tied_weight if self.weight is None else local(self.weight, x.dtype)
        assert weight is not None
        if (labels is None) != (token_weights is None):
            raise ValueError("a loss needs labels and token_weights, logits neither")
        if self.sequence_parallel:
            hidden = gather_tokens(x, self.group)  # (tokens, hidden)
        else:
            hidden = copy_to_group(x, self.group)
        if labels is None or token_weights is None:
            return self._logits(hidden, weight)
        chunk = max(1, CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cuda"]) // (4 * weight.shape[0]))
        arguments = hidden, weight, labels, token_weights, self.shard
        backend = self.kernels.cross_entropy
        if preference is not None:
            return linear_preference(*arguments, preference, chunk_tokens=chunk, backend=backend)
        return linear_cross_entropy(*arguments, chunk_tokens=chunk, backend=backend)

    def _logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """All logits on every rank, for generation and comparison (not differentiable across ranks)."""
        if torch.is_grad_enabled() and self.group.size > 1:
            raise RuntimeError("logits of a tensor-parallel model have no gradient here: use torch.no_grad()")
        columns = weight @ hidden.t()  # (rows per rank, tokens)
        return wait(start_all_gather(columns, self.group), self.group).t()[:, : self.vocab_size]
