"""Each way of exchanging keys or heads, on real processes: errors against fp64 beside those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.layers import context_parallel_attention
from tests.distributed import run_distributed
from tests.layers.context_parallel.plain import CASES, NAMES

CORES = {
    "flash": FusedAttention("flash"),
    "flash, grouped": FusedAttention("flash", grouped=True),
    "math": MathAttention(),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Squares = dict[str, tuple[float, float, float]]
"""By tensor: squares of the norms of a rank's error, of one rank's error in the same rows, and of the values."""


def mesh_of(method: str, ranks: int) -> Any:
    if method == "a2a+p2p":
        return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("p2p", "a2a"))
    return init_device_mesh("cpu", (ranks,))


def methods_of(ranks: int) -> list[str]:
    return ["p2p", "all_gather", "a2a", *(["a2a+p2p"] if ranks == 4 else [])]


def measure(rank: int, ranks: int) -> dict[tuple[str, ...], tuple[Squares, list[str]]]:
    """By (method, case, core, dtype): squares, and the tensors that have the bits of one rank."""
    found = {}
    meshes = {method: mesh_of(method, ranks) for method in methods_of(ranks)}
    for case_name, case in CASES.items():
        exact = [x[case.rows(case.cut(ranks), rank)] for x in case.exact()]
        for core_name, core in CORES.items():
            for dtype_name, dtype in DTYPES.items():
                one = [x[case.rows(case.cut(ranks), rank)] for x in case.whole(core, dtype)]
                for method, mesh in meshes.items():
                    mine = case.part(context_parallel_attention(core, mesh, method), dtype, rank, ranks, padding=3)
                    squares, same = {}, []
                    for name, x, y, z in zip(NAMES, mine, one, exact, strict=True):
                        parts = (x.double() - z, y.double() - z, z)
                        squares[name] = tuple(float(part.square().sum()) for part in parts)
                        same += [name] if torch.equal(x, y) else []
                    found[method, case_name, core_name, dtype_name] = squares, same
    return found


@pytest.mark.parametrize("ranks", [*(pytest.param(few, marks=pytest.mark.slow) for few in (2, 3)), 4])
def test_errors_are_those_of_one_rank(ranks: int) -> None:
    """fp32: at most twice; bf16: at most 1.3 times. Each number is of the whole tensor, over all ranks."""
    parts = run_distributed(measure, ranks)
    assert len(parts[0]) == len(methods_of(ranks)) * len(CASES) * len(CORES) * len(DTYPES)
    beyond = {}
    for key in parts[0]:
        for name in NAMES:
            error, one, norm = (sum(part[key][0][name][i] for part in parts) ** 0.5 for i in range(3))
            bound = 2.0 if key[-1] == "fp32" else 1.3
            floor = torch.finfo(DTYPES[key[-1]]).eps / 8 * norm  # below it both are noise
            if not error <= bound * max(one, floor):
                beyond[(*key, name)] = error / one
    assert beyond == {}
    for key in parts[0]:
        if key[0] == "a2a":
            groups = CASES[key[1]].groups
            # of repeated heads gradients are added in another order
            names = set(NAMES) if groups % ranks == 0 else {"out", "lse", "dq"}
            assert all(names <= set(part[key][1]) for part in parts), key


def whole_sequences(rank: int, ranks: int) -> bool:
    """Without a cut every rank has whole sequences and computes alone."""
    case = CASES["GQA"]
    for method in methods_of(ranks):
        core = context_parallel_attention(FusedAttention(), mesh_of(method, ranks), method)
        found, want = (case.whole(c, torch.float32) for c in (core, FusedAttention()))
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    return True


def test_a_layout_without_a_cut_is_computed_alone() -> None:
    assert all(run_distributed(whole_sequences, 2))
