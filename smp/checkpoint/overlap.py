"""Tensors to load into that share memory: the last one read would win, and checksums would not match."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch

from smp.checkpoint.format.entries import TensorEntry


def shared_memory(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Names of tensors that cannot be loaded because they share memory, and why.

    One memory may have several names, such as those of tied weights, when it is the same view of it and nothing shows
    that the checkpoint has two values for it.

    Args:
        tensors: by name, with data.
        stored: what the checkpoint has, at least for these names.
    """
    found: dict[str, str] = {}
    open_views: list[tuple[str, int, np.ndarray]] = []  # views before this one that reach as far as it: name, end
    # In the order of addresses: a view can only meet views that began before it and reach as far as it.
    for name in sorted(tensors, key=lambda n: (str(tensors[n].device), tensors[n].data_ptr())):
        data = tensors[name]
        if not data.numel():
            continue
        steps = sorted((stride, size) for size, stride in zip(data.shape, data.stride(), strict=True) if size > 1)
        reached = 0
        # From the smallest step to the largest: what the smaller ones reach must end before the next step begins.
        for stride, size in steps:
            if stride <= reached:  # of the views that torch makes, other than as_strided, only these meet themselves
                found[name] = "elements that share memory here"
            reached += (size - 1) * stride
        memory = _addresses(data)
        open_views = [
            view for view in open_views if view[1] > data.data_ptr() and tensors[view[0]].device == data.device
        ]
        for other, _, others in open_views:
            if _same_view(data, tensors[other]):
                # Tied weights have one memory here. In the checkpoint they may be two tensors,
                # which must be equal then.
                if _differ(stored[other], stored[name]):
                    found[name] = f"another value in the checkpoint than {other}, whose memory it shares here"
                break
            # Exact: rows and columns of one matrix reach over each other without having an element in common.
            if np.shares_memory(memory, others):
                found[name] = f"memory that is another part or shape of {other} here"
        else:
            open_views.append((name, data.data_ptr() + (reached + 1) * data.itemsize, memory))
    return found


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    strides = zip(one.shape, one.stride(), other.stride(), strict=False)
    same = (one.data_ptr(), one.dtype, one.shape) == (other.data_ptr(), other.dtype, other.shape)
    return same and all(a == b for size, a, b in strides if size > 1)


def _differ(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether checksums show that two tensors are not equal; cut in different ways they show nothing."""
    sums = {(shard.offsets, shard.sizes): shard.xxh3_64 for shard in one.shards}
    return any(sums.get((s.offsets, s.sizes), s.xxh3_64) != s.xxh3_64 for s in other.shards)


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """An array at a tensor's addresses, for comparing them only: the memory, which may be a GPU's, is not read."""
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    where = {"data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__={**where, "typestr": f"|V{tensor.itemsize}", "version": 3}))
