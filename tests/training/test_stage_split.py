"""Where pipeline stages end changes no bit: of losses, gradient norms, what routers log, and weights that are clipped.

Full recompute moves layers between stages, since it counts when they are balanced; so a run would differ by it.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from smp.optim.optimizer import clip_gradients
from tests.distributed import run_distributed
from tests.training.tuning_lab import pretrain, together

RUN = (
    "--mock-data --hidden-size 64 --num-layers 5 --num-attention-heads 4 --vocab-size 1400 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --log-interval 1 "
    "--lr 0.01 --init-method-std 0.1 --clip-grad 0.5 --no-tensorboard --no-progress-bar "
    "--pipeline-model-parallel-size 2"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
KINDS = {
    "FP8 by rows": "--fp8-format hybrid --fp8-recipe rowwise --fp8-emulate",
    "experts that drop tokens, multi-token prediction": f"{EXPERTS} --moe-expert-capacity-factor 1 --mtp-num-layers 1",
    "a tied matrix, bf16": "--no-untie-embeddings-and-output-weights --bf16",
}
SPLITS = ("", "--recompute-granularity full", "--pipeline-model-parallel-layout Et|t*4L")


def runs(rank: int, world: int, kinds: list[str]) -> list[list[dict[str, Any]]]:
    return [[pretrain(rank, world, f"{RUN} {KINDS[kind]} {split}") for split in SPLITS] for kind in kinds]


def test_a_run_is_the_same_wherever_its_stages_end() -> None:
    kinds = list(KINDS)
    ranks = run_distributed(runs, 2, kinds)
    layers = [{len(part["initial"]) for part in found[0]} for found in ranks]
    assert all(len(numbers) > 2 for numbers in layers), "the splits differ"
    for number, kind in enumerate(kinds):
        first, *others = (together([rank[number][i] for rank in ranks]) for i in range(len(SPLITS)))
        assert min(first["norms"]) > 0.5, "clipping bites"
        for split, other in zip(SPLITS[1:], others, strict=True):
            for name in ("losses", "norms", "more"):
                assert other[name] == first[name], (kind, split, name)
            differ = [name for name, t in first["final"].items() if not torch.equal(t, other["final"][name])]
            assert differ == [], (kind, split)


def norms(rank: int, world: int, seeds: int) -> list[set[float]]:
    """Of the gradients of each seed, shared out to the ranks in many ways."""
    found = []
    for seed in range(seeds):
        made = torch.Generator().manual_seed(seed)
        grads = [torch.randn(7 + i, generator=made) * 10 ** (i % 5 - 2) for i in range(24)]
        seen, order = set(), random.Random(seed)
        for _ in range(12):
            order.shuffle(grads)
            cut = order.randrange(len(grads) + 1)
            mine = grads[:cut] if rank == 0 else grads[cut:]
            parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in mine]
            for parameter, grad in zip(parameters, mine, strict=True):
                parameter.grad = grad.clone()
            copies = dict.fromkeys(parameters, 1 / world)  # one rank has it, not all
            seen.add(clip_gradients(parameters, 0.0, copies=copies).item())  # type: ignore[arg-type]
        found.append(seen)
    return found


def test_a_norm_does_not_depend_on_who_sums_what() -> None:
    for found in run_distributed(norms, 2, 40):
        assert all(len(seen) == 1 for seen in found)
