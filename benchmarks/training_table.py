"""The one-device training table: ``make gpu`` and ``make bench-cpu`` write it to ``benchmarks/results/training_*.txt``.

Llama shapes by transformers (eager, compiled, with Liger's kernels), megatron-core's local layers, torchtitan's layers
and by smp, in turn on the same device in the same run: fp32 master weights, fused AdamW, clipping; bf16 by autocast in
transformers, by a cast in each layer here. Programs that are not installed are left out, which a line says
(docs/kernels.md says what to install). Tokens per second, model FLOP/s as a part of the measured rate of a large matrix
product in the same precision (MFU), and peak memory. Rows are written as they come, so that a run that is cut short
leaves what it has.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peers import PEERS, missing
from timing import Clock, Report, product_rate, synchronize, warm_up
from torch.distributed.device_mesh import DeviceMesh
from training_step import MODEL, Step, Work, smp_step, transformers_step

from smp.config import Config, Layout, ModelConfig, resolve
from smp.models.arithmetic import count_parameters, training_flops_per_token
from smp.models.presets import PRESETS
from smp.parallel.context import build_context

GROUPS = 5
"""Timed groups of steps per entry, unless the command says so; the table shows the median, and the device is waited for
once per group."""
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Shape:
    """A model, cut to fit, and what a step holds."""

    name: str
    model: ModelConfig
    batch: int
    length: int
    bf16: bool


def llama(name: str, layers: int | None = None) -> ModelConfig:
    """A named size as transformers' plain Llama can be built too: no RoPE scaling, an output matrix of its own."""
    preset = {
        key: value for key, value in PRESETS[name].items() if key not in ("use_rope_scaling", "rope_scaling_factor")
    }
    model = replace(ModelConfig(), **{**preset, "untie_embeddings_and_output_weights": True})
    model = replace(model, num_layers=layers or model.num_layers)
    config = Config(model=model)
    config.training.dry_run = True
    return resolve(config, 1).model


def shapes(device: str) -> list[Shape]:
    """8,192 tokens a step on a GPU. The 8B shape keeps 12 of 32 layers: with AdamW in fp32 and weights cast to bf16, 18
    bytes a parameter, that is 66 GB, and leaves room for the eager entries' activations in 141 GB."""
    if device == "cpu":
        return [Shape("small, 8 x 512", MODEL, 2, 512, bf16) for bf16 in (False, True)]
    return [
        Shape("llama3-8b, 12 layers", llama("llama3-8b", 12), 1, 8192, True),
        Shape("llama3.2-1b", llama("llama3.2-1b"), 2, 4096, True),
    ]


def others(work: Work, bf16: bool) -> dict[str, Callable[[], Step]]:
    """Name -> how to build its step, of other programs; those that are not there are left out."""
    table: dict[str, Callable[[], Step]] = {
        "transformers": lambda: transformers_step(work, bf16),
        "transformers, torch.compile": lambda: transformers_step(work, bf16, compiled=True),
    }
    there = {name: build for name, (module, build) in PEERS.items() if not missing(module, work.device)}
    return table | {name: partial(build, work, bf16) for name, build in there.items()}


def entries(work: Work, mesh: DeviceMesh, bf16: bool) -> dict[str, Callable[[], Step]]:
    """Likewise, of all programs."""

    def ours(**parallel: Any) -> Callable[[], Step]:
        return lambda: smp_step(work, mesh, bf16=bf16, **parallel)

    table = {**others(work, bf16), "smp --kernels torch": ours(kernels="torch")}
    if work.device == "cpu":
        table["smp --kernels torch --compile"] = ours(kernels="torch", compile=True)
    if work.device == "cuda":
        table |= {
            "smp": ours(),
            "smp --compile": ours(compile=True),
            "smp --kernels triton --compile": ours(kernels="triton", compile=True),
            "smp --fp8-recipe tensorwise": ours(fp8_format="hybrid", fp8_recipe="tensorwise"),
            "smp --fp8-recipe delayed": ours(fp8_format="hybrid", fp8_recipe="delayed", fp8_amax_history_len=16),
        }
    return table


@dataclass(frozen=True)
class Measured:
    """Median seconds per step and peak bytes on the device (0 on a CPU); or why there are none."""

    seconds: float = 0.0
    peak: int = 0
    failure: str = ""


def why(error: Exception) -> str:
    """One line; it keeps nothing of the failed entry alive, as the exception itself would."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {error}".splitlines()[0][:80]


def measure(builds: dict[str, Callable[[], Step]], device: str, steps: int, groups: int) -> dict[str, Measured]:
    """Build the entries, then let them take turns, so that whatever else the machine does hits all of them."""
    found, running = dict.fromkeys(builds, Measured()), dict[str, Step]()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for name, build in builds.items():
        try:
            step = build()
            warm_up(step, groups)
            running[name] = step
        except Exception as error:  # the others are wanted all the same
            found[name] = Measured(failure=why(error))
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(groups):
        for name, step in running.items():
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize(device)
            times[name].append((time.perf_counter() - started) / steps)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return found | {name: Measured(statistics.median(seconds), peak) for name, seconds in times.items()}


def one_shape(report: Report, shape: Shape, device: str, mesh: DeviceMesh, steps: int, groups: int) -> int:
    """The rows of one shape; returns how many entries failed, other than for memory and of programs that come apart.

    The memory of a GPU holds one entry at a time. That of a CPU holds all, and they take turns.
    """
    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    sides = (8192, 8192, 8192) if device == "cuda" else (2048, 512, 1536)
    limit = product_rate(Clock(device, 10), *sides, dtype)
    work = Work(shape.model, shape.batch, shape.length, device)
    vocabulary = shape.model.vocab_size or 0
    flops = training_flops_per_token(shape.model, shape.length, vocabulary)
    parameters = count_parameters(shape.model, vocabulary).total / 1e9
    report.say(
        f"\n{shape.name}, {parameters:.2f} B parameters, {work.batch} x {work.length} tokens, "
        f"{'bf16' if shape.bf16 else 'fp32'}; product {' x '.join(map(str, sides))}: {limit / 1e12:.3f} TFLOP/s"
    )
    report.say(f"{'entry':34s}{'tokens/s':>10s}{'TFLOP/s':>10s}{'MFU':>7s}{'peak GB':>9s}{'x first':>9s}")
    everything = entries(work, mesh, shape.bf16)
    together = [everything] if device == "cpu" else [{name: build} for name, build in everything.items()]
    for name, (module, _) in PEERS.items():
        if reason := missing(module, device):
            report.say(f"{name:34s}  {reason}")
    first, failed, rates = 0.0, 0, dict[str, float]()
    for builds in together:
        for name, measured in measure(builds, device, steps, groups).items():
            if measured.failure:
                report.say(f"{name:34s}  {measured.failure}")
                failed += measured.failure != OUT_OF_MEMORY and name not in PEERS
                continue
            rate = rates[name] = work.tokens / measured.seconds
            first = first or rate
            memory = f"{measured.peak / 1e9:9.1f}" if measured.peak else f"{'-':>9s}"
            speed = f"{rate:10.0f}{rate * flops / 1e12:10.3f}{rate * flops / limit:7.3f}"
            report.say(f"{name:34s}{speed}{memory}{rate / first:9.3f}")
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    report.say(beside_the_best(rates))
    return failed


def beside_the_best(rates: dict[str, float]) -> str:
    """The fastest of ours, but for FP8, beside the fastest of the others."""
    own = {name: rate for name, rate in rates.items() if name.startswith("smp") and "fp8" not in name}
    theirs = {name: rate for name, rate in rates.items() if not name.startswith("smp")}
    if not own or not theirs:
        return "nothing to compare"
    mine, best = max(own, key=own.__getitem__), max(theirs, key=theirs.__getitem__)
    return f"{mine}: {own[mine] / theirs[best]:.3f} x {best}, the fastest other"


def main() -> int:
    """Measure, print and write; 1 if an entry failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--steps", type=int, default=2, help="steps in each timed group")
    parser.add_argument("--groups", type=int, default=GROUPS, help="timed groups of an entry; the median counts")
    parser.add_argument(
        "--only", default="", help="shapes whose name, length and dtype contain this: 'llama3-8b', 'x 8192' or 'bf16'"
    )
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    torch.set_float32_matmul_precision("high")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    name = f"training_{arguments.only.replace(' ', '_')}".rstrip("_")
    context, report, failed = build_context(Layout(), device), Report(name, device), 0
    for shape in shapes(device):
        if arguments.only in f"{shape.name}, {shape.batch} x {shape.length}, {'bf16' if shape.bf16 else 'fp32'}":
            failed += one_shape(report, shape, device, context, arguments.steps, arguments.groups)
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
