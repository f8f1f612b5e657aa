"""Tokens per second of one training step on a CPU: smp beside transformers, and two-way tensor parallelism beside none.

Every entry trains the same model (same sizes, batch, fp32 master weights and fused AdamW). Entries take turns, one step
each, in the same processes, so that whatever else the machine does hits all of them. Reported are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp.config import Layout, ModelConfig, OptimizerConfig, ParallelConfig
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.optim.optimizer import build_optimizer, clip_gradients
from smp.parallel.mesh import MESH_DIMS, build_mesh
from smp.sharding.parallelize import parallelize

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=64,
    vocab_size=32_000,
    max_position_embeddings=512,
)
BATCH, LENGTH = 4, 512
Step = Callable[[], float]


@dataclass
class Entry:
    """One row of the table: a step function and the seconds it took."""

    name: str
    step: Step
    threads: int
    seconds: list[float]


def smp_step(mesh: DeviceMesh, **parallel: Any) -> Step:
    """A training step of our model without data parallelism: loss, backward, clip, AdamW."""
    config = ParallelConfig(**parallel)
    model = GPT(MODEL, mesh["tp"], sequence_parallel=config.sequence_parallel, device="meta")
    parallelize(model, mesh, config)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens, labels = _batch()
    weights = torch.full(labels.shape, 1.0 / labels.numel())

    def step() -> float:
        loss = model(tokens, labels, weights)
        loss.backward()
        clip_gradients(model.parameters(), 1.0, mesh.get_group("tp"))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def transformers_step(bf16: bool) -> Step:
    """The same step by transformers' Llama, uncompiled, SDPA attention, autocast for bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden_size,
        intermediate_size=MODEL.ffn_hidden_size,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_attention_heads,
        num_key_value_heads=MODEL.num_query_groups,
        max_position_embeddings=MODEL.max_position_embeddings,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float().train()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    tokens, labels = _batch()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocab_size or 0, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def interleave(entries: list[Entry], rounds: int) -> None:
    """Let the entries take turns: a warm-up step each, then ``rounds`` timed ones."""
    for turn in range(rounds + 1):
        for entry in entries:
            torch.set_num_threads(entry.threads)
            if dist.get_world_size() > 1:
                dist.barrier()
            started = time.perf_counter()
            entry.step()
            if turn:
                entry.seconds.append(time.perf_counter() - started)


def table(entries: list[Entry]) -> list[tuple[str, float, float]]:
    """(name, tokens per second, ratio to the first entry) from the medians."""
    medians = [statistics.median(e.seconds) for e in entries]
    return [(e.name, BATCH * LENGTH / m, medians[0] / m) for e, m in zip(entries, medians, strict=True)]


def _print(title: str, entries: list[Entry]) -> None:
    print(title)
    for name, rate, ratio in table(entries):
        print(f"  {name:32s} {rate:8.0f} tokens/s  {ratio:.3f} x", flush=True)


def beside_transformers(rounds: int) -> None:
    """One process, two threads: transformers, ours, ours compiled; fp32 and bf16."""
    mesh = build_mesh(Layout(), "cpu")
    for bf16 in (False, True):
        entries = [
            Entry("transformers", transformers_step(bf16), 2, []),
            Entry("smp", smp_step(mesh, bf16=bf16), 2, []),
            Entry("smp --compile", smp_step(mesh, bf16=bf16, compile=True), 2, []),
        ]
        interleave(entries, rounds)
        _print("one step, bf16" if bf16 else "one step, fp32", entries)


def beside_one_process(rounds: int) -> None:
    """Tensor and sequence parallelism over two processes with a thread each, beside rank 0 alone with two threads."""
    alone = init_device_mesh("cpu", (2, 1, 1, 1, 1, 1), mesh_dim_names=("copy", *MESH_DIMS))[MESH_DIMS]
    both = build_mesh(Layout(tp=2), "cpu")
    single = smp_step(alone) if dist.get_rank() == 0 else _nothing
    entries = [
        Entry("smp TP=1", single, 2, []),
        Entry("smp TP=2 --sequence-parallel", smp_step(both, sequence_parallel=True), 1, []),
    ]
    interleave(entries, rounds)
    if dist.get_rank() == 0:
        _print("one step, fp32, two cores", entries)


def _nothing() -> float:
    """The other rank waits at the next barrier while rank 0 works alone."""
    return 0.0


def main() -> None:
    """Under plain python the comparison with transformers, under torchrun with 2 processes that with TP."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each entry")
    args = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    dist.init_process_group("gloo", store=None if world > 1 else dist.HashStore(), rank=rank, world_size=world)
    (beside_transformers if world == 1 else beside_one_process)(args.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
