"""What every rank does: train each case with the trainer that users run, and write its parts of what came out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.config import Layout
from smp.data.loader import IGNORED_LABEL, GlobalBatch
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.optim import optimizer as optimizer_module
from smp.optim.optimizer import build_optimizer
from smp.parallel import collectives
from smp.parallel.boxes import local_box
from smp.parallel.mesh import build_mesh, data_rank
from smp.sharding.parallelize import parallelize
from smp.training.trainer import Progress, Trainer
from tests.parity.cases import SEED, STEPS, Case, config_of
from tests.parity.data import share
from tests.parity.result import RECORDED_STEPS, Tensors

Meshes = dict[Layout, DeviceMesh]


def run_cases(rank: int, world_size: int, cases: list[Case], folder: str) -> None:
    """Run ``cases``, all of this world size, one after the other; file ``<number>.<rank>`` holds a rank's part."""
    meshes: Meshes = {}
    for number, case in enumerate(cases):
        with pytest.MonkeyPatch.context() as patch:
            if case.sabotage:
                SABOTAGE[case.sabotage](patch)
            record = train(case, meshes)
        part = Path(folder) / f"{number}.{rank}.part"
        torch.save(record, part)
        part.rename(part.with_suffix(""))  # a file under its final name is whole


class RecordingTrainer(Trainer):
    """Keeps this rank's part of the gradients of some steps, as they are before clipping."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gradients: list[Tensors] = []

    def _forward_backward(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        loss = super()._forward_backward(batch, valid_tokens)
        if self.progress.iteration in RECORDED_STEPS:
            grads = {name: p.grad for name, p in self.model.named_parameters()}
            self.gradients.append({name: _local(g) for name, g in grads.items() if g is not None})
        return loss


def train(case: Case, meshes: Meshes) -> dict[str, Any]:
    """One run, and this rank's part of its result."""
    config, spread = config_of(case), case.spread
    layout = Layout.from_config(config.parallel, spread.world_size)
    if layout not in meshes:
        meshes[layout] = build_mesh(layout, "cpu")
    mesh = meshes[layout]
    model = GPT(config.model, mesh["tp"], sequence_parallel=spread.sp, seed=SEED, device="meta")
    parallelize(model, mesh, config.parallel)
    model.to_empty(device="cpu")
    init_weights(model, SEED)
    initial = _weights(model)
    optimizer = build_optimizer(model, config.optim)
    trainer = RecordingTrainer(config, model, optimizer, mesh, torch.device("cpu"), Progress())
    steps = [trainer.train_step(share(case.problem, spread, data_rank(mesh), step)) for step in range(STEPS)]
    if spread.compile:
        torch._dynamo.reset()
    return {
        "losses": [s.loss for s in steps],
        "norms": [s.grad_norm for s in steps],
        "tensors": [initial, *trainer.gradients, _weights(model)],
        "shapes": {name: (tuple(p.shape), _logical_rows(model, name)) for name, p in model.named_parameters()},
        "boxes": {name: _box(p) for name, p in model.named_parameters()},
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone()


def _weights(model: GPT) -> Tensors:
    return {name: _local(p) for name, p in model.named_parameters()}


def _box(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    box = local_box(parameter)
    return box.offsets, box.sizes


def _logical_rows(model: GPT, name: str) -> int:
    """Rows of a parameter without the vocabulary padding."""
    return (
        model.config.vocab_size if name in ("embedding.weight", "head.weight") else model.get_parameter(name).shape[0]
    )  # type: ignore[return-value]


def _break_adjoint(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The gradient passes as it is, where it should be summed over the ranks."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(getattr(collectives, function), "backward", staticmethod(lambda ctx, grad: (grad, None)))

    return sabotage


def _keep_own_part(patch: pytest.MonkeyPatch) -> None:
    """gather_tokens with concat_tokens' adjoint."""
    backward = collectives._ConcatTokens.backward
    patch.setattr(collectives._GatherTokens, "backward", staticmethod(backward))


def _average_gradients(patch: pytest.MonkeyPatch) -> None:
    """FSDP divides by the number of data-parallel ranks, as it does unless told otherwise."""
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def _count_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by its own number of valid tokens, and the ranks' losses are averaged."""

    def count(self: Trainer, batch: GlobalBatch) -> int:
        ranks = self.mesh["dp_shard"].size() * self.mesh["dp_replicate"].size()
        return int((batch.labels != IGNORED_LABEL).sum()) * ranks

    patch.setattr(Trainer, "_valid_tokens", count)


def _count_copies(patch: pytest.MonkeyPatch) -> None:
    """The gradient norm counts an element once per rank that holds it."""
    patch.setattr(optimizer_module, "_copies", lambda tensor, group: 1)


def _number_tokens_per_rank(patch: pytest.MonkeyPatch) -> None:
    """Under sequence parallelism every rank drops as if it held the first tokens."""
    patch.setattr(GPT, "_own", lambda self, x: x[: x.shape[0] // self.group.size])


SABOTAGE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sum_gradient": _break_adjoint("_SumGradient"),
    "copy_to_group": _break_adjoint("_CopyToGroup"),
    "gather_tokens": _keep_own_part,
    "average_gradients": _average_gradients,
    "count_own_tokens": _count_own_tokens,
    "count_copies": _count_copies,
    "number_tokens_per_rank": _number_tokens_per_rank,
}
"""Bugs of the negative control, by name: each is one that parallel training programs have had."""
