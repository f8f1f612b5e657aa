"""AdamW whose moments are stored in bf16 or fp8.

A step widens the moments of some rows to fp32, runs torch's fused AdamW on them, and rounds them stochastically on the
way back (``smp.kernels.precision.low_precision``). The random bits are a function of (seed, step, parameter's name,
global row and column), so that every layout rounds alike, and a resumed run continues bit for bit. Tensors of one
dimension, biases and norms, keep fp32 moments.

===========  ================================================  =====================
moment       in fp8 (e4m3)                                     bytes of an element
===========  ================================================  =====================
exp_avg      itself, a scale for each 128 elements of a row    1 + 4 / 128; bf16: 2
exp_avg_sq   its square root, which needs half the exponent;   1 + 4 / 128; bf16: 2
             never 0 where it is not 0, or an update explodes
===========  ================================================  =====================

Scales are powers of two along the rows of the whole tensor. A layout may cut a row only between blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch.distributed.tensor import DTensor

from smp.config import ConfigError, OptimizerConfig
from smp.kernels.dropout import keyed_bits
from smp.kernels.precision.low_precision import BLOCK, expand, round_to_bf16, round_to_e4m3, smallest_e4m3
from smp.parallel.dtensor_region import cuts_of, local_part, local_region
from smp.parallel.rng import dropout_key

Kind = Literal["fp32", "bf16", "fp8"]
DTYPES: Mapping[Kind, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
MOMENTS = "exp_avg", "exp_avg_sq"
_CHUNK = 1 << 22
"""Elements that are widened to fp32 at a time."""
_MASK = (1 << 32) - 1


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with moments of the dtypes that ``config`` names; fp32 for both is torch's own, bit for bit.

    Args:
        groups: of parameters, with ``weight_decay``.
        config: of the optimizer.
        names: of the parameters, which the rounding is keyed by.
        seed: of the rounding.

    Raises:
        ConfigError: a layout cuts rows of an fp8 moment within a block.
    """

    _step_supports_amp_scaling = True  # an update that finds infinities changes nothing: see step_on_device_if

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        config: OptimizerConfig,
        names: Mapping[torch.Tensor, str],
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": config.lr})
        self.config = config
        self.kinds: dict[str, Kind] = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
        self.keys = {p: dropout_key(seed, f"moments of {name}") for p, name in names.items()}
        if "fp8" in self.kinds.values():
            for p, name in names.items():
                _check_blocks(p, name)

    def kind(self, moment: str, parameter: torch.Tensor) -> Kind:
        """The precision that a moment of this parameter is stored in."""
        return self.kinds[moment] if parameter.ndim > 1 else "fp32"

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step."""
        state = {"step": torch.zeros((), device=parameter.device)}
        for moment in MOMENTS:
            kind = self.kind(moment, parameter)
            # First as fp32 like the parameter, which places it as the parameter is placed.
            state[moment] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            if kind != "fp32":
                state[moment] = _like(parameter, local_part(state[moment]).to(DTYPES[kind]), parameter.shape)
            if kind == "fp8":
                *rows, columns = local_part(parameter).shape
                scale = torch.ones(*rows, -(-columns // BLOCK), device=parameter.device)
                whole = (*parameter.shape[:-1], -(-parameter.shape[-1] // BLOCK))
                state[f"{moment}_scale"] = _like(parameter, scale, torch.Size(whole))
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(self.new_state(p))
        found_inf = getattr(self, "found_inf", None)
        state["step"] += 1
        parts = {key: _rows(local_part(t)) for key, t in state.items() if key != "step"}
        weight, grad = _rows(local_part(p.detach())), _rows(local_part(cast(torch.Tensor, p.grad)))
        # Another key for each step: equal random bits in every step would round the same elements up for ever.
        key = (state["step"].long() * 0x9E3779B1 + self.keys[p]) & _MASK
        numbers, first_column = _row_numbers(p)
        # Some rows at a time, or there would be fp32 moments of the whole matrix for a moment.
        size = max(1, _CHUNK // max(1, weight.shape[1]))
        for start in range(0, weight.shape[0], size):
            at = slice(start, start + size)
            # Copies, but for moments that rest in fp32, which AdamW then updates in place.
            wide = {moment: self._widened(p, moment, parts, at) for moment in MOMENTS}
            torch._fused_adamw_(
                [weight[at]],
                [grad[at]],
                [wide["exp_avg"]],
                [wide["exp_avg_sq"]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=self.config.adam_beta1,
                beta2=self.config.adam_beta2,
                weight_decay=group["weight_decay"],
                eps=self.config.adam_eps,
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
            if p.ndim > 1:
                # Also where infinities were found and nothing changed: rounding what needs none changes nothing.
                self._narrow(wide, parts, at, keyed_bits(key, numbers[at], weight.shape[1], first_column))
        if found_inf is not None:
            # Taken back on the device: the host does not know whether there were any.
            state["step"] -= found_inf

    def _widened(self, p: torch.Tensor, moment: str, parts: Mapping[str, torch.Tensor], at: slice) -> torch.Tensor:
        """Some rows of a moment in fp32: a copy, or a view where the moment is stored in fp32."""
        kind, stored = self.kind(moment, p), parts[moment][at]
        wide = stored.float()
        if kind == "fp8":
            wide *= expand(parts[f"{moment}_scale"][at], wide.shape[1])
            # What is stored is the root.
            return wide.square_() if moment == "exp_avg_sq" else wide
        return wide

    def _narrow(
        self, wide: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor], at: slice, bits: torch.Tensor
    ) -> None:
        """Write rows of both moments back, each rounded by half of the random bits."""
        # 32 random bits for an element: 16 for each moment.
        for shift, moment in zip((0, 16), MOMENTS, strict=True):
            kind, x, own = self.kinds[moment], wide[moment], (bits >> shift) & 0xFFFF
            if kind == "bf16":
                parts[moment][at] = round_to_bf16(x, own)
            elif kind == "fp8":
                x = x.sqrt() if moment == "exp_avg_sq" else x
                rounded, parts[f"{moment}_scale"][at] = round_to_e4m3(x, own)
                parts[moment][at] = smallest_e4m3(rounded, x) if moment == "exp_avg_sq" else rounded


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix of rows, on the same memory."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.view(0, tensor.shape[-1])


def _row_numbers(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(numbers of this rank's rows in the whole tensor with all leading dimensions flattened, first column)."""
    # By the numbers in the whole tensor, so that every layout rounds alike.
    region = local_region(parameter)
    numbers = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    dims = zip(region.offsets[:-1], region.sizes[:-1], parameter.shape[:-1], strict=True)
    for offset, size, whole in dims:
        index = torch.arange(offset, offset + size, device=parameter.device)
        numbers = (numbers[:, None] * whole + index).reshape(-1)
    return numbers, region.offsets[-1]


def _like(parameter: torch.Tensor, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """This rank's ``part`` of a tensor of ``shape`` that is cut as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _check_blocks(parameter: torch.Tensor, name: str) -> None:
    """Raise ConfigError where a rank's part of a row is not made of whole blocks."""
    if parameter.ndim < 2 or not isinstance(parameter, DTensor):
        return
    mesh, last = parameter.device_mesh, parameter.ndim - 1
    parts = 1
    for cut in cuts_of(parameter):
        parts *= mesh.size(cut.mesh_dim) if cut.dim == last else 1
    if parts > 1 and parameter.shape[last] % (parts * BLOCK):
        raise ConfigError(
            f"--exp-avg-dtype and --exp-avg-sq-dtype fp8 have a scale for each {BLOCK} elements of a row: the rows of "
            f"{name} have {parameter.shape[last]} and are cut in {parts}; take bf16, or fewer processes"
        )
