"""Choose the attention kernel of a run, and try it once before the run starts.

PyTorch chooses at every call, and falls back to the slow kernel without a message. Here one backend is chosen for the
whole run: the first in order of speed that takes the model's shapes. A backend that was asked for by name and cannot
run them is an error. FlashAttention takes no mask on a GPU; documents and windows go to its variable-length kernel
there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from smp.config import ConfigError
from smp.kernels.attention_cores.attention_core import AttentionSpec, BlockCore
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.attention_cores.varlen import VarlenAttention
from smp.kernels.cpp.library import why_not
from smp.kernels.token_layout import TokenLayout

AttentionWish = Literal["auto", "flash", "cudnn", "efficient", "math", "cpp"]
CPP_LENGTH = 128
"""Shortest sequences for which ``auto`` takes this project's C++ on a CPU: of shorter ones attention is little of a
step, and compiling it would be most of a short run."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one call: (1, heads, length, head_dim), causal or with a mask.

    Attributes:
        heads, length, head_dim, dtype: of queries; keys and values have fewer heads, else the same.
        groups: key/value heads, each for heads / groups query heads.
        masked: attention has packed documents or a window.
        spans: documents and windows may go to a variable-length kernel as spans, without a mask; not with attention
            dropout.
        other_lengths: further sequence lengths that the run will use.
        changes_scores: the flag that says so; "": scores are scale q k^T + mask, which all backends compute.
    """

    heads: int
    groups: int
    length: int
    head_dim: int
    dtype: torch.dtype
    masked: bool
    spans: bool = True
    other_lengths: tuple[int, ...] = ()
    changes_scores: str = ""

    def __str__(self) -> str:
        dtype, seen = str(self.dtype).removeprefix("torch."), "documents or a window" if self.masked else "no mask"
        shared = f" with {self.groups} key/value heads" if self.groups < self.heads else ""
        return f"{self.heads} heads of {self.head_dim}{shared}, {self.length} tokens, {dtype}, {seen}"


@dataclass(frozen=True)
class AttentionChoice:
    """The chosen core, and the reason for the log."""

    core: BlockCore
    reason: str

    def __str__(self) -> str:
        return f"attention: {self.core} ({self.reason})"


def choose_attention(
    wish: AttentionWish,
    device: torch.device,
    shape: AttentionShape,
    *,
    deterministic: bool = False,
    no_cpp: str = "",
) -> AttentionChoice:
    """The first backend, in the order of :func:`preferred`, that runs forward and backward on ``shape``; ``no_cpp``
    says why another process of the run does not take cpp.

    Raises:
        ConfigError: the one that was asked for does not, or none does; one line.
    """
    if shape.changes_scores and wish not in ("auto", "math"):
        raise ConfigError(
            f"--attention-backend {wish} does not compute {shape.changes_scores}; --attention-backend math does"
        )
    # A backend that is named is taken, or it is an error; only ``auto`` goes through the list.
    names = [wish] if wish != "auto" else ["math"] if shape.changes_scores else preferred(device, shape, deterministic)
    # key/value heads as they are, which not all backends take, or repeated; the order of backends goes first
    shapes = dict.fromkeys((shape, replace(shape, groups=shape.heads)))
    tried = [name for name in names if name != "cpp" or not no_cpp]
    name, taken = next(((n, s) for n in tried for s in shapes if _works(n, device, s)), (None, shape))
    if name is None and wish == "auto":
        raise ConfigError(f"no attention backend of {', '.join(names)} takes {shape}, on {device.type}")
    # Of C++ there is a reason to tell: a missing compiler, or another processor.
    why = (no_cpp or why_not(shape.dtype)) if "cpp" in names and name != "cpp" and device.type == "cpu" else ""
    if name is None:
        raise ConfigError(
            f"--attention-backend {wish} does not take {shape}, on {device.type}{why and ': ' + why}; "
            "--attention-backend auto finds one"
        )
    first = f"the first of {', '.join(names)} that takes this model"
    if shape.changes_scores:
        first = f"the one that computes {shape.changes_scores}"
    reason = first if wish == "auto" else f"--attention-backend {wish}"
    # With the heads that were tried: a kernel that takes grouped heads gets them as they are.
    core = _core(name, device, replace(shape, groups=taken.groups))
    if shape.groups < shape.heads and not (isinstance(core, FusedAttention) and core.grouped):
        reason += "; each key/value head is repeated for its query heads"
    if why:
        reason += f"; cpp does not: {why}"
    return AttentionChoice(core, reason)


def _core(name: str, device: torch.device, shape: AttentionShape) -> BlockCore:
    """The core of backend ``name``."""
    if name == "math":
        return MathAttention()
    # FlashAttention's dense kernel takes no mask on a GPU; documents and windows go by their ends.
    if name == "flash" and device.type == "cuda" and shape.masked and shape.spans:
        return VarlenAttention()
    return FusedAttention(name, grouped=shape.groups < shape.heads)


def preferred(device: torch.device, shape: AttentionShape, deterministic: bool) -> list[str]:
    """Fastest first. On Hopper and newer cuDNN's kernel uses instructions that PyTorch's FlashAttention 2 does not (its
    authors report up to 75 % more speed on an H100, PyTorch 2.5 release notes); its backward pass is not deterministic.
    With a mask it visits what the mask hides, so spans come first."""
    if device.type != "cuda":
        return ["cpp", "flash", "math"] if shape.length >= CPP_LENGTH else ["flash", "math"]
    if torch.cuda.get_device_capability(device) >= (9, 0) and not deterministic:
        others = ["efficient", "math"]
        return ["flash", "cudnn", *others] if shape.masked else ["cudnn", "flash", *others]
    return ["flash", "efficient", "math"]


def _works(name: str, device: torch.device, shape: AttentionShape) -> bool:
    """Try it: whether a kernel takes a shape depends on versions and is documented nowhere. A CPU has two backends that
    take everything, and C++ where it can be compiled; its FlashAttention adds the gradients that query heads have for a
    key/value head in bf16, which is less exact than adding those of repeated ones."""
    if name == "cpp":
        return device.type == "cpu" and not why_not(shape.dtype)
    if device.type != "cuda":
        rounds = shape.groups < shape.heads and shape.dtype == torch.bfloat16
        return name == "math" or (name == "flash" and not rounds)
    core = _core(name, device, shape)
    try:
        return all(_runs(core, device, replace(shape, length=n)) for n in (shape.length, *shape.other_lengths))
    # Too little memory says nothing about the kernel: another one would hide it until the first step.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False


def _runs(core: BlockCore, device: torch.device, shape: AttentionShape) -> bool:
    """Forward and backward; False if PyTorch itself would not take this kernel, which knows of broken versions."""
    length = shape.length
    options: dict[str, Any] = {"device": device, "dtype": shape.dtype, "requires_grad": True}
    # Zeros: only whether a kernel runs is asked, not what it computes.
    q = torch.zeros(length, shape.heads, shape.head_dim, **options)
    k = torch.zeros(length, shape.groups, shape.head_dim, **options)
    # Two documents, so that a kernel that takes a mask has to show it.
    ids = (torch.arange(length) >= length // 2).long()[None] if shape.masked else None
    specs = [AttentionSpec(), AttentionSpec(window=max(length // 4, 1))] if shape.masked else [AttentionSpec()]
    for spec in specs:
        layout = core.prepare(TokenLayout(1, length, document_ids=ids), [spec], shape.dtype, device)
        if device.type == "cuda" and isinstance(core, FusedAttention) and not _torch_takes(core, q, k, layout, spec):
            return False
        # Backward too: a kernel may take a shape forward and not backward.
        core(q, k, k, layout, spec)[0].sum().backward()
    return True


def _torch_takes(
    core: FusedAttention, q: torch.Tensor, k: torch.Tensor, layout: TokenLayout, spec: AttentionSpec
) -> bool:
    """Whether PyTorch would choose the core's operator for its own function."""
    asked = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
    }
    queries, keys, _, scores = core.arguments(q, k, k, layout, spec)
    parameters = torch.backends.cuda.SDPAParams(
        queries, keys, keys, scores.mask, 0.0, scores.causal, keys.shape[1] < queries.shape[1]
    )
    # PyTorch warns of each reason why a kernel is not taken. Here that is no problem, only an answer.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asked[core.name](parameters)
