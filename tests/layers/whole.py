"""Whole tensors and a rank's parts of them, cut without the package's own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(whole: torch.Tensor, mesh: DeviceMesh, dim: int = 0, *, split: bool = True) -> torch.Tensor:
    """This rank's equal part along ``dim``, or all of it."""
    return whole.chunk(mesh.size(), dim)[mesh.get_local_rank()] if split else whole


def load(parameter: Any, whole: torch.Tensor) -> None:
    """Put this rank's part of ``whole`` into a parameter on a 1-D mesh; rows that ``whole`` lacks (padding) are 0."""
    [placement], mesh = parameter.placements, parameter.device_mesh
    padded = torch.zeros(parameter.shape, dtype=whole.dtype)
    padded[: whole.shape[0]] = whole
    with torch.no_grad():
        mine = part(padded, mesh, placement.dim) if isinstance(placement, Shard) else padded
        parameter.to_local().copy_(mine)


def load_all(module: nn.Module, seed: int = 0, scale: float = 0.5) -> dict[str, torch.Tensor]:
    """Give every parameter drawn values; returns the whole tensors by name, as leaves."""
    wholes = {}
    for i, (name, parameter) in enumerate(module.named_parameters()):
        wholes[name] = scale * draw(*parameter.shape, seed=1000 * seed + i, dtype=parameter.dtype)
        load(parameter, wholes[name])
        wholes[name].requires_grad_()
    return wholes


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The whole gradient of a parameter."""
    assert isinstance(parameter.grad, DTensor), "no gradient"
    return parameter.grad.full_tensor()


def leaf(x: torch.Tensor) -> torch.Tensor:
    """A copy that collects a gradient."""
    return x.detach().clone().requires_grad_()


def error(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    """Norm of the difference / norm of ``want`` (at least 1: some gradients are 0 but for rounding); infinite where the
    shapes differ."""
    assert got is not None and want is not None, "a tensor is missing"
    if got.shape != want.shape:
        return float("inf")
    difference = (got.detach().double() - want.detach().double()).norm()
    return (difference / want.detach().double().norm().clamp(min=1.0)).item()


def beyond(errors: dict[str, float], bound: float) -> dict[str, float]:
    """The errors that are not within ``bound`` (NaN is not)."""
    return {name: e for name, e in errors.items() if not e <= bound}
