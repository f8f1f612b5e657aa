"""The tokens of a micro-batch as layers see them: padding, slices of sequence parallelism, dropout keys, and the
tensors that layers need (:mod:`smp.layers.token_needs`), prepared once for all layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels.attention_cores.attention_core import AttentionCore, AttentionSpec
from smp.kernels.attention_cores.fused_attention import DEFAULT_ATTENTION
from smp.kernels.dropout import keyed_dropout
from smp.kernels.token_layout import TokenLayout
from smp.layers.block import DROPOUT_SITES
from smp.layers.indexer import LOSS_WEIGHTS
from smp.layers.parallel_mixers import mixers_of
from smp.layers.token_needs import TokenNeed, chunks_key, with_needs
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group
from smp.parallel.rng import dropout_keys


@dataclass(frozen=True)
class Tokens:
    """Tokens of one micro-batch.

    Attributes:
        layout: with what layers need.
        padding: rows to add so that the TP ranks can share the tokens evenly.
        keys: of dropout, int64 (sites,), the embedding's after those of all layers; None: nothing is dropped.
        group: the TP ranks that share the rows; None: every rank has all of them.
    """

    layout: TokenLayout
    padding: int
    keys: torch.Tensor | None
    group: Group | None

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length) -> (batch x length + padding,), zeros at the end: of weight 0 in the loss."""
        return _flat(x, self.padding)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor (batch, length), flat."""
        return _own(self.flat(x), self.group)

    def of_layer(self, layer: int) -> tuple[TokenLayout, torch.Tensor | None]:
        """(layout, dropout keys) of a layer. The layer is given by its number in the whole model, so that dropout does
        not depend on pipeline stages; the layout's cache becomes that of the layer."""
        if self.layout.cache is not None:
            self.layout.cache.layer = layer
        sites = slice(DROPOUT_SITES * layer, DROPOUT_SITES * (layer + 1))
        return self.layout, None if self.keys is None else self.keys[sites]

    def dropped_embedding(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """The embedding after dropout, (tokens [/p], hidden)."""
        if self.keys is None or self.layout.local_token_index is None:
            return x
        return keyed_dropout(x, self.keys[-1], self.layout.local_token_index, rate)


class TokenPreparation:
    """Makes the :class:`Tokens` of a model's micro-batches.

    Args:
        mixers: those of the model's layers on this rank.
        attention: the attention core of all of them.
        group: the TP ranks.
        sequence_parallel: they share the rows of the residual stream.
        seed: keys dropout.
        num_layers: of the whole model.
        drops: whether anything is dropped in training.
    """

    def __init__(
        self,
        mixers: Iterable[Any],
        attention: AttentionCore,
        group: Group,
        *,
        sequence_parallel: bool,
        seed: int,
        num_layers: int,
        drops: bool,
    ) -> None:
        # A layer with parallel mixers (Falcon-H1) has several.
        mixers = [one for mixer in mixers for one in mixers_of(mixer)]
        self.measures = any(getattr(mixer, "measures", False) for mixer in mixers)
        self.attention, self.group = attention, group if sequence_parallel else None
        self.seed, self.num_layers, self.drops = seed, num_layers, drops
        # Each need once, in the order of the layers: most models have one rotary table for all.
        self.needs: tuple[TokenNeed, ...] = tuple(dict.fromkeys(n for mixer in mixers for n in mixer.needs))
        # Of attention, by the size of its chunks: those that share chunks share masks and plans of exchanges.
        self.specs: dict[int | None, tuple[AttentionSpec, ...]] = {None: ()}
        for mixer in mixers:
            if (spec := getattr(mixer, "spec", None)) is not None:
                self.specs[mixer.chunk] = tuple(dict.fromkeys((*self.specs.get(mixer.chunk, ()), spec)))

    def padding(self, tokens: int) -> int:
        """Rows to add so that the TP ranks can share the tokens evenly."""
        return 0 if self.group is None else -tokens % self.group.size

    def of(self, micro_batch: MicroBatch, training: bool) -> Tokens:
        """The tokens of a micro-batch, without what attention derives, which depends on the activations' dtype: see
        :meth:`prepared`."""
        batch, length = micro_batch.input_ids.shape
        padding, device = self.padding(batch * length), micro_batch.input_ids.device
        position_ids = micro_batch.position_ids
        if position_ids is None:
            if micro_batch.cut is not None:
                raise ValueError("a cut micro-batch needs position_ids: its columns are not next to each other")
            position_ids = torch.arange(length, device=device).expand(batch, length)
        # Dropout's numbers cost a tensor, and are not given in evaluation.
        index = None
        if training and micro_batch.token_index is not None:
            index = _flat(micro_batch.token_index, padding)
        layout = TokenLayout(
            batch,
            length,
            padding,
            position_ids=_flat(position_ids, padding),  # padding continues at 0
            token_index=index,
            local_token_index=None if index is None else _own(index, self.group),
            document_ids=micro_batch.document_ids,
            cut=micro_batch.cut,
        )
        if micro_batch.cache is not None and micro_batch.position_ids is not None:
            layout = micro_batch.cache.laid_out(layout, micro_batch.position_ids)
        layout = with_needs(layout, self.needs, lambda: _flat(micro_batch.whole_lengths(), padding))
        return Tokens(layout, padding, self._dropout_keys(layout, training, device), self.group)

    def prepared(self, tokens: Tokens, x: torch.Tensor, loss_weights: torch.Tensor | None = None) -> Tokens:
        """``tokens`` with what attention to ``x`` derives from them, once for all layers: masks, where documents begin,
        plans of exchanges. Layers with chunks have a layout of their own in it.

        Args:
            tokens: from :meth:`of`.
            x: the residual stream, (tokens [/p], hidden).
            loss_weights: what each token's loss counts, (batch, length), for mixers with losses of their own; None:
                they have none in this pass.
        """
        # Kept keys are seen by masks of positions, whatever core the run has.
        core = self.attention if tokens.layout.key_positions is None else DEFAULT_ATTENTION
        # Not in :meth:`of`: a mask has the dtype of the scores, which is known from the activations.
        layout = core.prepare(tokens.layout, self.specs[None], x.dtype, x.device)
        # A layout for each chunk size: in it a chunk is a document, with masks and plans of its own.
        chunked = {
            chunks_key(size): core.prepare(tokens.layout.in_chunks(size), specs, x.dtype, x.device)
            for size, specs in self.specs.items()
            if size is not None
        }
        layout = replace(layout, prepared={**layout.prepared, **chunked}) if chunked else layout
        tokens = replace(tokens, layout=layout)
        return tokens if loss_weights is None else self.weighted(tokens, loss_weights)

    def weighted(self, tokens: Tokens, loss_weights: torch.Tensor) -> Tokens:
        """``tokens`` with what each one's loss counts, (batch, length), where mixers have losses of their own."""
        if not self.measures:
            return tokens
        prepared = {**tokens.layout.prepared, LOSS_WEIGHTS: tokens.flat(loss_weights)}
        return replace(tokens, layout=replace(tokens.layout, prepared=prepared))

    def _dropout_keys(self, layout: TokenLayout, training: bool, device: torch.device) -> torch.Tensor | None:
        """Keys of all sites; the last is the embedding's."""
        if not training or not self.drops:
            return None
        if layout.token_index is None:
            raise ValueError("dropout needs token_index: masks are keyed by the global number of each token")
        # Of the whole model, on every pipeline stage: a layer's keys follow from its number.
        return dropout_keys(self.seed, DROPOUT_SITES * self.num_layers + 1, device)


def _flat(x: torch.Tensor, padding: int) -> torch.Tensor:
    return F.pad(x.reshape(-1), (0, padding)) if padding else x.reshape(-1)


def _own(x: torch.Tensor, group: Group | None) -> torch.Tensor:
    """This rank's part of a per-token tensor."""
    if group is None:
        return x
    rows = x.shape[0] // group.size
    # A view: nothing is communicated, for all ranks have all of it.
    return x.narrow(0, group.rank * rows, rows)
