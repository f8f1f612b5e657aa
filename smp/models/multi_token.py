"""The loss of multi-token prediction; the layers of it are in :mod:`smp.layers.heads.prediction`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from smp.config.rules.mtp import mtp_layers
from smp.layers.heads.prediction import Prediction
from smp.models.auxiliary import Found
from smp.models.micro_batch import MicroBatch
from smp.models.tokens import Tokens

GPT = Any
"""The decoder, whose file imports this one."""


def mtp_loss(
    model: GPT,
    hidden: torch.Tensor,
    batch: MicroBatch,
    tokens: Tokens,
    matrices: tuple[torch.Tensor | None, torch.Tensor | None],
    found: Found,
) -> torch.Tensor:
    """The mean loss of the layers of multi-token prediction, as it is added to the model's.

    Args:
        model: with these layers.
        hidden: the final norm's result.
        batch, tokens: of the micro-batch.
        matrices: the embedding's and the output layer's, one for all uses, so that their gradients add as FSDP adds
            them.
        found: gets what the layers measure.
    """
    assert model.head is not None
    (table, matrix), losses = matrices, []
    # Dropout sites are numbered over the model's own layers; those of multi-token prediction have none.
    without_dropout = replace(tokens, keys=None)
    # Each continues from the hidden states of the one before.
    for layer, module, target in zip(mtp_layers(model.config), model.predictions.values(), batch.mtp, strict=True):
        prediction = cast(Prediction, module)
        # Hidden states of token t and the embedding of token t + k: it predicts token t + k + 1.
        x = prediction(hidden, model.embed(target.input_ids, without_dropout, table))
        # Tokens whose target lies after the document's end count neither in the loss nor in the balance.
        counted = model.expert_counts.of(tokens, target.loss_weights)
        weighted = model.tokens.weighted(without_dropout, target.loss_weights)
        x = model.run_layer(layer, x, weighted, counted, found)
        hidden = prediction.norm(x)
        labels, weights = tokens.flat(target.labels), tokens.flat(target.loss_weights)
        # The model's own head and matrix: a layer of multi-token prediction has a block, norms and
        # a projection.
        losses.append(model.head(model.scaled(hidden), labels, weights, matrix).loss)
    # The mean over these layers, as in DeepSeek-V3 (arXiv 2412.19437).
    return sum(losses[1:], losses[0]) * (model.config.mtp_loss_scaling_factor / len(losses))
