"""Pretraining in a script of one's own: the loop is here, the parts are smp's.

    torchrun --nproc-per-node 4 examples/own_loop.py --model debug --mock-data --vocab-size 1000 --seq-length 128 \
        --train-iters 20 --global-batch-size 8 --tensor-model-parallel-size 2 --hybrid-shard-degree 2 --save checkpoint

It takes the flags of pretrain_gpt.py and prints its losses, in every layout without a pipeline. Flags of what it leaves
out it does not read: logs, evaluation, --load, FP8, offload, multi-token prediction, batches that grow. The loop that
has all of them is in ``smp/training/run.py``.
"""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist

import pretrain_gpt
from smp import checkpoint
from smp.config import ConfigError, Layout
from smp.data.build import build_datasets
from smp.data.loader import BatchLoader
from smp.models.build import new_model
from smp.optim.lr_scheduler import learning_rate
from smp.optim.optimizer import build_optimizer, clip_gradients, set_learning_rate
from smp.parallel.agree import sum_over_ranks
from smp.parallel.context import build_context
from smp.sharding.parallelize import last_micro_batch, parallelize
from smp.training.build import choose_backends
from smp.training.objectives.next_token import NextToken
from smp.training.process import Process


def main(argv: list[str]) -> None:
    # Settings, checked and with every default filled in; then the process group and the meshes of this layout.
    process = Process.from_environment()
    config, _ = pretrain_gpt.read(argv, process.world_size)
    layout = Layout.from_config(config.parallel, process.world_size)
    if layout.pp > 1:
        raise ConfigError("this loop runs whole models: a pipeline is run by smp.training.pipelined")
    device = torch.device("cuda", process.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    parallel, timeout = config.parallel, datetime.timedelta(minutes=10)
    context = build_context(layout, device.type, timeout, sequence_parallel=parallel.sequence_parallel)

    # The model: declared without memory, sharded, and only then filled, so that no rank ever holds more than its part.
    kernels, _ = choose_backends(config, context, device, documents=config.data.reset_attention_mask)
    dtype = torch.bfloat16 if parallel.bf16 else None
    model = new_model(config.model, context, seed=config.training.seed, compute_dtype=dtype, kernels=kernels)
    parallelize(model, context, parallel)  # recompute, compile, hybrid FSDP
    model.draw(device, config.training.seed)  # the same bits in every layout
    # After parallelize: FSDP replaces the parameters.
    optimizer = build_optimizer(model, config.optim, context.fsdp, context.expert_fsdp)

    # The data: sample i is a function of (seed, i), and this rank reads its share of each step.
    assert config.model.vocab_size is not None and config.data.global_batch_size is not None
    assert config.training.train_iters is not None
    batches = BatchLoader(
        build_datasets(config.data, config.model.vocab_size, config.training.seed).train,
        micro_batch_size=config.data.micro_batch_size,
        batch_size=config.data.global_batch_size,
        dp_rank=context.data_rank,
        dp_size=context.data_size,
        with_documents=config.data.reset_attention_mask,
        with_positions=config.data.reset_position_ids,
    )
    objective = NextToken(device, context.cp_group)

    for step in range(1, config.training.train_iters + 1):
        batch = next(batches)
        # The loss is a mean over the global batch, so its tokens are counted before the first forward pass. Ranks that
        # share their samples (TP, CP) count them once.
        (num_valid,) = sum_over_ranks(batch.num_valid() if context.counts_tokens else 0)
        loss = torch.zeros((), device=device)
        micro_batches = objective.micro_batches(batch, num_valid)
        for i, micro_batch in enumerate(micro_batches):
            last_micro_batch(model, i == len(micro_batches) - 1)  # FSDP reduces gradients over replicas in the last one
            output = model(micro_batch)
            output.total.backward()  # with the auxiliary losses
            loss += output.loss.detach()
        norm = clip_gradients(model.parameters(), config.optim.clip_grad)  # over all ranks
        set_learning_rate(optimizer, learning_rate(config.optim, step))
        optimizer.step()
        optimizer.zero_grad()
        model.end_step(torch.tensor(True, device=device))
        loss = context.sum_loss(loss)
        if process.rank == 0:
            print(f"step {step} loss {loss.item():.7f} grad norm {norm.item():.4f}", flush=True)
    batches.close()

    if config.checkpoint.save is not None:  # any layout loads it: smp.checkpoint.load
        tensors, steps = checkpoint.training_state(model, optimizer)
        rows = checkpoint.collect_logical_rows(model, optimizer)
        extra = {"iteration": config.training.train_iters, "optimizer_steps": steps}
        checkpoint.save(tensors, config.checkpoint.save, extra=extra, logical_rows=rows)
    dist.barrier()  # gloo may still be handing back the last sum, and aborts a process that exits meanwhile
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
