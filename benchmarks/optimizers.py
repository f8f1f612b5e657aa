"""Loss curves of optimizers and their moments: a byte-level model on this project's own documentation.

    python benchmarks/optimizers.py --steps 300

Each optimizer starts from the same weights and sees the same batches. Printed are bytes of state per
parameter, processor time, the mean loss of the last 50 steps, and how far means of 50 steps are from those of AdamW
with fp32 moments: the last, and the worst.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

from smp.config import Layout, ModelConfig, OptimizerConfig, ParallelConfig, resolve_model
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.optim.lr_scheduler import learning_rate
from smp.optim.optimizer import build_optimizer, clip_gradients, set_learning_rate
from smp.parallel.context import build_context
from smp.sharding.parallelize import parallelize

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 50
OPTIMIZERS = {
    "adam, fp32": {},
    "adam, bf16": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "adam, fp8": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    "muon": {"optimizer": "muon"},
}


def batches(steps: int, rows: int, length: int) -> list[torch.Tensor]:
    """Pieces of the text at random places."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    data, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - length - 1, (steps, rows), generator=generator)
    return [torch.stack([data[s : s + length + 1].long() for s in row.tolist()]) for row in starts]


def train(options: dict[str, str], data: list[torch.Tensor], seed: int) -> tuple[list[float], float, float]:
    """(losses, bytes of state per parameter, seconds of processor time)."""
    context = build_context(Layout(), "cpu")
    config = resolve_model(ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, vocab_size=256))
    model = GPT(config, context)
    parallelize(model, context, ParallelConfig())
    model.to_empty(device="cpu")
    init_weights(model, seed)
    optim = OptimizerConfig(lr=1e-3, lr_decay_iters=len(data), lr_warmup_iters=len(data) // 20, **options)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, optim, None, seed=seed)
    losses, start = [], time.process_time()
    for step, tokens in enumerate(data):
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        loss = model(MicroBatch(ids, labels=labels, loss_weights=torch.full(ids.shape, 1 / ids.numel()))).loss
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        set_learning_rate(optimizer, learning_rate(optim, step + 1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    spent = time.process_time() - start
    states = (t for state in optimizer.state.values() for t in state.values() if t.ndim)
    size = sum(t.to_local().nbytes for t in states)
    return losses, size / sum(p.numel() for p in model.parameters()), spent


def windows(losses: list[float]) -> torch.Tensor:
    """Means of 50 losses each."""
    return torch.tensor(losses).view(-1, WINDOW).mean(1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="a multiple of 50")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data, base = batches(given.steps, given.rows, given.length), torch.zeros(0)
    print(f"{'optimizer':12s} {'bytes':>7s} {'seconds':>8s} {'last 50':>8s} {'last, %':>8s} {'worst, %':>9s}")
    for name, options in OPTIMIZERS.items():
        losses, size, spent = train(options, data, given.seed)
        means = windows(losses)
        base = base if len(base) else means
        far = 100 * (means / base - 1)
        print(f"{name:12s} {size:7.3f} {spent:8.1f} {means[-1]:8.4f} {far[-1]:8.3f} {far[far.abs().argmax()]:9.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
