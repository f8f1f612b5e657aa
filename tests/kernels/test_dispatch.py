"""Which kernels a run uses: what is chosen, why, and what is refused."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smp.config import ConfigError, load_config, resolve
from smp.kernels import TORCH, Kernels, cross_entropy, dispatch, norm
from smp.kernels.attention_cores import select_attention as attention
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.attention_cores.select_attention import AttentionShape, choose_attention
from smp.kernels.attention_cores.varlen import VarlenAttention
from smp.kernels.dispatch import choose_kernels, describe_kernels
from smp.training import build
from tests.plain_varlen import plain_varlen

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # choosing touches no device
FUSED = {"cross_entropy": "triton", "norm": "triton", "swiglu": "triton", "rope": "triton"}
IN_CPP = dict.fromkeys(FUSED, "cpp")
EVERY = {**FUSED, "router": "triton", "permute": "triton", "grouped_gemm": "triton"}


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_installed", lambda name: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_auto_is_triton_on_a_gpu() -> None:
    assert choose_kernels("auto", CUDA)[0] == Kernels(**FUSED, rope_in_place=True)  # type: ignore[arg-type]


def test_auto_is_cpp_on_a_cpu_where_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "why_not", lambda dtype: "")
    kernels, reasons = choose_kernels("auto", CPU)
    assert kernels == Kernels(**IN_CPP, rope_in_place=True)  # type: ignore[arg-type]
    assert (
        describe_kernels(kernels, reasons)[0] == "kernels: cpp for cross_entropy, norm, swiglu, rope (fused on a CPU)"
    )
    assert choose_kernels("cpp", CPU)[0] == kernels and choose_kernels("torch", CPU)[0] == TORCH
    assert not choose_kernels("auto", CPU, selective=True)[0].rope_in_place
    assert choose_kernels("auto", CPU, compile=True)[0] == Kernels(cross_entropy="cpp")
    assert choose_kernels("cpp", CPU, compile=True)[0] == Kernels(**IN_CPP)  # type: ignore[arg-type]
    asked: list[torch.dtype] = []
    monkeypatch.setattr(dispatch, "why_not", lambda dtype: asked.append(dtype) or "there is no C++ compiler (g++)")  # type: ignore[func-returns-value]
    kernels, reasons = choose_kernels("auto", CPU, dtype=torch.bfloat16)
    assert kernels == TORCH and set(asked) == {torch.bfloat16}
    assert reasons["norm"] == "runs on cpu; cpp does not: there is no C++ compiler (g++)"
    assert reasons["router"] == "runs on cpu"
    with pytest.raises(ConfigError, match=r"--kernels cpp cannot run: there is no C\+\+ compiler"):
        choose_kernels("cpp", CPU)
    with pytest.raises(ConfigError, match="--kernels cpp cannot run: this run is on cuda"):
        choose_kernels("cpp", CUDA)


def test_auto_leaves_to_pytorch_what_was_not_measured() -> None:
    kernels, reasons = choose_kernels("auto", CUDA)
    assert kernels.router == kernels.permute == kernels.grouped_gemm == "torch"
    why = "its kernel was not measured on a GPU; --kernels triton takes it"
    assert f"kernels: torch for router, permute, grouped_gemm ({why})" in describe_kernels(kernels, reasons)


def test_auto_leaves_to_the_compiler_what_it_fuses() -> None:
    kernels, reasons = choose_kernels("auto", CUDA, compile=True)
    assert kernels == Kernels(cross_entropy="triton")
    assert describe_kernels(kernels, reasons) == [
        "kernels: triton for cross_entropy (fused on CUDA)",
        "kernels: torch for norm, swiglu, rope, router, permute (torch.compile fuses it with its neighbours)",
        "kernels: torch for grouped_gemm (its kernel was not measured on a GPU; --kernels triton takes it)",
        "kernels: torch for delta_rule (flash-linear-attention was not measured here; --kernels triton takes it where "
        "it is installed)",
    ]


def test_auto_leaves_long_rows_to_pytorch_and_triton_refuses_them() -> None:
    kernels, reasons = choose_kernels("auto", CUDA, features=16384)
    assert kernels == Kernels(**{**FUSED, "norm": "torch"}, rope_in_place=True) and "16384" in reasons["norm"]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="up to 8192, --hidden-size is 16384"):
        choose_kernels("triton", CUDA, features=16384)


def test_auto_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_installed", lambda name: False)
    kernels, reasons = choose_kernels("auto", CUDA)
    assert kernels == TORCH and reasons["norm"] == "triton is not installed"
    with pytest.raises(ConfigError, match="not installed"):
        choose_kernels("triton", CUDA)


def test_auto_does_not_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels, reasons = choose_kernels("auto", CUDA)
    assert kernels == TORCH and "TRITON_INTERPRET=1 is set" in reasons["rope"]


def test_a_wish_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels("torch", CUDA)[0] == TORCH
    assert choose_kernels("triton", CUDA, compile=True)[0] == Kernels(**EVERY)  # type: ignore[arg-type]
    assert choose_kernels("triton", CUDA)[0].delta_rule == "fla"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_kernels("triton", CPU)[0] == Kernels(**EVERY, rope_in_place=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("wish", ["triton", "cuda", "apex"])
def test_a_wish_that_needs_a_gpu_is_one_line_without_one(wish: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_kernels(wish, CPU)
    assert f"--kernels {wish} needs a CUDA device" in str(caught.value) and "\n" not in str(caught.value)


def test_cuda_needs_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from smp.kernels.cuda import library

    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "no.so")
    with pytest.raises(ConfigError, match="not built: python -m smp.kernels.cuda.build"):
        choose_kernels("cuda", CUDA)
    monkeypatch.setattr(library, "library_path", lambda: tmp_path)
    library.library.cache_clear()
    with pytest.raises(ConfigError, match="does not run on this device: .*; build it anew") as caught:
        choose_kernels("cuda", CUDA)  # a folder is no library
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(library, "why_unusable", lambda device: None)
    assert choose_kernels("cuda", CUDA)[0] == Kernels(**{**FUSED, "cross_entropy": "cuda"}, rope_in_place=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"swiglu": "nonsense"}, {"rope": "cuda"}, {"norm": "cuda"}, {"router": "cuda"}, {"cross_entropy": "apex"}]
)
def test_an_operation_has_only_its_own_backends(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} runs on torch, triton.*there is no"):
        Kernels(**wrong)


def test_apex_computes_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of apex's functions, which need CUDA."""
    with pytest.raises(ConfigError, match="needs apex with its CUDA extensions"):
        choose_kernels("apex", CUDA)
    called: list[str] = []

    def fused_rms_norm_affine(x: torch.Tensor, weight: torch.Tensor, shape: Any, eps: float) -> torch.Tensor:
        called.append("rms")
        return torch.nn.functional.rms_norm(x, shape, weight, eps)

    def fused_layer_norm_affine(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Any, eps: float
    ) -> Any:
        called.append("layer")
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    module: Any = types.ModuleType("apex.normalization.fused_layer_norm")
    module.fused_rms_norm_affine, module.fused_layer_norm_affine = fused_rms_norm_affine, fused_layer_norm_affine
    for name in ("apex", "apex.normalization", "fused_layer_norm_cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "apex.normalization.fused_layer_norm", module)
    assert choose_kernels("apex", CUDA)[0] == Kernels(**{**FUSED, "norm": "apex"}, rope_in_place=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--compile exclude each other"):
        choose_kernels("apex", CUDA, compile=True)
    x, weight = torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(norm.norm(x, weight, None, 1e-5, "apex"), norm.norm(x, weight, None, 1e-5))
    both = norm.add_norm(x, x, weight, weight, 1e-5, "apex"), norm.add_norm(x, x, weight, weight, 1e-5)
    torch.testing.assert_close(*both)
    assert called == ["rms", "layer"]


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_kernel_of_another_device_is_named(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = f"the {backend} kernel of softmax_stats needs a CUDA device, this tensor is on a CPU"
    with pytest.raises(RuntimeError, match=message):
        cross_entropy._softmax_stats_op(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 3, backend)


def test_long_sequences_on_a_cpu_take_cpp_where_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(heads=2, groups=1, length=128, head_dim=16, dtype=torch.bfloat16, masked=True)
    monkeypatch.setattr(attention, "why_not", lambda dtype: "")
    choice = choose_attention("auto", CPU, shape)
    assert choice.core == FusedAttention("cpp", grouped=True)
    assert str(choice) == "attention: cpp (the first of cpp, flash, math that takes this model)"
    assert choose_attention("cpp", CPU, replace(shape, length=8)).core == choice.core
    monkeypatch.setattr(attention, "why_not", lambda dtype: "there is no C++ compiler (g++)")
    choice = choose_attention("auto", CPU, shape)
    assert choice.core == FusedAttention("flash")
    assert str(choice).endswith("cpp does not: there is no C++ compiler (g++))") and "\n" not in str(choice)
    with pytest.raises(
        ConfigError, match=r"--attention-backend cpp does not take .*, on cpu: there is no C\+\+ compiler"
    ):
        choose_attention("cpp", CPU, shape)
    assert "cpp" not in str(choose_attention("flash", CPU, shape))


def test_attention_is_the_first_backend_that_takes_the_shape() -> None:
    shape = AttentionShape(heads=2, groups=1, length=8, head_dim=16, dtype=torch.float32, masked=False)
    choice = choose_attention("auto", CPU, shape)
    assert (
        choice.core == FusedAttention("flash", grouped=True)
        and choice.reason == "the first of flash, math that takes this model"
    )
    assert choose_attention("math", CPU, shape).core == MathAttention()
    assert choose_attention("auto", CPU, replace(shape, masked=True)).core == choice.core
    assert choose_attention("auto", CPU, replace(shape, groups=2)).core == FusedAttention("flash")
    rounding = choose_attention("auto", CPU, replace(shape, dtype=torch.bfloat16))
    plain = choose_attention("math", CPU, replace(shape, dtype=torch.bfloat16))
    assert rounding.core == FusedAttention("flash") and plain.core == MathAttention()
    assert all("each key/value head is repeated" in str(choice) for choice in (rounding, plain))
    for wish in ("cudnn", "efficient"):
        with pytest.raises(
            ConfigError,
            match=f"--attention-backend {wish} does not take 2 heads of 16 with 1 key/value heads, 8 tokens, float32",
        ):
            choose_attention(wish, CPU, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("masked", "spans", "capability", "refused", "name", "in_spans"),
    [
        (False, True, (9, 0), (), "cudnn", False),
        (False, True, (8, 0), (), "flash", False),
        (True, True, (9, 0), (), "flash", True),
        (True, True, (8, 0), (), "flash", True),
        (True, False, (8, 0), ("flash",), "efficient", False),  # attention dropout: flash takes no mask
        (True, True, (9, 0), ("flash", "cudnn"), "efficient", False),  # fp32
    ],
)
def test_attention_on_a_gpu(
    masked: bool,
    spans: bool,
    capability: tuple[int, int],
    refused: tuple[str, ...],
    name: str,
    in_spans: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in of what a GPU takes."""
    shape = AttentionShape(heads=2, groups=1, length=8, head_dim=16, dtype=torch.bfloat16, masked=masked, spans=spans)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention, "_works", lambda name, device, shape: name not in refused)
    choice = choose_attention("auto", CUDA, shape)
    assert (choice.core.name, isinstance(choice.core, VarlenAttention)) == (name, in_spans)
    variable = "'s variable-length kernel" if in_spans else ""
    assert str(choice) == f"attention: {name}{variable} ({choice.reason})"
    assert choose_attention("math", CUDA, shape).core == MathAttention()
    assert choose_attention("auto", CUDA, shape, deterministic=True).core.name != "cudnn"  # whose backward pass is not
    monkeypatch.setattr(attention, "_works", lambda name, device, shape: False)
    with pytest.raises(ConfigError, match="no attention backend of .*math takes 2 heads of 16"):
        choose_attention("auto", CUDA, shape)
    monkeypatch.setattr(attention, "_works", lambda name, device, shape: name not in refused)
    if "flash" in refused:
        with pytest.raises(
            ConfigError, match="--attention-backend flash does not take .* documents or a window, on cuda"
        ):
            choose_attention("flash", CUDA, shape)


def test_key_value_heads_are_repeated_rather_than_the_backend_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(heads=2, groups=1, length=8, head_dim=16, dtype=torch.float32, masked=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(attention, "_works", lambda name, device, shape: name != "flash" and shape.groups == 2)
    choice = choose_attention("auto", CUDA, shape)
    assert choice.core == FusedAttention("efficient")
    said = "each key/value head is repeated for its query heads"
    assert str(choice) == f"attention: efficient (the first of flash, efficient, math that takes this model; {said})"
    assert choose_attention("math", CUDA, shape).reason == f"--attention-backend math; {said}"
    assert said not in str(choose_attention("auto", CUDA, replace(shape, groups=2)))
    monkeypatch.setattr(attention, "_works", lambda name, device, shape: True)
    choice = choose_attention("auto", CUDA, shape)
    assert choice.core == VarlenAttention()  # of repeated heads
    assert said in str(choice)
    choice = choose_attention("auto", CUDA, replace(shape, masked=False))
    assert choice.core == FusedAttention("flash", grouped=True) and said not in str(choice)


def test_what_is_tried_is_what_runs() -> None:
    """On a CPU: the shapes and arguments are right, with torch's own operator for spans."""
    shape = AttentionShape(heads=2, groups=1, length=8, head_dim=16, dtype=torch.float32, masked=True)
    for core in (MathAttention(), FusedAttention("flash"), FusedAttention("flash", grouped=True)):
        assert attention._runs(core, CPU, shape) and attention._runs(core, CPU, replace(shape, masked=False))
    with plain_varlen() as calls:
        assert attention._runs(VarlenAttention(), CPU, shape)
    assert calls == [2, 2]
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        attention._runs(FusedAttention("cudnn"), CPU, shape)


def test_changed_scores_are_computed_by_math_alone() -> None:
    shape = AttentionShape(4, 2, 16, 8, torch.float32, masked=False, changes_scores="--attn-logit-softcapping 5")
    for wish in ("auto", "math"):
        assert str(choose_attention(wish, CPU, shape)).startswith("attention: math (")
    assert "the one that computes --attn-logit-softcapping 5" in str(choose_attention("auto", CPU, shape))
    with pytest.raises(
        ConfigError, match="flash does not compute --attn-logit-softcapping 5; --attention-backend math"
    ):
        choose_attention("flash", CPU, shape)


def test_a_rank_that_cannot_takes_cpp_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of other processors, or without a compiler: what all ranks compute alike has the same bits on all."""
    words = "--mock-data --vocab-size 100 --train-iters 1 --num-layers 2 --seq-length 128"
    uncut: Any = SimpleNamespace(cp_exchange=None)
    for module in (dispatch, attention, build):
        monkeypatch.setattr(module, "why_not", lambda dtype: "")
    why = "there is no C++ compiler (g++)"

    def chosen(flags: str, found: list[str]) -> tuple[Kernels, list[str]]:
        monkeypatch.setattr(build, "gather", lambda value: found)
        return build.choose_backends(
            resolve(load_config([*words.split(), *flags.split()], {}), 2), uncut, CPU, documents=False
        )

    kernels, lines = chosen("", ["", ""])
    assert kernels.norm == "cpp" and kernels.attention == FusedAttention("cpp")
    kernels, lines = chosen("", ["", why])
    assert kernels.norm == kernels.cross_entropy == "torch" and kernels.attention == FusedAttention("flash")
    assert all(f"cpp does not: on rank 1 {why}" in line for line in lines)
    assert all(f"cpp does not: {why}" in line for line in chosen("", [why, why])[1])
    for flag in ("--kernels cpp", "--attention-backend cpp"):
        with pytest.raises(ConfigError, match=f"{flag} .*on rank 1 there is no"):
            chosen(flag, ["", why])
    asked = chosen("--kernels torch --attention-backend flash", ["", why])
    assert not any("rank" in line for line in asked[1]), "nobody asks for it"
