"""Which backend of PyTorch's scaled dot-product attention a run uses, tried once before it starts.

PyTorch chooses anew at every call and says nothing when it takes the slow one. Here the first of an order that takes
the model's shapes is the only one allowed, and one that was asked for and cannot is an error. FlashAttention takes no
mask on a GPU; documents and windows go to its variable-length kernel there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from smp.config import ConfigError

AttentionWish = Literal["auto", "flash", "cudnn", "efficient", "math"]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class AttentionShape:
    """What one call looks like: (1, heads, length, head_dim), causal or with a mask.

    Attributes:
        heads, length, head_dim, dtype: of queries; keys and values have fewer heads, else the same.
        groups: key/value heads, each for heads / groups query heads.
        masked: there are documents or a window.
        spans: what is masked may be given as spans instead; not beside attention dropout.
        other_lengths: of calls that come too.
    """

    heads: int
    groups: int
    length: int
    head_dim: int
    dtype: torch.dtype
    masked: bool
    spans: bool = True
    other_lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        dtype, seen = str(self.dtype).removeprefix("torch."), "documents or a window" if self.masked else "no mask"
        shared = f" with {self.groups} key/value heads" if self.groups < self.heads else ""
        return f"{self.heads} heads of {self.head_dim}{shared}, {self.length} tokens, {dtype}, {seen}"


@dataclass(frozen=True)
class AttentionChoice:
    """A backend.

    Attributes:
        name, backend: on the command line, and torch's.
        reason: why it is this one.
        spans: it takes them instead of masks.
        grouped: it is given key/value heads as they are; otherwise each is repeated before, for its query heads.
    """

    name: str
    backend: SDPBackend
    reason: str
    spans: bool = False
    grouped: bool = False

    def __str__(self) -> str:
        spans = "'s variable-length kernel" if self.spans else ""
        return f"attention: {self.name}{spans} ({self.reason})"


def choose_attention(
    wish: AttentionWish, device: torch.device, shape: AttentionShape, *, deterministic: bool = False
) -> AttentionChoice:
    """The first backend, in the order of :func:`preferred`, that runs forward and backward on ``shape``.

    Raises:
        ConfigError: the one that was asked for does not, or none does; one line.
    """
    spans = device.type == "cuda" and shape.masked and shape.spans
    names = preferred(device, shape, deterministic) if wish == "auto" else [wish]
    # key/value heads as they are, which not all backends take, or repeated; the order of backends goes first
    shapes = dict.fromkeys((shape, replace(shape, groups=shape.heads)))
    name, taken = next(((n, s) for n in names for s in shapes if _works(n, device, s)), (None, shape))
    if name is None and wish == "auto":
        raise ConfigError(f"no attention backend of {', '.join(names)} takes {shape}, on {device.type}")
    if name is None:
        raise ConfigError(
            f"--attention-backend {wish} does not take {shape}, on {device.type}; --attention-backend auto finds one"
        )
    first = f"the first of {', '.join(names)} that takes this model"
    reason = first if wish == "auto" else f"--attention-backend {wish}"
    spans = spans and name == "flash"
    grouped = taken.groups < shape.heads and not spans
    if shape.groups < shape.heads and (not grouped or name == "math"):  # which repeats them itself
        reason += "; each key/value head is repeated for its query heads"
    return AttentionChoice(name, BACKENDS[name], reason, spans, grouped)


def preferred(device: torch.device, shape: AttentionShape, deterministic: bool) -> list[str]:
    """Fastest first. On Hopper and newer cuDNN's kernel uses instructions that PyTorch's FlashAttention 2 does not (its
    authors report up to 75 % more speed on an H100, PyTorch 2.5 release notes); its backward pass is not deterministic.
    With a mask it visits what the mask hides, so spans come first."""
    if device.type != "cuda":
        return ["flash", "math"]
    if torch.cuda.get_device_capability(device) >= (9, 0) and not deterministic:
        others = ["efficient", "math"]
        return ["flash", "cudnn", *others] if shape.masked else ["cudnn", "flash", *others]
    return ["flash", "efficient", "math"]


def _works(name: str, device: torch.device, shape: AttentionShape) -> bool:
    """Try it: whether a kernel takes a shape depends on versions and is documented nowhere. A CPU has two backends that
    take everything; its FlashAttention adds the gradients that query heads have for a key/value head in bf16, which is
    less exact than adding those of repeated ones."""
    if device.type != "cuda":
        rounds = shape.groups < shape.heads and shape.dtype == torch.bfloat16
        return name == "math" or (name == "flash" and not rounds)
    try:
        with sdpa_kernel([BACKENDS[name]]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says why each of the others was not taken
            for length in (shape.length, *shape.other_lengths):
                spans = name == "flash" and shape.masked and shape.spans
                (_try_spans if spans else _try_sdpa)(device, replace(shape, length=length))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


def _try_sdpa(device: torch.device, shape: AttentionShape) -> None:
    length = shape.length
    options: dict[str, Any] = {"device": device, "dtype": shape.dtype}
    # as the layer gives them: heads of one token side by side
    q = torch.zeros(1, length, shape.heads, shape.head_dim, **options, requires_grad=True).transpose(1, 2)
    k = torch.zeros(1, length, shape.groups, shape.head_dim, **options, requires_grad=True).transpose(1, 2)
    mask = torch.zeros(1, 1, length, length, **options) if shape.masked else None
    grouped = shape.groups < shape.heads
    out = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    out.sum().backward()


def _try_spans(device: torch.device, shape: AttentionShape) -> None:
    from torch.nn.attention.varlen import varlen_attn  # which imports triton

    size, length = (shape.length, shape.heads, shape.head_dim), shape.length
    x = torch.zeros(size, device=device, dtype=shape.dtype, requires_grad=True)
    starts = torch.tensor([0, length // 2, length], dtype=torch.int32, device=device)
    for window in ((-1, 0), (max(length // 4, 1), 0)):
        out = varlen_attn(x, x, x, starts, starts, length, length, window_size=window)
        assert isinstance(out, torch.Tensor), "no other results were asked for"
        out.sum().backward()
