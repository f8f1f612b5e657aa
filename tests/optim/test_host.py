"""Adam on the host: the same bits as on the device, in runs as users have them, through checkpoints and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.checkpoint.state import training_state
from smp.config import Layout, OptimizerConfig, ParallelConfig
from smp.kernels.copier import Copier, CudaCopier, HostCopier
from smp.optim.host import HostAdamW
from smp.optim.optimizer import build_optimizer
from smp.parallel.boxes import local_box
from tests.fake_group import fake_context
from tests.sharding.copiers import QueueCopier
from tests.sharding.model import MODEL, build


def trained(copier: Copier | None, device: str = "cpu", steps: int = 4) -> dict[str, torch.Tensor]:
    """A small model's weights and moments after some steps, with weights that somebody sets in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.Linear(3, 2)).to(device)
    config = OptimizerConfig(lr=0.1, optimizer_cpu_offload=copier is not None)
    optimizer = build_optimizer(model, config, None, copier=copier)
    assert isinstance(optimizer, HostAdamW) is (copier is not None)
    x = torch.randn(6, 5).to(device)
    for step in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
    state = {f"{key} {i}": t for i, s in enumerate(optimizer.state.values()) for key, t in s.items()}
    return state | dict(model.state_dict())


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], t) for name, t in theirs.items())


@pytest.mark.parametrize("orders", [("early", "early"), ("late", "late"), ("early", "late"), ("late", "early")])
def test_no_order_of_copies_changes_a_bit(orders: Any) -> None:
    copier = QueueCopier(*orders)
    assert same(trained(copier), trained(None))
    assert copier.bytes_out > copier.bytes_back > 0


@pytest.mark.parametrize("forgotten", ["wait", "host_wait"])
def test_a_wait_that_is_left_out_shows(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = QueueCopier("late", "late")
    monkeypatch.setattr(copier, forgotten, lambda event: None)
    assert not same(trained(copier), trained(None))


def test_what_is_copied_is_counted() -> None:
    """Each step a gradient out and a weight back; weights out once, and one more when it was changed."""
    copier = HostCopier()
    trained(copier, steps=4)
    weights = 4 * (5 * 7 + 7 + 7 + 7 + 7 * 3 + 3 + 3 * 2 + 2)
    assert copier.bytes_back == 4 * weights
    assert copier.bytes_out == 5 * weights + 4 * 5 * 7


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(tp=2), Layout(dp_replicate=2, dp_shard=2, tp=2)])
def test_moments_are_on_the_host_and_placed_as_their_parameters(layout: Layout) -> None:
    """So checkpoints cut and join them as they do on a device."""
    with fake_context(layout, rank=1) as context:
        model = build(context, MODEL, ParallelConfig(layout.tp, hybrid_shard_degree=layout.dp_shard))
        config = OptimizerConfig(optimizer_cpu_offload=True)
        tensors, _ = training_state(model, build_optimizer(model, config, context.fsdp))
        moments = [name for name in tensors if name.startswith("optim.")]
        assert len(moments) == 2 * len(list(model.parameters()))
        for name in moments:
            parameter, moment = tensors["model." + name.split(".", 2)[2]], tensors[name]
            assert isinstance(moment, DTensor) and isinstance(parameter, DTensor)
            assert (moment.shape, moment.placements) == (parameter.shape, parameter.placements)
            assert local_box(moment) == local_box(parameter)
            assert moment.to_local().shape == parameter.to_local().shape
            assert not moment.to_local().any()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The host's arithmetic is not the device's to the bit: within a few roundings."""
    copier = CudaCopier(torch.device("cuda", 0))
    ours, theirs = trained(copier, "cuda"), trained(None, "cuda")
    assert all(ours[f"exp_avg {i}"].device.type == "cpu" for i in range(8))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].cpu(), tensor.cpu(), rtol=1e-5, atol=1e-6)
