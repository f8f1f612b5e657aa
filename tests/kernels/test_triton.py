"""Triton kernels without a GPU: their results in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import in_interpreter, needs_interpreter, needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return in_interpreter("tests.kernels.interpreted")


@needs_interpreter
@pytest.mark.parametrize("operation", ["cross_entropy", "norm", "swiglu", "rope", "router", "permute", "grouped_gemm"])
def test_fp32_equals_the_reference(errors: dict[str, float], operation: str) -> None:
    mine = {name: e for name, e in errors.items() if name.startswith(f"{operation}, float32")}
    assert len(mine) >= 18
    assert {name: e for name, e in mine.items() if e > 1e-6} == {}


@needs_interpreter
@pytest.mark.parametrize("operation", ["cross_entropy", "norm", "swiglu", "rope", "router", "permute", "grouped_gemm"])
def test_bf16_storage_is_within_a_unit_in_the_last_place(errors: dict[str, float], operation: str) -> None:
    """The interpreter cuts off where a GPU rounds, so half of the values are one unit, 2^-7 of themselves, lower."""
    mine = {name: e for name, e in errors.items() if name.startswith(f"{operation}, bfloat16")}
    assert len(mine) >= 18
    assert {name: e for name, e in mine.items() if e > 2**-7} == {}


@needs_interpreter
def test_numbers_of_8_bits_and_their_transposes() -> None:
    wrong = in_interpreter("tests.kernels.interpreted_fp8")
    assert len(wrong) == 5 * 2 * (2 + 6 + 2)
    assert not any(wrong.values()), wrong


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1"
RUNS = [
    "",
    f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --recompute-granularity full",
]
MORE_RUNS = [
    "--bf16",
    "--recompute-granularity selective --num-query-groups 2 --qk-layernorm",
    "--recompute-granularity full --normalization LayerNorm --rotary-percent 0.5",
    "--no-swiglu --no-disable-bias-linear",
    "--parallel-residual --hidden-dropout 0.1 --compile",
    f"{EXPERTS} --moe-router-pre-softmax --moe-router-num-groups 2 --moe-router-group-topk 1 --compile",
    f"{EXPERTS} --bf16 --recompute-granularity selective --moe-expert-capacity-factor 0.6",
]


@needs_interpreter
@pytest.mark.parametrize("cases", [RUNS, pytest.param(MORE_RUNS, marks=pytest.mark.slow)])
def test_real_runs_learn_alike_with_and_without_kernels(tmp_path: Path, cases: list[str]) -> None:
    short = [f"--train-iters 2 {flags}" for flags in cases]
    found = in_interpreter("tests.kernels.interpreted_runs", str(tmp_path), *short)
    for flags, both in zip(cases, found, strict=True):
        losses, operators = ({name: run[key] for name, run in both.items()} for key in ("losses", "operators"))
        assert len(losses["torch"]) == 2
        assert losses["triton"] == pytest.approx(losses["torch"], rel=5e-3 if "bf16" in flags else 1e-5), flags
        if "--compile" in flags:
            continue  # there they are not counted
        moved = ("smp::grouped_", "smp::combine_rows")  # of experts, which a CPU has operators for
        fused = {name for name in operators["torch"] if not name.startswith(moved)}
        assert fused == {"smp::softmax_stats", "smp::logits_to_gradient_"}
        assert operators["triton"].get("smp::choose_experts_backward", 0) == (2 * 2 if "experts" in flags else 0)
        assert operators["triton"].get("smp::combine_rows_backward", 0) == (2 * 2 if "experts" in flags else 0)
        assert ("smp::gather_rows" in operators["triton"]) == ("experts" in flags)
        assert flags or operators["triton"] == {
            "smp::softmax_stats": 2,  # a step
            "smp::logits_to_gradient_": 2,
            "smp::norm": 2 * 5,  # two per block, half of them after an addition, and the final one
            "smp::norm_backward": 2 * 5,
            "smp::swiglu": 2 * 2,
            "smp::swiglu_backward": 2 * 2,
            "smp::rope_": 2 * 2,  # in place
            "smp::rope": 2 * 2,  # its adjoint
        }


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_interpreter
def test_200_steps_follow_the_same_curve(tmp_path: Path) -> None:
    """Rounding differs in the last digit, and training makes small differences grow."""
    flags = "--train-iters 200 --num-query-groups 2"
    (runs,) = in_interpreter("tests.kernels.interpreted_runs", str(tmp_path), flags)
    assert len(runs["torch"]["losses"]) == 200
    assert runs["triton"]["losses"] == pytest.approx(runs["torch"]["losses"], rel=1e-3)


FEATURES = (128, 4096, 8192)


Compilation = tuple[str, str, dict[str, str], dict[str, Any], dict[str, int]]
"""File, kernel, types of its arguments, compile-time arguments, and how it is compiled."""


def products_of_experts(arch: int) -> list[Compilation]:
    """Of bf16, in tiles for few rows of an expert and for many, and of fp32 as training has it: one expert, TF32."""
    from smp.kernels.triton import grouped_gemm

    out: list[Compilation] = []
    kinds: list[tuple[torch.dtype, str, list[tuple[int, int]], bool, dict[str, Any]]] = [
        (torch.bfloat16, "*bf16", [(8192, 128), (65536, 128)], False, {"EXPERTS": 128}),
        (torch.float32, "*fp32", [(65536, 1)], True, {"EXPERTS": 1, "PRECISION": "tf32"}),
    ]
    for dtype, pointer, sizes, by_rows, more in kinds:
        types = {**dict.fromkeys(("x", "weight", "x_too", "weight_too", "grad", "out"), pointer), "counts": "*i64"}
        types |= dict.fromkeys(("experts", "inner", "height", "width"), "i32")
        ways: list[tuple[str, dict[str, Any], tuple[int, int]]] = [("weights_kernel", {}, (1, 0))]
        for both in (False, True):
            ways += [("rows_kernel", {"BOTH": both, "BY_ROWS": both or by_rows}, size) for size in sizes]
        for name, way, size in ways:
            constants = {**grouped_gemm.options(dtype, *size, arch == 90), **way, **more}
            how = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
            out.append(("grouped_gemm", name, types, constants, how))
    return out


def compilations(arch: int) -> list[Compilation]:
    """What a run compiles for bf16; on sm_90 also what only the tables of ``make gpu`` have."""
    from smp.kernels.triton import cross_entropy, fp8, norm, permute, rope, router, swiglu

    low, full, size = "*bf16", "*fp32", "i32"
    rows = {"stride": size, "valid": size, "columns": "*i64"}
    out: list[Any] = [
        (
            "cross_entropy",
            "stats_kernel",
            {**rows, "logits": low, "peaks": full, "log_sums": full, "targets": full},
            {"BLOCK": cross_entropy.FORWARD_BLOCK},
            cross_entropy.FORWARD_WARPS,
        ),
        (
            "cross_entropy",
            "gradient_kernel",
            {**rows, "logits": low, "peaks": full, "log_sums": full, "weights": full, "width": size},
            {"BLOCK": cross_entropy.GRADIENT_BLOCK},
            cross_entropy.GRADIENT_WARPS,
        ),
    ]
    strides = dict.fromkeys(("gate_stride", "up_stride", "da_stride", "width"), size)
    mlp = {**strides, **dict.fromkeys(("gate", "up", "out", "da", "dgate", "dup", "again"), low)}
    out.append(("swiglu", "forward_kernel", mlp, {"BLOCK": swiglu.BLOCK}, swiglu.WARPS))
    out += [
        ("swiglu", "backward_kernel", mlp, {"BLOCK": swiglu.BLOCK, "AGAIN": again}, swiglu.WARPS)
        for again in (False, True)
    ]
    heads = dict.fromkeys(("q_heads", "k_heads", "half", "rest", "head_dim", "q_blocks"), size)
    turned = {**heads, **dict.fromkeys(("q", "k", "q_out", "k_out"), low), "cos": full, "sin": full}
    out += [
        (
            "rope",
            "rope_kernel",
            turned,
            {"INVERSE": rest > 0, "HEADS": rope.HEADS, "HALF": half, "REST": rest},
            rope.WARPS,
        )
        for half, rest in ((64, 0), (16, 128))
    ]
    tensors = {**dict.fromkeys(("x", "residual", "weight", "bias", "y", "total", "dy", "dtotal", "dx"), low)}
    tensors |= {**dict.fromkeys(("mean", "scale", "dweight", "dbias"), full)}
    tensors |= dict.fromkeys(("rows", "features", "tiles"), size)
    for features in FEATURES:
        options = norm.tile_options(features)
        warps = options.pop("num_warps")
        for adds, center in ((False, False), (True, False), (True, True)):
            flags = {"ADD": adds, "CENTER": center, **options}
            out.append(("norm", "forward_kernel", tensors, {"EPS": 1e-5, **flags}, warps))
            more = norm.backward_options(features, center)["num_warps"]
            for stages in (norm.STAGES, 2) if arch == 90 and features == 4096 else (norm.STAGES,):
                out.append(("norm", "backward_kernel", tensors, {**flags, "STAGES": stages}, more))
    sums = {"PARTS": norm.SUM_PARTS, "COLUMNS": norm.SUM_COLUMNS}
    out.append(
        (
            "norm",
            "sum_kernel",
            {"partial": full, "out": low, "out_bias": low, "parts": size, **tensors},
            sums,
            norm.SUM_WARPS,
        )
    )
    routed = {**dict.fromkeys(("logits", "compared", "bias", "weights", "dweights", "dlogits"), full), "rows": size}
    routed |= {"experts": "*i64"}
    for experts, k in ((8, 2), (128, 8), (256, 8), (512, 10)):
        layout = router.options(experts, k)
        warps = layout.pop("num_warps")
        for scores in ("softmax", "pre_softmax", "sigmoid"):
            flags = {"SCORES": scores, "FACTOR": 2.5, **layout}
            slots = {"SLOTS": 1 << (k - 1).bit_length()}
            for given, biased in ((False, scores == "sigmoid"), (True, False)):
                chosen = {"GIVEN": given, "BIASED": biased, **flags, **slots}
                out.append(("router", "forward_kernel", routed, chosen, warps))
            out.append(("router", "backward_kernel", routed, flags, warps))
    moved = {**dict.fromkeys(("x", "rows", "out", "grad", "drows"), low), "weights": full, "products": full}
    moved |= {**dict.fromkeys(("index", "choices", "order"), "*i64"), "width": size}
    for k in (1, 2, 8, 22):
        shape = {"K": k, "BLOCK": permute.BLOCK}
        out.append(("permute", "gather_kernel", moved, shape, permute.WARPS))
        for weighted in (False, True):
            out.append(("permute", "combine_kernel", moved, {"WEIGHTED": weighted, **shape}, permute.WARPS))
        out.append(("permute", "combine_backward_kernel", moved, shape, permute.WARPS))
    for source in (low, full):
        for by_column in (False, True):
            numbers = {"x": source, "inverse": full, "out": "*fp8e4nv", "row_step": size, "stride": size, "width": size}
            constants = {"END": 448.0, "BY_COLUMN": by_column, "BLOCK": fp8.BLOCK}
            out.append(("fp8", "quantise_kernel", numbers, constants, fp8.WARPS))
        one = {"x": source, "bits": "*i32", "count": "i64"}
        out.append(("fp8", "largest_kernel", one, {"BLOCK": fp8.LARGEST_BLOCK}, fp8.LARGEST_WARPS))
    turned = {"x": "*u8", "out": "*u8", **dict.fromkeys(("stride", "out_stride", "rows", "width"), size)}
    out.append(("fp8", "transpose_kernel", turned, {"TILE": fp8.TILE}, fp8.TILE_WARPS))
    return [(*what, {"num_warps": warps}) for *what, warps in out] + products_of_experts(arch)


def compile_for(
    arch: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], how: dict[str, int]
) -> tuple[str, str, int]:
    """(PTX, what ptxas -v says of it, bytes of shared memory) of a kernel, with pointers and sizes that 16 divides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if name not in constants and name not in ("valid", "rows", "tiles", "experts")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=how)
    ptx = made.asm["ptx"]
    target = re.search(r"\.target\s+(sm_\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", "-o", os.devnull, file.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    return ptx, said, made.metadata.shared


SHARED = {90: 232_448, 80: 101_376}
"""Bytes that a program may have: of a Hopper, and of what has least of those that are not, sm_86 and sm_89."""


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_kernels_compile_without_double_precision_and_spills(arch: int) -> None:
    import importlib

    faults = {}
    for file, name, types, constants, how in compilations(arch):
        if name == "quantise_kernel" and arch < 89:
            continue  # which has no 8-bit floating point
        kernel = getattr(importlib.import_module(f"smp.kernels.triton.{file}"), name)
        ptx, said, shared = compile_for(arch, kernel, types, constants, how)
        spills = {int(number) for number in re.findall(r"(\d+) bytes spill", said)}
        wide = ".v4" in ptx  # loads and stores of 16 bytes
        if ".f64" in ptx or spills != {0} or not wide or shared > SHARED[arch]:
            faults[f"{file}.{name} {constants}"] = (".f64" in ptx, spills, wide, shared)
        if file == "grouped_gemm" and types["x"] == "*bf16":
            assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in ptx, "a slower path than tensor cores'"
    assert not faults


def test_the_interpreter_is_not_what_compiles() -> None:
    """The other tests of this file would pass on nothing if kernels of this process were interpreted."""
    from triton.runtime.jit import JITFunction

    from smp.kernels.triton.rope import rope_kernel

    assert isinstance(rope_kernel, JITFunction)
