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
from smp.models.micro_batch import MicroBatch
from smp.optim.host import HostAdamW
from smp.optim.optimizer import build_optimizer, scaling_of
from smp.parallel.dtensor_region import local_region
from smp.training.forward_backward import Accumulation, stream_gradients
from smp.training.micro_batches import MicroBatches
from tests.fake_group import fake_context
from tests.sharding.copiers import QueueCopier
from tests.sharding.model import MODEL, build

Tensors = dict[str, torch.Tensor]
WEIGHTS = 4 * (5 * 7 + 7 + 7 + 7 + 7 * 3 + 3 + 3 * 2 + 2)
"""Bytes of the weights of :func:`trained`."""


def trained(copier: Copier | None, device: str = "cpu", steps: int = 4, stream: bool = False) -> Tensors:
    """A small model's weights and moments after some steps, of two micro-batches, with gradients that are scaled in the
    second and third, a step that is skipped, and weights that somebody sets in between."""
    torch.manual_seed(0)
    first, third = nn.Linear(5, 7), nn.Linear(7, 3)
    model = nn.Sequential(first, nn.LayerNorm(7), third, nn.Linear(3, 2)).to(device)
    config = OptimizerConfig(lr=0.1, optimizer_cpu_offload=copier is not None)
    optimizer = build_optimizer(model, config, None, copier=copier)
    assert isinstance(optimizer, HostAdamW) is (copier is not None)
    x = torch.randn(2, 6, 5).to(device)
    for step in range(steps):
        model(x[0]).square().sum().backward()
        if isinstance(optimizer, HostAdamW) and stream:
            optimizer.stream(later=[third.bias])
        model(x[1] + step).square().sum().backward()
        assert third.bias.grad is not None
        third.bias.grad *= 2.0  # as the two ends of a pipeline add up theirs
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        scale = scaling_of(optimizer) if stream else torch._foreach_mul_
        scale(gradients, torch.tensor([1.0, 0.3, 0.7, 1.0][step], device=device))
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                first.weight.mul_(0.5)
    state = {f"{key} {i}": t for i, s in enumerate(optimizer.state.values()) for key, t in s.items()}
    return state | dict(model.state_dict())


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], t) for name, t in theirs.items())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("orders", [("early", "early"), ("late", "late"), ("early", "late"), ("late", "early")])
def test_no_order_of_copies_changes_a_bit(orders: Any, stream: bool) -> None:
    copier = QueueCopier(*orders)
    assert same(trained(copier, stream=stream), trained(None))
    assert copier.bytes_out > copier.bytes_back > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("forgotten", ["wait", "host_wait"])
def test_a_wait_that_is_left_out_shows(forgotten: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = QueueCopier("late", "late")
    monkeypatch.setattr(copier, forgotten, lambda event: None)
    assert not same(trained(copier, stream=stream), trained(None))


def test_gradients_leave_while_the_last_backward_pass_runs() -> None:
    """All but those of ``later``, which leave in the step; the last layer's are the first ones."""
    first, copier = nn.Linear(5, 7), HostCopier()
    model = nn.Sequential(first, nn.Linear(7, 3))
    optimizer = HostAdamW([{"params": list(model.parameters())}], copier, lr=0.1)
    x, left = torch.randn(2, 5, requires_grad=True), list[int]()
    model(x).sum().backward()
    assert copier.bytes_out == 0, "the first micro-batch's are not final"
    first.register_full_backward_pre_hook(lambda *_: left.append(copier.bytes_out))
    optimizer.stream(later=[first.bias])
    model(x).sum().backward()
    assert left == [2 * 4 * (7 * 3 + 3)], "gradients, and weights at the first step"
    assert copier.bytes_out == left[0] + 2 * 4 * 5 * 7
    optimizer.step()
    assert copier.bytes_out == left[0] + 2 * 4 * (5 * 7 + 7)


def test_a_copy_of_a_strided_gradient_lives_until_it_is_there() -> None:
    weights = [nn.Parameter(torch.ones(3, 5)) for _ in range(2)]
    strided = torch.arange(15.0).view(5, 3).t()
    weights[0].grad, weights[1].grad = strided, strided.contiguous()  # torch's kernel of a CPU overlooks strides
    HostAdamW([{"params": weights[:1]}], QueueCopier("late", "late"), lr=0.1).step()
    torch.optim.AdamW(weights[1:], lr=0.1, fused=True).step()
    assert torch.equal(*weights)


def test_a_gradient_that_left_and_was_replaced_is_an_error() -> None:
    layer = nn.Linear(2, 2)
    optimizer = HostAdamW([{"params": list(layer.parameters())}], HostCopier(), lr=0.1)
    optimizer.stream()
    layer(torch.ones(1, 2)).sum().backward()
    layer.weight.grad = torch.zeros(2, 2)
    with pytest.raises(AssertionError, match="that left was replaced"):
        optimizer.step()


@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_a_step_that_was_not_made_are_given_up(again: bool) -> None:
    """They had left already, for some parameters; the next step is of its own gradients, that leave or do not."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = HostAdamW([{"params": weights}], HostCopier(), lr=0.1)
    optimizer.stream()
    (1e3 * sum(weight.sum() for weight in weights)).backward()  # type: ignore[union-attr]
    optimizer.scale([], torch.tensor(0.0))
    optimizer.zero_grad()
    assert [weight.grad for weight in weights] == [None, None]
    if again:
        optimizer.stream()
    (2 * weights[0].sum()).backward()
    optimizer.step()
    moments = optimizer.state[weights[0]]["exp_avg"]
    assert torch.allclose(moments, torch.full((3,), 0.2)) and weights[1] not in optimizer.state
    assert torch.equal(weights[1], torch.ones(3)) and not torch.equal(weights[0], weights[1])


def test_what_is_copied_is_counted() -> None:
    """Each step a gradient and a weight out, and a weight back."""
    copier = HostCopier()
    trained(copier, steps=4)
    assert copier.bytes_back == 3 * WEIGHTS
    assert copier.bytes_out == 2 * copier.bytes_back


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
            assert local_region(moment) == local_region(parameter)
            assert moment.to_local().shape == parameter.to_local().shape
            assert not moment.to_local().any()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2)])
def test_all_gradients_leave_in_the_last_micro_batch(layout: Layout) -> None:
    """With FSDP and without: it calls what autograd would when it has reduced a gradient."""
    with fake_context(layout, rank=1) as context:
        model = build(context, MODEL, ParallelConfig(layout.tp, hybrid_shard_degree=layout.dp_shard))
        optimizer = build_optimizer(model, OptimizerConfig(optimizer_cpu_offload=True), context.fsdp)
        assert isinstance(optimizer, HostAdamW)
        passes, before = Accumulation(model), list[int]()
        stream_gradients(passes, optimizer)

        def make(i: int) -> MicroBatch:
            before.append(len(optimizer._streamed))
            ids = torch.arange(12)[None]
            return MicroBatch(ids, ids, torch.ones(1, 12))

        passes.train(MicroBatches(3, make))
        assert before == [0, 0, 0] and optimizer._streamed.keys() == set(model.parameters())


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The host's arithmetic is not the device's to the bit: within a few roundings."""
    copier = CudaCopier(torch.device("cuda", 0))
    ours, theirs = trained(copier, "cuda"), trained(None, "cuda")
    assert all(ours[f"exp_avg {i}"].device.type == "cpu" for i in range(8))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].cpu(), tensor.cpu(), rtol=1e-5, atol=1e-6)
