"""Tensors to load into whose memory is not theirs alone: what is read last would win, and checksums would not fit."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch

from smp.checkpoint.entries import TensorEntry


def shared_memory(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Names that cannot be loaded for that reason, and why.

    One memory may have several names, such as those of tied weights, when it is the same view of it and nothing shows
    that the checkpoint has two values for it.

    Args:
        tensors: by name, with data.
        stored: what the checkpoint has, at least for these names.
    """
    found: dict[str, str] = {}
    views: dict[tuple[torch.device, int, torch.Size, tuple[int, ...]], str] = {}
    for name, data in tensors.items():
        if any(stride == 0 and size > 1 for size, stride in zip(data.shape, data.stride(), strict=True)):
            found[name] = "one memory for many elements here: an expanded tensor"
        elif data.numel():
            other = views.setdefault((data.device, data.data_ptr(), data.shape, data.stride()), name)
            if _differ(stored[other], stored[name]):
                found[name] = f"another value in the checkpoint than {other}, whose memory it shares here"
    return found | _overlaps({name: tensors[name] for name in views.values()})


def _differ(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether checksums show that two tensors are not equal; cut in different ways they show nothing."""
    sums = {(shard.offsets, shard.sizes): shard.xxh3_64 for shard in one.shards}
    return any(sums.get((s.offsets, s.sizes), s.xxh3_64) != s.xxh3_64 for s in other.shards)


def _overlaps(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of different views: those that have an element in common with one before."""
    found: dict[str, str] = {}
    open_views: list[tuple[int, str]] = []
    by_place = sorted(tensors, key=lambda name: (str(tensors[name].device), tensors[name].data_ptr()))
    for name in by_place:
        data = tensors[name]
        open_views = [(end, other) for end, other in open_views if end > data.data_ptr()]
        for _, other in open_views:
            if data.device == tensors[other].device and np.shares_memory(_places(data), _places(tensors[other])):
                found[name] = f"memory that is another part or shape of {other} here"
        last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
        open_views.append((data.data_ptr() + (last + 1) * data.itemsize, name))
    return found


def _places(tensor: torch.Tensor) -> np.ndarray:
    """An array at a tensor's addresses, which are not looked into: they may be a GPU's."""
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    places = {"data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__={**places, "typestr": f"|V{tensor.itemsize}", "version": 3}))
