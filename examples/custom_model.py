"""A masked-token encoder, an architecture that smp does not have, made of smp's layers under TP x hybrid FSDP.

    torchrun --nproc-per-node 4 examples/custom_model.py --tp 2 --shard 2 --steps 100 --save encoder
    torchrun --nproc-per-node 2 examples/custom_model.py --tp 1 --shard 2 --steps 50 --load encoder

Of the processes --tp share every matrix, --shard times as many share weights and optimizer state, the rest are
replicas. Any layout trains alike and loads what any other one saved. CPU or GPUs; nothing but torch's DeviceMesh.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp import checkpoint, layers
from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, exit_code, in_one_line
from smp.optim.optimizer import clip_gradients
from smp.sharding.parallelize import shard
from smp.training.process import Process
from smp.training.settings import report as report_end

VOCAB, HIDDEN, HEADS, LENGTH, BATCH, MASK = 100, 64, 4, 16, 48, 99


class Encoder(nn.Module):
    """Tokens, labels and weights, each (batch, length) -> sum of weight x cross-entropy of the label."""

    def __init__(self, tp: DeviceMesh, depth: int = 2) -> None:
        super().__init__()
        self.embedding = layers.VocabParallelEmbedding(VOCAB, HIDDEN, tp)
        self.positions = layers.PositionEmbedding(LENGTH, HIDDEN, tp)
        self.blocks = nn.ModuleList(self.block(tp) for _ in range(depth))
        self.norm = layers.LayerNorm(HIDDEN, tp)
        self.head = layers.VocabParallelHead(VOCAB, HIDDEN, tp)  # each rank has some columns of the logits

    @staticmethod
    def block(tp: DeviceMesh) -> nn.Module:
        attention = layers.SelfAttention(
            HIDDEN, HEADS, tp, spec=layers.AttentionSpec(causal=False), bias=True, qkv_bias=True
        )
        mlp = layers.MLP(HIDDEN, 4 * HIDDEN, tp, activation="gelu", bias=True)
        return layers.TransformerBlock(attention, mlp, layers.LayerNorm(HIDDEN, tp), layers.LayerNorm(HIDDEN, tp))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        layout = layers.TokenLayout(batch, length)
        x = self.embedding(tokens.flatten()) + self.positions(torch.arange(length, device=tokens.device).repeat(batch))
        for block in self.blocks:
            x = block(x, layout)  # (tokens, hidden)
        return self.head(self.norm(x), labels.flatten(), weights.flatten()).loss


def mean_loss(model: nn.Module, step: int, data: DeviceMesh, device: str) -> torch.Tensor:
    """This rank's part of the mean loss over the masked tokens of global batch ``step``: counting, with gaps."""
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.randint(MASK, (BATCH, 1), generator=generator) + torch.arange(LENGTH)) % MASK
    masked = torch.rand(tokens.shape, generator=generator) < 0.2
    inputs, weights = tokens.masked_fill(masked, MASK), masked / masked.sum()
    rank = data.get_local_rank("replicate") * data["shard"].size() + data.get_local_rank("shard")
    mine = slice(rank, None, data.size())
    return model(*(x[mine].to(device) for x in (inputs, tokens, weights)))


def report(step: int, loss: torch.Tensor, data: DeviceMesh) -> None:
    """Sum the ranks' parts of a loss and print it."""
    total = loss.detach().clone()
    for name in ("replicate", "shard"):
        dist.all_reduce(total, group=data.get_group(name))
    if dist.get_rank() == 0:
        print(f"step {step} loss {total.item():.6f}", flush=True)


def arguments(process: Process) -> argparse.Namespace:
    """The command line. Raises ConfigError for a layout that cannot be."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="processes that share every matrix")
    parser.add_argument("--shard", type=int, default=1, help="times as many share weights and optimizer state")
    parser.add_argument("--steps", type=int, default=100, help="to train, from where --load stopped")
    parser.add_argument("--save", metavar="FOLDER", help="leave a checkpoint")
    parser.add_argument("--load", metavar="FOLDER", help="continue from a checkpoint")
    args = parser.parse_args()
    if not process.under_launcher:
        raise ConfigError("start it with torchrun, as the first lines of this file show")
    if min(args.tp, args.shard) < 1 or process.world_size % (args.tp * args.shard):
        raise ConfigError(f"--tp {args.tp} x --shard {args.shard} does not divide {process.world_size} processes")
    return args


def train(args: argparse.Namespace) -> None:
    """Build, load, train, save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    sizes = (dist.get_world_size() // (args.tp * args.shard), args.shard, args.tp)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]

    with torch.device("meta"):  # no rank ever holds more than its part
        model = Encoder(mesh["tp"])
    shard(model, list(model.blocks), data)
    model.to_empty(device=device)
    layers.init_weights(model, seed=0)  # the same bits in every layout
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tensors, _ = checkpoint.training_state(model, optimizer)
    rows = checkpoint.collect_logical_rows(model, optimizer)
    first = 0
    if args.load:
        extra = checkpoint.load(tensors, args.load, logical_rows=rows)
        checkpoint.restore_optimizer_scalars(model, optimizer, extra["optimizer_steps"])
        first = extra["step"]

    last = first + args.steps
    for step in range(first, last):
        loss = mean_loss(model, step, data, device)
        if step % 10 == 0:
            report(step, loss, data)
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        report(last, mean_loss(model, last, data, device), data)
    if args.save:
        tensors, steps = checkpoint.training_state(model, optimizer)
        checkpoint.save(tensors, args.save, extra={"step": last, "optimizer_steps": steps}, logical_rows=rows)
    dist.barrier()  # gloo may still be handing back the last sum, and aborts a process that exits meanwhile
    dist.destroy_process_group()


def main() -> int:
    process = Process.from_environment()
    try:
        train(arguments(process))
    except (ValueError, OSError) as error:
        report_end(in_one_line(error), process.rank)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
