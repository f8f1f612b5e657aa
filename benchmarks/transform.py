"""A step (forward and backward) of a small Llama of transformers, transformed and not; in turns, processor time.

    python benchmarks/transform.py                              # one process: the losses beside Hugging Face's own
    torchrun --nproc-per-node 2 benchmarks/transform.py         # TP 2: beside transformers' own tp_plan="auto"

Processor time of the slowest rank, its minimum over rounds: waiting for a busy machine does not count. At TP 2 also
wall time, medians, beside one process with a thread for each rank, while the other ranks wait.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

import smp

CONFIG = LlamaConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
)


def variants(tp: int, dtype: torch.dtype, folder: str) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; the first is what the others are compared with."""

    def plain() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def ours(sequence_parallel: bool = False, **options: Any) -> Any:
        smp.state.reset()
        smp.init({"tensor_parallel_degree": tp, "sequence_parallel": sequence_parallel})
        return smp.transform(plain(), **options)

    def theirs() -> Any:
        from transformers.distributed import DistributedConfig

        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, distributed_config=DistributedConfig(tp_size=tp)
        )

    made = {f"transformed, loss={loss}": lambda loss=loss: ours(loss=loss) for loss in ("gathered", "chunked")}
    if tp == 1:
        return {"untransformed": plain, **made}
    made["transformed, loss=vocab_parallel"] = lambda: ours(loss="vocab_parallel")
    made["transformed, sequence_parallel"] = lambda: ours(sequence_parallel=True, loss="vocab_parallel")
    return {"transformers' tp_plan": theirs, **made}


def step(model: Any, ids: torch.Tensor) -> float:
    """Seconds of processor time, of the slowest rank."""
    model.zero_grad(set_to_none=True)
    begin = time.process_time()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    seconds = torch.tensor(time.process_time() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def wall_seconds(model: Any, ids: torch.Tensor, threads: int, alone: bool) -> float:
    """Seconds of a step, until all ranks are done; ``alone``: of rank 0, for which the others wait."""
    torch.set_num_threads(threads)
    dist.barrier()
    begin = time.perf_counter()
    if not alone or dist.get_rank() == 0:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    dist.barrier()
    seconds = time.perf_counter() - begin
    torch.set_num_threads(1)
    return seconds


def beside_threads(tp: int, dtype: torch.dtype, folder: str, ids: torch.Tensor, rounds: int) -> None:
    """Ranks of a thread each beside one process with as many threads, transformed and not."""

    def made(degree: int, **options: Any) -> Any:
        smp.state.reset()
        smp.init({"tensor_parallel_degree": degree})
        return smp.transform(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), **options)

    models = {
        f"transformed, TP 1, {tp} threads": (made(1), tp, True),
        f"untransformed, {tp} threads": (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), tp, True),
        f"transformed, TP {tp}, gathered": (made(tp), 1, False),
        f"transformed, TP {tp}, vocab_parallel": (made(tp, loss="vocab_parallel"), 1, False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, (model, threads, alone) in models.items():
            seconds[name].append(wall_seconds(model, ids, threads, alone))
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    first = next(iter(median.values()))
    if dist.get_rank() == 0:
        print(f"  wall time on {tp} cores, medians", flush=True)
        for name, value in median.items():
            print(f"  {name:<36} {value * 1e3:8.1f} ms  {first / value:5.2f} x", flush=True)


def main() -> None:
    """A table for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    smp.init({})
    tp = dist.get_world_size()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG)).save_pretrained(folder[0])
    dist.barrier()
    ids = torch.randint(0, CONFIG.vocab_size, (args.batch, args.length), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        models = {name: make() for name, make in variants(tp, dtype, folder[0]).items()}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(args.rounds):
            for name, model in models.items():
                seconds[name].append(step(model, ids))
        best = {name: min(times[1:]) for name, times in seconds.items()}
        first = next(iter(best.values()))
        if dist.get_rank() == 0:
            print(f"{args.batch} x {args.length} tokens, {str(dtype).removeprefix('torch.')}, TP {tp}", flush=True)
            for name, value in best.items():
                print(f"  {name:<36} {value * 1e3:8.1f} ms  {first / value:5.2f} x", flush=True)
        del models
        if tp > 1:
            beside_threads(tp, dtype, folder[0], ids, args.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
