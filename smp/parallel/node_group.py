"""A process group of ranks of one machine that exchange CPU tensors through memory: the backend ``smp_node``.

    import smp.parallel.node_group
    torch.distributed.new_group(ranks, backend="smp_node")

gloo sends every byte through the system's sockets: a sum of 256 KiB over two ranks takes 0.2 ms, through memory 0.05
ms (docs/measurements/collectives.md). A collective runs in the thread that calls it and is done when the call returns:
ranks have to call the collectives of all their groups in one order, as programs for NCCL have to.

A group uses it if all of its ranks see the same memory and their processor keeps the order of stores (x86); else, and
for what this class does not have (``reduce``, sparse tensors, messages between two ranks other than a pipeline's, which
:mod:`smp.parallel.mailboxes` has), it is what the backend ``smp`` is (:mod:`smp.parallel.backend`). ``group.counts``
says what ran how.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.device_mesh import DeviceMesh

from smp.parallel.backend import NetworkProcessGroup, limit_of, options_of
from smp.parallel.network.topology import Topology
from smp.parallel.shared_memory import DTYPES, OPERATIONS, join

NAME = "smp_node"
"""Name for new_group, once this module is imported."""
# ``DTYPES`` begins with those that can be added up.
_ADDED = DTYPES[: DTYPES.index(torch.bool)]


class NodeProcessGroup(NetworkProcessGroup):
    """The group that ``new_group(backend="smp_node")`` makes; see the module docstring."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._store, self._stores = options.store, 0
        # Keys of its own: the backends of the base class use the same store.
        store = dist.PrefixStore("smp/memory", options.store)
        # Collective over the group: all of its ranks get memory, or none.
        self.memory = join(options.group_rank, options.group_size, store) if options.group_size > 1 else None

    def getBackendName(self) -> str:  # noqa: N802
        """The backend's name, which torch asks for."""
        return NAME

    def name(self) -> str:
        """The backend's name, as newer versions of torch ask for it."""
        return NAME

    def new_store(self) -> dist.Store:
        """Where ranks can tell each other something; each call, which all ranks make, gives another one."""
        self._stores += 1
        return dist.PrefixStore(f"smp/more/{self._stores}", self._store)

    def shutdown(self) -> None:
        """Called by ``destroy_process_group``."""
        if self.memory is not None:
            self.memory.leave()
            self.memory = None
        super().shutdown()

    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        """All-reduce in place; of a single tensor through memory."""
        opts = options_of(dist.AllreduceOptions, opts, more)
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        # Decided by what is the same on all ranks: a rank that went another way would wait for ever.
        operation = _operation(opts.reduceOp, given[0])
        if self.memory is None or len(given) > 1 or operation is None:
            # The next backend: hierarchical collectives or gloo, see ``backend``.
            return super().allreduce(tensors, opts)
        x = given[0]
        return self._through_memory("all-reduce", x, opts, lambda out, limit, m: m.all_reduce(out, limit, operation))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n) of every rank -> (n x ranks)."""
        opts = options_of(AllgatherOptions, opts, more)
        fits = output.numel() == self.size() * given.numel()
        if self.memory is None or not fits or not _is_moved(output, given):
            return super().all_gather_single(output, given, opts)
        return self._through_memory(
            "all-gather", output, opts, lambda out, limit, m: m.all_gather(out, _flat(given), limit)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Any:
        """(shape) of every rank -> a list of as many."""
        opts, given = options_of(AllgatherOptions, opts, more), inputs[0]
        alike = len(inputs) == 1 and all(one.shape == given.shape for one in outputs[0])
        if self.memory is None or not alike or not _is_moved(given, *outputs[0]):
            return super().allgather(outputs, inputs, opts)
        whole = given.new_empty(self.size(), *given.shape)
        # Through memory it is done here, so the parts can be copied at once.
        work = self.all_gather_single(whole, given, opts)
        for one, part in zip(outputs[0], whole, strict=True):
            one.copy_(part)
        return work

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n x ranks) of every rank -> (n) of the sum."""
        opts = options_of(dist.ReduceScatterOptions, opts, more)
        fits, operation = given.numel() == self.size() * output.numel(), _operation(opts.reduceOp, output, given)
        if self.memory is None or not fits or operation is None:
            return super().reduce_scatter_single(output, given, opts)
        return self._through_memory(
            "reduce-scatter", output, opts, lambda out, limit, m: m.reduce_scatter(out, _flat(given), limit, operation)
        )

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, received: Any, sent: Any, opts: Any = None, **more: Any
    ) -> Any:
        """Rows of ``given`` to each rank, and from each rank into ``output``; without numbers equal parts."""
        opts = options_of(dist.AllToAllOptions, opts, more)
        if self.memory is None or not _is_moved(output, given):
            return super().all_to_all_single(output, given, received, sent, opts)
        into, out_of = (_elements(x, rows, self.size()) for x, rows in ((output, received), (given, sent)))
        return self._through_memory(
            "all-to-all", output, opts, lambda out, limit, m: m.all_to_all(out, _flat(given), into, out_of, limit)
        )

    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        """Broadcast in place; of a single tensor through memory."""
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        fits = len(given) == 1 and isinstance(opts, dist.BroadcastOptions) and _is_moved(*given)
        if self.memory is None or not fits:
            return super().broadcast(tensors, opts, **more)
        root = opts.rootRank
        return self._through_memory("broadcast", given[0], opts, lambda out, limit, m: m.broadcast(out, root, limit))

    def barrier(self, opts: Any = None, **more: Any) -> Any:
        """Wait for all ranks."""
        if self.memory is None or not isinstance(opts, dist.BarrierOptions):
            return super().barrier(opts, **more)
        self.counts["memory barrier"] += 1
        # The limit as a function: it is asked for only when a rank is late.
        self.memory.barrier(partial(self._seconds, opts))
        return CompletedWork([])

    def shift(self, output: torch.Tensor, given: torch.Tensor, source: int) -> Any:
        """Each rank reads ``given`` of its ``source`` into ``output``; every rank is the source of one. None: these
        tensors cannot go through memory, and the caller uses messages."""
        if self.memory is None or not _is_moved(output, given):
            return None
        opts = dist.AllToAllOptions()
        return self._through_memory(
            "shift", output, opts, lambda out, limit, m: m.shift(out, _flat(given), source, limit)
        )

    # The names that torch 2.11 calls. Inherited ones would be the base class's methods.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _through_memory(
        self, kind: str, output: torch.Tensor, opts: Any, call: Callable[[torch.Tensor, Any, Any], None]
    ) -> Any:
        """Run ``call`` with the flat output, the time limit and the memory, count it as ``kind``, and return its
        handle."""
        self.counts[f"memory {kind}"] += 1
        inference = output.is_inference()  # outside of its mode nothing may write to it
        same = inference == torch.is_inference_mode_enabled()
        with nullcontext() if same else torch.inference_mode(inference):
            # A view where the tensor is contiguous; else a copy, which is written back.
            result = _flat(output)
            call(result, partial(self._seconds, opts), self.memory)
            _copy_into(result, output)
        return CompletedWork([output])

    def _seconds(self, opts: Any) -> float:
        return (limit_of(opts) or self.network.timeout).total_seconds()


def default_backend() -> str:
    """Backend of the default group of a run on CPUs: memory where torchrun started all processes on this machine, else
    gloo."""
    # torchrun sets both; they are equal where all processes are on this machine.
    here, everywhere = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return NAME if here == everywhere and here not in (None, "1") else "gloo"


def within_nodes(topology: Topology) -> Callable[[Sequence[int]], str | None]:
    """(ranks of a group) -> its backend, for :func:`smp.parallel.context.build_context`: memory where all are on one
    node of ``topology``, which knows all ranks of the default group; else that of the default group."""

    def backend(ranks: Sequence[int]) -> str | None:
        on_one_node = len({topology.locations[rank][0] for rank in ranks}) == 1
        return NAME if on_one_node and len(ranks) > 1 else None

    return backend


def describe_exchange(meshes: Mapping[str, DeviceMesh]) -> list[str]:
    """A line for the log: which of this rank's groups use shared memory and which gloo; empty without groups.

    Args:
        meshes: 1-D, by the name to print.
    """
    groups = {name: mesh.get_group() for name, mesh in meshes.items() if mesh.size() > 1}
    shared = [name for name, group in groups.items() if getattr(group, "memory", None) is not None]
    over = [name for name in groups if name not in shared]
    said = [f"shared memory ({', '.join(shared)})"] if shared else []
    said += [f"gloo ({', '.join(over)})"] if over else []
    return [f"collectives: {', '.join(said)}"] if said else []


def _operation(op: Any, *tensors: torch.Tensor) -> str | None:
    """The name of the reduction, if it runs through memory, else None. All ranks must decide alike, so this depends
    only on dtype, device and operation, never on the strides of this rank's tensor."""
    found = next((name for name in OPERATIONS if op == getattr(dist.ReduceOp, name)), None)
    numbers = tensors[0].dtype in _ADDED and (found != "AVG" or tensors[0].dtype.is_floating_point)
    return found if numbers and _is_moved(*tensors) else None


def _is_moved(*tensors: torch.Tensor) -> bool:
    """Whether the tensors can go through memory. All ranks must decide alike, so this depends on device, layout and
    dtype only."""
    there = all(x.device.type == "cpu" and x.layout is torch.strided for x in tensors)
    return there and tensors[0].dtype in DTYPES and all(x.dtype == tensors[0].dtype for x in tensors)


def _elements(x: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Elements of each rank's part of ``x``, given as ``rows`` of dim 0; without ``rows`` equal parts.

    Raises:
        ValueError: the parts are not all of it.
    """
    count = x.shape[0] if x.ndim else 1
    # An empty list means equal parts, as torch has it.
    rows = list(rows) or [count // size] * size
    if sum(rows) != count or len(rows) != size:
        raise ValueError(f"all-to-all over {size} ranks: parts of {rows} rows are not the {count} of the tensor")
    # A tensor without rows has no elements: 1 only avoids the division by 0.
    return [number * (x.numel() // max(count, 1)) for number in rows]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(elements), with a stride of 1: a view of x, or a copy of a strided tensor or of a negated or conjugated view."""
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor with one element, or none, is contiguous whatever its strides say; views of other dtypes ask for 1.
    return plain.as_strided((plain.numel(),), (1,))


def _copy_into(result: torch.Tensor, x: torch.Tensor) -> None:
    """Write the result back into x where :func:`_flat` made a copy."""
    if x.is_neg() or x.is_conj() or not x.is_contiguous():
        x.detach().copy_(result.view(x.shape))


class CompletedWork(dist.Work):
    """The handle of a collective that has finished."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _create(options: Any, _: Any = None) -> NodeProcessGroup:
    return NodeProcessGroup(options)


# Once a process: torch refuses a name that is registered already.
if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
