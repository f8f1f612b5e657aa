"""What a rank says to others, in order, and whether all of them say the same.

Ranks that call a communicator's collectives in different orders hang on GPUs, or add up what does not belong together;
on gloo it can go unseen. Within a communicator every rank has to call the same operations on the same shapes.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smp.parallel.collectives import SHIFT_TAG
from tests.nccl_rules import MESSAGES, group_of, partners

Log = dict[tuple[str, tuple[int, ...]], list[str]]
"""By communicator, its group's name and its ranks: operations, as texts."""

_BY_ROOT = ("c10d::gather_", "c10d::scatter_", "c10d::broadcast_", "c10d::reduce_", "c10d::allgather_")
"""In these, ranks may hold other shapes than the root does, or say objects of other lengths."""


class Recorder(TorchDispatchMode):
    """While it is entered, keeps the operations of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.log: Log = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and (group := group_of(args)) is not None:
            ranks = partners(func, args, group)
            text = _text(func, args, ranks)
            # a shift over gloo, which is all that sends so, receives first: each direction has an order of its own
            way = text.partition(":")[0] if func._schema.name in MESSAGES and args[-1] == SHIFT_TAG else ""
            self.log.setdefault((f"{group.group_name} {way}".strip(), ranks), []).append(text)
        return func(*args, **(kwargs or {}))


def _text(func: Any, arguments: tuple[Any, ...], ranks: tuple[int, ...]) -> str:
    """A send reads as the receive at its other end does."""
    name = func._schema.name
    shapes = [f"{tuple(t.shape)} {t.dtype}" for t in tree_leaves(list(arguments)) if isinstance(t, torch.Tensor)]
    if name in MESSAGES:
        own, (other,) = dist.get_rank(), [rank for rank in ranks if rank != dist.get_rank()]
        source, destination = (own, other) if name == "c10d::send" else (other, own)
        return f"{source} to {destination}: {shapes[0]}"
    return name if name in _BY_ROOT else " ".join([name, *shapes])


def check_order(logs: list[Log]) -> None:
    """Raise AssertionError, which names the first call in which two ranks (0, 1, ... of ``logs``) differ."""
    for communicator in sorted({key for log in logs for key in log}):
        first, *others = ranks = communicator[1]
        for other in others:
            both = zip_longest(logs[first].get(communicator, []), logs[other].get(communicator, []))
            for number, (one, two) in enumerate(both):
                assert one == two, f"call {number} of {ranks}: rank {first} has {one}, rank {other} has {two}"
