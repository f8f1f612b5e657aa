"""Losses beside the model's own, of any stage, are minimised and reported in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smp.config import Config, DataConfig, Layout, ParallelConfig, TrainingConfig, resolve
from smp.kernels import TORCH
from smp.layers import ModelOutput, init_weights
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel.context import build_context
from smp.pipeline.stage_plan import plan_pipeline
from smp.sharding.parallelize import parallelize
from smp.training.build import RunSetup, build_forward_backward
from smp.training.micro_batches import MicroBatches
from tests.distributed import run_distributed
from tests.sharding.model import BATCH, LENGTH, MODEL

COUNT, CPU = 4, torch.device("cpu")


class Penalized(GPT):
    """A decoder whose every block adds a loss, as a router would: here the mean square of what leaves it."""

    def forward(self, micro_batch: MicroBatch, hidden: Any = None, part: Any = None) -> ModelOutput:
        found: dict[str, torch.Tensor] = {}
        hooks = [
            block.register_forward_hook(
                lambda m, args, out, name=name: found.update({name: out.square().mean() / COUNT})
            )
            for name, block in self.layers.items()
            if part is None or int(name) in part.layers
        ]
        output = super().forward(micro_batch, hidden, part)
        for hook in hooks:
            hook.remove()
        return output._replace(aux_losses=found)


def train(
    rank: int, world: int, schedule: str | None, kind: type[GPT] = Penalized
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and the gradients of this rank's part of the model, of one step."""
    parallel = ParallelConfig(pipeline_model_parallel_size=world, pipeline_schedule=schedule)  # type: ignore[arg-type]
    data = DataConfig(mock_data=True, seq_length=LENGTH, micro_batch_size=BATCH, global_batch_size=BATCH * COUNT)
    model_config = replace(MODEL, num_layers=4)
    config = resolve(Config(model_config, parallel, data, training=TrainingConfig(train_iters=1)), world)
    layout = Layout.from_config(config.parallel, world)
    context, plan = build_context(layout, "cpu"), plan_pipeline(config, layout) if world > 1 else None
    parts = None if plan is None else list(plan.stages_of(rank).values())
    model = kind(config.model, context, seed=1, parts=parts)
    parallelize(model, context, config.parallel)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    runner = build_forward_backward(config, RunSetup(context, CPU, TORCH, plan), model)
    outputs = runner.train(MicroBatches(COUNT, micro_batch))
    losses = [loss for output in outputs if (loss := output.total) is not None]
    loss = context.sum_loss(sum(losses, torch.zeros(()))).item()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss, {name: (g.to_local() if isinstance(g, DTensor) else g).clone() for name, g in grads.items()}


def micro_batch(i: int) -> MicroBatch:
    tokens = (torch.arange(BATCH * LENGTH) * (i + 3)).view(BATCH, LENGTH) % 64
    return MicroBatch(tokens, tokens.flip(1), torch.full((BATCH, LENGTH), 1.0 / (COUNT * BATCH * LENGTH)))


def every_schedule(rank: int, world: int) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    out = {}
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v") if world > 1 else (None,):
        out[str(schedule)] = train(rank, world, schedule)
        dist.barrier()
    if world == 1:
        out["without"] = train(rank, world, None, GPT)
    return out


def test_auxiliary_losses_leave_a_pipeline_and_are_minimised() -> None:
    (alone,) = run_distributed(every_schedule, 1)
    loss, wanted = alone["None"]
    assert loss > alone["without"][0] and any(
        not torch.equal(grad, wanted[name]) for name, grad in alone["without"][1].items()
    )
    ranks = run_distributed(every_schedule, 2)
    for schedule in ranks[0]:
        found = {name: grad for rank in ranks for name, grad in rank[schedule][1].items()}
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert (found[name] - grad).norm() <= 1e-6 * grad.norm() + 1e-9, (schedule, name)
        assert abs(ranks[0][schedule][0] / loss - 1) < 1e-6
