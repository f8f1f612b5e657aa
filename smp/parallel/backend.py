"""A backend of torch.distributed whose large collectives know nodes: ``init_process_group("smp")``.

    import smp.parallel.backend
    torch.distributed.init_process_group("smp")          # or new_group(ranks, backend="smp")

All-reduce, all-gather and reduce-scatter of CPU tensors (sums and averages, 64 KiB and more, where several ranks are on
one of several nodes) run by the schedules of ``smp.parallel.network``; everything else, and all of CUDA's, is what gloo
and NCCL do: every call that this class does not have goes to the backend that it registers for the tensor's device. A
group counts what it ran itself and what it left to gloo: ``group.counts``.

Nodes are found by hostname when a group is made, or from the file that SMP_NETWORK_TOPOLOGY names
(docs/collectives.md). The name ``smddp``, of SageMaker's library, is taken too, with a note.

torch cannot subclass a ``Backend`` in Python, and a ``ProcessGroup`` without registered backends
lacks what is not overridden, so this is one that registers them. Methods have the names of torch 2.11 and of 2.13.

What is not ours goes through a second, plain ``ProcessGroup`` with the same backends, not through ``super()``: torch
calls the methods that a subclass in Python inherits with the interpreter lock held. There gloo waits for its queue's
mutex, which its thread holds while it drops the tensors of the call before, for which it needs the interpreter lock:
a deadlock about once in thousands of calls, without a timeout.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from smp.config import ConfigError
from smp.parallel.network.choose import SMALLEST
from smp.parallel.network.cost import Policy
from smp.parallel.network.group import CollectiveWork, NetworkGroup
from smp.parallel.network.topology import Topology, read_topology

NAME = "smp"
"""What init_process_group and new_group take, once this module is imported."""
TOPOLOGY = "SMP_NETWORK_TOPOLOGY"
"""Environment variable: a file as of --network-topology. Its ranks are those of the default group."""
DIVIDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ADDED = (*DIVIDED, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""What torch adds on a CPU. A rank that has nothing to add would else wait for one that failed."""


_ProcessGroup: Any = dist.ProcessGroup  # its methods have other names in torch 2.11 than in 2.13


def _forwarded(name: str) -> Callable[..., Any]:
    """A method that is the plain group's; see this module."""

    def method(self: Any, *args: Any, **more: Any) -> Any:
        return getattr(self._plain_group, name)(*args, **more)

    return method


class NetworkProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The group that ``init_process_group("smp")`` makes; see this module."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        # So that tests and users can see what was hierarchical and what was not.
        self.counts: Counter[str] = Counter()
        self._gloo = _gloo(options)
        self._nccl = _nccl(options) if torch.cuda.is_available() and dist.is_nccl_available() else None
        kind = dist.ProcessGroup.BackendType
        # See above: calls that are not ours go through it and not through ``super()``.
        self._plain_group = _ProcessGroup(rank, size)
        for group in (self, self._plain_group):
            group._set_default_backend(kind.GLOO)
            group._register_backend(torch.device("cpu"), kind.GLOO, self._gloo)
            if self._nccl is not None:
                group._register_backend(torch.device("cuda"), kind.NCCL, self._nccl)
        # Every rank makes the same policy from the same topology, or they would run different schedules.
        topology, links = _topology(options)
        # Without measured links a limit in bytes stands for them; with them the cost model decides at every size.
        smallest = SMALLEST if links is None else 0
        policy = Policy(topology, links, hierarchical=topology.several_levels, smallest=smallest)
        ranks = list(options.global_ranks_in_group) or list(range(size))
        self.network = NetworkGroup(ranks, rank, self._gloo, policy)

    def getBackendName(self) -> str:  # noqa: N802
        """What torch asks for."""
        return NAME

    def name(self) -> str:
        """The same in newer versions."""
        return NAME

    def shutdown(self) -> None:
        """What ``destroy_process_group`` calls: ends the thread. gloo closes its connections with the last reference
        to the group, as it does without this class."""
        self.network.close()
        super().shutdown()

    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        """In place; a sum or an average of one tensor is hierarchical."""
        opts = options_of(dist.AllreduceOptions, opts, more)
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        way = self.network.way("all-reduce", given[0])
        # What no schedule can do is left to gloo and counted there.
        flat = _in_memory_order(given[0]) if len(given) == 1 and _is_summed(given[0], opts.reduceOp) else None
        if way.route is None or flat is None:
            return self._inner("all-reduce", given[0]).allreduce(given, opts)
        self.counts["hierarchical all-reduce"] += 1
        return self._run(self.network.all_reduce(flat, way), flat, opts, list(given))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n) of every rank -> (n x ranks)."""
        opts, given = options_of(AllgatherOptions, opts, more), _resolved(given)
        way = self.network.way("all-gather", output)
        fits = _alike_on_cpu(output, given) and output.numel() == self.size() * given.numel()
        if way.route is None or not fits:
            return self._inner("all-gather", given)._allgather_base(output, given, opts)
        self.counts["hierarchical all-gather"] += 1
        running = self.network.all_gather(output.view(-1), given.view(-1), way)
        return running.work([output], timeout=limit_of(opts))

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n x ranks) of every rank -> (n) of the sum."""
        opts, given = options_of(dist.ReduceScatterOptions, opts, more), _resolved(given)
        way = self.network.way("reduce-scatter", given)
        fits = _alike_on_cpu(output, given) and given.numel() == self.size() * output.numel()
        if way.route is None or not fits or not _is_summed(given, opts.reduceOp):
            return self._inner("reduce-scatter", given)._reduce_scatter_base(output, given, opts)
        self.counts["hierarchical reduce-scatter"] += 1
        return self._run(self.network.reduce_scatter(output.view(-1), given.view(-1), way), output, opts, [output])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Any:
        """Several, one after the other; functional collectives and DTensor call this with one."""
        opts = options_of(AllgatherOptions, opts, more)
        works = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _all_of(works, list(outputs))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Any:
        """Likewise."""
        opts = options_of(dist.ReduceScatterOptions, opts, more)
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _all_of(works, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # what else torch looks for in a subclass, PyProcessGroup.hpp
    allgather, allreduce_coalesced, reduce_scatter = map(
        _forwarded, ("allgather", "allreduce_coalesced", "reduce_scatter")
    )
    all_to_all_single, alltoall_base = map(_forwarded, ("all_to_all_single", "alltoall_base"))
    barrier, broadcast, recv, send = map(_forwarded, ("barrier", "broadcast", "recv", "send"))

    def _run(self, running: Any, result: torch.Tensor, opts: Any, tensors: list[torch.Tensor]) -> CollectiveWork:
        average = opts.reduceOp == dist.ReduceOp.AVG
        # An average is the sum, divided once at the end.
        divide = (lambda: result.div_(self.size())) if average else (lambda: None)
        return running.work(tensors, divide, limit_of(opts))

    def _inner(self, what: str, tensor: torch.Tensor) -> Any:
        """The backend of the tensor's device; of one without a backend (meta) what torch does there."""
        if tensor.device.type not in ("cpu", "cuda"):
            return self._plain_group
        self.counts[f"{'nccl' if tensor.is_cuda else 'gloo'} {what}"] += 1
        return self._nccl if tensor.is_cuda else self._gloo


def _gloo(options: Any) -> Any:
    store = dist.PrefixStore("smp/cpu", options.store)
    made = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    made.options.global_ranks_in_group = options.global_ranks_in_group
    made.options.group_name = options.group_id
    return made


def _nccl(options: Any) -> Any:
    chosen = dist.ProcessGroupNCCL.Options()
    chosen._timeout = options.timeout
    chosen.global_ranks_in_group, chosen.group_name = options.global_ranks_in_group, options.group_id
    store = dist.PrefixStore("smp/cuda", options.store)
    return dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, chosen)


def _topology(options: Any) -> tuple[Topology, Any]:
    """Of a group, and links where the file has them. Ranks tell each other through the store what they know.

    Raises:
        ConfigError: a rank cannot read its file, which all raise, or ranks have read different files, or only some have
            one: they would run different schedules.
    """
    size, file = options.group_size, os.environ.get(TOPOLOGY)
    place, links, read, problem = socket.gethostname(), None, "None None", ""
    try:
        if file is not None:
            nodes, links = read_topology(file, dist.get_world_size() if dist.is_initialized() else size)
            read = f"{nodes!r} {links!r}"
            if nodes is not None:
                place = nodes.name_of((list(options.global_ranks_in_group) or range(size))[options.group_rank])
    except ConfigError as error:  # the others would wait for what this rank has to say
        problem = str(error).removeprefix("--network-topology ")
    store = dist.PrefixStore("smp/nodes", options.store)
    digest = hashlib.sha256(read.encode()).hexdigest()  # short: every rank reads those of all
    store.set(str(options.group_rank), json.dumps([place, problem, file is not None, digest]))
    said = [json.loads(store.get(str(rank))) for rank in range(size)]
    _check_alike([problem for _, problem, *_ in said], [read for _, _, *read in said])
    return Topology.of([place for place, *_ in said]), links


def _check_alike(problems: Sequence[str], files: Sequence[Sequence[Any]]) -> None:
    """What each rank failed with, and (has a file, its digest) of each."""
    failed = next((rank for rank, problem in enumerate(problems) if problem), None)
    if failed is not None:
        raise ConfigError(f"{TOPOLOGY} of rank {failed} in a group of {len(files)}: {problems[failed]}")
    other = next((rank for rank, read in enumerate(files) if read != files[0]), None)
    if other is not None:
        first, here = files[0][0], files[other][0]
        reads = "has another file" if first == here else "has a file" if here else "has none"
        raise ConfigError(
            f"{TOPOLOGY}: rank {other} of a group of {len(files)} {reads}, unlike rank 0; all need the same"
        )


def options_of(kind: Any, opts: Any, more: dict[str, Any]) -> Any:
    """Callers pass options, or in their place an operation and a timeout."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    op = more.get("op", opts)
    if op is not None:
        made.reduceOp = op
    if more.get("timeout") is not None:
        made.timeout = more["timeout"]
    return made


def limit_of(opts: Any) -> timedelta | None:
    """The timeout of one call; None: that of the group, for which torch has a negative number."""
    return opts.timeout if opts.timeout > timedelta(0) else None


def _is_summed(tensor: torch.Tensor, op: Any) -> bool:
    """Whether a schedule can do it: sums of what can be added, averages of what can be divided."""
    return (op == dist.ReduceOp.SUM and tensor.dtype in _ADDED) or (op == dist.ReduceOp.AVG and tensor.dtype in DIVIDED)


def _alike_on_cpu(*tensors: torch.Tensor) -> bool:
    """Whether they are contiguous, on the CPU, and of one dtype; gloo refuses several."""
    dtype = tensors[0].dtype
    return all(_is_plain(t) and t.is_contiguous() and t.dtype == dtype for t in tensors)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a conjugated or negated view, whose memory has others, in memory of their own."""
    return tensor.resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is on the CPU, not sparse, and its memory has its numbers, neither conjugated nor negated."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its memory, (elements), of any strides without gaps, such as those of channels_last: gloo adds that up, too, and
    ranks whose strides differ must not go different ways. None: there are gaps, or it is not plain."""
    if not _is_plain(tensor):
        return None
    ordered = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return ordered.view(-1) if ordered.is_contiguous() else None


def _all_of(works: Sequence[Any], result: list[torch.Tensor]) -> Any:
    """One handle for several."""
    return works[0] if len(works) == 1 else _WorkOfSeveral(works, result)


class _WorkOfSeveral(dist.Work):
    """Waits for all of them, where it is waited for and not before: others may first need something from this rank."""

    def __init__(self, works: Sequence[Any], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._result = works, result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _create(options: Any, _: Any = None) -> NetworkProcessGroup:
    return NetworkProcessGroup(options)


def _create_smddp(options: Any, _: Any = None) -> NetworkProcessGroup:
    if options.group_rank == 0:
        print("note: the backend smddp is smp's here; write smp", file=sys.stderr)
    return NetworkProcessGroup(options)


for _name, _creator in ((NAME, _create), ("smddp", _create_smddp)):
    # torch refuses to register a name twice, as a reload of this module would.
    if _name not in dist.Backend.backend_list:
        dist.Backend.register_backend(_name, _creator, extended_api=True, devices=["cpu", "cuda"])
