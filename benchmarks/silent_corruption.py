"""Flip bits in a real run and count which are found: weights, moments, gradients; sign, exponent, mantissa.

    python benchmarks/silent_corruption.py --ranks 3 --flips 200
    python benchmarks/silent_corruption.py --ranks 3 --flips 200 --rerun

Starts ``pretrain_gpt.py --check-replicas-interval 1`` with torchrun, every rank a replica. In every second step one bit
of one element on one rank flips: of a weight or a moment before the step, of a gradient after it was summed over the
replicas, or, with --rerun, before that. A flip counts as found if the next comparison names its rank; the steps between
have none and count false alarms. Runs on CPUs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

import torch

PARTS = ("weight", "exp_avg", "exp_avg_sq", "gradient")
BITS = {"mantissa": range(23), "exponent": range(23, 31), "sign": range(31, 32)}
FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 16 --micro-batch-size 1 --log-interval 1000000 --no-tensorboard --no-progress-bar "
    "--check-replicas-interval 1 --hybrid-shard-degree 1 --max-skipped-steps 1000"
)


def planned(flips: int, ranks: int, seed: int) -> list[tuple[str, str, int, int]]:
    """(part, kind of bit, bit, rank), each part and kind as often as the others."""
    draw = random.Random(seed)
    cases = [(PARTS[i % 4], list(BITS)[i // 4 % 3]) for i in range(flips)]
    return [(part, kind, draw.choice(BITS[kind]), draw.randrange(ranks)) for part, kind in cases]


def worker(argv: list[str]) -> int:
    """One rank of the run."""
    import pretrain_gpt
    from smp.parallel.dtensor_region import local_part
    from smp.training import trainer
    from tests.training.test_replicas import flip

    flips, seed, before_sum = (int(word) for word in argv[:3])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cases, draw = planned(flips, ranks, seed), random.Random(seed + 1)
    start, clip, state = trainer.Trainer.start_step, trainer.clip_gradients, {"gradient": None}

    def start_step(self: Any, *arguments: Any) -> Any:
        number, even = divmod(self.progress.iteration, 2)
        part, _, bit, wrong = cases[min(number, flips - 1)]
        name = draw.choice([name for name, _ in self.model.named_parameters()])
        place, now = draw.random(), even == 1 and number < flips
        parameter = self.model.get_parameter(name)
        state["gradient"] = None
        if now and rank == wrong and part == "gradient":
            state["gradient"] = parameter, place, bit
        elif now and rank == wrong:
            tensor = parameter if part == "weight" else self.optimizer.state[parameter][part]
            hit(tensor, place, bit)
        return start(self, *arguments)

    def hit(tensor: torch.Tensor, place: float, bit: int) -> None:
        shard = local_part(tensor.detach())
        flip(shard, int(place * shard.numel()), bit)

    def clip_gradients(*arguments: Any, **more: Any) -> Any:
        if state["gradient"] is not None and not before_sum:
            parameter, place, bit = state["gradient"]
            state["gradient"] = None
            hit(parameter.grad, place, bit)
        return clip(*arguments, **more)

    backward = torch.Tensor.backward

    def spoiled(self: Any, *arguments: Any, **more: Any) -> Any:
        """Before the sum over replicas: of what the loss sends back, once."""
        if state["gradient"] is not None and before_sum:
            *_, bit = state["gradient"]
            state["gradient"] = None
            seeds = torch.ones_like(self).view(1)
            flip(seeds, 0, bit)
            return backward(self, seeds.view(()), **more)
        return backward(self, *arguments, **more)

    trainer.Trainer.start_step, trainer.clip_gradients = start_step, clip_gradients  # type: ignore[method-assign]
    torch.Tensor.backward = spoiled  # type: ignore[method-assign]
    return pretrain_gpt.main(argv[3:])


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        return worker(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rerun", action="store_true", help="flip gradients before they are summed, and repeat steps")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{FLAGS} --global-batch-size {args.ranks} --train-iters {2 * args.flips + 2} --log-dir {folder}"
        flags += " --rerun-mode validate_results" if args.rerun else ""
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        words += [__file__, "--worker", str(args.flips), str(args.seed), str(int(args.rerun)), *flags.split()]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        return 1
    said = {}
    for line in done.stdout.splitlines():
        if found := re.search(r"iteration (\d+): silent corruption: .*?rank (\d+) on", line):
            said.setdefault(int(found[1]), set()).add(int(found[2]))
    print(table(planned(args.flips, args.ranks, args.seed), said))
    return 0


def table(cases: list[tuple[str, str, int, int]], said: dict[int, set[int]]) -> str:
    """Found by part and kind of bit, and false alarms."""
    found, all_of = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for number, (part, kind, _, rank) in enumerate(cases):
        all_of[part, kind] += 1
        found[part, kind] += said.get(2 * number + 2) == {rank}
    rows = [f"{'':12}" + "".join(f"{kind:>12}" for kind in BITS)]
    for part in PARTS:
        rows.append(f"{part:12}" + "".join(f"{f'{found[part, k]}/{all_of[part, k]}':>12}" for k in BITS))
    false = sum(iteration % 2 == 1 or iteration > 2 * len(cases) for iteration in said)
    wrong = sum(said.get(2 * n + 2, {rank}) != {rank} for n, (_, _, _, rank) in enumerate(cases))
    return "\n".join([*rows, f"false alarms in {len(cases)} steps without a flip: {false}; wrong ranks named: {wrong}"])


if __name__ == "__main__":
    sys.exit(main())
