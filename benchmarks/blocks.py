"""The table of blocks: ``make gpu`` and ``make bench-cpu`` write it to ``benchmarks/results/blocks_*.txt``.

Forward and backward pass of transformer blocks of Llama 3 8B's size, with almost no vocabulary and no optimizer: what
FP8, recompute and the offload of activations make of a block's time and memory. Entries take turns in one process.

What an offloaded block's copies cost is the time that the pass takes longer than without them. Beside it stands the
time of the same bytes copied alone, out and then back: what is not there in the first is hidden behind computation.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from timing import Report, synchronize, warm_up
from training_step import MODEL, Work, smp_model
from training_table import llama, why

from smp.config import Layout
from smp.kernels.copier import Copier, copier_of
from smp.layers.fp8.apply import fp8_history
from smp.parallel.context import ParallelContext, build_context

GROUPS = 5
"""Timed groups of passes per entry, unless the command says so; the table shows the median."""
HORIZON = 2


def work_on(device: str) -> Work:
    """One micro-batch of 8,192 tokens through 8 of Llama 3 8B's blocks; on a CPU something small."""
    if device == "cpu":
        return Work(replace(MODEL, num_layers=4, vocab_size=256), 1, 512, device)
    return Work(replace(llama("llama3-8b", 8), vocab_size=1024), 1, 8192, device)


def entries(device: str) -> dict[str, dict[str, Any]]:
    """Name -> settings of the run."""
    emulate = device == "cpu"
    eight = {"fp8_format": "hybrid", "fp8_emulate": emulate}
    table: dict[str, dict[str, Any]] = {"bf16": {}}
    table |= {
        f"FP8, {recipe}": {**eight, "fp8_recipe": recipe, "fp8_amax_history_len": 16}
        for recipe in ("tensorwise", "delayed", "rowwise")
    }
    table |= {
        "full recompute": {"recompute_granularity": "full"},
        "selective recompute": {"recompute_granularity": "selective"},
        "offload": {"offload_activations": True, "activation_loading_horizon": HORIZON},
        "offload, full recompute": {
            "offload_activations": True,
            "activation_loading_horizon": HORIZON,
            "recompute_granularity": "full",
        },
    }
    return table


@dataclass
class Passes:
    """One entry at work; its weights are its own, so there is one at a time on a GPU.

    Attributes:
        run: a forward and a backward pass.
        copier: of its offload.
    """

    run: Callable[[], object]
    copier: Copier | None


def build(work: Work, context: ParallelContext, settings: dict[str, Any]) -> Passes:
    """A model with settings, ready to be timed."""
    model, place, _ = smp_model(work, context, bf16=True, **settings)
    history, micro_batch = fp8_history(model), work.micro_batch()

    def run() -> None:
        model(micro_batch).loss.backward()
        if history is not None:
            history.advance(history.checked(torch.ones((), device=work.device)).isfinite())
        for parameter in model.parameters():
            parameter.grad = None

    return Passes(run, None if place.offload is None else place.offload.copier)


def seconds_of(passes: Passes, device: str, repeats: int, groups: int) -> float:
    """Of one pass, the median of ``groups`` of ``repeats``."""
    times = []
    for _ in range(groups):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            passes.run()
        synchronize(device)
        times.append((time.perf_counter() - started) / repeats)
    return statistics.median(times)


def seconds_to_copy(nbytes: int, device: str) -> float:
    """Of ``nbytes`` to the host and then back, in 64 MiB at a time, with nothing else on the device."""
    copier, size = copier_of(torch.device(device)), 64 << 20
    on_host, on_device = copier.host(size), torch.ones(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(GROUPS):
        synchronize(device)
        started = time.perf_counter()
        for copy, source, target in ((copier.out, on_device, on_host), (copier.back, on_host, on_device)):
            events = [copy(source, target) for _ in range(8)]
            copier.host_wait(events[-1])
        synchronize(device)
        times.append((time.perf_counter() - started) / 8 * nbytes / size)
    return statistics.median(times)


def measure(report: Report, work: Work, context: ParallelContext, repeats: int, groups: int) -> int:
    """All entries, each in turn with plain bf16, and with what it offloads without that. Returns how many failed."""
    device, failed, table = work.device, 0, entries(work.device)
    base = build(work, context, {})
    for name, settings in table.items():
        entry = there = None
        without = {key: value for key, value in settings.items() if "activation" not in key}
        try:
            entry = build(work, context, settings) if settings else base
            there = build(work, context, without) if without and without != settings else base
            for passes in (base, there, entry):
                warm_up(passes.run, groups)
            peak, copied = _peak(entry, device), _copied(entry)
            plain, stays, own = [seconds_of(passes, device, repeats, groups) for passes in (base, there, entry)]
            report.say(row(name, plain, stays, own, peak, copied, device))
        except Exception as error:  # the others are wanted all the same
            report.say(f"{name:26s}  {why(error)}")
            failed += 1
        entry = there = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return failed


def row(name: str, plain: float, stays: float, own: float, peak: int, copied: int, device: str) -> str:
    """A line of the table: seconds of plain bf16, without offload and of the entry, bytes at the peak and copied."""
    memory = f"{peak / 1e9:9.2f}" if peak else f"{'-':>9s}"
    line = f"{name:26s}{own * 1e3:10.2f}{plain / own:9.3f}{memory}"
    if not copied or device == "cpu":  # which copies where it is asked to
        return line
    alone = seconds_to_copy(copied, device)
    return f"{line}{copied / 1e9:12.2f}{alone * 1e3:10.2f}{1 - (own - stays) / alone:9.2f}"


def _peak(passes: Passes, device: str) -> int:
    """Most bytes that one pass has above what is there before and after it; 0 on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    passes.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _copied(passes: Passes) -> int:
    """Bytes that one pass copies to the host; as many come back."""
    if passes.copier is None:
        return 0
    before = passes.copier.bytes_out
    passes.run()
    return passes.copier.bytes_out - before


def main() -> int:
    """Measure, print and write; 1 if an entry failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--repeats", type=int, default=3, help="passes in each timed group")
    parser.add_argument("--groups", type=int, default=GROUPS, help="timed groups of an entry; the median counts")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    report, work = Report("blocks", device), work_on(device)
    model = work.model
    report.say(
        f"\n{model.num_layers} blocks, hidden {model.hidden_size}, ffn {model.ffn_hidden_size}, {work.batch} x "
        f"{work.length} tokens, bf16; x bf16: speed beside plain bf16 in turn; peak: above weights\n"
        f"{'entry':26s}{'ms':>10s}{'x bf16':>9s}{'peak GB':>9s}{'GB each way':>12s}{'alone ms':>10s}{'hidden':>9s}"
    )
    failed = measure(report, work, build_context(Layout(), device), arguments.repeats, arguments.groups)
    dist.destroy_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
