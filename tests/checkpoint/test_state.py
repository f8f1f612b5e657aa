"""Model and optimizer as named tensors and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from smp.checkpoint import (
    CheckpointError,
    collect_logical_rows,
    load,
    materialize_optimizer_state,
    restore_optimizer_scalars,
    save,
    training_state,
)


class FusedAdam(Optimizer):
    """Keeps its state the way apex's does: fp32 moments per parameter, the step count per group, after a step."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p).float()
                    state["exp_avg_sq"] = torch.zeros_like(p).float()
                state["exp_avg"].lerp_(p.grad.float(), 0.1)
                state["exp_avg_sq"].lerp_(p.grad.float() ** 2, 0.01)
                correction = (1 - 0.99 ** group["step"]) ** 0.5
                p.sub_((group["lr"] * correction * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)).to(p.dtype))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=0.1),
    "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.5),
    "adamw-fused": lambda p: AdamW(p, lr=0.1, weight_decay=0.5, fused=True),
    "adamw-foreach-amsgrad": lambda p: AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    "fused-adam": lambda p: FusedAdam(p, lr=0.1),
}


class Tied(nn.Module):
    """A padded embedding tied to the head, a buffer that is saved and one that is not, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.logical_rows = self.head.logical_rows = {"weight": 5}
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(ids)))[..., :5]  # padding takes no part


def model_and(kind: str) -> tuple[Tied, Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return model, OPTIMIZERS[kind]([{"params": decayed}, {"params": others}])


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([0, 1, 2 + step % 2])).pow(2).mean().backward()
        optimizer.step()


def bits(value: Any) -> Any:
    """Something that compares equal only for the same type, dtype, device and bits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    return type(value), value


def snapshot(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    states = [
        {k: bits(v) for k, v in optimizer.state.get(p, {}).items()} for g in optimizer.param_groups for p in g["params"]
    ]
    return [[bits(p) for p in model.parameters()], states, [g.get("step") for g in optimizer.param_groups]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_materializing_changes_nothing(kind: str) -> None:
    """Zeros made early give the same bits as zeros made by the first step, and existing state is left alone."""
    (lazy, lazy_optimizer), (early, early_optimizer) = model_and(kind), model_and(kind)
    with torch.no_grad():
        early.block.bias[0] = lazy.block.bias[0] = -0.0
    weights = [bits(p) for p in early.parameters()]
    materialize_optimizer_state(early_optimizer)
    assert [bits(p) for p in early.parameters()] == weights
    train(lazy, lazy_optimizer, 2)
    train(early, early_optimizer, 2)
    assert snapshot(lazy, lazy_optimizer) == snapshot(early, early_optimizer)
    materialize_optimizer_state(lazy_optimizer)
    assert snapshot(lazy, lazy_optimizer) == snapshot(early, early_optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resume_is_bitwise(kind: str, tmp_path: Path) -> None:
    straight, straight_optimizer = model_and(kind)
    train(straight, straight_optimizer, 2)
    tensors, steps = training_state(straight, straight_optimizer)
    save(tensors, tmp_path, extra={"steps": steps}, logical_rows=collect_logical_rows(straight, straight_optimizer))
    train(straight, straight_optimizer, 3)

    resumed, resumed_optimizer = model_and(kind)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter[:5].fill_(9.0)  # rows after the fifth of the embedding are padding, which a load leaves alone
        resumed.embedding.weight[5:] = straight.embedding.weight[5:]
    tensors, _ = training_state(resumed, resumed_optimizer)
    extra = load(tensors, tmp_path, logical_rows=collect_logical_rows(resumed, resumed_optimizer))
    restore_optimizer_scalars(resumed, resumed_optimizer, extra["steps"])
    train(resumed, resumed_optimizer, 3)
    if kind != "sgd" and kind != "sgd-momentum":
        assert set(extra["steps"].values()) == {2.0}
    real = slice(0, 5)
    assert torch.equal(straight.embedding.weight[real], resumed.embedding.weight[real])
    assert snapshot(straight.block, straight_optimizer)[0] == snapshot(resumed.block, resumed_optimizer)[0]
    for one, other in zip(straight_optimizer.state.values(), resumed_optimizer.state.values(), strict=True):
        assert {k: bits(v[real] if v.ndim else v) for k, v in one.items()} == {
            k: bits(v[real] if v.ndim else v) for k, v in other.items()
        }


def test_names() -> None:
    model, optimizer = model_and("adamw")
    tensors, steps = training_state(model, optimizer)
    weights = {"embedding.weight", "block.weight", "block.bias"}
    moments = {f"optim.{key}.{name}" for key in ("exp_avg", "exp_avg_sq") for name in weights}
    assert set(tensors) == moments | {f"model.{name}" for name in weights | {"frozen", "kept"}}
    assert steps == dict.fromkeys(weights, 0.0)
    assert tensors["model.block.weight"] is model.block.weight
    assert collect_logical_rows(model) == {"model.embedding.weight": 5}
    assert collect_logical_rows(model, optimizer) == {
        f"{prefix}.embedding.weight": 5 for prefix in ("model", "optim.exp_avg", "optim.exp_avg_sq")
    }


def test_wrappers_leave_no_trace_in_names() -> None:
    plain, _ = model_and("adamw")
    wrapped, _ = model_and("adamw")
    wrapped.block = checkpoint_wrapper(wrapped.block)
    compiled = torch.compile(wrapped, backend="eager")
    assert set(training_state(compiled)[0]) == set(training_state(plain)[0])  # type: ignore[arg-type]


def test_optimizer_of_another_model_is_refused() -> None:
    model, _ = model_and("adamw")
    _, optimizer = model_and("adamw")
    with pytest.raises(CheckpointError, match="build it over this model, after sharding, which"):
        training_state(model, optimizer)


@pytest.mark.parametrize("optimizer", [RMSprop, lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1)])
def test_unknown_state_is_refused(optimizer: Callable[[Any], Optimizer]) -> None:
    model = Tied()
    with pytest.raises(CheckpointError, match=r"cannot checkpoint the optimizer (RMSprop|SGD with dampening)"):
        training_state(model, optimizer(model.parameters()))


def test_step_counts_must_be_complete_and_agree() -> None:
    model, optimizer = model_and("adamw")
    _, steps = training_state(model, optimizer)
    del steps["block.bias"]
    with pytest.raises(CheckpointError, match=r"no optimizer step count for block\.bias"):
        restore_optimizer_scalars(model, optimizer, steps)
    model, optimizer = model_and("fused-adam")
    _, steps = training_state(model, optimizer)
    restore_optimizer_scalars(model, optimizer, dict.fromkeys(steps, 4.0))
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]
    with pytest.raises(CheckpointError, match="counts steps per group"):
        restore_optimizer_scalars(model, optimizer, steps | {"block.weight": 7.0})


def test_capturable_group_step_keeps_its_tensor() -> None:
    model, optimizer = model_and("fused-adam")
    for group in optimizer.param_groups:
        group["step"] = torch.tensor([2], dtype=torch.int32)
    _, steps = training_state(model, optimizer)
    saved = copy.deepcopy(steps)
    before = optimizer.param_groups[0]["step"]
    restore_optimizer_scalars(model, optimizer, dict.fromkeys(steps, 5.0))
    assert set(saved.values()) == {2.0} and before.tolist() == [5] and optimizer.param_groups[0]["step"] is before
