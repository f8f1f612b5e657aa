"""Several processes on one GPU: collectives through the host's memory, with the freedom of NCCL's.

NCCL takes one process for each GPU. Here every group has a thread and a stream, and others for messages to and from
each rank: a collective reads its input behind what the caller's stream had been given before, goes over gloo, and
writes its output while the caller goes on. Who uses an output without waiting for it, or writes over an input too
early, reads what NCCL would have it read: something else.
Without a GPU the same happens to tensors of the CPU, so that what runs on a card can be tried on a laptop.

It is the backend ``one_card`` of ``init_process_group`` once this module is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp.parallel.network.group import CollectiveWork

NAME = "one_card"
LATE = 0.001
"""Seconds by which every output comes later than it could."""
_ProcessGroup: Any = dist.ProcessGroup  # its methods have other names in torch 2.11 than in 2.13


def device_of(kind: str, rank: int) -> torch.device:
    """Of a rank whose tests run on ``cpu``, on ``cuda`` with a GPU each, or on ``one card``; without one on the CPU."""
    if kind == "one card":
        kind, rank = "cuda" if torch.cuda.is_available() else "cpu", 0
    return torch.device(kind, rank if kind == "cuda" else None)


def _through_host(name: str, *, writes: bool = True) -> Callable[..., Any]:
    """A method of the group; its first argument is what it writes, if it ``writes``."""

    def method(self: OneCardGroup, *args: Any, **more: Any) -> CollectiveWork:
        return self.begin(name, args, more, args[0] if writes and args else [])

    return method


class OneCardGroup(_ProcessGroup):  # type: ignore[misc]
    """See this module."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        store = dist.PrefixStore("one card", options.store)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        kind = dist.ProcessGroup.BackendType
        # Calls go through another one: torch keeps the interpreter's lock in what a subclass inherits.
        self._plain = _ProcessGroup(rank, size)
        for group in (self, self._plain):
            group._set_default_backend(kind.GLOO)
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), kind.GLOO, gloo)
        self._lanes: dict[Any, tuple[ThreadPoolExecutor, Any]] = {}

    @staticmethod
    def arrive() -> None:
        """What comes before an output is written; a test may hold it back."""
        time.sleep(LATE)

    def getBackendName(self) -> str:  # noqa: N802
        """What torch asks for."""
        return NAME

    def name(self) -> str:
        """The same in newer versions."""
        return NAME

    def shutdown(self) -> None:
        """What ``destroy_process_group`` calls."""
        for thread, _ in self._lanes.values():
            thread.shutdown()

    def _lane(self, name: str, args: Any) -> tuple[ThreadPoolExecutor, Any]:
        """The thread and the stream of a call: collectives run one after the other, and messages to or from one rank,
        which have no other order than that in which they were begun."""
        key = (name, args[1]) if name in ("send", "recv") else ""
        if key not in self._lanes:
            self._lanes[key] = ThreadPoolExecutor(1), torch.cuda.Stream() if torch.cuda.is_available() else None
        return self._lanes[key]

    def begin(self, name: str, args: Any, more: dict[str, Any], outputs: Any) -> CollectiveWork:
        """Start a collective, which writes into ``outputs``."""
        thread, stream = self._lane(name, args)
        ready = torch.cuda.Event() if stream is not None else None
        if ready is not None:
            ready.record()
        inference = any(x.is_inference() for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor))

        def job() -> None:
            with torch.inference_mode() if inference else torch.no_grad():
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    if stream is not None:
                        stream.wait_event(ready)
                    self._run(name, args, more, outputs)
                    if stream is not None:
                        stream.synchronize()

        work = CollectiveWork(outputs)
        thread.submit(work.run, job)
        return work

    def _run(self, name: str, args: Any, more: dict[str, Any], outputs: Any) -> None:
        """On the group's stream: copies of all tensors on the host, gloo, and what it wrote back."""
        copies: dict[int, torch.Tensor] = {}

        def copied(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in copies:
                # Whole and in order: gloo takes no others.
                copies[id(x)] = x.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
            return copies[id(x)]

        given = torch.utils._pytree.tree_map(copied, args)
        work = getattr(self._plain, name)(*given, **more)
        if work is not None:
            work.wait()
        self.arrive()
        for x in torch.utils._pytree.tree_leaves(outputs):
            x.detach().copy_(copies[id(x)])

    allreduce, allreduce_coalesced = _through_host("allreduce"), _through_host("allreduce_coalesced")
    broadcast, reduce = _through_host("broadcast"), _through_host("reduce")
    allgather, gather = _through_host("allgather"), _through_host("gather")
    reduce_scatter, scatter = _through_host("reduce_scatter"), _through_host("scatter")
    alltoall, barrier = _through_host("alltoall"), _through_host("barrier", writes=False)
    send, recv = _through_host("send", writes=False), _through_host("recv")

    # By the names of torch 2.11, which 2.13 has, too; and by its own.
    all_gather_single = _allgather_base = _through_host("_allgather_base")
    reduce_scatter_single = _reduce_scatter_base = _through_host("_reduce_scatter_base")
    all_to_all_single = alltoall_base = _through_host("alltoall_base")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _through_host("allgather_into_tensor_coalesced")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _through_host("reduce_scatter_tensor_coalesced")


def _create(options: Any, _: Any) -> OneCardGroup:
    return OneCardGroup(options)


def init(store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
    """The default group."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world_size, timeout=timeout)
