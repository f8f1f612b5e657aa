"""The decoder: one class, configured, for the whole Llama/GPT family.

Specs (:mod:`smp.config.layers`) define the layers, and :mod:`smp.models.tokens` prepares the per-token tensors that
they need. Nothing in this file depends on the kind of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.config import ModelConfig
from smp.config.layers import layer_specs, norm_of
from smp.config.rules.mtp import mtp_layers
from smp.kernels import TORCH, Kernels
from smp.layers.block import MoEBlock, TransformerBlock
from smp.layers.heads.head import ModelOutput, VocabParallelHead
from smp.layers.moe import Counted
from smp.models.auxiliary import Found, auxiliary_outputs
from smp.models.build_layers import Build, build_embedding, build_head, build_positions, build_prediction
from smp.models.expert_counts import ExpertCounts
from smp.models.micro_batch import MicroBatch
from smp.models.multi_token import mtp_loss
from smp.models.part import ModelPart, whole
from smp.models.protocol import StagedModel
from smp.models.tokens import TokenPreparation, Tokens
from smp.models.units import fsdp_units, stage_units
from smp.parallel.context import ParallelContext


class GPT(StagedModel):
    """Embedding, blocks, final norm and vocabulary-parallel loss.

    Args:
        config: resolved architecture (no field left to its default rule); ``vocab_size`` set.
        parallel: a context, or a plain 1-D tensor-parallel mesh.
        seed: keys dropout.
        device: of the parameters; ``"meta"`` defers them.
        compute_dtype: of the activations; by default that of the parameters. (FSDP casts parameters itself.)
        parts: build only these parts, in their order; by default the whole model.
        kernels: what computes attention and the operations that have fused kernels.

    Blocks live in a ModuleDict under their global number, so a part of the model keeps the whole model's names. With a
    tied head, and with multi-token prediction, the part that holds the head has a copy of the embedding's matrix.
    """

    capabilities = frozenset(("context parallelism", "generation"))

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelContext | DeviceMesh,
        *,
        seed: int = 0,
        device: torch.device | str = "meta",
        compute_dtype: torch.dtype | None = None,
        parts: Sequence[ModelPart] | None = None,
        kernels: Kernels = TORCH,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.config, self.specs = config, layer_specs(config)
        self.parts = tuple(parts) if parts is not None else (whole(config.num_layers),)
        self.group, self.sequence_parallel = context.tp_group, context.sequence_parallel
        self.expert_counts = ExpertCounts(self.specs)
        # On "meta" no memory is taken: FSDP shards first, and a rank allocates its shards alone.
        with torch.device(device):
            self._build(context, kernels, compute_dtype)
        self.tokens = TokenPreparation(
            [block.attention for block in self.layers.values() if block.attention is not None],
            kernels.attention,
            self.group,
            sequence_parallel=self.sequence_parallel,
            seed=seed,
            num_layers=config.num_layers,
            drops=max(config.hidden_dropout, config.attention_dropout) > 0.0,
        )

    def _build(self, context: ParallelContext, kernels: Kernels, compute_dtype: torch.dtype | None) -> None:
        """Make the layers of all parts. Attributes of layers that no part has are None."""
        config, build, norm = self.config, Build.of(self.config, context, kernels), norm_of(self.config)
        first, last = any(p.embedding for p in self.parts), any(p.head for p in self.parts)
        # The last stage has a copy of the matrix where it needs one; the values of both follow from its name.
        with_matrix = first or (last and self.embeds_at_the_end)
        self.embedding = build_embedding(config, context, compute_dtype) if with_matrix else None
        learned = first and config.position_embedding_type == "learned_absolute"
        self.positions = build_positions(config, context, compute_dtype) if learned else None
        self.embedding_norm = build.norm(norm) if first and config.embedding_layernorm else None
        # They read what the final norm gives, so they belong to the part that has it.
        mtp = mtp_layers(config) if last else range(0)
        layers = [*(i for part in self.parts for i in part.layers), *mtp]
        # By the number in the whole model: a checkpoint does not show where it was cut.
        self.layers = nn.ModuleDict({str(i): build.block(self.specs[i]) for i in layers})
        self.mtp_blocks = [self.layers[str(i)] for i in mtp]
        predictions = {str(k): build_prediction(config, build, norm) for k in range(len(mtp))}
        self.predictions = nn.ModuleDict(predictions)
        # None and not left out: every stage has the same attributes, and state_dict has no keys for None.
        self.final_norm = build.norm(norm) if last else None
        self.head = build_head(config, context, kernels) if last else None

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole model, and no other pipeline rank a part of it."""
        return self.parts == (whole(self.config.num_layers),)

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's matrix."""
        return not self.config.untie_embeddings_and_output_weights

    @property
    def embeds_at_the_end(self) -> bool:
        """Whether the embedding's matrix is also used after the blocks."""
        return self.tied or self.config.mtp_num_layers is not None

    def fsdp_units(self) -> list[nn.Module | list[nn.Module]]:
        return fsdp_units(self)

    def stage_units(self, part: ModelPart) -> list[nn.Module]:
        return stage_units(self, part)

    def embedding_matrix(self) -> nn.Parameter:
        assert self.embedding is not None, "this rank has an end"
        return self.embedding.weight

    def forward(
        self, micro_batch: MicroBatch, hidden: torch.Tensor | None = None, part: ModelPart | None = None
    ) -> ModelOutput:
        """Loss of a micro-batch, or its logits; of a part without head what the next part takes.

        Args:
            micro_batch: tokens and what is known of them.
            hidden: what the part before returned, when ``part`` has no embedding.
            part: one of ``self.parts``; by default the only one.

        Returns:
            ``hidden``, of the shape ``hidden_shape(batch, length)``, without a head; with it ``loss``, ``logits`` or
            ``values``, see :class:`ModelOutput`.
        """
        batch, labels, weights = micro_batch, micro_batch.labels, micro_batch.loss_weights
        # Labels without weights would train on padding and prompts.
        if (labels is None) != (weights is None):
            raise ValueError("a loss needs labels and loss_weights, logits neither")
        if part is None:
            (part,) = self.parts
        # In one place for the whole model: every layer after it sees tokens that the ranks share evenly.
        tokens = self.tokens.of(batch, self.training)
        tied_weight = None
        if self.embeds_at_the_end and part.head and self.embedding is not None:
            tied_weight = self.embedding.table()  # one for both ends, so that its gradients add as FSDP adds them
        # (tokens [/tp], hidden)
        x = self.embed(batch.input_ids, tokens, tied_weight) if hidden is None else hidden
        # Not in evaluation, nor for losses of answers, which say nothing of how experts are loaded.
        measured = weights if self.training and batch.answers is None else None
        tokens = self.tokens.prepared(tokens, x, measured)
        counted = None if measured is None else self.expert_counts.of(tokens, measured)
        found = Found()
        for i in part.layers:
            x = self.run_layer(i, x, tokens, counted, found)
        if not part.head:
            # Losses of this stage's routers: each stage computes the gradients of its own.
            return ModelOutput(hidden=x)._replace(**auxiliary_outputs(self.config, found))
        assert self.final_norm is not None and self.head is not None
        x = self.final_norm(x)
        matrix = tied_weight if self.tied else None
        if batch.cache is not None:
            return self._wanted(self.scaled(x), batch, matrix)
        if labels is None or weights is None:
            output = self.head(self.scaled(x), tied_weight=matrix)  # of the padding too
            return ModelOutput(logits=output.logits[: batch.input_ids.numel()].view(*batch.input_ids.shape, -1))
        mtp = None
        if measured is not None and batch.mtp:
            if matrix is None:  # one for all uses, so that its gradients add as FSDP adds them
                matrix = cast(VocabParallelHead, self.head).matrix(x.dtype)
            mtp = mtp_loss(self, x, batch, tokens, (tied_weight, matrix), found)
        # Every TP rank has all labels, also where the hidden states are split by tokens: the head gathers them.
        flat, shape = (tokens.flat(labels), tokens.flat(weights)), batch.input_ids.shape
        output = self.head(self.scaled(x), *flat, matrix, batch.distilled or batch.answers, shape)
        return output._replace(**auxiliary_outputs(self.config, found, mtp))

    def run_layer(self, i: int, x: torch.Tensor, tokens: Tokens, counted: Counted | None, found: Found) -> torch.Tensor:
        """Run layer number ``i``; measures of its router and its mixer are added to ``found``."""
        block = cast(TransformerBlock, self.layers[str(i)])
        arguments: tuple[Any, ...] = x, *tokens.of_layer(i)
        if isinstance(block, MoEBlock):
            arguments = *arguments, self.expert_counts.before(i, counted)
        result = block(*arguments)
        x, *measured = (result,) if isinstance(result, torch.Tensor) else result
        if isinstance(block, MoEBlock):
            found.balance += self.expert_counts.after(i, measured[0])
        if block.measures and measured[-1] is not None:
            found.indexers.append(measured[-1])
        return x

    def _wanted(self, x: torch.Tensor, batch: MicroBatch, matrix: torch.Tensor | None) -> ModelOutput:
        """Logits of the tokens that generation asks for, from the head's input."""
        assert self.head is not None and batch.cache is not None
        # A piece of a long prompt before its last: only the cache is filled.
        if batch.cache.last is None:
            return ModelOutput()
        assert isinstance(self.head, VocabParallelHead), "a reward model writes nothing"
        logits = self.head.local_logits(x, batch.cache.last, cut=batch.cut is not None, tied_weight=matrix)
        return ModelOutput(logits=logits)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """A norm's result times ``logit_scale``: the input of the output matrix."""
        return x if self.config.logit_scale == 1.0 or self.config.scalar_head else x * self.config.logit_scale

    def end_step(self, applied: torch.Tensor) -> None:
        """After an optimizer step: move the expert biases by the tokens that each expert got in it, unless it was
        skipped (``applied``, 0-dim), and count from 0 again."""
        self.expert_counts.end_step(cast(dict[str, nn.Module], self.layers), applied)

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]:
        """(tokens [/p], hidden) of what one part hands to the next."""
        rows = batch * length + self.tokens.padding(batch * length)
        return rows // (self.group.size if self.sequence_parallel else 1), self.config.hidden_size

    def embed(self, input_ids: torch.Tensor, tokens: Tokens, table: torch.Tensor | None = None) -> torch.Tensor:
        """ids (batch, length) -> (tokens [/p], hidden)."""
        assert self.embedding is not None
        x = self.embedding(tokens.flat(input_ids), table)
        if self.config.embedding_multiplier != 1.0:
            x = x * torch.tensor(self.config.embedding_multiplier, dtype=x.dtype)  # Gemma rounds it to bf16
        if self.positions is not None:
            x = x + self.positions(tokens.layout.position_ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return tokens.dropped_embedding(x, self.config.hidden_dropout)
