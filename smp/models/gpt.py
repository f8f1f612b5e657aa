"""The decoder: one class, configured, for the whole Llama/GPT family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.config import ModelConfig
from smp.kernels import TORCH, Kernels
from smp.layers.attention import SelfAttention, SequenceInfo
from smp.layers.block import TransformerBlock
from smp.layers.documents import Documents, Spans, document_mask
from smp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from smp.layers.head import VocabParallelHead
from smp.layers.mlp import MLP, Activation
from smp.layers.norm import LayerNorm, Norm, RMSNorm
from smp.layers.preference import Preference
from smp.layers.rope import RopeScaling, rope_frequencies, rope_table
from smp.models.part import ModelPart, whole
from smp.parallel.collectives import Group
from smp.parallel.rng import dropout_keys, keyed_dropout, to_device

SITES_PER_BLOCK = 3
"""Dropout sites of a block: attention probabilities, attention output, MLP output."""


def activation_of(config: ModelConfig) -> Activation:
    """The MLP's activation that the three switches name."""
    if config.swiglu:
        return "swiglu"
    if config.squared_relu:
        return "squared_relu"
    return "tanh_gelu" if config.tanh_gelu else "gelu"


class GPT(nn.Module):
    """Embedding, blocks, final norm and vocabulary-parallel loss.

    Args:
        config: resolved architecture (no field left to its default rule); ``vocab_size`` set.
        mesh: 1-D tensor-parallel mesh.
        sequence_parallel: split the residual stream over the TP ranks along the tokens.
        seed: keys dropout.
        device: of the parameters; ``"meta"`` defers them.
        parts: build only these parts, in their order; by default the whole model.
        kernels: what computes the operations that have fused kernels.
        spans: documents and windows go to FlashAttention's variable-length kernel instead of becoming a mask. Without
            attention dropout only.
        grouped: attention gets key/value heads as they are, not repeated for each of their query heads. Not all
            backends of torch take that; ``smp.kernels.attention`` tries them.

    Blocks live in a ModuleDict under their global number, so a part of the model keeps the whole model's names. With a
    tied head the part that holds the head has a copy of the embedding's matrix.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool = False,
        seed: int = 0,
        device: torch.device | str = "meta",
        parts: Sequence[ModelPart] | None = None,
        kernels: Kernels = TORCH,
        spans: bool = False,
        grouped: bool = False,
    ) -> None:
        super().__init__()
        assert config.vocab_size is not None
        if spans and config.attention_dropout > 0.0:
            raise ValueError("attention dropout needs a mask: spans are for FlashAttention's variable-length kernel")
        self.config, self.seed, self.spans, self.grouped = config, seed, spans, grouped
        self.frozen = False  # apart from adapters
        self.unsharded = False  # ready to train without FSDP around it, see smp.sharding.parallelize
        self.adapter_dropout = 0.0
        self.parts = tuple(parts) if parts is not None else (whole(config.num_layers),)
        self.group, self.sequence_parallel = Group.of(mesh), sequence_parallel
        place: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device}
        self.embedding: VocabParallelEmbedding | None = None
        self.positions: PositionEmbedding | None = None
        self.final_norm: Norm | None = None
        self.head: VocabParallelHead | None = None
        first, last = any(p.embedding for p in self.parts), any(p.head for p in self.parts)
        vocab = {**place, "divisible_by": config.make_vocab_size_divisible_by, "init_std": config.init_method_std}
        if first or (last and self.tied):
            self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, mesh, **vocab)
        if first and config.position_embedding_type == "learned_absolute":
            self.positions = PositionEmbedding(
                config.max_position_embeddings, config.hidden_size, mesh, init_std=config.init_method_std, **place
            )
        numbers = [i for part in self.parts for i in part.layers]
        self.layers = nn.ModuleDict({str(i): _block(config, mesh, kernels, place) for i in numbers})
        if last:
            self.final_norm = _norm(config, mesh, kernels, place)
            vocab |= {"tied": self.tied, "kernels": kernels}
            self.head = VocabParallelHead(config.vocab_size, config.hidden_size, mesh, **vocab)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the model is on another pipeline rank."""
        return self.parts == (whole(self.config.num_layers),)

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's matrix."""
        return not self.config.untie_embeddings_and_output_weights

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        token_weights: torch.Tensor | None = None,
        sample_index: torch.Tensor | None = None,
        documents: torch.Tensor | Documents | None = None,
        positions: torch.Tensor | None = None,
        preference: Preference | None = None,
        hidden: torch.Tensor | None = None,
        part: ModelPart | None = None,
    ) -> torch.Tensor:
        """Loss of a micro-batch, or its logits; of a part without head what the next part takes.

        Args:
            tokens: int64 (batch, length).
            labels: int64 (batch, length), the token that follows each; without them and the weights logits are
                returned.
            token_weights: fp32 (batch, length): what each token's loss counts. 1 / (valid tokens of the global batch)
                makes the sum over micro-batches and ranks the mean loss; 0 leaves a token out.
            sample_index: int64 (batch,), global numbers of the samples, or (batch, length), of the tokens. Dropout is
                keyed by them; needed in training mode when dropout is on.
            documents: int64 (batch, length): tokens see only tokens with the same number. Without it a sequence is one
                document. As ``Documents`` they stay on the host, where ``spans`` need them.
            positions: int64 (batch, length), below ``max_position_embeddings``: where each token stands. Without it
                they count from 0 in every sequence.
            preference: rows are pairs of answers, whose loss this describes; tokens of weight 0 belong to the prompt.
            hidden: what the part before returned, when ``part`` has no embedding.
            part: one of ``self.parts``; by default the only one.

        Returns:
            0-dim fp32, equal on all TP ranks; without labels (batch, length, vocab); with a preference that has no
            reference the log-probability of each answer, fp32 (batch,); of a part without head ``hidden_shape(batch,
            length)``.
        """
        if (labels is None) != (token_weights is None):
            raise ValueError("a loss needs labels and token_weights, logits neither")
        if part is None:
            (part,) = self.parts
        batch, length = tokens.shape
        padding = self._padding(batch * length)
        places = self._position_ids(tokens, padding, positions)
        info = self._sequence_info(tokens, padding, places, sample_index)
        keys = self._dropout_keys(info, tokens.device)
        tied_weight = None
        if self.tied and part.head and self.embedding is not None:
            tied_weight = self.embedding.table()  # one for both ends, so that its gradients add as FSDP adds them
        x = self._embed(_flat(tokens, padding), places, info, keys, tied_weight) if hidden is None else hidden
        window = self.config.window_size
        numbers = documents.numbers if isinstance(documents, Documents) else documents
        if numbers is None and window is not None and window < length:
            numbers = torch.zeros(batch if self.spans else 1, length, dtype=torch.long)  # one mask for all samples
        if numbers is not None and self.spans:
            info.spans = Spans.of(numbers, window, x.device)  # for all layers
        elif numbers is not None:
            info.mask = document_mask(to_device(numbers, x.device), window, x.dtype)
        for i in part.layers:
            x = self.layers[str(i)](
                x, info, None if keys is None else keys[SITES_PER_BLOCK * i : SITES_PER_BLOCK * (i + 1)]
            )
        if not part.head:
            return x
        assert self.final_norm is not None and self.head is not None
        x = self.final_norm(x)
        if labels is None or token_weights is None:
            logits = self.head(x, tied_weight=tied_weight)
            return logits[: batch * length].view(batch, length, -1)
        return self.head(x, _flat(labels, padding), _flat(token_weights, padding), tied_weight, preference)

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int]:
        """(tokens [/p], hidden) of what one part hands to the next."""
        tokens = batch * length + self._padding(batch * length)
        return tokens // (self.group.size if self.sequence_parallel else 1), self.config.hidden_size

    def _padding(self, tokens: int) -> int:
        """Rows to add so that the TP ranks can share the tokens evenly."""
        return -tokens % self.group.size if self.sequence_parallel else 0

    def _sequence_info(
        self, tokens: torch.Tensor, padding: int, places: torch.Tensor, sample_index: torch.Tensor | None
    ) -> SequenceInfo:
        """Rotary tables and, when dropout needs them, global token numbers."""
        batch, length = tokens.shape
        info = SequenceInfo(batch, length, batch * length + padding, grouped=self.grouped)
        c = self.config
        if c.position_embedding_type == "rope":
            scaling = None
            if c.use_rope_scaling:
                scaling = RopeScaling(
                    c.rope_scaling_factor,
                    c.rope_low_freq_factor,
                    c.rope_high_freq_factor,
                    c.rope_original_max_position,
                )
            assert c.kv_channels is not None
            freqs = rope_frequencies(round(c.kv_channels * c.rotary_percent), c.rotary_base, scaling, tokens.device)
            info.rope = rope_table(places, freqs)
        if self.training and max(c.hidden_dropout, c.attention_dropout, self.adapter_dropout) > 0:
            if sample_index is None:
                raise ValueError("dropout needs sample_index: masks are keyed by the global number of each sample")
            if sample_index.ndim == 1:
                sample_index = sample_index[:, None] * length + torch.arange(length, device=tokens.device)
            info.numbers = _flat(sample_index, padding)
            info.local_numbers = self._own(info.numbers)
        return info

    def _position_ids(self, tokens: torch.Tensor, padding: int, positions: torch.Tensor | None) -> torch.Tensor:
        """int64 (tokens,); padding continues at 0."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return _flat(positions, padding)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a per-token tensor."""
        if not self.sequence_parallel:
            return x
        rows = x.shape[0] // self.group.size
        return x.narrow(0, self.group.rank * rows, rows)

    def _dropout_keys(self, info: SequenceInfo, device: torch.device) -> torch.Tensor | None:
        """Keys of all sites; the last is the embedding's."""
        if info.numbers is None:
            return None
        return dropout_keys(self.seed, SITES_PER_BLOCK * self.config.num_layers + 1, device)

    def _embed(
        self,
        flat: torch.Tensor,
        places: torch.Tensor,
        info: SequenceInfo,
        keys: torch.Tensor | None,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids (tokens,) -> (tokens [/p], hidden)."""
        assert self.embedding is not None
        x = self.embedding(flat, table)
        if self.positions is not None:
            x = x + self.positions(places)
        if keys is None or info.local_numbers is None:
            return x
        return keyed_dropout(x, keys[-1], info.local_numbers, self.config.hidden_dropout)


def is_unsharded(model: nn.Module) -> bool:
    """Whether ``parallelize`` has made ``model`` ready to train without FSDP: a whole GPT on one data-parallel rank."""
    return isinstance(model, GPT) and model.unsharded


def _flat(x: torch.Tensor, padding: int) -> torch.Tensor:
    """(batch, length) -> (batch x length + padding,), zeros at the end: of weight 0 in the loss."""
    return F.pad(x.reshape(-1), (0, padding)) if padding else x.reshape(-1)


def _norm(config: ModelConfig, mesh: DeviceMesh, kernels: Kernels, place: dict[str, Any]) -> Norm:
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(
        config.hidden_size,
        mesh,
        eps=config.norm_epsilon,
        sequence_parallel=place["sequence_parallel"],
        kernels=kernels,
        device=place["device"],
    )


def _block(config: ModelConfig, mesh: DeviceMesh, kernels: Kernels, place: dict[str, Any]) -> TransformerBlock:
    assert config.ffn_hidden_size is not None
    bias = not config.disable_bias_linear
    std: dict[str, Any] = {
        "init_std": config.init_method_std,
        "output_std": config.init_method_std / (2 * config.num_layers) ** 0.5,
        "kernels": kernels,
    }
    attention = SelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        mesh,
        num_groups=config.num_query_groups,
        head_dim=config.kv_channels,
        bias=bias,
        qkv_bias=bias or config.add_qkv_bias,
        qk_norm_eps=config.norm_epsilon if config.qk_layernorm else None,
        window=config.window_size,
        dropout=config.attention_dropout,
        **place,
        **std,
    )
    mlp = MLP(
        config.hidden_size,
        config.ffn_hidden_size,
        mesh,
        activation=activation_of(config),
        bias=bias,
        **place,
        **std,
    )
    return TransformerBlock(
        attention,
        mlp,
        _norm(config, mesh, kernels, place),
        _norm(config, mesh, kernels, place),
        parallel_residual=config.parallel_residual,
        dropout=config.hidden_dropout,
    )
