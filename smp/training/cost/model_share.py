"""What one process has of a model, in elements, as the memory formula reads it. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smp.config import Layout, ModelConfig
from smp.config.rules.mtp import mtp_layers
from smp.models.inventory import Parameter, inventory, of_each_block, prediction_parameters, vocabulary_matrix
from smp.models.part import ModelPart


@dataclass(frozen=True)
class Tuned:
    """Settings of a fine-tuning run that change its memory."""

    adapters: int = 0  # elements on one of the tensor-parallel processes, before ep; 0: all weights are trained
    in_4_bits: bool | None = None  # frozen weights of linear layers are; True: with double quantization
    rows: int = 1  # sequences of a sample: 2 when it is a pair
    copies: int = 0  # of the model, frozen


PRETRAINED = Tuned()
"""A run without adapters or frozen parts."""


@dataclass(frozen=True)
class Share:
    """One process's share of a model, in elements.

    Attributes:
        parts: of the model.
        layers: numbers of its layers, with those of multi-token prediction.
        parameters: of all of it.
        elements: of them.
        blocks: of each layer.
        experts: of those of the layer that has most.
        rows: of its part of the vocabulary's matrix; 0: it has none.
        vocabulary: of that.
        mtp: how many layers of multi-token prediction are its own.
        around: of what stands around the block of one.
        matrices: of the vocabulary used at its loss: the output matrix, for multi-token prediction the embedding.
        head, scores: it has the loss, and that is one of scores.
    """

    parts: Sequence[ModelPart]
    layers: list[int]
    parameters: list[Parameter]
    elements: int
    blocks: list[int]
    experts: int
    rows: int
    vocabulary: int
    mtp: int
    around: int
    matrices: int
    head: bool
    scores: bool

    @staticmethod
    def of(model: ModelConfig, layout: Layout, parts: Sequence[ModelPart]) -> Share:
        """The share that these parts of the model make."""
        head = any(p.head for p in parts)
        mtp = mtp_layers(model) if head else range(0)
        layers = [*(i for part in parts for i in part.layers), *mtp]
        parameters = list(inventory(model, parts))
        # The embedding and the output matrix have one shape.
        rows, hidden = vocabulary_matrix(model, "head", has_product=True).local_shape(layout)
        has_matrix = head or any(p.embedding for p in parts)
        return Share(
            parts,
            layers,
            parameters,
            elements(parameters, layout),
            of_each_block(model, layers, lambda block: elements(block, layout)),
            max(of_each_block(model, layers, lambda block: elements(_experts(block), layout)), default=0),
            rows * has_matrix,
            rows * hidden * has_matrix,
            len(mtp),
            elements(prediction_parameters(model, 0), layout) if mtp else 0,
            # Untied: multi-token prediction looks tokens up in the embedding, a second matrix on
            # the last stage.
            1 + (len(mtp) > 0 and model.untie_embeddings_and_output_weights),
            head,
            model.scalar_head,
        )

    @property
    def block(self) -> int:
        """Elements of the largest layer."""
        return max(self.blocks, default=0)

    @property
    def ends(self) -> int:
        """Elements of the parameters used after the blocks: matrices of the vocabulary, and multi-token prediction."""
        return self.matrices * self.vocabulary + self.mtp * self.around

    def largest(self, layout: Layout) -> int:
        """Elements whose gradients are reduced at once: a block or a matrix; with multi-token prediction the root's
        FSDP unit."""
        # Without FSDP, or in a pipeline, they are separate.
        joined = self.mtp and layout.pp == 1 and layout.has_fsdp
        return max(self.block, self.ends if joined else self.vocabulary)


def _experts(block: Iterable[Parameter]) -> list[Parameter]:
    return [p for p in block if p.chosen is not None]


def elements(parameters: Iterable[Parameter], layout: Layout) -> int:
    """Elements on one process."""
    return sum(math.prod(p.local_shape(layout)) for p in parameters)
