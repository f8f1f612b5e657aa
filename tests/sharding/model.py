"""A small model on any mesh, and one loss of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from smp.config import ModelConfig, ParallelConfig
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch, MTPBatch
from smp.sharding.offload import Offload
from smp.sharding.parallelize import parallelize

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    vocab_size=64,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=12,
)
LENGTH, BATCH = 12, 4


def build(context: Any, config: ModelConfig, parallel: ParallelConfig, offload: Offload | None = None) -> GPT:
    model = GPT(
        config,
        replace(context, sequence_parallel=parallel.sequence_parallel),
        seed=1,
        compute_dtype=torch.bfloat16 if parallel.bf16 else None,
    )
    parallelize(model, context, parallel, offload)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    return model


def loss_of(model: GPT) -> torch.Tensor:
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 64
    weights = torch.full((BATCH, LENGTH), 1.0 / (BATCH * LENGTH))
    index = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    further = tuple(MTPBatch(tokens.flip(0), tokens, weights) for _ in model.predictions)
    total = model(MicroBatch(tokens, tokens.flip(1), weights, token_index=index, mtp=further)).total
    assert total is not None
    return total
