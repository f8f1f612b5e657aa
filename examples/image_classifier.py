"""An image classifier: a ViT of transformers in a loop of one's own, tensor-parallel and sharded by three lines.

    torchrun --nproc-per-node 4 examples/image_classifier.py --tp 2 --shard 2 --steps 60 --save classifier
    torchrun --nproc-per-node 2 examples/image_classifier.py --tp 2 --steps 20 --load classifier

The images are drawn here: stripes at eight angles, in any colour, with noise. Any layout prints the same numbers, but
for rounding, and goes on from what any other one saved. CPU or GPUs.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import ViTConfig, ViTForImageClassification

import smp
from smp import checkpoint

ANGLES, SIZE, BATCH = 8, 32, 64
TINY = ViTConfig(
    image_size=SIZE,
    patch_size=8,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    hidden_dropout_prob=0.0,  # masks would depend on the layout
    attention_probs_dropout_prob=0.0,
    num_labels=ANGLES,
)


def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of batch ``step``: images (rows, 3, size, size) and the numbers of their angles."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(ANGLES, (BATCH,), generator=generator)
    angles = (labels * math.pi / ANGLES)[:, None, None]
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    phases = 2 * math.pi * torch.rand(BATCH, 1, 1, generator=generator)
    stripes = torch.sin(0.8 * (x * angles.cos() + y * angles.sin()) + phases)  # (batch, size, size)
    images = stripes[:, None] * torch.rand(BATCH, 3, 1, 1, generator=generator)
    images += 0.3 * torch.randn(images.shape, generator=generator)
    mine = slice(smp.state.dp_rank, None, smp.state.dp_size)
    return images[mine].to(smp.state.device_type), labels[mine].to(smp.state.device_type)


def main() -> None:
    """Load, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder of a ViT; by default a tiny one with random weights")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every matrix")
    parser.add_argument("--shard", type=int, default=0, help="data ranks that share one copy of the weights; 0: all")
    parser.add_argument("--steps", type=int, default=60, help="to train, from where --load stopped")
    parser.add_argument("--save", metavar="FOLDER", help="leave a checkpoint")
    parser.add_argument("--load", metavar="FOLDER", help="continue from a checkpoint")
    args = parser.parse_args()

    smp.init({"tensor_parallel_degree": args.tp, "hybrid_shard_degree": args.shard})  # 1
    torch.manual_seed(0)
    model = ViTForImageClassification.from_pretrained(args.model) if args.model else ViTForImageClassification(TINY)
    smp.transform(model, device=smp.state.device_type)  # 2
    for layer in model.vit.layers:
        fully_shard(layer, mesh=smp.state.data_mesh)
    fully_shard(model, mesh=smp.state.data_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first = 0
    if args.load:
        tensors, _ = checkpoint.training_state(model, optimizer)
        extra = checkpoint.load(tensors, args.load)
        checkpoint.restore_optimizer_scalars(model, optimizer, extra["optimizer_steps"])
        first = extra["step"]
    last = first + args.steps
    for step in range(first, last):
        images, labels = draw(step)
        out = model(pixel_values=images, labels=labels)
        out.loss.backward()
        norm = smp.clip_grad_norm_(model, 1.0)  # 3
        optimizer.step()
        optimizer.zero_grad()
        right = (out.logits.argmax(-1) == labels).float().mean()
        loss, right = (smp.state.mean_over_data(x.detach()) for x in (out.loss, right))
        if smp.state.rank == 0 and (step % 10 == 0 or step == last - 1):
            print(f"step {step} loss {loss:.6f} norm {norm:.6f} right {right:.2f}", flush=True)
    if args.save:
        tensors, steps = checkpoint.training_state(model, optimizer)
        checkpoint.save(tensors, args.save, extra={"step": last, "optimizer_steps": steps})
    dist.barrier()  # gloo may still be handing back the last sum, and aborts a process that exits meanwhile
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
