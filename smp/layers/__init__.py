"""Parallel layers for any ``nn.Module``. They take a 1-D DeviceMesh or a ``ParallelContext``, and need no config, no
trainer and no global state.

Read ``block`` first: norms and residual around a mixer (``attention``, ``latent_attention``, ``sparse_attention``,
``recurrences``) and ``mlp`` or :mod:`smp.layers.moe`; all of them are built from ``linear``. :mod:`smp.layers.heads`
has losses, :mod:`smp.layers.adapters` LoRA, :mod:`smp.layers.context_parallel` attention and recurrences over cut
sequences.
"""

from smp.data.sample import IGNORE_INDEX
from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.attention_cores.fused_attention import DEFAULT_ATTENTION
from smp.kernels.rope import rotate as apply_rope
from smp.kernels.sequence_cut import SequenceCut, cut_sequences
from smp.kernels.token_layout import TokenLayout
from smp.layers.adapters.lora import Lora, adapters_off, add_adapters
from smp.layers.attention import QueryKeyOptions, SelfAttention
from smp.layers.block import MoEBlock, TransformerBlock
from smp.layers.context_parallel import context_parallel_attention
from smp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy, vocab_parallel_cross_entropy
from smp.layers.heads.head import ModelOutput, VocabParallelHead
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.layers.mlp import MLP
from smp.layers.moe import Experts, MoE, Router
from smp.layers.norm import LayerNorm, RMSNorm
from smp.layers.parallel_mixers import ParallelMixers
from smp.layers.parameter import Constant, Normal, init_weights, local, tp_parameter
from smp.layers.recurrences.delta_net import GatedDeltaNet
from smp.layers.recurrences.kimi_delta import KimiDeltaAttention
from smp.layers.recurrences.mamba import Mamba2
from smp.layers.rope import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    rope_frequencies,
    rope_table,
)
from smp.layers.sparse_attention import SparseLatentAttention
from smp.parallel.context import ParallelContext, build_context

__all__ = [
    "DEFAULT_ATTENTION",
    "IGNORE_INDEX",
    "MLP",
    "AttentionSpec",
    "ColumnParallelLinear",
    "Constant",
    "DynamicScaling",
    "Experts",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LayerNorm",
    "LinearScaling",
    "LongRopeScaling",
    "Lora",
    "Mamba2",
    "MoE",
    "MoEBlock",
    "ModelOutput",
    "Normal",
    "ParallelContext",
    "ParallelMixers",
    "PositionEmbedding",
    "QueryKeyOptions",
    "RMSNorm",
    "RopeScaling",
    "Router",
    "RowParallelLinear",
    "SelfAttention",
    "SequenceCut",
    "SparseLatentAttention",
    "TokenLayout",
    "TransformerBlock",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabShard",
    "YarnScaling",
    "adapters_off",
    "add_adapters",
    "apply_rope",
    "build_context",
    "column_parallel",
    "context_parallel_attention",
    "cut_sequences",
    "init_weights",
    "linear_cross_entropy",
    "local",
    "rope_frequencies",
    "rope_table",
    "tp_parameter",
    "vocab_parallel_cross_entropy",
]
