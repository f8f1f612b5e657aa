"""NCCL's blocking rules on gloo: what hangs on GPUs fails here, in seconds.

The first message between two ranks of a process group builds their communicator, and the first collective that of the
group: the host of each rank stops there until all of them have come. What follows on a communicator is only posted.
Gloo waits for nobody, so an order of calls that hangs on GPUs passes on a CPU. Inside :func:`nccl_rules` every first
use waits for the other side, and an error says which one was waited for in vain.

As a program it runs another one under these rules: ``nccl_rules.py PROGRAM FLAG...``.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGES = ("c10d::send", "c10d::recv_")
SECONDS = 8
"""How long a rank waits for another one, which is as slow as this machine."""


class NcclRules(TorchDispatchMode):
    """While it is entered, first uses of communicators wait for all of their ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and (group := group_of(args)) is not None:
            self._meet(group, partners(func, args, group))
        return func(*args, **(kwargs or {}))

    def _meet(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        """Stop until all of ``ranks`` are here, the first time."""
        key = group.group_name, ranks
        if key in self.met or len(ranks) == 1:
            return
        self.met.add(key)
        store = dist.PrefixStore(f"nccl rules {key}", distributed_c10d._get_default_store())
        own = dist.get_rank()
        store.set(str(own), "")
        for rank in ranks:
            try:
                store.wait([str(rank)], timedelta(seconds=SECONDS))
            except RuntimeError as error:
                raise AssertionError(f"NCCL would hang: rank {own} waits for {rank} in {key}") from error


def group_of(arguments: Iterable[Any]) -> dist.ProcessGroup | None:
    """The group of an operation: an object among its arguments, or a name at their end."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in arguments if isinstance(argument, str)]
    known = {group.group_name: group for group in distributed_c10d._world.pg_map}
    return known.get(names[-1]) if names else None


def partners(func: Any, arguments: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks that share the communicator: two for a message, all of the group for a collective."""
    ranks = dist.get_process_group_ranks(group)
    if func._schema.name in MESSAGES:
        return tuple(sorted((dist.get_rank(), ranks[arguments[2]])))
    return tuple(ranks)


if __name__ == "__main__":
    program, sys.argv = sys.argv[1], sys.argv[1:]
    with NcclRules():
        runpy.run_path(program, run_name="__main__")
