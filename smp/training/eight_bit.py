"""FP8 of a run: the recipe that the settings ask for, on this device, and the lines to print about it."""

from __future__ import annotations

import torch
from torch import nn

from smp.config import Config, ConfigError
from smp.config.layers import ranges_of
from smp.config.rules.fp8 import layers_in_bf16
from smp.kernels.precision.fp8 import has_kernels
from smp.layers.fp8.apply import Fp8, fp8_layers
from smp.layers.fp8.scaling import Precision

_TENSOR_CORES = (8, 9)
"""First compute capability with FP8 matrix products: Ada, sm_89. Scales of rows came with Hopper, sm_90."""
_ROWS = (9, 0)


def fp8_of(config: Config) -> Fp8 | None:
    """The FP8 recipe of a run; None without FP8."""
    parallel = config.parallel
    if parallel.fp8_format is None:
        return None
    precision = Precision(parallel.fp8_recipe, parallel.fp8_format, parallel.fp8_emulate)
    if parallel.fp8_recipe != "delayed":
        return Fp8(precision)
    return Fp8(precision, parallel.fp8_amax_history_len, parallel.fp8_amax_compute_algo)


def layers_without_fp8(config: Config, model: nn.Module) -> set[str]:
    """Names of the linear layers in blocks that compute as without FP8."""
    # Blocks at the ends may stay in bf16 (--first-last-layers-bf16).
    blocks = {f"layers.{i}" for i in layers_in_bf16(config.parallel, config.model.num_layers)}
    return {name for name in fp8_layers(model) if ".".join(name.split(".")[:2]) in blocks}


def choose_fp8(config: Config, device: torch.device) -> list[str]:
    """Check that the device can compute in FP8. Returns lines for the user, none without FP8.

    Raises:
        ConfigError: the device has no FP8 products, and --fp8-emulate is not given.
    """
    if config.parallel.fp8_format is not None and not config.parallel.fp8_emulate:
        _check_device(config, device)
    lines = describe_fp8(config)
    if lines and device.type == "cuda":
        how = (
            "Triton"
            if has_kernels(device)
            else "PyTorch, which is slower (Triton is missing, or the GPU is older than Ada)"
        )
        lines.append(f"FP8: maxima, rounding and transposes by {how}; the same numbers; --kernels does not affect it")
    return lines


def describe_fp8(config: Config) -> list[str]:
    """A line that says which layers compute in FP8; none without FP8."""
    parallel = config.parallel
    if parallel.fp8_format is None:
        return []
    otherwise = "bf16" if parallel.bf16 else "fp32"
    left = layers_in_bf16(parallel, config.model.num_layers)
    routers = ", routers" if config.model.num_experts else ""
    kept = [f"embedding, norms, attention{routers}, output layer and loss"]
    kept += [f"layers {ranges_of(left)}"] if left else []
    kept += ["gradients of weights"] if parallel.fp8_recipe in ("rowwise", "nvfp4") else []
    kept += ["adapters"] if config.has_adapters else []
    formats = "e4m3, gradients e5m2" if parallel.fp8_format == "hybrid" else parallel.fp8_format
    bits = 4 if parallel.fp8_format == "e2m1" else 8
    how = f"emulated: rounded to {bits} bits, multiplied in fp32" if parallel.fp8_emulate else "on tensor cores"
    how += ", weights gathered as 8-bit numbers" if parallel.fp8_param_gather else ""
    return [f"FP8: linear layers in {formats}, {_recipe(config)} scales, {how}; in {otherwise}: {'; '.join(kept)}"]


def without_history(config: Config, what: str) -> list[str]:
    """Notes on a second model of the run that is never trained, where scales are delayed: these come from steps."""
    parallel = config.parallel
    if parallel.fp8_format is None or parallel.fp8_recipe != "delayed":
        return []
    return [f"note: the {what} is computed without FP8: delayed scales come from training steps, and it has none"]


def _recipe(config: Config) -> str:
    parallel = config.parallel
    if parallel.fp8_recipe != "delayed":
        return parallel.fp8_recipe
    steps = f"{parallel.fp8_amax_compute_algo} of {parallel.fp8_amax_history_len} steps"
    return f"delayed ({steps}; a run's first step is without FP8)"


def _check_device(config: Config, device: torch.device) -> None:
    parallel = config.parallel
    needed = _ROWS if parallel.fp8_recipe == "rowwise" else _TENSOR_CORES
    # Tuples compare by major, then minor.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= needed:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    raise ConfigError(
        f"--fp8-format {parallel.fp8_format}: {name} has no FP8 products with {parallel.fp8_recipe} scales; "
        "--fp8-emulate computes the same numbers without them"
    )
