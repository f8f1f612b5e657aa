"""A training step of a Llama by both implementations of a model, by transformers alone with FSDP2, and with its own
tensor parallelism, in turns.

    torchrun --nproc-per-node 2 benchmarks/implementations.py [--rounds 15]

All take the same steps: 2 x 128 tokens of each data rank, cross-entropy, fused AdamW, weights in fp32, no clipping
(torch's refuses what transformers' tp_plan leaves, DTensors next to plain tensors).
On shards the row to compare with is transformers' module under ``fully_shard``; at TP its ``tp_plan``. Medians over
turns, multiples as the median of those within a turn. On a machine with other work wall time says little; processor
time counts ranks of a run that wait for each other in shared memory, so of one process (``--nproc-per-node 1``) it is
the work itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import Report
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transform import CONFIG
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings

ROWS, LENGTH = 2, 128
Step = Callable[[], None]


def run_step(folder: str, implementation: str, tp: int) -> Step:
    """Of ``pretrain_gpt.py``."""
    world = dist.get_world_size()
    words = (
        f"--model-config {folder}/config.json --model-implementation {implementation} --mock-data --train-iters 10000 "
        f"--seq-length {LENGTH} --micro-batch-size {ROWS} --global-batch-size {ROWS * world // tp} --lr 1e-4 "
        f"--clip-grad 0 --tensor-model-parallel-size {tp} --log-dir {folder}/{implementation}-{tp} --no-tensorboard "
        "--no-progress-bar"
    )
    process = Process(dist.get_rank(), world, dist.get_rank())
    run = Run(Pretraining(read_settings(words.split(), PRESETS, world)), process, torch.device("cpu"), StopSignal())

    batch = run.batches.next_or_reason()

    def step() -> None:
        run.trainer.train_step(batch)

    return step


def plain_step(folder: str, tp: int) -> Step:
    """Of transformers alone: sharded by FSDP2, or cut by its plan."""
    if tp > 1:
        from transformers.distributed import DistributedConfig

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=tp)
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    weights = list(model.parameters())
    groups = [
        [p for p in weights if isinstance(p, DTensor) == cut] for cut in (True, False)
    ]  # not together in one call
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group], lr=1e-4, betas=(0.9, 0.95), fused=True
    )
    drawn = torch.Generator().manual_seed(dist.get_rank() // tp)
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH), generator=drawn)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(step: Step) -> tuple[float, float]:
    """Seconds of (wall time, processor time), of the slowest rank."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    step()
    taken = torch.tensor((time.perf_counter() - wall, time.process_time() - processor), dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken[0]), float(taken[1])


def table(report: Report | None, title: str, steps: dict[str, Step], rounds: int) -> None:
    """Time all in turns; the first is what the others are compared with."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            taken = measure(step)
            found[name] += [taken] if turn >= 2 else []
    if report is None:
        return
    report.say(title)
    first = found[next(iter(steps))]
    for name, times in found.items():
        wall, processor = (statistics.median(kind) for kind in zip(*times, strict=True))
        pairs = list(zip(first, times, strict=True))
        multiples = [statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1)]
        report.say(
            f"  {name:<36} wall {wall * 1e3:7.1f} ms, {multiples[0]:5.2f} x   "
            f"processor {processor * 1e3:7.1f} ms, {multiples[1]:5.2f} x"
        )


def main() -> None:
    """Two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder[0])
    dist.barrier()
    world = dist.get_world_size()
    report = Report(f"implementations_{world}", "cpu") if dist.get_rank() == 0 else None
    rivals = {1: f"transformers and FSDP2, {world} shards", world: f"transformers' tp_plan, TP {world}"}
    for tp, plain in rivals.items() if world > 1 else [(1, "transformers and FSDP2, one process")]:
        steps = {plain: plain_step(folder[0], tp)}
        for implementation in ("transformers", "smp"):
            steps[f"pretrain_gpt.py, {implementation}"] = run_step(folder[0], implementation, tp)
        table(report, f"{plain}: {ROWS} x {LENGTH} tokens of a data rank, fp32", steps, rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
