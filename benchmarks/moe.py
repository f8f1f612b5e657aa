"""The table of experts: ``make gpu`` and ``make bench-cpu`` write it to ``benchmarks/results/moe_*.txt``.

Forward and backward pass of blocks whose MLP is a mixture of experts, in turn with the same blocks with one MLP as wide
as a token's experts together: the same products of tokens, so the difference is routing, moving rows, and products of
fewer rows. Weights are random, so experts get about as many tokens each. On a GPU the last lines say of each Triton
kernel that ``auto`` leaves out whether one run speaks for it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from blocks import GROUPS, build, seconds_of
from timing import Report, warm_up
from training_step import MODEL, Work
from training_table import llama, why

from smp.config import Layout, ModelConfig, resolve_model
from smp.parallel.context import ParallelContext, build_context

Times = tuple[float, float]
UNMEASURED = ("router", "permute", "grouped_gemm")
"""Triton kernels that ``auto`` leaves out, because no GPU has measured them."""
NOISE = 0.02
"""Of a ratio, which says nothing."""
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


def entries(device: str) -> dict[str, dict[str, Any]]:
    """Name -> settings of the blocks with experts; on a GPU each Triton kernel that ``auto`` leaves out by itself."""
    table: dict[str, dict[str, Any]] = {"": {}, "--compile": {"compile": True}}
    if device == "cuda":
        table |= {f"{name} by triton": {"backends": {name: "triton"}} for name in UNMEASURED}
        table |= {"--kernels triton": {"kernels": "triton"}}
    return table


def measured(
    model: ModelConfig, device: str, context: ParallelContext, settings: dict[str, Any], repeats: int, groups: int
) -> Times:
    """Seconds of the blocks, and of those with one MLP."""
    work = [Work(resolve_model(m), 1, 512 if device == "cpu" else 8192, device) for m in (as_one_mlp(model), model)]
    dense = build(work[0], context, {name: value for name, value in settings.items() if name != "backends"})
    experts = build(work[1], context, settings)
    for passes in (dense, experts):
        warm_up(passes.run, groups)
    plain, own = [seconds_of(passes, device, repeats, groups) for passes in (dense, experts)]
    return own, plain


def verdicts(found: dict[str, dict[str, Times]]) -> list[str]:
    """Of each kernel that ``auto`` leaves out whether it should: of all shapes (label -> seconds), beside PyTorch's in
    the same blocks."""
    lines = []
    for kernel in UNMEASURED:
        label = f"{kernel} by triton"
        gains = [rows[""][0] / rows[label][0] for rows in found.values() if "" in rows and label in rows]
        if not gains or len(gains) < len(found):
            continue
        pays = max(gains) >= 1 + NOISE and min(gains) >= 1 - NOISE
        told = "auto should take it" if pays else "it does not pay: delete it, or say for which shapes it does"
        lines.append(f"{kernel}: {', '.join(f'{gain:.3f}' for gain in gains)} x the blocks without it: {told}")
    return lines


def main() -> int:
    """Measure, print and write; 1 if an entry failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--repeats", type=int, default=3, help="passes in each timed group")
    parser.add_argument("--groups", type=int, default=GROUPS, help="timed groups of an entry; the median counts")
    arguments = parser.parse_args()
    device, failed = arguments.device, 0
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    report, context, found = Report("moe", device), build_context(Layout(), device), dict[str, dict[str, Times]]()
    report.say(f"\n2 blocks, 1 x {512 if device == 'cpu' else 8192} tokens, bf16, forward and backward pass")
    report.say(f"{'blocks':56s}{'ms':>10s}{'one MLP':>10s}{'speed of it':>13s}")
    for name, model in shapes(device).items():
        found[name] = {}
        for label, settings in entries(device).items():
            title = ", ".join(filter(None, (name, label)))
            try:
                given = model, device, context, settings, arguments.repeats, arguments.groups
                own, plain = found[name][label] = measured(*given)
                report.say(f"{title:56s}{own * 1e3:10.2f}{plain * 1e3:10.2f}{plain / own:13.3f}")
            except Exception as error:  # the others are wanted all the same
                report.say(f"{title:56s}  {why(error)}")
                failed += 1
            torch._dynamo.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    for line in verdicts(found):
        report.say(line)
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
