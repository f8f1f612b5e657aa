"""Mamba-2 mixers of transformers, whose fused kernel multiplies with the output matrix by itself: where that is cut,
the kernel is given none. Here a stand-in for the kernel, which CPUs do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import run_distributed
from tests.hf.matrix import measure
from tests.parity.result import TOLERANCE

pytest.importorskip("transformers")


def _measured(rank: int, world_size: int, kinds: list[str]) -> Any:
    """What differs at TP 2, and of each call of the kernel whether it got an output matrix."""
    from transformers.models.mamba2 import modeling_mamba2 as modeling

    seen: list[bool] = []

    def fused(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        y = _scanned(modeling, x, *args, **options)
        matrix, bias = options["outproj_weight"], options["outproj_bias"]
        seen.append(matrix is not None)
        if matrix is not None:
            return F.linear(y, matrix, bias)
        assert bias is None, "as in mamba_ssm"
        return y

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(modeling, "mamba2_split_conv1d_scan_combined", fused)
        found = measure(rank, world_size, kinds, ["TP 2"], 1)
    return found, seen


def _scanned(modeling: Any, x: torch.Tensor, conv: Any, bias: Any, dt_bias: Any, decay: Any, **of: Any) -> torch.Tensor:
    """What mamba_ssm's kernel computes in front of its last product."""
    width, size, groups = len(of["rmsnorm_weight"]), of["headdim"], of["ngroups"]
    heads, states = width // size, (len(conv) - width) // 2
    gate, convolved, step = x.split((width, len(conv), heads), -1)
    convolved = modeling.causal_conv1d_fn(convolved.transpose(1, 2), conv, bias, activation=of["activation"])
    values, b, c = convolved.transpose(1, 2).split((width, states, states), -1)
    y = modeling.mamba2_chunk_scan(
        values.unflatten(-1, (heads, size)),
        step,
        decay,
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
        **{"chunk_size": of["chunk_size"], "D": of["D"], "dt_bias": dt_bias, "dt_limit": of["dt_limit"]},
        dt_softplus=True,
    )
    norm = modeling.MambaRMSNormGated(width, width // groups, of["rmsnorm_eps"])
    return torch.func.functional_call(norm, {"weight": of["rmsnorm_weight"]}, (y.flatten(-2), gate))


def test_a_fused_kernel_leaves_a_product_out_whose_matrix_is_cut() -> None:
    for found, seen in run_distributed(_measured, 2, ["mamba2"]):
        errors = found["mamba2"]["TP 2"]
        assert isinstance(errors, dict), errors
        assert max(errors.values()) <= TOLERANCE, errors
        assert False in seen, "the cut model's kernel got no matrix"
