"""What a run leaves behind, put together from the parts that its ranks wrote, and the distance between two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.communication import check_order

TOLERANCE = 1e-5
FLOOR = torch.finfo(torch.float32).eps / TOLERANCE
"""Fraction of a layer's norm that a tensor's norm counts as at least, see :func:`tensor_errors`."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """Losses and gradient norms of all steps; whole tensors without vocabulary padding.

    Attributes:
        losses, norms: one per step; the norm is before clipping.
        initial, final: weights by name.
        gradients: by step and name, before clipping.
    """

    losses: list[float]
    norms: list[float]
    initial: Tensors
    gradients: dict[int, Tensors]
    final: Tensors


@dataclass(frozen=True)
class Errors:
    """Relative distances between a run and the run it should equal; the worst over steps and tensors.

    loss and norm: |x - y| / |y|. gradient: norm-wise per tensor, |x - y| / |y| in the L2 norm. weight: the same for the
    final weights, but relative to how far training has moved them, which is stricter. ``where`` names the tensors.
    """

    loss: float
    gradient: float
    norm: float
    weight: float
    where: str

    @property
    def worst(self) -> float:
        """The largest of the four."""
        return max(self.loss, self.gradient, self.norm, self.weight)


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: a block, or the module itself outside of the blocks."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def layer_norms(tensors: Tensors) -> dict[str, float]:
    """L2 norm of each layer's tensors together."""
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + tensor.double().square().sum().item()
    return {layer: square**0.5 for layer, square in squares.items()}


def tensor_errors(got: Tensors, expected: Tensors, scale: Tensors) -> dict[str, float]:
    """Per tensor |got - expected| / max(|scale|, FLOOR x norm of the layer's ``expected``).

    The floor lets a difference of eps times the layer's norm pass at ``TOLERANCE``: GPT-2's key bias has a gradient of
    exactly zero in theory, so relative to itself its rounding noise is never small.
    """
    assert got.keys() == expected.keys()
    norms, errors = layer_norms(expected), {}
    for name, tensor in expected.items():
        size = max(scale[name].double().norm().item(), FLOOR * norms[layer_of(name)])
        error = (got[name].double() - tensor.double()).norm().item()
        # Of what is frozen, with all around it, nothing at all may be there.
        errors[name] = _finite(error / size) if size else math.inf if error else 0.0
    return errors


def compare(got: Result, expected: Result) -> Errors:
    """The distance of ``got`` from ``expected``; NaN anywhere is an infinite distance."""
    gradient = {
        f"{name} (step {step})": error
        for step, tensors in expected.gradients.items()
        for name, error in tensor_errors(got.gradients[step], tensors, tensors).items()
    }
    moved = {name: w.double() - expected.initial[name].double() for name, w in expected.final.items()}
    weight = tensor_errors(got.final, expected.final, moved)
    worst_gradient, worst_weight = max(gradient, key=gradient.__getitem__), max(weight, key=weight.__getitem__)
    return Errors(
        loss=_relative(got.losses, expected.losses),
        gradient=gradient[worst_gradient],
        norm=_relative(got.norms, expected.norms),
        weight=weight[worst_weight],
        where=f"gradient of {worst_gradient}, weight {worst_weight}",
    )


def _relative(got: list[float], expected: list[float]) -> float:
    return max(_finite(abs(x - y) / abs(y)) for x, y in zip(got, expected, strict=True))


def _finite(error: float) -> float:
    """NaN compares as small: make it infinite."""
    return math.inf if math.isnan(error) else error


def assemble(paths: list[Path]) -> Result:
    """A run's result from the files of all its ranks.

    Raises:
        AssertionError: ranks disagree about a loss, about elements that several of them hold or about the order of what
            they say to each other, elements are missing, or vocabulary padding is not zero.
    """
    ranks: list[dict[str, Any]] = [torch.load(path, weights_only=True) for path in paths]
    for rank in ranks[1:]:
        assert rank["losses"] == ranks[0]["losses"] and rank["norms"] == ranks[0]["norms"], "ranks disagree"
    check_order([rank["communication"] for rank in ranks])
    whole = [_whole([rank["tensors"][i] for rank in ranks], ranks) for i in range(len(ranks[0]["tensors"]))]
    gradients = dict(zip(ranks[0]["recorded"], whole[1:-1], strict=True))
    return Result(ranks[0]["losses"], ranks[0]["norms"], whole[0], gradients, whole[-1])


def _whole(parts: list[Tensors], ranks: list[dict[str, Any]]) -> Tensors:
    """Whole tensors from the ranks' parts, which ``regions`` locates."""
    out = {}
    for name, (shape, rows) in {name: size for rank in ranks for name, size in rank["shapes"].items()}.items():
        dtype = next(part[name].dtype for part in parts if name in part)
        tensor = torch.full(shape, float("nan"), dtype=dtype)
        for part, rank in zip(parts, ranks, strict=True):
            if name not in rank["regions"]:  # another pipeline rank's
                continue
            offsets, sizes = rank["regions"][name]
            target = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            filled = ~target.isnan()
            assert torch.equal(target[filled], part[name][filled]), f"copies of {name} differ between ranks"
            target.copy_(part[name])
        assert not tensor.isnan().any(), f"parts of {name} are missing or NaN"
        assert not tensor[rows:].any(), f"the vocabulary padding of {name} is not zero"
        out[name] = tensor[:rows].clone()
    return out
