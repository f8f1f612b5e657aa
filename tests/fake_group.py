"""One process that plays a rank of any world: groups exist, collectives do nothing.

Enough for what a rank decides alone (which part it holds, which values that starts from, which error it raises), and
for whole models on a world of one. Costs milliseconds where real processes cost seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp.config import Layout
from smp.parallel.context import ParallelContext, build_context


@contextmanager
def fake_context(
    layout: Layout | None = None, rank: int = 0, *, sequence_parallel: bool = False, heads_group: int = 1
) -> Iterator[ParallelContext]:
    """The context of ``layout`` (by default one rank) as ``rank`` sees it, inside a process group that ends with the
    block."""
    layout = layout or Layout()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    _clear_sharding_prop_cache()  # its entries hold meshes of an earlier rank, which compare equal
    try:
        yield build_context(layout, "cpu", sequence_parallel=sequence_parallel, heads_group=heads_group)
    finally:
        dist.destroy_process_group()


@contextmanager
def lone_context(device: str = "cpu") -> Iterator[ParallelContext]:
    """The context of one process in a real group of its own, for what agrees with the other ranks by messages."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _clear_sharding_prop_cache()
    try:
        yield build_context(Layout(), device)
    finally:
        dist.destroy_process_group()
