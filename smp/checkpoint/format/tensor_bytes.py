"""Torch's tensors in safetensors files: names of dtypes, the bytes, and where each of them goes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch

from smp.checkpoint.format.entries import CheckpointError
from smp.checkpoint.format.tensor_file import ALIGNMENT, METADATA, FileLayout, Slot

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes, the same in the manifest as in safetensors headers."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def lay_out(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Tensors in the order of safetensors, widest elements first, so that every one is aligned.

    Only shapes and dtypes of ``tensors`` are used; ``metadata`` are texts for the header.

    Raises:
        CheckpointError: a key that a reader could not give back.
    """
    slots, start = [], 0
    # By itemsize, then name: the safetensors package writes files in this order.
    for key, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        # half of a surrogate pair is no text: readers of JSON refuse it
        if key in ("", METADATA) or key.encode(errors="replace").decode() != key:
            raise CheckpointError(f"no tensor of a safetensors file can be called {key!r}")
        slots.append(Slot(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), start, tensor.nbytes))
        start += tensor.nbytes
    entries: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    entries |= {s.key: {"dtype": s.dtype, "shape": s.shape, "data_offsets": (s.start, s.start + s.size)} for s in slots}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Spaces after JSON are allowed, and the data begin at a cache line.
    # 8: the length of the header, in front of it.
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return FileLayout(struct.pack("<Q", len(text)) + text, tuple(slots))


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and shape with integer elements: numpy lacks some dtypes, and a NaN equals itself as an
    integer."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous(), "other memory would be read or written"
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # of one element any stride is contiguous
    return flat.view(torch.uint8).numpy().data
