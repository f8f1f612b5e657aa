"""Tensors to load into whose memory is not theirs alone: what is read last would win, and checksums would not fit."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

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
    views: dict[Any, str] = {}
    for name, data in tensors.items():
        if _overlaps_itself(data):
            found[name] = "elements that share memory here"
        elif data.numel():
            other = views.setdefault((data.device, data.dtype, data.data_ptr(), data.shape, *_steps(data)), name)
            if other != name and _differ(stored[other], stored[name]):
                found[name] = f"another value in the checkpoint than {other}, whose memory it shares here"
    return found | _overlaps({name: tensors[name] for name in views.values()})


def _steps(data: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension that has a second element."""
    return [(stride, size) for size, stride in zip(data.shape, data.stride(), strict=True) if size > 1]


def _overlaps_itself(data: torch.Tensor) -> bool:
    """Whether a dimension's step is not above what the ones with shorter steps reach, such as that of an expanded
    tensor. Of the views that torch makes, other than as_strided, no other has that."""
    reached = 0
    for stride, size in sorted(_steps(data)):
        if stride <= reached:
            return data.numel() > 0
        reached += (size - 1) * stride
    return False


def _differ(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether checksums show that two tensors are not equal; cut in different ways they show nothing."""
    sums = {(shard.offsets, shard.sizes): shard.xxh3_64 for shard in one.shards}
    return any(sums.get((s.offsets, s.sizes), s.xxh3_64) != s.xxh3_64 for s in other.shards)


def _overlaps(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of different views: those that have an element in common with one before."""
    found: dict[str, str] = {}
    open_views: list[tuple[int, str, np.ndarray]] = []
    by_place = sorted(tensors, key=lambda name: (str(tensors[name].device), tensors[name].data_ptr()))
    for name in by_place:
        data = tensors[name]
        places = _places(data)
        open_views = [view for view in open_views if view[0] > data.data_ptr()]
        for _, other, theirs in open_views:
            if data.device == tensors[other].device and np.shares_memory(places, theirs):
                found[name] = f"memory that is another part or shape of {other} here"
        last = sum((size - 1) * stride for stride, size in _steps(data))
        open_views.append((data.data_ptr() + (last + 1) * data.itemsize, name, places))
    return found


def _places(tensor: torch.Tensor) -> np.ndarray:
    """An array at a tensor's addresses, which are not looked into: they may be a GPU's."""
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    places = {"data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__={**places, "typestr": f"|V{tensor.itemsize}", "version": 3}))
