"""A backend of torch.distributed whose large collectives know nodes: ``init_process_group("smp")``.

    import smp
    torch.distributed.init_process_group("smp")          # or new_group(ranks, backend="smp")

All-reduce, all-gather and reduce-scatter of CPU tensors (sums and averages, 64 KiB and more, where several ranks are on
one of several nodes) run by the schedules of ``smp.parallel.network``; everything else, and all of CUDA's, is what gloo
and NCCL do: every call that this class does not have goes to the backend that it registers for the tensor's device. A
group counts what it ran itself and what it left to gloo: ``group.counts``.

Nodes are found by hostname when a group is made, or from the file that SMP_NETWORK_TOPOLOGY names
(docs/collectives.md). The name ``smddp``, of SageMaker's library, is taken too, with a note.

torch cannot subclass a ``Backend`` in Python, and a ``ProcessGroup`` without registered backends
lacks what is not overridden, so this is one that registers them. Methods have the names of torch 2.11 and of 2.13.

Before any data is sent ranks compare what they call, in messages of fixed size (:mod:`smp.parallel.network.same_call`):
where sizes, dtypes, operations or the order of calls differ, all of them raise an error that names two of the calls.

What this backend does not run goes through a second, plain ``ProcessGroup`` with the same backends, not through
``super()``: torch calls the methods that a subclass in Python inherits with the interpreter lock held. There gloo waits
for its queue's mutex, which its thread holds while it drops the tensors of the call before, for which it needs the
interpreter lock: a deadlock about once in thousands of calls, without a timeout.
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
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from smp.config import ConfigError
from smp.parallel.network.cost import Policy
from smp.parallel.network.group import CollectiveWork, NetworkGroup
from smp.parallel.network.same_call import Call
from smp.parallel.network.select_collectives import SMALLEST
from smp.parallel.network.topology import Topology, read_topology

NAME = "smp"
"""Name for init_process_group and new_group, once smp is imported (:mod:`smp.backend_names`)."""
TOPOLOGY = "SMP_NETWORK_TOPOLOGY"
"""Environment variable: a file as of --network-topology. Its ranks are those of the default group."""
DIVIDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ADDED = (*DIVIDED, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes that torch can add on a CPU. With another one a rank would fail in its sum while others wait for it."""


_OP = dist.ReduceOp
_OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_ProcessGroup: Any = dist.ProcessGroup  # its methods have other names in torch 2.11 than in 2.13


def _forwarded(name: str) -> Callable[..., Any]:
    """A method that calls the plain group's method ``name``; see the module docstring."""

    def method(self: Any, *args: Any, **more: Any) -> Any:
        return getattr(self._plain_group, name)(*args, **more)

    return method


def _compared(name: str, kind: str, alike: int | None = 0) -> Callable[..., Any]:
    """A method that is the plain group's, once all ranks are at this call; ``alike``: the argument whose tensors are of
    one size on all."""

    def method(self: Any, *args: Any, **more: Any) -> Any:
        tensors = _tensors_in(args)
        # What has to be the same on all ranks: sizes of the tensors at ``alike``, and operations and roots.
        call = Call(kind, *_described(() if alike is None else _tensors_in(args[alike]), [*args, *more.values()]))
        run = partial(getattr(self._plain_group, name), *args, **more)
        return self._ask(call, run, tensors, args[0] if tensors else [], args[-1] if args else None)

    return method


class NetworkProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The group that ``init_process_group("smp")`` makes; see this module."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        # So that tests and users can see what was hierarchical and what was not.
        self.counts: Counter[str] = Counter()
        self._gloo = _gloo(options)
        # CUDA tensors go to NCCL unchanged.
        self._nccl = _nccl(options) if torch.cuda.is_available() and dist.is_nccl_available() else None
        kind = dist.ProcessGroup.BackendType
        # See above: calls that it does not run go through it and not through ``super()``.
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
        """The backend's name, which torch asks for."""
        return NAME

    def name(self) -> str:
        """The backend's name, as newer versions of torch ask for it."""
        return NAME

    def shutdown(self) -> None:
        """End the thread; called by ``destroy_process_group``. gloo closes its connections when the last reference to
        the group is gone, as without this class."""
        self.network.close()
        super().shutdown()

    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        """All-reduce in place; a sum or an average of one tensor is hierarchical."""
        opts = options_of(dist.AllreduceOptions, opts, more)
        # torch passes one tensor, or a list of one.
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        way = self.network.way("all-reduce", given[0])
        # What no schedule can do is left to gloo and counted there.
        # Which way is taken may depend only on what is the same on all ranks: sizes, dtypes, operations.
        flat = _in_memory_order(given[0]) if len(given) == 1 and _is_summed(given[0], opts.reduceOp) else None
        call = Call("all-reduce", *_described(given, [opts]))
        if way.route is None or flat is None:
            inner = self._inner("all-reduce", given[0])
            return self._ask(call, lambda: inner.allreduce(given, opts), given, list(given), opts)
        self.counts["hierarchical all-reduce"] += 1
        return self._run(self.network.all_reduce(flat, way), flat, opts, list(given), call)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n) of every rank -> (n x ranks)."""
        opts, given = options_of(AllgatherOptions, opts, more), _resolved(given)
        way = self.network.way("all-gather", output)
        fits = _alike_on_cpu(output, given) and output.numel() == self.size() * given.numel()
        call = Call("all-gather", *_described([output], []))
        if way.route is None or not fits:
            # Flat: gloo or NCCL, after the comparison of calls.
            inner = self._inner("all-gather", given)
            both = [output, given]
            return self._ask(call, lambda: inner._allgather_base(output, given, opts), both, [output], opts)
        self.counts["hierarchical all-gather"] += 1
        running = self.network.all_gather(output.view(-1), given.view(-1), way)
        return running.work([output], timeout=limit_of(opts), call=call)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None, **more: Any) -> Any:
        """(n x ranks) of every rank -> (n) of the sum."""
        opts, given = options_of(dist.ReduceScatterOptions, opts, more), _resolved(given)
        way = self.network.way("reduce-scatter", given)
        fits = _alike_on_cpu(output, given) and given.numel() == self.size() * output.numel()
        call = Call("reduce-scatter", *_described([given], [opts]))
        if way.route is None or not fits or not _is_summed(given, opts.reduceOp):
            inner = self._inner("reduce-scatter", given)
            both = [output, given]
            return self._ask(call, lambda: inner._reduce_scatter_base(output, given, opts), both, [output], opts)
        self.counts["hierarchical reduce-scatter"] += 1
        running = self.network.reduce_scatter(output.view(-1), given.view(-1), way)
        return self._run(running, output, opts, [output], call)

    # The names that torch 2.11 calls.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Any:
        """Several all-gathers, one after the other; functional collectives and DTensor call this with one."""
        opts = options_of(AllgatherOptions, opts, more)
        works = [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _all_of(works, list(outputs))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Any:
        """Several reduce-scatters, one after the other; functional collectives and DTensor call this with one."""
        opts = options_of(dist.ReduceScatterOptions, opts, more)
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _all_of(works, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # what else torch looks for in a subclass, PyProcessGroup.hpp, and what it calls in Python
    allgather, gather = _compared("allgather", "all-gather", 1), _compared("gather", "gather", 1)
    reduce_scatter, scatter = _compared("reduce_scatter", "reduce-scatter"), _compared("scatter", "scatter")
    allreduce_coalesced = _compared("allreduce_coalesced", "all-reduce of several")
    broadcast, reduce = _compared("broadcast", "broadcast"), _compared("reduce", "reduce")
    alltoall, barrier = _compared("alltoall", "all-to-all of a list", None), _compared("barrier", "barrier", None)
    recv, send = map(_forwarded, ("recv", "send"))

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, received: Any, sent: Any, opts: Any = None, **more: Any
    ) -> Any:
        """Rows of ``given`` to each rank, and from each rank into ``output``; without numbers equal parts."""
        opts = options_of(dist.AllToAllOptions, opts, more)

        def run() -> Any:
            self._compare_parts(_bytes_of(given, sent, self.size()), _bytes_of(output, received, self.size()), opts)
            return self._plain_group.alltoall_base(output, given, received, sent, opts)

        call = Call("all-to-all", 0, _words(given.dtype))
        return self._ask(call, run, [output, given], [output], opts)

    alltoall_base = all_to_all_single

    def _compare_parts(self, sent: list[int], received: list[int], opts: Any) -> None:
        """Check that the bytes that each rank sends to this one are those that it expects. Collective."""
        # Each rank tells the others how much it sends them, before any data: gloo would end the process.
        coming = torch.empty(self.size(), dtype=torch.int64)
        self._plain_group.alltoall_base(coming, torch.tensor(sent), [], [], opts).wait()
        wrong = next((rank for rank, size in enumerate(coming.tolist()) if size != received[rank]), None)
        said = "all-to-all"
        if wrong is not None:
            there = f"rank {self.network.ranks[wrong]} sends {int(coming[wrong]):,} bytes and {received[wrong]:,}"
            said = f"in an all-to-all where {there} are waited for"
        # A rank where all is right compares too, so that the error reaches all ranks.
        self.network.compare(Call(said, 0), limit_of(opts))

    def _ask(self, call: Call, run: Callable[[], Any], tensors: Sequence[Any], result: Any, opts: Any) -> Any:
        """Run a call of gloo once all ranks are at this call. NCCL runs in the order of the caller's stream."""
        if self.size() == 1 or any(tensor.device.type != "cpu" for tensor in tensors):
            return run()
        timeout = limit_of(opts) if hasattr(opts, "timeout") else None
        # A tensor made in inference mode may only be written to in inference mode.
        inference = any(tensor.is_inference() for tensor in tensors)

        def job() -> None:
            # Modes belong to a thread, and the job runs on the group's.
            with torch.inference_mode() if inference else torch.no_grad():
                run().wait()

        return self.network.run(call, job, result, timeout)

    def _run(self, running: Any, result: torch.Tensor, opts: Any, tensors: Any, call: Call) -> CollectiveWork:
        average = opts.reduceOp == dist.ReduceOp.AVG
        # An average is the sum, divided once at the end.
        divide = (lambda: result.div_(self.size())) if average else (lambda: None)
        return running.work(tensors, divide, limit_of(opts), call)

    def _inner(self, what: str, tensor: torch.Tensor) -> Any:
        """The backend of the tensor's device; for another device (meta) the plain group, as torch has it."""
        if tensor.device.type not in ("cpu", "cuda"):
            return self._plain_group
        self.counts[f"{'nccl' if tensor.is_cuda else 'gloo'} {what}"] += 1
        return self._nccl if tensor.is_cuda else self._gloo


def _gloo(options: Any) -> Any:
    # Prefixes: gloo, NCCL and this file use one store, with keys of the same names.
    store = dist.PrefixStore("smp/cpu", options.store)
    made = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    # As torch sets them on the backends that it makes itself.
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
    """The topology of a group, and links where the file has them. Ranks tell each other through the store what they
    know.

    Raises:
        ConfigError: a rank cannot read its file, which all raise, or ranks have read different files, or only some have
            one: they would run different schedules.
    """
    size, file = options.group_size, os.environ.get(TOPOLOGY)
    node, links, read, problem = socket.gethostname(), None, "None None", ""
    try:
        if file is not None:
            nodes, links = read_topology(file, dist.get_world_size() if dist.is_initialized() else size)
            read = f"{nodes!r} {links!r}"
            if nodes is not None:
                node = nodes.name_of((list(options.global_ranks_in_group) or range(size))[options.group_rank])
    except ConfigError as error:  # the others would wait for what this rank has to say
        problem = str(error).removeprefix("--network-topology ")
    store = dist.PrefixStore("smp/nodes", options.store)
    digest = hashlib.sha256(read.encode()).hexdigest()  # short: every rank reads those of all
    store.set(str(options.group_rank), json.dumps([node, problem, file is not None, digest]))
    # ``get`` waits for a key: every rank has read what all others found.
    said = [json.loads(store.get(str(rank))) for rank in range(size)]
    _check_alike([problem for _, problem, *_ in said], [read for _, _, *read in said])
    return Topology.of([node for node, *_ in said]), links


def _check_alike(problems: Sequence[str], files: Sequence[Sequence[Any]]) -> None:
    """Raise ConfigError unless all ranks read the same: the problem of each rank ("": none), and (has a file,
    digest)."""
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


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors_in(part)] if isinstance(value, list | tuple) else []


def _described(tensors: Sequence[torch.Tensor], options: Sequence[Any]) -> tuple[int, str]:
    """(bytes, other properties as text) of a call, which have to be the same on all ranks."""
    told = [_words(dtype) for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)]
    # Only option objects have a root or an operation; other arguments are passed over.
    for option in options:
        if hasattr(option, "rootRank"):
            told.append(f"rank {option.rootRank} of the group")
        if hasattr(option, "reduceOp"):
            told += [name for name in _OPERATIONS if option.reduceOp == getattr(_OP, name)]
    sizes = list(map(_bytes, tensors))
    if len(set(sizes)) > 1:  # equal sums of other sizes would be added up one over the other
        told.append(
            " + ".join(f"{n} x {size}" for size, n in ((size, len(list(same))) for size, same in groupby(sizes)))
        )
    return sum(sizes), ", ".join(told)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; for a sparse one those of the dense tensor, because ranks may hold different numbers of
    values."""
    return tensor.numel() * tensor.element_size()


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(x: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Bytes of each rank's part of ``x``, of which it has so many rows; without rows equal ones."""
    count = max(x.shape[0] if x.ndim else 1, 1)
    return [number * (x.nbytes // count) for number in list(rows) or [count // size] * size]


def options_of(kind: Any, opts: Any, more: dict[str, Any]) -> Any:
    """The options object of a call: callers pass one, or an operation and a timeout instead."""
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
    """Whether a schedule can compute it: a sum or an average, of a dtype that has that operation on a CPU."""
    return (op == dist.ReduceOp.SUM and tensor.dtype in _ADDED) or (op == dist.ReduceOp.AVG and tensor.dtype in DIVIDED)


def _alike_on_cpu(*tensors: torch.Tensor) -> bool:
    """Whether they are contiguous, on the CPU, and of one dtype; gloo refuses several."""
    dtype = tensors[0].dtype
    return all(_is_plain(t) and t.is_contiguous() and t.dtype == dtype for t in tensors)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a conjugated or negated view with its actual values in memory; other tensors themselves."""
    return tensor.resolve_conj().resolve_neg()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is on the CPU, not sparse, and its memory has its numbers, neither conjugated nor negated."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its memory, (elements), of any strides without gaps, such as those of channels_last: gloo adds that up, too, and
    ranks whose strides differ must not go different ways. None: there are gaps, or it is not plain."""
    if not _is_plain(tensor):
        return None
    # Dimensions by falling stride: without gaps the permuted tensor is contiguous.
    ordered = tensor.detach().permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return ordered.view(-1) if ordered.is_contiguous() else None


def _all_of(works: Sequence[Any], result: list[torch.Tensor]) -> Any:
    """One handle for several works."""
    return works[0] if len(works) == 1 else _WorkOfSeveral(works, result)


class _WorkOfSeveral(dist.Work):
    """Waits for all works, but only in ``wait``: before that other ranks may need something from this rank."""

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


def create(options: Any, _: Any = None) -> NetworkProcessGroup:
    return NetworkProcessGroup(options)


def create_smddp(options: Any, _: Any = None) -> NetworkProcessGroup:
    if options.group_rank == 0:
        print("note: the backend smddp is smp's here; write smp", file=sys.stderr)
    return NetworkProcessGroup(options)
