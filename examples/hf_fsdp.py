"""A Hugging Face model in a training loop of one's own, tensor-parallel and sharded.

    torchrun --nproc-per-node 4 examples/hf_fsdp.py --tp 2 --shard 2 --save out
    torchrun --nproc-per-node 1 examples/hf_fsdp.py --model out

The three lines of smp are marked; without them this is an FSDP2 script. CPU or GPUs. Any
layout prints the same losses, but for rounding.
"""

from __future__ import annotations

import argparse

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import smp

ROWS, LENGTH = 8, 32
TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=2,
)


def batch(step: int, device: str) -> torch.Tensor:
    """This rank's rows of a global batch: ids that count, from somewhere."""
    start = torch.randint(256, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    rows = (start + torch.arange(LENGTH)) % 256
    return rows.chunk(smp.state.dp_size)[smp.state.dp_rank].to(device)


def main() -> None:
    """Train for some steps; save in Hugging Face's format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; by default a tiny Llama with random weights")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share every matrix")
    parser.add_argument("--shard", type=int, default=0, help="data ranks that share one copy of the weights; 0: all")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="folder")
    args = parser.parse_args()

    smp.init({"tensor_parallel_degree": args.tp, "hybrid_shard_degree": args.shard})  # 1
    device = smp.state.device_type
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else AutoModelForCausalLM.from_config(TINY)
    smp.transform(model, device=device)  # 2
    for layer in model.model.layers:
        fully_shard(layer, mesh=smp.state.data_mesh)
    fully_shard(model, mesh=smp.state.data_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        ids = batch(step, device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = smp.clip_grad_norm_(model, 1.0)  # 3
        optimizer.step()
        optimizer.zero_grad()
        mean = smp.state.mean_over_data(loss.detach())
        if smp.state.rank == 0:
            print(f"step {step} loss {mean:.6f} norm {norm:.6f}", flush=True)
    if args.save:
        model.save_pretrained(args.save)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
