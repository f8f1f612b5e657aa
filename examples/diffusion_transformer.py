"""A diffusion transformer of smp's layers, trained by flow matching under tensor parallelism and hybrid FSDP.

    torchrun --nproc-per-node 4 examples/diffusion_transformer.py --tp 2 --shard 2 --steps 200 --save flow
    torchrun --nproc-per-node 2 examples/diffusion_transformer.py --tp 1 --shard 2 --steps 100 --load flow

DiT's blocks (Peebles and Xie 2023, arXiv 2212.09748): norms without weights, whose scale, shift and gate come from the
time and the class (adaLN-Zero). It learns the velocity of straight paths from noise to data (Lipman et al. 2023, arXiv
2210.02747). The latents are made here: waves of eight directions. At the end it draws some from noise, and counts those
that are of the class that was asked for. Any layout trains alike and loads what any other one saved. CPU or GPUs.
"""

from __future__ import annotations

import argparse
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

from smp import checkpoint, layers
from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, exit_code, in_one_line
from smp.optim.optimizer import clip_gradients
from smp.sharding.parallelize import shard
from smp.training.process import Process
from smp.training.settings import report as report_end

WAVES = torch.tensor([(0, 1), (1, 0), (1, 1), (1, 7), (0, 2), (2, 0), (1, 2), (2, 1)])  # a class each, by (y, x)
CHANNELS, SIZE, PATCH, HIDDEN, HEADS, BATCH = 2, 8, 2, 64, 4, 64
TOKENS, VALUES = (SIZE // PATCH) ** 2, CHANNELS * PATCH**2


class Whole(nn.Module):
    """A linear layer that every tensor-parallel rank has and computes whole: what it reads is the same on all."""

    def __init__(self, inputs: int, outputs: int, tp: DeviceMesh, std: float | None = None) -> None:
        super().__init__()
        self.weight = layers.tp_parameter((outputs, inputs), Replicate(), tp)
        self.bias = layers.tp_parameter((outputs,), Replicate(), tp)
        first = layers.Normal(inputs**-0.5 if std is None else std) if std != 0.0 else layers.Constant(0.0)
        self.initializers = {"weight": first, "bias": layers.Constant(0.0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layers.local(self.weight, x.dtype), layers.local(self.bias, x.dtype))


class Block(nn.Module):
    """(tokens, hidden) and the condition of each sample (batch, hidden) -> (tokens, hidden)."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        spec = layers.AttentionSpec(causal=False)
        self.attention = layers.SelfAttention(HIDDEN, HEADS, tp, spec=spec, bias=True, qkv_bias=True)
        self.mlp = layers.MLP(HIDDEN, 4 * HIDDEN, tp, activation="gelu", bias=True)
        self.modulation = Whole(HIDDEN, 6 * HIDDEN, tp, std=0.0)  # a block begins as the identity

    def forward(self, x: torch.Tensor, condition: torch.Tensor, layout: layers.TokenLayout) -> torch.Tensor:
        of_samples = self.modulation(F.silu(condition))
        shift, scale, gate, shift_2, scale_2, gate_2 = of_samples.repeat_interleave(TOKENS, 0).chunk(6, 1)
        x = x + gate * self.attention(modulated(x, shift, scale), layout)
        return x + gate_2 * self.mlp(modulated(x, shift_2, scale_2))


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (HIDDEN,)) * (1 + scale) + shift


class Flow(nn.Module):
    """Latents (batch, channels, size, size) at times (batch,) of classes (batch,) -> their velocity."""

    def __init__(self, tp: DeviceMesh, depth: int = 3) -> None:
        super().__init__()
        self.patches = Whole(VALUES, HIDDEN, tp)
        self.positions = layers.PositionEmbedding(TOKENS, HIDDEN, tp)
        self.times = nn.Sequential(Whole(HIDDEN, HIDDEN, tp), nn.SiLU(), Whole(HIDDEN, HIDDEN, tp))
        self.classes = layers.VocabParallelEmbedding(len(WAVES), HIDDEN, tp)
        self.blocks = nn.ModuleList(Block(tp) for _ in range(depth))
        self.modulation = Whole(HIDDEN, 2 * HIDDEN, tp, std=0.0)
        self.head = Whole(HIDDEN, VALUES, tp, std=0.0)

    def forward(self, latents: torch.Tensor, times: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        batch, side = len(latents), SIZE // PATCH
        # fold and unfold are each other's inverse here: patches do not overlap
        x = self.patches(F.unfold(latents, PATCH, stride=PATCH).transpose(1, 2).reshape(-1, VALUES))
        x = x + self.positions(torch.arange(side * side, device=x.device).repeat(batch))
        rates = torch.exp(-math.log(1e4) * torch.arange(HIDDEN // 2, device=x.device) / (HIDDEN // 2))
        angles = 1000 * times[:, None] * rates
        condition = self.times(torch.cat((angles.cos(), angles.sin()), 1)) + self.classes(classes)
        layout = layers.TokenLayout(batch, TOKENS)
        for block in self.blocks:
            x = block(x, condition, layout)
        shift, scale = self.modulation(F.silu(condition)).repeat_interleave(TOKENS, 0).chunk(2, 1)
        values = self.head(modulated(x, shift, scale)).view(batch, TOKENS, VALUES)
        return F.fold(values.transpose(1, 2), SIZE, PATCH, stride=PATCH)


def make(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents (batch, channels, size, size) and their classes: waves, each moved by up to a quarter of its length."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(len(WAVES), (BATCH,), generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    ways = WAVES[classes][:, :, None, None]
    phases = torch.rand(BATCH, CHANNELS, 1, 1, generator=generator) / 4
    return torch.sin(2 * math.pi * ((ways[:, :1] * y + ways[:, 1:] * x) / SIZE + phases)) * 2**0.5, classes


def rank_of(data: DeviceMesh) -> int:
    return int(data.get_local_rank("replicate") * data["shard"].size() + data.get_local_rank("shard"))


def flow_loss(model: nn.Module, step: int, data: DeviceMesh, device: str) -> torch.Tensor:
    """This rank's part of the mean over batch ``step`` of the squared error of the velocity."""
    latents, classes = make(step)
    generator = torch.Generator().manual_seed(step + 2**32)
    noise, times = torch.randn(latents.shape, generator=generator), torch.rand(BATCH, generator=generator)
    mine = slice(rank_of(data), None, data.size())
    latents, classes, noise, times = (x[mine].to(device) for x in (latents, classes, noise, times))
    between = torch.lerp(noise, latents, times[:, None, None, None])
    found: torch.Tensor = model(between, times, classes)
    return (found - (latents - noise)).square().mean((1, 2, 3)).sum() / BATCH


@torch.no_grad()
def drawn_right(model: nn.Module, data: DeviceMesh, device: str, steps: int = 20) -> torch.Tensor:
    """This rank's part of the share of samples, drawn from noise along the flow, that are of the class asked for."""
    noise, classes = make(-1)[0], torch.arange(BATCH) % len(WAVES)
    noise = torch.randn(noise.shape, generator=torch.Generator().manual_seed(0))
    mine = slice(rank_of(data), None, data.size())
    x, classes = noise[mine].to(device), classes[mine].to(device)
    for i in range(steps):
        x = x + model(x, torch.full((len(x),), i / steps, device=device), classes) / steps
    power = torch.fft.fft2(x).abs().square().sum(1)  # (batch, size, size)
    strongest = power[:, WAVES[:, 0], WAVES[:, 1]].argmax(1)
    return (strongest == classes).float().sum() / BATCH


def report(step: int, what: str, part: torch.Tensor, data: DeviceMesh) -> None:
    """Sum the ranks' parts of a number and print it."""
    total = part.detach().clone()
    for name in ("replicate", "shard"):
        dist.all_reduce(total, group=data.get_group(name))
    if dist.get_rank() == 0:
        print(f"step {step} {what} {total.item():.6f}", flush=True)


def arguments(process: Process) -> argparse.Namespace:
    """The command line. Raises ConfigError for a layout that cannot be."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="processes that share every matrix")
    parser.add_argument("--shard", type=int, default=1, help="times as many share weights and optimizer state")
    parser.add_argument("--steps", type=int, default=200, help="to train, from where --load stopped")
    parser.add_argument("--save", metavar="FOLDER", help="leave a checkpoint")
    parser.add_argument("--load", metavar="FOLDER", help="continue from a checkpoint")
    args = parser.parse_args()
    if not process.under_launcher:
        raise ConfigError("start it with torchrun, as the first lines of this file show")
    if min(args.tp, args.shard) < 1 or process.world_size % (args.tp * args.shard):
        raise ConfigError(f"--tp {args.tp} x --shard {args.shard} does not divide {process.world_size} processes")
    return args


def train(args: argparse.Namespace) -> None:
    """Build, load, train, draw, save."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    sizes = (dist.get_world_size() // (args.tp * args.shard), args.shard, args.tp)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]

    with torch.device("meta"):  # no rank ever holds more than its part
        model = Flow(mesh["tp"])
    shard(model, list(model.blocks), data)
    model.to_empty(device=device)
    layers.init_weights(model, seed=0)  # the same bits in every layout
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tensors, _ = checkpoint.training_state(model, optimizer)
    rows = checkpoint.collect_logical_rows(model, optimizer)
    first = 0
    if args.load:
        extra = checkpoint.load(tensors, args.load, logical_rows=rows)
        checkpoint.restore_optimizer_scalars(model, optimizer, extra["optimizer_steps"])
        first = extra["step"]

    last = first + args.steps
    for step in range(first, last):
        loss = flow_loss(model, step, data, device)
        if step % 10 == 0:
            report(step, "loss", loss, data)
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report(last, "right", drawn_right(model, data, device), data)
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
