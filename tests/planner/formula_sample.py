"""Random layouts of random presets, and how far the memory formula is off the step on tensors without data.

    PYTHONPATH=. python -m tests.planner.formula_sample --first 0 --count 200 --output sample.csv

A sample is a function of its number. Presets keep their widths and get few blocks, so that a step takes seconds;
layouts that smp refuses are drawn again. ``tests/planner/test_formula_sample.py`` runs the first few.
"""

from __future__ import annotations

import argparse
import csv
import random
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from smp.config import Config, ConfigError, Layout
from smp.layers.heads.head import CHUNK_BYTES
from smp.models.presets import PRESETS
from smp.pipeline.stage_plan import Plan, plan_pipeline
from smp.training.cost.fake_step import fake_gpu_step
from smp.training.cost.memory import largest_memory
from smp.training.settings import read_settings


@dataclass(frozen=True)
class Sample:
    """A layout, resolved."""

    world: int
    flags: str
    config: Config
    layout: Layout
    plan: Plan | None

    def error(self) -> tuple[float, float]:
        """(relative error of the formula, GiB of the step) on the rank that needs most."""
        ranks = range(self.layout.pp)
        found = max(fake_gpu_step(self.config, self.layout, self.plan, rank).peak for rank in ranks)
        said = largest_memory(self.config, self.layout, CHUNK_BYTES["cuda"], self.plan).total
        return said / found - 1, found / 2**30


def sample(number: int) -> Sample:
    """The layout of this number."""
    draw = random.Random(f"layout {number}")
    while True:
        world, flags = _drawn(draw)
        try:
            config = read_settings(shlex.split(flags), PRESETS, world)
            layout = Layout.from_config(config.parallel, world)
            return Sample(world, flags, config, layout, plan_pipeline(config, layout) if layout.pp > 1 else None)
        except ConfigError:
            continue


def _drawn(draw: random.Random) -> tuple[int, str]:
    name = draw.choice(sorted(name for name, preset in PRESETS.items() if preset.get("vocab_size")))
    world = draw.choice([1, 2, 4, 8, 8, 16, 16, 32, 64])
    tp, pp, cp = (draw.choice(sizes) for sizes in ([1, 1, 2, 4, 8], [1, 1, 2, 4], [1, 1, 1, 2, 4]))
    preset = PRESETS[name]
    words = [f"--model {name} --bf16 --mock-data --dry-run"]
    words.append(f"--num-layers {draw.choice([2, 4, 6, 8]) * (2 if pp > 2 else 1)}")
    if preset.get("moe_layer_freq") is not None:
        words.append("--moe-layer-freq 1")
    words.append(f"--seq-length {draw.choice([1024, 2048, 4096])} --micro-batch-size {draw.choice([1, 1, 2])}")
    ranks = max(1, world // (tp * pp * cp))
    words.append(f"--global-batch-size {ranks * draw.choice([2, 4, 8, 16])}")
    words.append(f"--recompute-granularity {draw.choice(['none', 'selective', 'full'])}")
    if tp > 1:
        words.append(f"--tensor-model-parallel-size {tp} --sequence-parallel")
    if cp > 1:
        words.append(f"--context-parallel-size {cp} --cp-comm-type {draw.choice(['p2p', 'all_gather', 'a2a'])}")
    if pp > 1:
        schedule = draw.choice(["1f1b", "1f1b", "interleaved", "zb-h1", "zb-v"])
        words.append(f"--pipeline-model-parallel-size {pp} --pipeline-schedule {schedule}")
        words.append("--num-virtual-stages-per-pipeline-rank 2" if schedule == "interleaved" else "")
    else:
        words.append(f"--data-parallel-sharding-strategy {draw.choice(['optim_grads_params', 'optim_grads', 'optim'])}")
    if preset.get("num_experts"):
        words.append(f"--expert-model-parallel-size {draw.choice([1, 2, 4, 8])}")
    words.append(f"--optimizer {draw.choice(['adam', 'adam', 'adam', 'muon'])}")
    return world, " ".join(filter(None, words))


def main() -> None:
    """Write a line for each sample, as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first sample")
    parser.add_argument("--count", type=int, default=200, help="of samples")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    args = parser.parse_args()
    with args.output.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["number", "error_percent", "step_gib", "processes", "flags"])
        for number in range(args.first, args.first + args.count):
            one, began = sample(number), time.monotonic()
            error, gib = one.error()
            lines.writerow([number, f"{100 * error:+.2f}", f"{gib:.2f}", one.world, one.flags])
            file.flush()
            print(
                f"{number} {100 * error:+.2f} % {gib:.1f} GiB {time.monotonic() - began:.1f} s {one.world} {one.flags}"
            )


if __name__ == "__main__":
    main()
