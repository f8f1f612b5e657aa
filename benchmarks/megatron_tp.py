"""Tokens per second of a training step with TP 2 and sequence parallelism on a CPU: smp beside megatron-core.

    torchrun --nproc-per-node 2 benchmarks/megatron_tp.py

Both train the Llama of ``benchmarks/training_step.py`` in fp32 in the same two processes, a step each in turns; medians
are reported. megatron-core (pip install --no-deps megatron-core) has its local layers, without Transformer Engine, and
gloo; smp has its exchange through shared memory. What differs from a run of its own on GPUs:

- torch.cuda's streams and current device are stand-ins that do nothing (``benchmarks/megatron_experts.py``);
- its attention is products, a mask and a softmax: the fused kernels that it calls are for GPUs;
- its torch norm refuses sequence parallelism, because nothing would sum its gradient over the ranks; here it is built
  all the same, and gradients of norms are summed by one all-reduce, as ``finalize_model_grads`` does for its others;
- gradients stay in the parameters, as without its distributed optimizer; AdamW and clipping are torch's, which are
  those that its own optimizer calls without apex and Transformer Engine. Clipping sees the norm of all ranks.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron_experts import prepare
from peers import megatron_gpt, missing
from training_step import ON_CPU, Entry, Step, Work, interleave, show, smp_step

from smp.config import Layout
from smp.parallel.context import build_context
from smp.training.host_memory import keep_freed_memory


def megatron_model(work: Work, tp: int) -> Any:
    """megatron-core's GPT in its local layers, this rank's part, with random weights."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = _rms_norm
    model = megatron_gpt(
        work,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        params_dtype=torch.float32,
    )
    return model.train()


def _rms_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """What megatron-core's wrapper builds, under sequence parallelism, too."""
    return torch.nn.RMSNorm(hidden_size, eps)


def megatron_step(work: Work, tp: int) -> Step:
    """A step of it: loss, backward, norms' gradients over the ranks, clip, AdamW."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    model = megatron_model(work, tp)
    whole = [p for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)]
    cut = [p for p in model.parameters() if getattr(p, "tensor_model_parallel", False)]
    weights = [*cut, *whole]
    groups = [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    (tokens, labels), positions = work.data(), torch.arange(work.length).expand(work.batch, -1)
    hidden = torch.ones(1, 1, work.length, work.length, dtype=torch.bool).triu(1)

    def step() -> torch.Tensor:
        loss = model(tokens, positions, hidden, labels=labels).mean()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in whole])
        dist.all_reduce(flat, group=group)
        for p, summed in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
            p.grad.copy_(summed.view_as(p))
        squares = torch.stack([p.grad.square().sum() for p in cut]).sum()
        dist.all_reduce(squares, group=group)
        norm = (squares + flat.square().sum()).sqrt()
        torch.nn.utils.clip_grads_with_norm_(weights, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    """Under torchrun with 2 processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each entry")
    rounds = parser.parse_args().rounds
    tp = int(os.environ.get("WORLD_SIZE", "1"))
    if why := missing("megatron.core", "cpu"):
        print(f"megatron-core: {why}")
        return
    keep_freed_memory()  # as a run of ours does; of both, as they share the processes
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prepare(tp)
    context = build_context(Layout(tp=tp), "cpu")
    split = tp > 1
    entries = [
        Entry("megatron-core, local layers", megatron_step(ON_CPU, tp), 1, []),
        Entry("smp", smp_step(ON_CPU, context, sequence_parallel=split), 1, []),
        Entry("smp --compile", smp_step(ON_CPU, context, sequence_parallel=split, compile=True), 1, []),
    ]
    interleave(entries, rounds)
    if dist.get_rank() == 0:
        show(f"one step, fp32, TP={tp} --sequence-parallel, two cores", ON_CPU, entries)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
