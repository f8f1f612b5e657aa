"""--kernels: which implementation each operation of a run uses, decided once, with the reason."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch

from smp.config import ConfigError
from smp.kernels.attention_cores.attention_core import AttentionCore
from smp.kernels.attention_cores.fused_attention import DEFAULT_ATTENTION
from smp.kernels.cpp.library import why_not
from smp.kernels.registry import interpreted

Backend = Literal["torch", "triton", "cuda", "apex", "fla", "cpp"]
Wish = Literal["auto", "torch", "triton", "cuda", "apex", "cpp"]


_IN_CPP = ("cross_entropy", "norm", "swiglu", "rope")
OPERATIONS = ("cross_entropy", "norm", "swiglu", "rope", "router", "permute", "grouped_gemm", "delta_rule")


@dataclass(frozen=True)
class Kernels:
    """The backend of each operation. Layers take it as an argument; by default all is plain PyTorch.

    Attributes:
        cross_entropy: softmax statistics and gradient of local logits (:mod:`smp.kernels.cross_entropy`).
        norm: RMSNorm and LayerNorm, alone and after an addition (:mod:`smp.kernels.norm`).
        swiglu: SiLU(gate) x up, computed again in the backward pass (:mod:`smp.kernels.swiglu`).
        rope: rotation of queries and keys (:mod:`smp.kernels.rope`).
        router: choice of each token's experts and their weights (:mod:`smp.kernels.experts.router`).
        permute: rows of tokens to their experts and back (:mod:`smp.kernels.experts.permute`).
        grouped_gemm: products of rows with their experts' matrices (:mod:`smp.kernels.experts.grouped`).
        delta_rule: the gated delta rule (:mod:`smp.kernels.recurrences.delta_rule`).
        attention: what computes attention (:mod:`smp.kernels.attention_cores.attention_core`).
        recurrence_exchange: what context-parallel ranks exchange for layers with a recurrence: states, or heads for
            tokens.
        rope_in_place: the fused RoPE overwrites the projections' outputs. Not under torch.compile, nor with selective
            recompute, which keeps those outputs.

    Raises:
        ValueError: an operation has no such backend. Whether this machine can run it shows when it is used.
    """

    cross_entropy: Backend = "torch"
    norm: Backend = "torch"
    swiglu: Backend = "torch"
    rope: Backend = "torch"
    router: Backend = "torch"
    permute: Backend = "torch"
    grouped_gemm: Backend = "torch"
    delta_rule: Backend = "torch"
    attention: AttentionCore = DEFAULT_ATTENTION
    recurrence_exchange: Literal["states", "heads"] = "states"
    rope_in_place: bool = False

    def __post_init__(self) -> None:
        # Checked here: a wrong name would otherwise fail in the first forward pass.
        known_of: dict[str, tuple[str, ...]] = dict.fromkeys(OPERATIONS, ("torch", "triton"))
        known_of |= dict.fromkeys(_IN_CPP, ("torch", "triton", "cpp"))
        known_of |= {"cross_entropy": ("torch", "triton", "cuda", "cpp"), "norm": ("torch", "triton", "apex", "cpp")}
        known_of |= {"delta_rule": ("torch", "fla")}
        for name, known in known_of.items():
            backend = getattr(self, name)
            if backend not in known:
                raise ValueError(f"{name} runs on {', '.join(known)}; there is no {backend!r}")


TORCH = Kernels()
LONGEST_ROW = 8192
"""Most features of a row of a Triton norm: longer rows do not fit in registers (16,384 spill 600 bytes a thread)."""
# What torch.compile fuses with its neighbours, and an operator keeps it from.
_FUSIBLE = ("norm", "swiglu", "rope", "router", "permute")


def choose_kernels(
    wish: Wish,
    device: torch.device,
    *,
    features: int = 0,
    compile: bool = False,
    selective: bool = False,
    dtype: torch.dtype = torch.float32,
    no_cpp: str = "",
) -> tuple[Kernels, dict[str, str]]:
    """The backend of each operation, and the reason for it.

    Args:
        wish: of --kernels.
        device: of the run.
        features: width of the widest norm.
        compile: whether blocks go through torch.compile.
        selective: whether the results of matrix products are kept for selective recompute.
        dtype: of products and activations.
        no_cpp: why another process of the run does not take cpp; "": this one decides.

    Raises:
        ConfigError: the wish cannot be met; one line.
    """
    # The automatic choice for all, of which a wish replaces some or all.
    chosen = {name: _automatic(name, device, features, compile, dtype, no_cpp) for name in OPERATIONS}
    if device.type != "cuda" and wish in ("cuda", "apex"):
        raise ConfigError(
            f"--kernels {wish} needs a CUDA device, this run is on {device.type}; --kernels torch runs anywhere"
        )
    if wish == "torch":
        chosen = dict.fromkeys(OPERATIONS, ("torch", "--kernels torch"))
    elif wish == "triton":
        _require_triton(device, features)
        chosen = dict.fromkeys(OPERATIONS, ("triton", "--kernels triton"))
        # Not an error where it cannot: flash-linear-attention is optional, the others are this package's.
        chosen["delta_rule"] = _delta_rule_in_triton(device, compile)
    elif wish == "cuda":
        _require_cuda(device)
        # There are CUDA C++ kernels of this operation only; the others stay as chosen.
        chosen["cross_entropy"] = ("cuda", "--kernels cuda")
    elif wish == "cpp":
        _require_cpp(device, dtype, no_cpp)
        chosen |= dict.fromkeys(_IN_CPP, ("cpp", "--kernels cpp"))
    elif wish == "apex":
        _require_apex(compile)
        # apex has kernels of norms only; the others stay as chosen.
        chosen["norm"] = ("apex", "--kernels apex")
    backends: dict[str, Any] = {name: backend for name, (backend, _) in chosen.items()}
    # Only a fused kernel writes over its input; see the attribute for who needs that input later.
    kernels = Kernels(**backends, rope_in_place=backends["rope"] != "torch" and not compile and not selective)
    return kernels, {name: reason for name, (_, reason) in chosen.items()}


def describe_kernels(kernels: Kernels, reasons: dict[str, str]) -> list[str]:
    """One line for each backend and reason, such as ``"kernels: triton for cross_entropy (fused on CUDA)"``.

    Args:
        kernels: of the run.
        reasons: by operation; operations without a reason are left out.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((getattr(kernels, name), reason), []).append(name)
    return [f"kernels: {backend} for {', '.join(names)} ({reason})" for (backend, reason), names in groups.items()]


def _automatic(
    name: str, device: torch.device, features: int, compile: bool, dtype: torch.dtype, no_cpp: str
) -> tuple[str, str]:
    if device.type != "cuda":
        return _automatic_elsewhere(name, device, compile, dtype, no_cpp)
    # An operator of this package is a fusion barrier for Inductor.
    if compile and name in _FUSIBLE:
        return "torch", "torch.compile fuses it with its neighbours"
    if not _installed("triton"):
        return "torch", "triton is not installed"
    if interpreted():
        return "torch", "TRITON_INTERPRET=1 is set, which is for tests"
    if name == "delta_rule":
        return "torch", "flash-linear-attention was not measured here; --kernels triton takes it where it is installed"
    if name in ("router", "permute", "grouped_gemm"):
        return "torch", "its kernel was not measured on a GPU; --kernels triton takes it"
    if name == "norm" and features > LONGEST_ROW:
        return "torch", f"rows of {features} do not fit into a multiprocessor's registers"
    return "triton", "fused on CUDA"


def _automatic_elsewhere(
    name: str, device: torch.device, compile: bool, dtype: torch.dtype, no_cpp: str
) -> tuple[str, str]:
    """Without a GPU."""
    if name not in _IN_CPP or device.type != "cpu":
        return "torch", f"runs on {device.type}"
    if why := no_cpp or why_not(dtype):
        return "torch", f"runs on {device.type}; cpp does not: {why}"
    if compile and name in _FUSIBLE:
        return "torch", "torch.compile fuses it with its neighbours"
    return "cpp", "fused on a CPU"


def _delta_rule_in_triton(device: torch.device, compile: bool) -> tuple[str, str]:
    """(backend, reason) of the delta rule under ``--kernels triton``: the kernels are flash-linear-attention's."""
    if device.type != "cuda":
        return "torch", f"runs on {device.type}"
    if compile:
        return "torch", "torch.compile cannot trace flash-linear-attention"
    if not _installed("fla"):
        return "torch", "flash-linear-attention is not installed: pip install flash-linear-attention"
    return "fla", "--kernels triton"


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _require_triton(device: torch.device, features: int) -> None:
    if not _installed("triton"):
        raise ConfigError("--kernels triton needs triton, which is not installed; --kernels torch needs nothing")
    if device.type != "cuda" and not interpreted():
        raise ConfigError(
            f"--kernels triton needs a CUDA device, this run is on {device.type}; with TRITON_INTERPRET=1 in the "
            "environment kernels are interpreted (slow, for tests), --kernels torch runs anywhere"
        )
    if features > LONGEST_ROW:
        raise ConfigError(
            f"--kernels triton normalizes rows of up to {LONGEST_ROW}, --hidden-size is {features}; --kernels auto "
            "leaves norms to PyTorch there"
        )


def _require_cpp(device: torch.device, dtype: torch.dtype, no_cpp: str) -> None:
    why = (no_cpp or why_not(dtype)) if device.type == "cpu" else f"this run is on {device.type}"
    if why:
        raise ConfigError(f"--kernels cpp cannot run: {why}; --kernels auto takes what can")


def _require_cuda(device: torch.device) -> None:
    from smp.kernels.cuda.library import library_path, why_unusable

    if not library_path().exists():
        raise ConfigError(
            "--kernels cuda needs the CUDA C++ kernels, which were not built: python -m smp.kernels.cuda.build, or "
            "SMP_BUILD_CUDA=1 at pip install (both need nvcc)"
        )
    # Built for other GPUs, or from older sources: known now and not at the first step.
    if (reason := why_unusable(device)) is not None:
        raise ConfigError(
            f"--kernels cuda: {library_path()} does not run on this device: {reason}; build it anew with "
            "python -m smp.kernels.cuda.build (SMP_CUDA_ARCHS names other targets)"
        )


def _require_apex(compile: bool) -> None:
    if compile:
        raise ConfigError(
            "--kernels apex and --compile exclude each other: torch.compile cannot trace apex; leave out one"
        )
    try:
        # Imported, not only looked for: apex may be installed without its CUDA extensions.
        importlib.import_module("apex.normalization.fused_layer_norm")
        importlib.import_module("fused_layer_norm_cuda")
    except ImportError as error:
        raise ConfigError(
            f"--kernels apex needs apex with its CUDA extensions: {error}; --kernels auto needs none"
        ) from None
