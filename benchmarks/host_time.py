"""Time of the host in a step in which the device has next to nothing to do, by part of the step, per parameter.

    python benchmarks/host_time.py                                     # one rank of TP 8, whose collectives do nothing
    torchrun --standalone --nproc-per-node 2 benchmarks/host_time.py   # TP 2

A model of many small layers. Steps with
``smp.layers.parameter.local`` as it is take turns with steps in which it goes through ``DTensor.to_local``. Reported
are medians of the quotient of neighbouring steps, which what else the machine does hits alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_step import MODEL, Work, smp_model

from smp.config import Layout
from smp.layers import parameter
from smp.optim.optimizer import build_optimizer, clip_gradients
from smp.parallel.context import build_context

PARTS = ("forward", "backward", "clipping", "optimizer")
Parts = dict[str, float]


class ByDTensor:
    """In place of ``_Local``: what torch offers."""

    @staticmethod
    def apply(dtensor: Any, dtype: torch.dtype) -> torch.Tensor:
        return dtensor.to_local(grad_placements=dtensor.placements).to(dtype)


@contextmanager
def through_dtensor() -> Iterator[None]:
    """Within, ``local`` goes through ``DTensor.to_local``."""
    module: Any = parameter
    fast = module._Local
    module._Local = ByDTensor
    try:
        yield
    finally:
        module._Local = fast


def step_of(layers: int, micro_batches: int, bf16: bool, sequence_parallel: bool) -> tuple[Callable[[], Parts], int]:
    """A step that tells the microseconds of its parts, and the number of parameters."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "ffn_hidden_size": 64,
        "kv_channels": 8,
        "num_query_groups": 8,
        "vocab_size": 1024,
    }
    work = Work(replace(MODEL, num_layers=layers, **sizes), batch=1, length=16, device="cpu")
    context = build_context(Layout(tp=dist.get_world_size()), "cpu")
    model, place, config = smp_model(work, context, bf16=bf16, sequence_parallel=sequence_parallel)
    optimizer, batch = build_optimizer(model, config.optim, place.context.fsdp), work.micro_batch()

    def step() -> Parts:
        spent = dict.fromkeys(PARTS, 0.0)

        def timed(part: str, run: Callable[[], Any]) -> Any:
            started = time.perf_counter()
            made = run()
            spent[part] += (time.perf_counter() - started) * 1e6
            return made

        for _ in range(micro_batches):
            loss = timed("forward", lambda: model(batch).loss)
            timed("backward", loss.backward)
        timed("clipping", lambda: clip_gradients(model.parameters(), 1.0, context.tp.get_group()))
        timed("optimizer", optimizer.step)
        optimizer.zero_grad()
        return spent

    return step, len(list(model.parameters()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    title = f"{args.layers} layers, TP {dist.get_world_size()}, a thread per process"
    print(f"{title}; us per parameter, of {args.rounds} pairs of steps")
    print(f"{'':40s}{'to_local':>10s}{'local':>10s}   quotient (least to largest)")
    for bf16, split in ((False, False), (False, True), (True, False)):
        for count in (1, 4):
            step, number = step_of(args.layers, count, bf16, split)
            before, after = [], []
            for _ in range(args.rounds + 1):
                with through_dtensor():
                    before.append(step())
                after.append(step())
            name = (
                f"{'bf16' if bf16 else 'fp32'}{', SP' if split else ''}, {count} micro-batch{'es' if count > 1 else ''}"
            )
            for part in (*PARTS, "step"):
                show(f"{name:26s} {part}", *([total(x, part) / number for x in xs[1:]] for xs in (before, after)))
    dist.destroy_process_group()


def total(spent: Parts, part: str) -> float:
    return sum(spent.values()) if part == "step" else spent[part]


def show(name: str, before: list[float], after: list[float]) -> None:
    """A row."""
    quotients = [b / a for b, a in zip(before, after, strict=True)]
    spread = f"{statistics.median(quotients):.2f} ({min(quotients):.2f} to {max(quotients):.2f})"
    print(f"{name:40s}{statistics.median(before):10.1f}{statistics.median(after):10.1f}   {spread}", flush=True)


if __name__ == "__main__":
    main()
