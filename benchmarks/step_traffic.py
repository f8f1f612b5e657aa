"""What a rank holds and sends in a step of large models, from steps on fake tensors; no GPU, minutes on a CPU.

python benchmarks/step_traffic.py
"""

from __future__ import annotations

import time

from smp.config import Config, Layout
from smp.models.presets import PRESETS
from smp.training.cost.fake_step import StepMeasures, fake_gpu_step
from smp.training.settings import read_settings

COMMON = "--bf16 --seq-length 8192 --mock-data --dry-run "
LAYOUTS = {
    "8B, FSDP 8": (8, "--model llama3-8b --global-batch-size 32"),
    "8B, TP 8 + SP": (8, "--model llama3-8b --global-batch-size 4 --tensor-model-parallel-size 8 --sequence-parallel"),
    "70B, TP 8 + SP x FSDP 8": (
        64,
        "--model llama3-70b --global-batch-size 32 --tensor-model-parallel-size 8 --sequence-parallel",
    ),
}
STRATEGIES = ("optim_grads_params", "optim_grads", "optim")


def settings(flags: str, world: int) -> Config:
    return read_settings([*COMMON.split(), *flags.split()], PRESETS, world)


def measure(flags: str, world: int) -> StepMeasures:
    """Of one rank on a GPU."""
    config = settings(flags, world)
    return fake_gpu_step(config, Layout.from_config(config.parallel, world))


def row(name: str, strategy: str, step: StepMeasures) -> str:
    """Cells of a table."""
    traffic = step.counts.traffic
    cells = [f"{name:24s}", f"{strategy:19s}", f"{step.peak / 2**30:6.2f}"]
    for group, kind in (("dp_shard", "all-gather"), ("dp_shard", "reduce-scatter")):
        entry = traffic.get((group, kind))
        cells.append("      -" if entry is None else f"{entry.calls:4d} {entry.sent / 1e9:7.2f}")
    tp = [entry for (group, _), entry in traffic.items() if group == "tp"]
    cells.append(f"{sum(e.calls for e in tp):5d} {sum(e.sent for e in tp) / 1e9:7.2f}")
    return " | ".join(cells)


def main() -> None:
    """Print the table."""
    print("layout | sharded between micro-batches | peak GiB | gathers, GB | reduce-scatters, GB | TP's, GB")
    for name, (world, flags) in LAYOUTS.items():
        for strategy in STRATEGIES if "FSDP" in name else STRATEGIES[:1]:
            started = time.perf_counter()
            step = measure(f"{flags} --data-parallel-sharding-strategy {strategy}", world)
            print(f"{row(name, strategy, step)} | {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
