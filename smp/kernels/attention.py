"""Which backend of PyTorch's scaled dot-product attention a run uses, tried once before it starts.

PyTorch chooses anew at every call and says nothing when it takes the slow one. Here the first of an order that takes
the model's shapes is the only one allowed, and one that was asked for and cannot is an error.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

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
    """What one call looks like: (1, heads, length, head_dim), causal or with a mask."""

    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    masked: bool


@dataclass(frozen=True)
class AttentionChoice:
    """The backend, its name on the command line, and why it is this one."""

    name: str
    backend: SDPBackend
    reason: str


def choose_attention(
    wish: AttentionWish, device: torch.device, shape: AttentionShape, *, deterministic: bool = False
) -> AttentionChoice:
    """The first backend, in the order of :func:`preferred`, that runs forward and backward on ``shape``.

    Raises:
        ConfigError: the one that was asked for does not; one line.
    """
    if wish == "auto":
        names = preferred(device, deterministic)
        name = next((name for name in names if _works(BACKENDS[name], device, shape)), "math")
        return AttentionChoice(name, BACKENDS[name], f"the first of {', '.join(names)} that takes this model")
    if not _works(BACKENDS[wish], device, shape):
        mask = "a mask" if shape.masked else "no mask"
        raise ConfigError(
            f"--attention-backend {wish} does not take {shape.heads} heads of {shape.head_dim}, {shape.length} tokens, "
            f"{str(shape.dtype).removeprefix('torch.')}, {mask}, on {device.type}; --attention-backend auto finds one"
        )
    return AttentionChoice(wish, BACKENDS[wish], f"--attention-backend {wish}")


def preferred(device: torch.device, deterministic: bool) -> list[str]:
    """Fastest first. On Hopper and newer cuDNN's kernel uses instructions that PyTorch's FlashAttention 2 does not (its
    authors report up to 75 % more speed on an H100, PyTorch 2.5 release notes); its backward pass is not
    deterministic."""
    if device.type != "cuda":
        return ["flash", "math"]
    if torch.cuda.get_device_capability(device) >= (9, 0) and not deterministic:
        return ["cudnn", "flash", "efficient", "math"]
    return ["flash", "efficient", "math"]


def _works(backend: SDPBackend, device: torch.device, shape: AttentionShape) -> bool:
    """Try it: whether a kernel takes a shape depends on versions and is documented nowhere. A CPU has two backends that
    take everything."""
    if device.type != "cuda":
        return backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    size = (1, shape.heads, shape.length, shape.head_dim)
    x, length = torch.zeros(size, device=device, dtype=shape.dtype, requires_grad=True), shape.length
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() if shape.masked else None
    try:
        with sdpa_kernel([backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says why each of the others was not taken
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None).sum().backward()
    except RuntimeError:
        return False
    return True
