"""Count what a piece of code allocates, computes and communicates while it runs.

:class:`Meter` watches every operation that PyTorch dispatches. On fake tensors nothing else happens: a step of a model
of any size runs in seconds and in no memory, and what it would have needed is known to the byte (but for what kernels
and libraries allocate inside).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from smp.kernels import matmul
from smp.kernels.cpp import attention, norm
from smp.kernels.registry import BODIES

_aten = torch.ops.aten
_GATHER = {"_allgather_base_", "all_gather_into_tensor"}
_SCATTER = {"_reduce_scatter_base_", "reduce_scatter_tensor"}
_REDUCE = {"allreduce_", "all_reduce"}
_KINDS = (
    dict.fromkeys(_GATHER, "all-gather")
    | dict.fromkeys(_SCATTER, "reduce-scatter")
    | dict.fromkeys(_REDUCE, "all-reduce")
    | {"send": "send", "alltoall_base_": "all-to-all", "all_to_all_single": "all-to-all"}
)
_COPIED_BY_GLOO = {"all-gather", "reduce-scatter"}
"""Gloo works on a copy of the whole tensor (measured, torch 2.13); all-reduces and all-to-alls on the tensor."""
_WAITS = {torch.ops._c10d_functional.wait_tensor}
_FUSED = ("triton", "cuda", "apex", "cpp")
FREE = {"view", "t", "transpose", "detach", "permute", "as_strided", "slice", "alias", "expand", "unsqueeze", "split"}
"""Operations that launch nothing."""


@dataclass
class Traffic:
    """Calls of one collective on one group, and what this rank sends in them, in bytes: (n - 1) / n of the whole tensor
    of a gathering or a scatter on n ranks, twice that of an all-reduce."""

    calls: int = 0
    sent: float = 0.0


Key = tuple[str, str]  # name of the group, kind of collective


@dataclass
class Counts:
    """Counted FLOPs, bytes and collectives.

    Attributes:
        flops: of matrix products and attention; a causal one counts whole.
        kernels: operations that are no views.
        traffic: by group and kind.
        calls: how often each was made, of a meter that keeps them (``smp.planner.record``).
    """

    flops: int = 0
    kernels: int = 0
    traffic: defaultdict[Key, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    calls: Counter[Hashable] = field(default_factory=Counter)

    def plus(self, other: Counts, times: int) -> Counts:
        """The sum of this and ``times`` the other."""
        total = Counts(self.flops + times * other.flops, self.kernels + times * other.kernels)
        for key in self.traffic.keys() | other.traffic.keys():
            one, two = self.traffic.get(key, Traffic()), other.traffic.get(key, Traffic())
            total.traffic[key] = Traffic(one.calls + times * two.calls, one.sent + times * two.sent)
        # Not Counter's ``+``, which drops counts that are not above 0.
        total.calls = Counter({call: self.calls[call] + times * other.calls[call] for call in self.calls | other.calls})
        return total


class Meter(TorchDispatchMode):
    """Context manager that counts what runs inside it.

    Args:
        groups: names for users, by torch's name of a process group.

    Attributes:
        held: bytes of all storages that were made while it was entered and are still there.
        peaks: most bytes at once, by phase.
        counts: work and traffic since :meth:`start`.
        elsewhere_held: bytes that were made inside of :meth:`elsewhere`.
        over_gloo: what gloo takes during a collective counts.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        super().__init__()
        self.groups, self.held = groups, 0
        self.peaks: dict[str, int] = {}
        self.counts, self.over_gloo = Counts(), False
        # Bytes by storage, keyed by its C++ address: a Python tensor may go while its storage is
        # used.
        self._sizes: dict[int, int] = {}
        self._copies: dict[int, int] = {}  # gloo's, of results that were not waited for yet
        self._phase: str | None = None
        self.elsewhere_held, self._is_elsewhere, self._is_trial = 0, False, False

    def start(self) -> None:
        """Count anew; what is held stays."""
        self.counts = Counts()
        self.peaks.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count peaks for ``name``; what autograd runs inside counts for "backward"."""
        self._phase = name
        self._note_peak()
        try:
            yield
        finally:
            self._phase = None

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, what is allocated is memory of the host, not of the device."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Enter the meter, and also see storages that are resized, by which FSDP frees gathered weights; DTensor's
        trial runs for sharding propagation are left out."""
        # FSDP frees memory by resizing storages in place, which is no operation that is dispatched.
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        # DTensor tries what is new to it on fake tensors of global shapes, which no device allocates.
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any, **kwargs: Any) -> Any:
            self._is_trial = True
            try:
                return propagate(*args, **kwargs)
            finally:
                self._is_trial = False

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # DTensor dispatches its local operations one by one, which are counted then
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_trial:
            return func(*args, **kwargs)
        if (body := self._body(func, args)) is not None:
            # Inside of a dispatch the mode is off; what the body calls is to be counted.
            with self:
                return body(*args, **kwargs)
        if func._overloadpacket in _WAITS:
            # Gloo's copy of a collective lives until it is waited for.
            self.held -= self._copies.pop(args[0].untyped_storage()._cdata, 0)
            return args[0]  # as on a device; a fake one would be another tensor
        result = func(*args, **kwargs)
        # ``prim`` operators, such as ``device``, ask about a tensor and make none.
        if func.namespace == "prim":
            return result
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._made(tensor.untyped_storage())
        self._needed(_scratch(func._overloadpacket, args))
        # Views launch nothing.
        self.counts.kernels += func._opname not in FREE
        self.counts.flops += _flops(func._overloadpacket, args, kwargs, result)
        if func.namespace in ("c10d", "_c10d_functional"):
            if func._opname in _KINDS:
                self._communicated(func._opname, args, result)
        else:
            self._ran(func, args, kwargs, result)
        return result

    def _body(self, func: Any, args: Any) -> Callable[..., Any] | None:
        """The function whose operators are counted instead of ``func``; None: ``func`` is counted itself."""
        return _body(func, args)

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Hook for subclasses that record an operation with its arguments."""

    def _sent(self, key: Key, ranks: int, size: int) -> None:
        """Hook for subclasses: a collective of ``ranks`` on a tensor of ``size`` bytes, all parts together."""

    def _made(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        # A view, or an operation in place: the storage is known.
        if key in self._sizes:
            return
        # 0 first: ``_resized`` adds the difference.
        self._sizes[key] = 0
        if self._is_elsewhere:
            self.elsewhere_held += storage.nbytes()
            weakref.finalize(storage, self._freed_elsewhere, key, storage.nbytes())
            return
        # Memory counts until its storage is freed, also after the tensor that was seen here is gone.
        weakref.finalize(storage, self._freed, key)
        self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            self.held += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self._note_peak()

    def _needed(self, size: int) -> None:
        """Count memory that an operation takes only while it runs."""
        self.held += size
        self._note_peak()
        self.held -= size

    def _freed(self, key: int) -> None:
        self.held -= self._sizes.pop(key) + self._copies.pop(key, 0)

    def _freed_elsewhere(self, key: int, size: int) -> None:
        self.elsewhere_held -= size
        del self._sizes[key]

    @property
    def current_phase(self) -> str | None:
        """The name given to :meth:`phase`, or ``backward`` in autograd's pass; None outside."""
        # -1 outside of autograd's engine: the backward pass of a phase is told apart by it.
        in_backward = self._phase is not None and torch._C._current_graph_task_id() >= 0
        return "backward" if in_backward else self._phase

    def _note_peak(self) -> None:
        if (phase := self.current_phase) is not None:
            self.peaks[phase] = max(self.peaks.get(phase, 0), self.held)

    def _communicated(self, name: str, args: Any, result: Any) -> None:
        group = _group(args)
        size = group.size()
        key = self.groups.get(group.group_name, "pp" if name == "send" else "all"), _KINDS[name]
        entry = self.counts.traffic[key]
        entry.calls += size > 1
        if name == "all_to_all_single":  # its rows, except for those that this rank keeps
            x, _, rows, _ = args
            row = x[:1].numel() * x.itemsize
            entry.sent += (sum(rows) - rows[group.rank()]) * row
            # All rows from one rank are a shift around a ring, which a run on CPUs has a collective of its own for.
            whole = sum(rows) * row
            self._sent((key[0], "shift") if size > 1 and max(rows) == sum(rows) else key, size, whole)
            return
        tensors = [tensor for tensor in tree_iter(args) if isinstance(tensor, torch.Tensor)]
        # Of input and output the larger one is the whole.
        whole = max(tensor.numel() * tensor.itemsize for tensor in tensors)
        if name == "all_gather_into_tensor":  # its output is not among its arguments
            whole *= size
        if self.over_gloo and key[1] in _COPIED_BY_GLOO:
            self._needed(whole)
            if isinstance(result, torch.Tensor):  # started, and waited for later
                self._copies[result.untyped_storage()._cdata] = whole
                self.held += whole
        # A ring: each rank sends n - 1 of n parts, in an all-reduce twice.
        times = {"send": 1.0, "all-reduce": 2 * (size - 1) / size}.get(_KINDS[name], (size - 1) / size)
        entry.sent += times * whole
        self._sent(key, size, whole)


def _group(args: Any) -> dist.ProcessGroup:
    """The group among a collective's arguments: an object, or a name at the end."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    return torch._C._distributed_c10d._resolve_process_group(args[-1])


def _body(func: Any, args: Any) -> Callable[..., Any] | None:
    """The decomposition of an operator that calls other operators; None: it counts as itself. A fused kernel allocates
    nothing inside, its reference in operators does."""
    if func in BODIES and args[-1] not in _FUSED:
        return BODIES[func]
    return _PARTS.get(func)


def _scratch(packet: Any, args: Any) -> int:
    """Bytes that an operator takes while it runs, where that is not in a tensor."""
    if packet is torch.ops.smp.linear:
        return matmul.scratch_bytes(args[1])
    if packet is torch.ops.smp.cpp_attention:
        return attention.scratch_bytes(*args[:2], backward=False)
    if packet is torch.ops.smp.cpp_attention_backward:
        return attention.scratch_bytes(*args[1:3], backward=True)
    if packet is torch.ops.smp.norm_backward and args[-1] == "cpp":
        return norm.scratch_bytes(args[2], args[6])
    return 0


def _flops(packet: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    if (formula := _FLOPS.get(packet)) is not None:
        return formula(*args)
    if packet not in flop_registry:
        return 0
    return flop_registry[packet](*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=result)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    return sdpa_flop_count(q.shape, _as_many(k, q), _as_many(v, q))


def _attention_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    return sdpa_backward_flop_count(dout.shape, q.shape, _as_many(k, q), _as_many(v, q))


def _as_many(keys: torch.Tensor, queries: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``keys`` with key/value heads repeated to the number of query heads."""
    return (keys.shape[0], queries.shape[1], *keys.shape[2:])


_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.smp.cpp_attention: _attention,
    torch.ops.smp.cpp_attention_backward: _attention_backward,
    _aten.addmm_: lambda total, a, b, *_args: 2 * a.numel() * b.shape[1],  # torch's registry has addmm only
    # by a fused kernel; PyTorch's products are counted themselves
    torch.ops.smp.grouped_product: lambda x, weight, *_: 2 * x.numel() * weight.shape[1],
    torch.ops.smp.grouped_input_gradient: lambda grads, weights, *_: sum(
        2 * grad.numel() * weight.shape[2] for grad, weight in zip(grads, weights, strict=True)
    ),
    torch.ops.smp.grouped_weight_gradient: lambda grad, x, *_: 2 * grad.numel() * x.shape[1],
}
_PARTS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _aten.linear.default.decompose,
    _aten.matmul.default: _aten.matmul.default.decompose,
}
"""Composite operators that arrive as one call inside of another operator, and their decomposition."""
