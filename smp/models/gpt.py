"""The decoder: one class, configured, for the whole Llama/GPT family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.config import ModelConfig
from smp.config.mtp import further_layers
from smp.kernels import TORCH, Kernels
from smp.kernels.attention_core import AttentionSpec
from smp.kernels.dropout import keyed_dropout
from smp.kernels.token_layout import TokenLayout
from smp.layers.attention import SelfAttention
from smp.layers.block import MoEBlock, TransformerBlock
from smp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from smp.layers.head import ModelOutput, VocabParallelHead
from smp.layers.latent_attention import LatentAttention
from smp.layers.moe import Counted, MoE
from smp.layers.norm import Norm
from smp.layers.prediction import Prediction
from smp.layers.rope import LongRopeScaling, rope_frequencies, rope_table, temperature
from smp.layers.score import ScoreHead
from smp.models.beside import beside
from smp.models.build_layers import build_block, build_head, build_norm, build_prediction
from smp.models.micro_batch import MicroBatch
from smp.models.part import ModelPart, whole
from smp.models.rope_scaling import rope_scaling
from smp.parallel.context import ParallelContext
from smp.parallel.rng import dropout_keys

SITES_PER_BLOCK = 3
"""Dropout sites of a block: attention probabilities, attention output, MLP output."""


class GPT(nn.Module):
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
        self.config, self.seed, self.attention = config, seed, kernels.attention
        self.parts = tuple(parts) if parts is not None else (whole(config.num_layers),)
        self.group, self.sequence_parallel = context.tp_group, context.sequence_parallel
        self.seen: dict[int, torch.Tensor] = {}  # by layer, tokens of each expert in this step so far
        with torch.device(device):
            self._build(context, kernels, compute_dtype)

    def _build(self, context: ParallelContext, kernels: Kernels, compute_dtype: torch.dtype | None) -> None:
        """Make the layers of all parts."""
        config = self.config
        assert config.vocab_size is not None
        self.embedding: VocabParallelEmbedding | None = None
        self.positions: PositionEmbedding | None = None
        self.embedding_norm: Norm | None = None
        self.final_norm: Norm | None = None
        self.head: VocabParallelHead | ScoreHead | None = None
        first, last = any(p.embedding for p in self.parts), any(p.head for p in self.parts)
        multiple, std = config.make_vocab_size_divisible_by, config.init_method_std
        # The last stage has a copy of the matrix where it needs one; both begin with the same values,
        # which follow from the name.
        if first or (last and self.embeds_at_the_end):
            self.embedding = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                context,
                divisible_by=multiple,
                init_std=std,
                compute_dtype=compute_dtype,
            )
        if first and config.position_embedding_type == "learned_absolute":
            self.positions = PositionEmbedding(
                config.max_position_embeddings,
                config.hidden_size,
                context,
                offset=config.position_embedding_offset,
                init_std=std,
                compute_dtype=compute_dtype,
            )
        if first and config.embedding_layernorm:
            self.embedding_norm = build_norm(config, context, kernels)
        # They read what the final norm gives, so they belong to the part that has it.
        further = further_layers(config) if last else range(0)
        layers = [*(i for part in self.parts for i in part.layers), *further]
        # By the number in the whole model: a checkpoint does not show where it was cut.
        blocks = {str(i): build_block(config, context, kernels, i) for i in layers}
        attentions = [block.attention for block in blocks.values()]
        self.attention_specs = _specs(attentions, chunk=None)
        self.chunked_specs = _specs(attentions, chunk=config.attention_chunk_size)
        self.ropes = {attention.rope for attention in attentions}
        self.layers = nn.ModuleDict(blocks)
        self.further_blocks = [blocks[str(i)] for i in further]
        predictions = {str(k): build_prediction(config, context, kernels) for k in range(len(further))}
        self.predictions = nn.ModuleDict(predictions)
        if last:
            self.final_norm = build_norm(config, context, kernels)
            self.head = build_head(config, context, kernels)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the model is on another pipeline rank."""
        return self.parts == (whole(self.config.num_layers),)

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's matrix."""
        return not self.config.untie_embeddings_and_output_weights

    @property
    def embeds_at_the_end(self) -> bool:
        """Whether the embedding's matrix is also used behind the blocks."""
        return self.tied or self.config.mtp_num_layers is not None

    def fsdp_units(self) -> list[nn.Module | list[nn.Module]]:
        """What FSDP gathers and frees together: each block, and what comes before and after the blocks.

        A tied matrix is used at both ends: in a whole model it stays in the root unit, with the small rest. So do, with
        multi-token prediction, all that it uses more than once. A part of a
        model leaves the root nothing: FSDP gathers the root around every forward, also of stages that need none of it.
        """
        blocks: list[nn.Module | list[nn.Module]] = list(self.layers.values())
        # In the root: FSDP's root unit is gathered around the whole forward pass, so both ends find it.
        if self.is_whole and self.embeds_at_the_end:
            return blocks
        ends: list[nn.Module | None] = [self.embedding]
        if not self.is_whole:
            ends += [self.positions, self.embedding_norm]
        units = [*blocks, *(module for module in ends if module is not None), *self.predictions.values()]
        if len(self.predictions) and self.head is not None and self.final_norm is not None:
            return [*units, self.final_norm, *([] if self.tied else [self.head])]
        if self.head is not None and self.final_norm is not None:
            units.append(self.final_norm if self.tied else [self.final_norm, self.head])
        return units

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
            ``log_probs``, see :class:`ModelOutput`.
        """
        batch, labels, weights = micro_batch, micro_batch.labels, micro_batch.loss_weights
        if (labels is None) != (weights is None):
            raise ValueError("a loss needs labels and loss_weights, logits neither")
        if part is None:
            (part,) = self.parts
        rows, length = batch.input_ids.shape
        # In one place for the whole model: every layer behind it sees tokens that the ranks share evenly.
        padding = self._padding(rows * length)
        layout = self._token_layout(batch, padding)
        keys = self._dropout_keys(layout, batch.input_ids.device)
        tied_weight = None
        if self.embeds_at_the_end and part.head and self.embedding is not None:
            tied_weight = self.embedding.table()  # one for both ends, so that its gradients add as FSDP adds them
        x = hidden
        if x is None:
            x = self._embed(_flat(batch.input_ids, padding), layout, keys, tied_weight)
        # Once for all layers: masks, cu_seqlens and plans of exchanges depend on tokens alone.
        layout = self._prepared(layout, x)
        # Not in evaluation, nor for losses of answers, which say nothing of how experts are loaded.
        measures = self.training and weights is not None and batch.preference is None
        counted = self._counted(weights, padding) if measures and weights is not None else None
        balance: list[torch.Tensor] = []
        for i in part.layers:
            x = self._block(i, x, layout, keys, counted, balance)
        if not part.head:
            return ModelOutput(hidden=x)._replace(**beside(self.config, balance))
        assert self.final_norm is not None and self.head is not None
        x = self.final_norm(x)
        matrix = tied_weight if self.tied else None
        if labels is None or weights is None:
            output = self.head(self._scaled(x), tied_weight=matrix)
            # Without the padding.
            return ModelOutput(logits=output.logits[: rows * length].view(rows, length, -1))
        further = None
        if measures and batch.further:
            if matrix is None:  # one for all uses, so that its gradients add as FSDP adds them
                matrix = cast(VocabParallelHead, self.head).matrix(x.dtype)
            further = self._further_loss(x, batch, layout, (tied_weight, matrix), balance)
        x = self._scaled(x)
        output = self.head(x, _flat(labels, padding), _flat(weights, padding), matrix, batch.preference)
        measured = beside(self.config, balance, further)
        return output._replace(**measured) if measured else output

    def _block(
        self,
        i: int,
        x: torch.Tensor,
        layout: TokenLayout,
        keys: torch.Tensor | None,
        counted: Counted | None,
        balance: list[torch.Tensor],
    ) -> torch.Tensor:
        """Block number ``i``; what its router measures goes into ``balance``."""
        block, site = self.layers[str(i)], SITES_PER_BLOCK * i
        # By the block's number in the whole model, so that a pipeline drops what one rank drops.
        arguments = x, layout, None if keys is None else keys[site : site + SITES_PER_BLOCK]
        if not isinstance(block, MoEBlock):
            result: torch.Tensor = block(*arguments)
            return result
        # Counted over the micro-batches of a step: balances over the global batch, and the bias, need all of them.
        seen = None if counted is None else counted._replace(seen=self.seen.get(i, counted.seen))
        x, measured = block(*arguments, seen)
        if measured is not None:
            balance.append(measured.measures)
            self.seen[i] = measured.seen
        return x

    def _further_loss(
        self,
        hidden: torch.Tensor,
        batch: MicroBatch,
        layout: TokenLayout,
        matrices: tuple[torch.Tensor | None, torch.Tensor | None],
        balance: list[torch.Tensor],
    ) -> torch.Tensor:
        """Loss of the layers of multi-token prediction as it is added, from the final norm's result and the embedding's
        and the output layer's matrix. See ``smp.layers.prediction``."""
        assert self.head is not None
        (table, matrix), losses, padding = matrices, [], layout.padding
        # Each goes on from the hidden states of the one before.
        for layer, prediction, target in zip(
            further_layers(self.config), self.predictions.values(), batch.further, strict=True
        ):
            embedded = self._embed(_flat(target.input_ids, padding), layout, None, table)
            x = cast(Prediction, prediction)(hidden, embedded)
            counted = self._counted(target.loss_weights, padding)
            hidden = cast(Prediction, prediction).norm(self._block(layer, x, layout, None, counted, balance))
            labels, weights = _flat(target.labels, padding), _flat(target.loss_weights, padding)
            losses.append(self.head(self._scaled(hidden), labels, weights, matrix).loss)
        # The mean over these layers, as in DeepSeek-V3 (arXiv 2412.19437).
        return sum(losses[1:], losses[0]) * (self.config.mtp_loss_scaling_factor / len(losses))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """What the output matrix is multiplied with, of a norm's result."""
        return x if self.config.logit_scale == 1.0 or self.config.scalar_head else x * self.config.logit_scale

    def _counted(self, weights: torch.Tensor, padding: int) -> Counted | None:
        """What routers measure their balance with, of loss weights (batch, length); padding does not count."""
        count = self.config.num_experts
        if count is None:
            return None
        seen = torch.zeros(count, dtype=torch.int64, device=weights.device)
        counted = Counted(self._own(_flat(weights, padding)), seen)
        if self.config.moe_router_load_balancing_type != "seq_aux_loss":
            return counted
        # Which sequence each token belongs to: that balance is within sequences.
        rows = torch.arange(len(weights), device=weights.device)[:, None].expand_as(weights)
        return counted._replace(sequences=self._own(_flat(rows, padding)), num_sequences=len(weights))

    def end_step(self, applied: torch.Tensor) -> None:
        """After an optimizer step: move the expert biases by the tokens that each expert got in it, unless it was
        skipped (``applied``, 0-dim), and count from 0 again."""
        # Once for a step, over all its micro-batches, as an optimizer moves weights.
        for layer, seen in self.seen.items():
            mlp = cast(TransformerBlock, self.layers[str(layer)]).mlp
            assert isinstance(mlp, MoE), "only they count"
            router = mlp.router
            if router.expert_bias is not None and router.weight.requires_grad:
                router.update_bias(seen, applied)
        self.seen.clear()

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]:
        """(tokens [/p], hidden) of what one part hands to the next."""
        tokens = batch * length + self._padding(batch * length)
        return tokens // (self.group.size if self.sequence_parallel else 1), self.config.hidden_size

    def _padding(self, tokens: int) -> int:
        """Rows to add so that the TP ranks can share the tokens evenly."""
        return -tokens % self.group.size if self.sequence_parallel else 0

    def _token_layout(self, micro_batch: MicroBatch, padding: int) -> TokenLayout:
        """Also rotary tables and global token numbers."""
        batch, length = micro_batch.input_ids.shape
        position_ids = micro_batch.position_ids
        if position_ids is None:
            if micro_batch.cut is not None:
                raise ValueError("a cut micro-batch needs position_ids: its columns are not next to each other")
            position_ids = torch.arange(length, device=micro_batch.input_ids.device).expand(batch, length)
        position_ids = _flat(position_ids, padding)  # padding continues at 0
        index = None
        if self.training and micro_batch.token_index is not None:
            index = _flat(micro_batch.token_index, padding)
        return TokenLayout(
            batch,
            length,
            padding,
            position_ids=position_ids,
            token_index=index,
            local_token_index=None if index is None else self._own(index),
            document_ids=micro_batch.document_ids,
            cut=micro_batch.cut,
            rope=self._rope(position_ids, micro_batch, padding) if "global" in self.ropes else None,
            local_rope=self._local_rope(position_ids) if "local" in self.ropes else None,
            query_scale=temperature(position_ids, self.config.floor_scale, self.config.attn_scale)
            if self.config.attn_temperature_tuning
            else None,
        )

    def _prepared(self, layout: TokenLayout, x: torch.Tensor) -> TokenLayout:
        """The layout with what attention to ``x`` derives from it, once for all layers: masks, where documents begin,
        plans of exchanges. Layers with chunks have a layout of their own in it."""
        prepared = self.attention.prepare(layout, self.attention_specs, x.dtype, x.device)
        size = self.config.attention_chunk_size
        if size is None or not self.chunked_specs:
            return prepared
        chunked = self.attention.prepare(layout.in_chunks(size), self.chunked_specs, x.dtype, x.device)
        return replace(prepared, chunked=chunked)

    def _rope(
        self, position_ids: torch.Tensor, micro_batch: MicroBatch, padding: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c, scaling = self.config, rope_scaling(self.config)
        freqs = rope_frequencies(c.rotary_channels, c.rotary_base, scaling, position_ids.device)
        if isinstance(scaling, LongRopeScaling):
            freqs = scaling.frequencies(freqs, _flat(micro_batch.whole_lengths(), padding))
        return rope_table(position_ids, freqs, 1.0 if scaling is None else scaling.amplitude)

    def _local_rope(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        assert c.rotary_base_local is not None, "there are such layers"
        return rope_table(
            position_ids, rope_frequencies(c.rotary_channels, c.rotary_base_local, None, position_ids.device)
        )

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a per-token tensor."""
        if not self.sequence_parallel:
            return x
        rows = x.shape[0] // self.group.size
        # A view: nothing is communicated, for all ranks have all of it.
        return x.narrow(0, self.group.rank * rows, rows)

    def _dropout_keys(self, layout: TokenLayout, device: torch.device) -> torch.Tensor | None:
        """Keys of all sites; the last is the embedding's."""
        if not self.training or max(self.config.hidden_dropout, self.config.attention_dropout) == 0.0:
            return None
        if layout.token_index is None:
            raise ValueError("dropout needs token_index: masks are keyed by the global number of each token")
        return dropout_keys(self.seed, SITES_PER_BLOCK * self.config.num_layers + 1, device)

    def _embed(
        self,
        input_ids: torch.Tensor,
        layout: TokenLayout,
        keys: torch.Tensor | None,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids (tokens,) -> (tokens [/p], hidden)."""
        assert self.embedding is not None
        x = self.embedding(input_ids, table)
        if self.config.embedding_multiplier != 1.0:
            x = x * torch.tensor(self.config.embedding_multiplier, dtype=x.dtype)  # Gemma rounds it to bf16
        if self.positions is not None:
            x = x + self.positions(layout.position_ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if keys is None or layout.local_token_index is None:
            return x
        return keyed_dropout(x, keys[-1], layout.local_token_index, self.config.hidden_dropout)


def _flat(x: torch.Tensor, padding: int) -> torch.Tensor:
    """(batch, length) -> (batch x length + padding,), zeros at the end: of weight 0 in the loss."""
    return F.pad(x.reshape(-1), (0, padding)) if padding else x.reshape(-1)


def _specs(layers: Iterable[SelfAttention | LatentAttention], chunk: int | None) -> tuple[AttentionSpec, ...]:
    """Those of layers with chunks of this size, each once."""
    return tuple(dict.fromkeys(layer.spec for layer in layers if layer.chunk == chunk))
