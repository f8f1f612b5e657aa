"""A layer of experts on one CPU core beside others', and a whole training step; see docs/moe.md.

    PYTHONPATH=. python benchmarks/experts.py     # with transformers and megatron-core

Layers: forward and backward pass of ours, of a dense MLP with a token's FLOPs, of transformers' Mixtral (its loop and
its grouped implementation) and of megatron-core's, same sizes, same random inputs, weights in the dtype of the run.
Steps: a small Mixtral, fp32 masters and AdamW. Entries take turns, one call each, in one process with one thread, and
what is shown is the median of the processor's seconds of a call: what else runs on the machine takes none of them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron_experts import megatron_layer, prepare
from timing import Report
from torch import nn
from training_step import Step, Work, smp_step

from smp.config import Layout, ModelConfig
from smp.layers.mlp import MLP
from smp.layers.moe.experts import Experts
from smp.layers.moe.layer import MoE
from smp.layers.moe.router import Router
from smp.parallel.context import ParallelContext, build_context

TOKENS, HIDDEN = 2048, 512


@dataclass(frozen=True)
class Shape:
    """Of a layer: ``topk`` of ``experts`` per token, each of ``width``."""

    experts: int
    topk: int
    width: int

    def __str__(self) -> str:
        return f"{self.experts} experts of width {self.width}, {self.topk} of a token"


SHAPES = (Shape(8, 2, 512), Shape(32, 4, 256), Shape(64, 6, 176))
GROWING = tuple(Shape(experts, 2, 512) for experts in (4, 8, 16, 32, 64))
"""More and more experts, of which a token has as many as ever."""
STEP_MODEL = ModelConfig(
    num_layers=4,
    hidden_size=HIDDEN,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=64,
    vocab_size=8000,
    max_position_embeddings=512,
)


def with_experts(shape: Shape) -> ModelConfig:
    """The model of the steps with such layers."""
    return replace(STEP_MODEL, num_experts=shape.experts, moe_router_topk=shape.topk, moe_ffn_hidden_size=shape.width)


def our_layer(shape: Shape, context: ParallelContext) -> nn.Module:
    """Ours, without values."""
    router = Router(HIDDEN, shape.experts, shape.topk, context)
    return MoE(router, Experts(shape.experts, HIDDEN, shape.width, context), context)


def transformers_layer(shape: Shape, implementation: str) -> nn.Module:
    """Mixtral's, by one of transformers' implementations."""
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = _transformers_config(with_experts(shape))
    config._experts_implementation = implementation
    return MixtralSparseMoeBlock(config)


def _transformers_config(sizes: ModelConfig):  # type: ignore[no-untyped-def]
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.moe_ffn_hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_query_groups,
        max_position_embeddings=sizes.max_position_embeddings,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.moe_router_topk,
        use_cache=False,
        attn_implementation="sdpa",
    )


def passes(layer: nn.Module, dtype: torch.dtype, batched: bool) -> Callable[[], object]:
    """A forward and a backward pass of random tokens; ``batched``: the layer takes (batch, tokens, hidden)."""
    generator = torch.Generator().manual_seed(0)
    layer.to(dtype).train()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    shape = (1, TOKENS, HIDDEN) if batched else (TOKENS, HIDDEN)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()

    def run() -> None:
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).backward(grad)
        layer.zero_grad()
        x.grad = None

    return run


def layers(shape: Shape, context: ParallelContext, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The entries of one comparison, the dense one first."""
    sizes = HIDDEN, shape.width, shape.experts, shape.topk
    found: dict[str, tuple[nn.Module, bool]] = {
        "dense MLP of equal FLOPs": (MLP(HIDDEN, shape.topk * shape.width, context), False),
        "smp": (our_layer(shape, context), False),
        "transformers, grouped_mm": (transformers_layer(shape, "grouped_mm"), True),
        "transformers, eager": (transformers_layer(shape, "eager"), True),
        "megatron-core, allgather": (megatron_layer(*sizes, "allgather", dtype), True),
        "megatron-core, alltoall": (megatron_layer(*sizes, "alltoall", dtype), True),
    }
    return {name: passes(layer, dtype, batched) for name, (layer, batched) in found.items()}


def transformers_moe_step(work: Work, implementation: str, bf16: bool) -> Step:
    """A training step of Mixtral: loss, backward, clip, AdamW; autocast for bf16."""
    from transformers import MixtralForCausalLM

    config = _transformers_config(work.model)
    model = MixtralForCausalLM(config).float().train()
    model.set_experts_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    tokens, labels = work.data()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def turns(entries: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each entry, which take turns; two calls of each come first."""
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    for turn in range(rounds + 2):
        for name, run in entries.items():
            started = time.process_time()
            run()
            if turn >= 2:
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def show(report: Report, title: str, entries: dict[str, Callable[[], object]], rounds: int) -> None:
    """A comparison: milliseconds, and multiples of the first entry's."""
    report.say(f"\n{title}")
    found = turns(entries, rounds)
    first = next(iter(found.values()))
    for name, seconds in found.items():
        report.say(f"  {name:32s}{seconds * 1e3:10.1f} ms{seconds / first:8.2f} x")
    gc.collect()


def compare_growth(report: Report, context: ParallelContext, rounds: int) -> None:
    """What more experts cost that no token uses more of."""
    report.say(
        "\nfp32, experts of width 512, 2 of a token: forward and backward pass of a layer; a model's training step"
    )
    report.say("  experts  parameters      layer ms    step ms")
    made = {shape: passes(our_layer(shape, context), torch.float32, False) for shape in GROWING}
    found = turns({str(shape.experts): run for shape, run in made.items()}, rounds)
    for shape in GROWING:
        work = Work(with_experts(shape), 2, 512, "cpu")
        step, timed = smp_step(work, context), []
        for _ in range(rounds // 2 + 1):
            started = time.process_time()
            step()
            timed.append(time.process_time() - started)
        total = 3 * HIDDEN * shape.width * shape.experts
        report.say(
            f"  {shape.experts:7d}{total / 1e6:10.1f} M{found[str(shape.experts)] * 1e3:13.1f}"
            f"{statistics.median(timed[1:]) * 1e3:11.1f}"
        )
        del step
        gc.collect()


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="timed calls of each entry")
    parser.add_argument("--only", choices=("layers", "steps", "growth"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    prepare()
    context, report = build_context(Layout(), "cpu"), Report("experts", "cpu")
    report.say(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; processor seconds")
    parts = [arguments.only] if arguments.only else ["layers", "steps", "growth"]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if "layers" in parts:
        for shape in SHAPES:
            for name, dtype in dtypes.items():
                title = f"layer, {TOKENS} tokens of {HIDDEN}, {shape}, {name}"
                show(report, title, layers(shape, context, dtype), arguments.rounds)
    if "steps" in parts:
        for shape in (SHAPES[0], SHAPES[-1]):
            for name in dtypes:
                work, bf16 = Work(with_experts(shape), 2, 512, "cpu"), name == "bf16"
                # Two at a time: the loop multiplies numbers of rows that were not there before, and their code drives
                # that of the others out of oneDNN's cache.
                for other, rounds in (("grouped_mm", 7), ("eager", 3)):
                    entries = {
                        "smp": smp_step(work, context, bf16=bf16),
                        f"transformers, {other}": transformers_moe_step(work, other, bf16),
                    }
                    show(report, f"training step, 4 blocks, {work.tokens} tokens, {shape}, {name}", entries, rounds)
    if "growth" in parts:
        compare_growth(report, context, arguments.rounds)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
