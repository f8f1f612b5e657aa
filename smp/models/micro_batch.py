"""The input of a model: the tokens of one micro-batch with labels, positions, documents and caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smp.data.tuning.image_batches import ImageTensors
from smp.kernels.sequence_cut import SequenceCut
from smp.layers.heads.answers import AnswerLoss
from smp.layers.heads.distillation import Distilled
from smp.layers.kv_cache import CacheView


@dataclass(frozen=True)
class MTPBatch:
    """Inputs and labels of a layer of multi-token prediction, k tokens ahead of the model: tensors as those of
    :class:`MicroBatch`, shifted by k.

    Attributes:
        input_ids: the token k places after each.
        labels: the token that follows that.
        loss_weights: what each counts; 0 where the sequence, or the document, ends before.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor


@dataclass(eq=False)
class OwnCache:
    """The cache of a model that keeps keys, values and states by itself, for rows of one length.

    Attributes:
        value: the model's cache object; None before the first tokens, and after them for a model without a cache. It
            has ``reorder_cache``, as transformers' caches do.
    """

    value: Any = None

    def select(self, rows: torch.Tensor) -> None:
        """Go on with some ``rows``, int64, in this order; one may be there several times."""
        self.value.reorder_cache(rows)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass, on the model's device but for ``document_ids``. (A dataclass, so that FSDP, which
    moves the tensors that it finds among a module's arguments to the device, leaves it alone: the host has to count
    documents, and on the device it would wait for them.)

    Attributes:
        input_ids: int64 (batch, length).
        labels: int64 (batch, length), the token that follows each; without them and the weights the model gives logits.
        loss_weights: fp32 (batch, length), what each token's loss counts. 1 / (valid tokens of the global batch) makes
            the sum over micro-batches and ranks the mean loss; 0 leaves a token out.
        position_ids: int64 (batch, length), below ``max_position_embeddings``; None: counted from 0 in every sequence.
        document_ids: int64 (batch, length), on the host: a token sees only tokens with its number; None: all of its
            sequence.
        token_index: int64 (batch, length), global number of each token, which dropout is keyed by: needed in training
            mode when there is any.
        cut: the tensors are this rank's columns of every sequence, in the order of the cut; ``position_ids`` are given
            then, and documents are those of the cut. None: whole sequences.
        sequence_lengths: int64 (batch, length), tokens of the whole sequence that each token belongs to, or of its
            document where positions start again with each: LongRoPE goes by it. None: rows are whole, or of the cut.
        answers: rows are answers, and this loss is computed over them; tokens of weight 0 belong to the prompt.
        distilled: the loss of each token is its divergence from a teacher instead of the cross-entropy of its label.
        mtp: inputs of each layer of multi-token prediction.
        cache: keys and values of the tokens before these, while text is generated; without labels.
        own_cache: the same of a model with a cache of its own, which gives logits of each row's last token.
        images: the images' tensors, for a vision-language model.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor | None = None
    loss_weights: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    token_index: torch.Tensor | None = None
    cut: SequenceCut | None = None
    sequence_lengths: torch.Tensor | None = None
    answers: AnswerLoss | None = None
    distilled: Distilled | None = None
    mtp: tuple[MTPBatch, ...] = ()
    cache: CacheView | None = None
    own_cache: OwnCache | None = None
    images: ImageTensors | None = None

    def whole_lengths(self) -> torch.Tensor:
        """``sequence_lengths``, or the length of the rows where they are not given, int64 (batch, length)."""
        if self.sequence_lengths is not None:
            return self.sequence_lengths
        # Under context parallelism a rank has some columns of each sequence; its length is that of the whole.
        whole = self.input_ids.shape[1] if self.cut is None else self.cut.length
        return torch.full_like(self.input_ids, whole)
