"""A function that is called after each step: here it writes how large the weights are, every few steps.

    torchrun --nproc-per-node 2 examples/step_callback.py --mock-data --vocab-size 1000 --seq-length 128 \
        --train-iters 20 --tensor-model-parallel-size 2

``pretrain_gpt.main`` and ``finetune.main`` take such functions, as the Trainer of transformers and Lightning take
callbacks. Each is called on every rank, with what the step measured (the same on all ranks) and this rank's part of the
model after the step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import pretrain_gpt
from smp.models.protocol import Model
from smp.training.trainer import StepResult


class WeightScale:
    """Appends a line of JSON to ``path`` every ``every`` steps: iteration, loss, and the root mean square of each
    weight. A resumed run appends to the same file."""

    def __init__(self, path: Path, every: int = 5) -> None:
        self.path, self.every = path, every

    @torch.no_grad()
    def __call__(self, result: StepResult, model: Model) -> None:
        # By the iteration and not by a count of calls: all ranks decide alike, and so does a resumed run.
        if result.iteration % self.every or result.skipped:
            return
        scales = {}
        for name, weight in model.named_parameters():
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()  # a collective: before anything that only rank 0 does
            scales[name] = weight.float().square().mean().sqrt().item()
        if dist.get_rank() == 0:
            line = {"iteration": result.iteration, "loss": result.loss, "learning rate": result.learning_rate}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"scales": scales}) + "\n")


if __name__ == "__main__":
    sys.exit(pretrain_gpt.main(sys.argv[1:], callbacks=[WeightScale(Path("weights.jsonl"))]))
