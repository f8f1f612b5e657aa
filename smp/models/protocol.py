"""The protocol of a model: the interface that training, sharding, optimizers, checkpoints, adapters and generation use.

Every model implements :class:`Model`. Optional features are :class:`StagedModel`, and the names in ``capabilities``.
``smp.models.gpt.GPT`` is the implementation that gives all of it, and ``smp.hf.run.model.TransformersModel`` a causal
language model of transformers. ``smp.training.build.assemble`` chooses between that and
:func:`smp.models.build.new_model`, which makes all others. Outside of ``smp/models`` nothing imports ``GPT`` (``make
check``).

It is a base class and not a ``typing.Protocol``: FSDP, optimizers and hooks take an ``nn.Module``, and a protocol
cannot say that it is one. Everything else that is asked of a model is what every module has. ``parameters`` and
``named_parameters``: the optimizer, clipping, checkpoints and adapters find what there is by the names in
``smp.models.inventory``, of DTensors on the tensor-parallel mesh. ``modules``: adapters, FP8 and 4-bit weights are put
into layers of ``smp.layers``, wherever they are. ``train`` and ``eval``: dropout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from smp.config import ConfigError, ModelConfig
from smp.layers import init_weights
from smp.layers.block import TransformerBlock
from smp.layers.heads.cross_entropy import VocabShard
from smp.layers.heads.head import ModelOutput, VocabParallelHead
from smp.layers.moe import Experts
from smp.models.micro_batch import MicroBatch
from smp.models.part import ModelPart

Capability = Literal["context parallelism", "generation", "own cache"]


class OutputShard(NamedTuple):
    """This rank's shard of a model's output matrix.

    Attributes:
        shard: which columns of the logits it makes.
        sequence_parallel: whether the hidden states in front of it are split over the tensor-parallel ranks by tokens.
    """

    shard: VocabShard
    sequence_parallel: bool


class Model(nn.Module, ABC):
    """A model that can be trained.

    Attributes:
        config: the architecture, resolved; ``smp.models.inventory`` lists its parameters, and FLOPs, memory and
            exports follow from it.
        head: computes the loss from hidden states, a chunk of tokens at a time; None: another pipeline rank has it. It
            takes an ``AnswerLoss``. A head of scores is trained as a whole also with adapters.
        mtp_blocks: blocks that run in training only, so validation must not gather them.
        casts_weights: whether layers cast fp32 weights to the dtype of their input, where there is no FSDP to do it.
        capabilities: optional features. ``context parallelism``: micro-batches may be cut (``MicroBatch.cut``).
            ``generation``: they may have a key/value cache (``MicroBatch.cache``). ``own cache``: the model has a cache
            of its own (``MicroBatch.own_cache``), and all rows have the same number of tokens.
    """

    config: ModelConfig
    head: nn.Module | None
    mtp_blocks: Sequence[nn.Module] = ()
    casts_weights: bool = True
    capabilities: frozenset[Capability] = frozenset()

    @abstractmethod
    def forward(self, micro_batch: MicroBatch) -> ModelOutput:
        """The loss of a micro-batch, with its graph, as a part of the mean over the global batch: the weights in it
        contain the division, so losses and gradients of micro-batches and ranks add up. With ``answers`` their loss or
        values; without labels the logits. Auxiliary losses and metrics come with it, under the names of
        ``smp.models.auxiliary``."""

    @abstractmethod
    def fsdp_units(self) -> list[nn.Module | list[nn.Module]]:
        """FSDP's units, in the order of the forward pass; all other parameters form the root unit."""

    def output_shard(self) -> OutputShard | None:
        """This rank's shard of the output matrix; None: another pipeline rank has it, or there is a head of scores
        instead. With ``AnswerLoss.states`` a forward pass gives the hidden states in front of it as ``values``."""
        head = self.head
        return OutputShard(head.shard, head.sequence_parallel) if isinstance(head, VocabParallelHead) else None

    def blocks(self) -> list[Any]:
        """The blocks among the FSDP units, in order: what is recomputed, compiled and offloaded. Their attribute
        ``run`` is what their forward pass calls (``smp.layers.block.TransformerBlock``)."""
        # In the order of construction, which is that of the layers.
        return [module for module in self.modules() if isinstance(module, TransformerBlock)]

    def experts(self) -> list[nn.Module]:
        """Modules of experts, which expert parallelism spreads over ranks: FSDP shards each over those that have the
        same."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def allocate(self, device: torch.device) -> None:
        """Allocate everything that is on the meta device, and compute the buffers that have formulas."""
        self.to_empty(device=device)

    def draw(self, device: torch.device, seed: int) -> None:
        """Allocate everything and draw the initial weights: a function of the seed, equal in every layout."""
        self.allocate(device)
        # ``to_empty`` loses buffers too, so this fills all that has an initializer.
        init_weights(self, seed)

    def end_step(self, applied: torch.Tensor) -> None:
        """Called after each optimizer step; ``applied`` (0-dim, bool) is False if it was skipped. For state that a
        model counts over the micro-batches of a step and updates without gradients, such as expert biases."""


class StagedModel(Model):
    """A model that a pipeline can cut: built for some parts of it, and run part by part.

    Attributes:
        parts: those of this rank.
    """

    parts: tuple[ModelPart, ...]

    @abstractmethod
    def forward(
        self, micro_batch: MicroBatch, hidden: torch.Tensor | None = None, part: ModelPart | None = None
    ) -> ModelOutput:
        """The output of :meth:`Model.forward`; of a part without the head ``hidden``, which the next part takes."""

    @abstractmethod
    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]:
        """Shape of the hidden states that one part sends to the next, which the receiver must know before the
        message."""

    @abstractmethod
    def stage_units(self, part: ModelPart) -> list[nn.Module]:
        """The modules that hold the parameters of a part, in the order of their use, as ``fsdp_units`` cuts them: the
        schedule says when each is gathered. Two parts of a rank may share one."""

    @property
    @abstractmethod
    def embeds_at_the_end(self) -> bool:
        """Whether the last part uses the embedding's matrix as well: both ends then have a copy of it, whose gradients
        are added up."""

    @abstractmethod
    def embedding_matrix(self) -> nn.Parameter:
        """The embedding's matrix, on ranks with the first or the last part."""


def require_capability(model: Model, capability: Capability, flag: str) -> None:
    """Raise ConfigError unless ``model`` has it; ``flag`` is what asks for it."""
    if capability not in model.capabilities:
        raise ConfigError(f"{flag}: {type(model).__name__} has no {capability}; leave it out")


def require_stages(model: Model) -> StagedModel:
    """``model``, which a pipeline is to cut. Raises ConfigError where it has no stages."""
    if not isinstance(model, StagedModel):
        name = type(model).__name__
        raise ConfigError(f"--pipeline-model-parallel-size: {name} cannot be cut into stages; leave it out")
    return model
