"""The self-check of ``smp.transform``: logits and gradients of a small batch, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.config.schema import ConfigError
from smp.parallel.agree import gather
from smp.parallel.dtensor_region import local_part, local_region

# Largest relative error by dtype: sums in another order round differently.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSE = 3e-2
"""Tolerance of dtypes with 16 bits."""


@dataclass(frozen=True)
class Expected:
    """Output and whole gradients (by name) of the model before it was cut."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @staticmethod
    def of(model: nn.Module) -> Expected:
        """Run ``model`` once; gradients are freed afterwards."""
        output = _run(model)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return Expected(output, gradients)

    def compare(self, model: nn.Module) -> None:
        """Run the transformed model and compare.

        Raises:
            ConfigError: on all ranks, with what differs most on any of them.
        """
        try:
            errors = {"the output": _error(_run(model), self.output, 0.0)}
        except (RuntimeError, ValueError) as wrong:  # shapes that do not fit, on every rank
            raise ConfigError(f"the transformed {type(model).__name__} does not run: {wrong}") from wrong
        # A gradient that should be zero has only rounding errors: small ones are compared with a
        # floor.
        floor = 1e-3 * max((float(g.norm()) for g in self.gradients.values()), default=0.0)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                whole = self.gradients[name]
                if isinstance(parameter.grad, DTensor):
                    region = local_region(parameter.grad)
                    for dim, (first, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                        whole = whole.narrow(dim, first, size)
                errors[f"the gradient of {name}"] = _error(local_part(parameter.grad), whole, floor)
        model.zero_grad(set_to_none=True)
        error, what = max(max((error, what) for what, error in ranks.items()) for ranks in gather(errors))
        dtype = next(model.parameters()).dtype
        # not <=: NaN counts as a difference.
        if not error <= _TOLERANCE.get(dtype, _COARSE):
            raise ConfigError(
                f"the transformed {type(model).__name__} is not equal: {what} is off by {error:.1e}; a row is missing "
                "or wrong, and this model object must not be used"
            )


def _error(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    size = max(float(wanted.float().norm()), floor, 1e-30)
    return float((found.float() - wanted.to(found.device).float()).norm()) / size


def _output_of(result: Any) -> torch.Tensor:
    """Logits, or the first tensor that the model returns."""
    if hasattr(result, "keys"):
        return result["logits"] if "logits" in result else next(iter(result.values()))
    return result if isinstance(result, torch.Tensor) else result[0]


def _run(model: Any) -> torch.Tensor:
    """Forward and backward of two sequences of eight ids, the same on every rank, in evaluation mode."""
    if not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f"{type(model).__name__} takes no input_ids that verify could make: verify=False")
    vocabulary = model.get_input_embeddings().num_embeddings
    device = next(model.parameters()).device
    ids = (torch.arange(16, device=device).view(2, 8) * 7919 + 3) % vocabulary
    training = model.training
    model.eval()
    try:
        result = model(input_ids=ids)
        output = _output_of(result)
        # A loss of all outputs with different weights, so that no gradient cancels by symmetry.
        weights = torch.linspace(-1, 1, output[0].numel(), device=device, dtype=torch.float32).view(output[0].shape)
        (output.float() * weights).mean().backward()
    finally:
        model.train(training)
    return output.detach()
