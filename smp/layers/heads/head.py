"""The output layer: from hidden states to a loss or to logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.kernels import TORCH, Kernels
from smp.kernels.matmul import linear
from smp.layers.embedding import padded_vocab_size
from smp.layers.heads.answers import AnswerLoss, linear_answers
from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy
from smp.layers.heads.distillation import Distilled, linear_divergence
from smp.layers.parameter import SHARD_ROWS, Initializer, Normal, local, tp_parameter
from smp.parallel.collectives import copy_to_group, gather_features, gather_tokens, sum_over
from smp.parallel.context import ParallelContext

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Size of one chunk of logits in fp32 (half of it in bf16): 524 tokens of 32,000 logits on a CPU. Larger chunks make
matrix products more efficient and take more memory."""

TILE = 128
"""Rows that a tile of a matrix product has on a GPU: of 1,046 the last 22 would cost as much as 128."""


DISTILLED = 8
"""A divergence makes seven (of stored log-probabilities) to thirteen tensors of the size of a chunk's logits: its
chunks are this much smaller."""


def chunk_tokens(weight: torch.Tensor, chunk_bytes: int | None = None, share: int = 1) -> int:
    """Tokens whose logits by ``weight`` (rows, hidden) fill ``chunk_bytes`` / ``share`` in fp32; None:
    ``CHUNK_BYTES``."""
    chunk_bytes = chunk_bytes or CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cuda"])
    # 4 bytes: a loss is computed in fp32, whatever the logits are kept in.
    chunk = max(1, chunk_bytes // (4 * share * weight.shape[0]))
    return chunk - chunk % TILE if chunk > TILE else chunk


class ModelOutput(NamedTuple):
    """Output of a model, or of a pipeline stage of it, for a micro-batch. A NamedTuple, because FSDP looks for the
    tensors in what a module returns, and dataclasses are opaque to it.

    Attributes:
        loss: 0-dim fp32, equal on all TP ranks: this micro-batch's part of the mean over the global batch.
        logits: (batch, length, vocab), equal on all TP ranks, when there are no labels; with a cache this rank's
            columns of those that are wanted, (rows, columns/p).
        values: fp32 (batch, length), of each token of an answer, when only these are wanted: log-probabilities, or
            scores of a reward model; 0 elsewhere. Or what the output matrix is multiplied with, (tokens [/p], hidden),
            where that is asked for.
        hidden: of a stage without the head, what the next stage takes.
        aux_losses: 0-dim losses by name that are added to ``loss``, also of stages without the head (a router's).
        metrics: what else was measured, by name: sums over the micro-batch, without gradient.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    values: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    aux_losses: dict[str, torch.Tensor] = {}  # noqa: RUF012 (never written to)
    metrics: dict[str, torch.Tensor] = {}  # noqa: RUF012

    @property
    def total(self) -> torch.Tensor | None:
        """The sum that is minimised: the loss and all auxiliary losses; None for a stage without any."""
        losses = [*([] if self.loss is None else [self.loss]), *self.aux_losses.values()]
        # From the first one on, and not from 0: a sum that begins with a number would add it to the graph.
        return sum(losses[1:], losses[0]) if losses else None


class VocabParallelHead(nn.Module):
    """Output matrix with the vocabulary split over the TP ranks, and the cross-entropy on top of it.

    Args:
        vocab_size: number of token ids, any number.
        hidden_size: width of the input.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` the input is split
            along dim 0.
        tied: own no matrix; the embedding's is passed to ``forward``.
        divisible_by: rows per rank are padded to this multiple.
        init_std: standard deviation of the initial rows.
        softcap: logits z become softcap x tanh(z / softcap); None: no cap.
        kernels: what computes the cross-entropy.

    Attributes:
        chunk_bytes: of one chunk of logits in fp32; None: ``CHUNK_BYTES`` of the device.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        tied: bool = False,
        divisible_by: int = 128,
        init_std: float = 0.02,
        softcap: float | None = None,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.group, self.sequence_parallel = context.tp_group, context.sequence_parallel
        self.cp = context.cp_group
        self.vocab_size, self.kernels = vocab_size, kernels
        self.chunk_bytes: int | None = None
        rows = padded_vocab_size(vocab_size, divisible_by, self.group.size)
        self.weight = None if tied else tp_parameter((rows, hidden_size), SHARD_ROWS, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}
        self.logical_rows = {} if tied else {"weight": vocab_size}
        self.shard = VocabShard.of(self.group, rows // self.group.size, vocab_size, softcap)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor | None:
        """This rank's rows as ``forward`` uses them, for several calls of it; None: tied."""
        return None if self.weight is None else local(self.weight, dtype)

    def local_logits(
        self, x: torch.Tensor, last: torch.Tensor, *, cut: bool, tied_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's columns of the logits of some tokens, (rows, columns/p), without gradient.

        Args:
            x: (tokens [/p], hidden).
            last: int64 (rows,), numbers of the tokens; those below 0 are on another context-parallel rank.
            cut: sequences are cut over the context-parallel ranks.
            tied_weight: as of :meth:`forward`.
        """
        weight = self.matrix(x.dtype) if tied_weight is None else tied_weight
        assert weight is not None
        hidden = gather_tokens(x, self.group) if self.sequence_parallel else x
        # (rows, hidden): the output matrix is applied to wanted tokens only
        hidden = hidden[last.clamp(min=0)]
        if cut and self.cp is not None:
            # One rank has each token, so this sum adds zeros to it.
            hidden = sum_over(hidden.masked_fill(last[:, None] < 0, 0.0), [self.cp])
        return self.shard.capped(linear(hidden, weight))

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        tied_weight: torch.Tensor | None = None,
        answers: AnswerLoss | Distilled | None = None,
        shape: tuple[int, int] | None = None,
    ) -> ModelOutput:
        """The loss; without labels and weights the logits (tokens, vocab), which can be differentiated.

        Args:
            x: (tokens [/p], hidden).
            labels: int64 (tokens,).
            loss_weights: fp32 (tokens,), what each token's loss counts.
            tied_weight: the embedding's ``table()`` when tied, or what :meth:`matrix` gave.
            answers: instead of the weighted sum, a loss of answers, or one by what a teacher says; tokens of weight 0
                are the prompt's.
            shape: (rows, length) of them; after these tokens is padding.

        Raises:
            ValueError: for labels without weights, or weights without labels.
        """
        weight = self.matrix(x.dtype) if tied_weight is None else tied_weight
        assert weight is not None
        if (labels is None) != (loss_weights is None):
            raise ValueError("a loss needs labels and loss_weights, logits neither")
        if isinstance(answers, AnswerLoss) and answers.states is not None:
            answers.states(weight)
            return ModelOutput(values=x)
        # Each rank multiplies all tokens by its columns, so the input's gradient is a sum over the ranks either way.
        gather = gather_tokens if self.sequence_parallel else copy_to_group
        hidden = gather(x, self.group)  # (tokens, hidden)
        if labels is None or loss_weights is None:
            # All logits on every rank: for callers that ask for logits, never in training.
            logits = gather_features(self.shard.capped(linear(hidden, weight)), self.group)  # (tokens, rows)
            # Cut after the gather: padding is at the end of the last rank's columns only.
            return ModelOutput(logits=logits[:, : self.vocab_size])
        chunk = chunk_tokens(weight, self.chunk_bytes)
        arguments = hidden, weight, labels, loss_weights, self.shard
        backend = self.kernels.cross_entropy
        if isinstance(answers, Distilled):
            # Smaller: a divergence needs several tensors of the size of a chunk's logits.
            chunk = chunk_tokens(weight, self.chunk_bytes, share=DISTILLED)
            return ModelOutput(loss=linear_divergence(*arguments, answers, chunk_tokens=chunk, backend=backend))
        if answers is None:
            return ModelOutput(loss=linear_cross_entropy(*arguments, chunk_tokens=chunk, backend=backend))
        assert shape is not None, "answers have rows"
        values, result = linear_answers(*arguments, answers, shape, chunk_tokens=chunk, backend=backend, cp=self.cp)
        return ModelOutput(values=values) if result is None else ModelOutput(loss=result.loss, metrics=result.metrics)
