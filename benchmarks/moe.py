"""The table of experts: ``make gpu`` and ``make bench-cpu`` write it to ``benchmarks/results/moe_*.txt``.

Forward and backward pass of blocks whose MLP is a mixture of experts, in turn with the same blocks with one MLP as wide
as a token's experts together: the same products of tokens, so the difference is routing, moving rows, and products of
fewer rows. Weights are random, so experts get about as many tokens each.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from blocks import build, seconds_of
from timing import Report
from training_step import MODEL, Work
from training_table import llama, why

from smp.config import Layout, ModelConfig, resolve_model
from smp.parallel.context import build_context

SMALL: dict[str, Any] = {"num_layers": 2, "vocab_size": 1024}


def shapes(device: str) -> dict[str, ModelConfig]:
    """Mixtral's blocks, and those of Qwen3-30B-A3B, which has many small experts; on a CPU both kinds, small."""
    few, many = {"num_experts": 8, "moe_router_topk": 2}, {"num_experts": 128, "moe_router_topk": 8}
    if device == "cpu":
        base = replace(MODEL, **{**SMALL, "vocab_size": 256})
        return {
            "8 experts, 2 of a token": replace(base, **few, moe_ffn_hidden_size=768),
            "32 experts, 4 of a token": replace(base, num_experts=32, moe_router_topk=4, moe_ffn_hidden_size=256),
        }
    wide = replace(llama("llama3-8b", 2), **SMALL)
    narrow = replace(wide, hidden_size=2048, ffn_hidden_size=6144, num_query_groups=4)
    return {
        "Mixtral: 8 experts, 2 of a token": replace(wide, **few, moe_ffn_hidden_size=14336),
        "Qwen3-30B-A3B: 128 experts, 8": replace(narrow, **many, moe_ffn_hidden_size=768),
    }


def as_one_mlp(model: ModelConfig) -> ModelConfig:
    """With an MLP as wide as a token's experts together."""
    width = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    plain = replace(ModelConfig(), ffn_hidden_size=width)
    names = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "ffn_hidden_size")
    return replace(model, **{name: getattr(plain, name) for name in names})


def main() -> int:
    """Measure, print and write; 1 if an entry failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--repeats", type=int, default=3, help="passes in each of five timed groups")
    arguments = parser.parse_args()
    device, failed = arguments.device, 0
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    report, context, length = Report("moe", device), build_context(Layout(), device), 512 if device == "cpu" else 8192
    report.say(f"\n2 blocks, 1 x {length} tokens, bf16, forward and backward pass")
    report.say(f"{'blocks':36s}{'ms':>10s}{'one MLP':>10s}{'speed of it':>13s}")
    for name, model in shapes(device).items():
        for label, settings in ((name, {}), (f"{name}, --compile", {"compile": True})):
            try:
                dense, experts = (
                    build(Work(resolve_model(m), 1, length, device), context, settings)
                    for m in (as_one_mlp(model), model)
                )
                for passes in (dense, experts):
                    for _ in range(3):
                        passes.run()
                plain, own = [seconds_of(passes, device, arguments.repeats) for passes in (dense, experts)]
                report.say(f"{label:36s}{own * 1e3:10.2f}{plain * 1e3:10.2f}{plain / own:13.3f}")
            except Exception as error:  # the others are wanted all the same
                report.say(f"{label:36s}  {why(error)}")
                failed += 1
            dense = experts = passes = None
            torch._dynamo.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
