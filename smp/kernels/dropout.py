"""Dropout whose mask is a function of (key, global token, channel): no layout, no replay and no order changes it.

A counter-based hash stands where a generator would have a state. Its arithmetic stays below 63 bits, so that it is the
same on every device and compiler.
"""

from __future__ import annotations

import torch

from smp.config.at_once import DROPOUT_BITS

_MASK = (1 << 32) - 1


def _mix(x: torch.Tensor) -> torch.Tensor:
    """32-bit finalizer on int64 tensors that hold values below 2^32.

    Two multiply-xorshift rounds with constants from the hash-prospector search. Both are below 2^31, so no product
    overflows 63 bits and the arithmetic is the same on every device and compiler.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def keyed_bits(key: torch.Tensor, rows: torch.Tensor, columns: int, first_column: int = 0) -> torch.Tensor:
    """32 random bits for each element of (len(rows), columns), in int64: a function of (key, row, column) alone.

    Args:
        key: 0-dim int64 below 2^32, also on the host: then nothing goes to the device.
        rows: int64 (n,), global numbers.
        columns: how many; column c is column first_column + c of every layout.
        first_column: of the columns that this rank holds.
    """
    return keyed_bits_at(key, rows, torch.arange(first_column, first_column + columns, device=rows.device)[None])


def keyed_bits_at(key: torch.Tensor | int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Random bits as of :func:`keyed_bits` for numbered ``columns``, int64 (n or 1, count)."""
    # Both halves of the number take part: a long run has more than 2^32 tokens, and would repeat its masks. Between the
    # halves is a round of mixing, or tokens whose halves have the same XOR would share a mask.
    hashed = _mix((rows & _MASK) ^ key)
    hashed = _mix(hashed ^ ((rows >> 32) & _MASK) ^ 0x5BF03635)
    return _mix(hashed[:, None] ^ _mix(columns + 0x9E3779B9))  # (n, count)


def keyed_keep_mask(
    key: torch.Tensor, tokens: torch.Tensor, channels: int, p: float, first_channel: int = 0
) -> torch.Tensor:
    """Boolean (len(tokens), channels): True with probability 1 - p, a function of (key, token, channel) alone.

    Args:
        key: this site's key, 0-dim int64, also on the host: then nothing goes to the device.
        tokens: int64 (n,), global token numbers.
        channels: number of columns; column c is channel first_channel + c of every layout.
        p: probability of False, in [0, 1).
        first_channel: of the columns that this rank holds.
    """
    # Bits are compared as integers: no float decides, which a device might round in another way, and one element that
    # is dropped in one layout and kept in another is a difference that training amplifies.
    bound = int(p * 2**32)
    # Bits are int64: made for some rows at a time, or they would take 8 bytes for each element.
    rows = max(1, DROPOUT_BITS // max(1, channels))
    if torch.compiler.is_compiling() or len(tokens) <= rows:  # a compiler makes no bits that lie in memory
        return keyed_bits(key, tokens, channels, first_channel) >= bound
    keep = torch.empty(len(tokens), channels, dtype=torch.bool, device=tokens.device)
    for some, out in zip(tokens.split(rows), keep.split(rows), strict=True):
        torch.ge(keyed_bits(key, some, channels, first_channel), bound, out=out)
    return keep


def keyed_dropout(
    x: torch.Tensor, key: torch.Tensor, tokens: torch.Tensor, p: float, *, first_channel: int = 0
) -> torch.Tensor:
    """Dropout of ``x`` (n, channels) whose mask is keyed by (key, global token, channel); p == 0 returns ``x``."""
    if p == 0.0:
        return x
    keep = keyed_keep_mask(key, tokens, x.shape[-1], p, first_channel)
    # Scaled first and selected then: what is dropped is 0 even where x is infinite.
    return torch.where(keep, x / (1.0 - p), 0.0)
