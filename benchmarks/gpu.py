"""The one-GPU training table: ``make gpu`` writes it to ``benchmarks/results/training_step_gpu.txt``.

Llama 3.2 1B's sizes in bf16 with fp32 master weights, 4 x 2,048 tokens a step, beside transformers with autocast and
SDPA. Entries take turns, one step each.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from training_step import Entry, Work, interleave, product_limit, show, smp_step, transformers_step

from smp.config import Config, Layout, ModelConfig, resolve
from smp.models.arithmetic import peak_flops
from smp.models.presets import PRESETS
from smp.parallel.mesh import build_mesh

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 10


def main() -> None:
    """Measure, print and write."""
    torch.set_float32_matmul_precision("high")
    model = replace(ModelConfig(), **{**PRESETS["llama3.2-1b"], "untie_embeddings_and_output_weights": True})
    model = replace(model, use_rope_scaling=False)  # transformers' plain Llama on the other side
    config = Config(model=model)
    config.training.dry_run = True
    work = Work(resolve(config, 1).model, batch=4, length=2048, device="cuda")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = build_mesh(Layout(), "cuda")
    entries = [
        Entry("transformers", transformers_step(work, bf16=True), 1, []),
        Entry("smp", smp_step(work, mesh, bf16=True), 1, []),
        Entry("smp --compile", smp_step(work, mesh, bf16=True, compile=True), 1, []),
    ]
    interleave(entries, ROUNDS)
    name = torch.cuda.get_device_name()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print(f"{date.today()}, commit {commit.strip()}, torch {torch.__version__}, {name}")
        show(f"one step, bf16, {work.batch} x {work.length} tokens", work, entries)
        limit = product_limit(8192, 8192, 8192, torch.bfloat16, "cuda")
        print(f"  limit: {limit / 1e12:.0f} TFLOP/s, a product of 8192^3 alone; data sheet: {peak_flops(name, 'bf16')}")
        print(f"  largest memory of the three together: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(text.getvalue())
    path = ROOT / "benchmarks/results/training_step_gpu.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.getvalue())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
