"""Activation offload: what a block saves for its backward pass waits in host memory.

What a block saves for its backward pass (under full recompute its input, else all that its operations keep) is copied
to the host while the next block computes, and comes back while the block after it is in its backward pass:

    forward   | block 0 | block 1 | block 2 | block 3 |        horizon 2: of two blocks, that which computes and
    to host   |         |  of 0   |  of 1   |  of 2   |        the one next to it, there is something on the device
    backward            | block 3 | block 2 | block 1 | block 0 |
    from host           |         |  of 1   |  of 0   |

At most ``horizon`` blocks have something on the device at any moment; SMP v2 calls it the activation loading horizon.
With 1 a backward pass waits for each copy.

Copies are of whole storages, and what was saved comes back as a view of the copy: views, and a tensor that several
operations save, are restored as they were, and copied once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from smp.config import ParallelConfig
from smp.kernels.copier import Copier, Event, HostPool, copier_of
from smp.parallel.dtensor_region import local_part

Run = Callable[..., Any]


@dataclass(eq=False)
class _Storage:
    """Memory that a block has saved.

    Attributes:
        alive: the storage, until it has left: keeps its address, by which it is found, from being used again.
        flat: the whole storage on the device, 1-D; None while it is on the host.
        version: of the tensor, when it was saved.
        buffer: where it is on the host.
        gone, came: when the copies have been made.
    """

    alive: torch.UntypedStorage | None
    flat: torch.Tensor | None
    version: int
    buffer: torch.Tensor | None = None
    gone: Event = None
    came: Event = None
    awaited: bool = False

    def __post_init__(self) -> None:
        assert self.flat is not None
        self._make = partial(torch.empty, self.flat.shape, dtype=self.flat.dtype, device=self.flat.device)
        self.nbytes = self.flat.nbytes
        self._dtype = self.flat.dtype

    def on_device(self) -> torch.Tensor:
        """New memory for it on the device."""
        return self._make()

    def on_host(self) -> torch.Tensor:
        """The tensor's part of the host buffer."""
        assert self.buffer is not None
        return self.buffer[: self.nbytes].view(self._dtype)

    def check(self) -> None:
        """Raise if the tensor was written to after it was saved, as autograd does for saved tensors."""
        if self.alive is not None and self.flat is not None and self.flat._version != self.version:
            raise RuntimeError(
                "a tensor that an operation has saved for its backward pass was written to in place while it was on "
                "its way to the host"
            )


@dataclass(eq=False)
class _Block:
    """Tensors that one forward pass of a block has saved.

    Attributes:
        key: of the micro-batch's pass through a stage.
        kept: addresses of storages that stay on the device: parameters, and what blocks share.
        leaving: it is being copied to the host.
        away: it is not on the device.
        fetched: it came back, or is about to.
        used: its backward pass has begun.
    """

    key: Hashable
    kept: set[int]
    storages: dict[int, _Storage] = field(default_factory=dict)
    leaving: bool = False
    away: bool = False
    fetched: bool = False
    used: bool = False


class _Token:
    """Referenced by everything that a block's backward pass needs: when the last reference is gone, the block is
    done."""

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: _Block) -> None:
        self.block = block


@dataclass(frozen=True)
class _Saved:
    """One saved tensor: a view of a storage."""

    token: _Token
    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Offload:
    """Moves activations of wrapped blocks to the host and back.

    Args:
        copier: of the device; see :func:`smp.kernels.copier.copier_of`.
        horizon: most blocks that have something on the device at once, at least 1.
        min_tensor_size: elements; a saved tensor with fewer stays on the device.

    Attributes:
        pool: the host's memory.
        most_live: most blocks that had something on the device at once so far.
    """

    def __init__(self, copier: Copier, *, horizon: int = 2, min_tensor_size: int = 0) -> None:
        if horizon < 1:
            raise ValueError(f"horizon {horizon}: at least the block that computes has its activations on the device")
        self.copier, self.horizon, self.min_tensor_size = copier, horizon, min_tensor_size
        self.pool, self.most_live = HostPool(copier), 0
        self._live: list[_Block] = []  # in the order in which they came
        self._passes: dict[Hashable, list[_Block]] = {}  # blocks to go backward, in the order of their forward pass
        self._order: list[Hashable] = []
        self._key: Hashable = None

    def around(self, block: nn.Module, run: Run) -> Run:
        """``run`` of ``block``, whose first argument is the block's input, with its saved tensors offloaded to the
        host.

        Tensors among the other arguments are shared by blocks and stay, as parameters do. What recomputes the block
        lies inside of ``run``, and what gathers its parameters outside.
        """

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            # Nothing is saved for a backward pass that will not come.
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                raise RuntimeError("a block that is recomputed: wrap what recomputes it, see offload_activations()")
            # The addresses are taken at each call: FSDP gathers parameters into new memory every time. A parameter that
            # was taken for an activation would be copied to the host, and kept there after FSDP freed it.
            token = self._enter(_addresses([*block.parameters(), *block.buffers(), args[1:], kwargs]))
            with saved_tensors_hooks(lambda tensor: self._pack(token, tensor), self._unpack):
                return run(*args, **kwargs)

        return offloaded

    def plan(self, order: Sequence[Hashable]) -> None:
        """Set the order of coming backward passes, by the keys of :meth:`of_pass`; by default the last forward pass
        first."""
        self._order = list(order)

    @contextmanager
    def of_pass(self, key: Hashable) -> Iterator[None]:
        """Context manager: forward passes of blocks inside belong to the pass ``key``."""
        # The key before comes back, because passes may lie in each other.
        before, self._key = self._key, key
        try:
            yield
        finally:
            self._key = before

    def _enter(self, kept: set[int]) -> _Token:
        """A block begins its forward pass."""
        self._make_room()
        block = _Block(self._key, kept)
        self._passes.setdefault(block.key, []).append(block)
        self._arrive(block)
        # The copy begins before this block computes, so that it runs meanwhile.
        if len(self._live) >= self.horizon:  # the next block will need the place of the oldest
            # Not one that came back for its backward pass, nor one in the middle of it.
            oldest = next(b for b in self._live if not (b.fetched or b.used) or b is block)
            self._leave(oldest)
        token = _Token(block)
        # Not at the end of the interpreter: the device and the copier may be gone by then.
        weakref.finalize(token, self._finish, block).atexit = False
        return token

    def _arrive(self, block: _Block) -> None:
        self._live.append(block)
        self.most_live = max(self.most_live, len(self._live))

    def _make_room(self) -> None:
        """Make room for one more block on the device: evict the oldest one, or one that was fetched too early."""
        while len(self._live) >= self.horizon:
            idle = [block for block in self._live if not block.used]
            if not idle:
                return  # backward passes inside of backward passes
            # Those that were fetched are needed soonest: one of them goes only where there is no
            # other, the last that came.
            self._send_away(next((block for block in idle if not block.fetched), idle[-1]))

    def _leave(self, block: _Block) -> None:
        """Begin to copy it to the host."""
        if not block.leaving:
            block.leaving = True
            for storage in block.storages.values():
                self._copy_out(storage)

    def _copy_out(self, storage: _Storage) -> None:
        assert storage.flat is not None
        # The copy before from the same memory has to end first, or that of the buffer's last user.
        after = storage.gone
        if storage.buffer is None:
            storage.buffer, after = self.pool.take(storage.nbytes)
        storage.gone = self.copier.out(storage.flat, storage.on_host(), after)

    def _send_away(self, block: _Block) -> None:
        """Free its memory on the device, when the copy is made."""
        self._leave(block)
        for storage in block.storages.values():
            # The memory may be used for something else only when the copy has read it.
            self.copier.wait(storage.came if block.fetched else storage.gone)
            # After the copy: what was written to while it ran would be restored as neither the old nor the new.
            storage.check()
            storage.alive, storage.flat, storage.came = None, None, None
        block.away, block.fetched = True, False
        self._live.remove(block)

    def _pack(self, token: _Token, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        """Called by autograd for each tensor that an operation saves; ``tensor`` has no graph."""
        block = token.block
        if tensor.numel() < self.min_tensor_size or not tensor.numel() or is_traceable_wrapper_subclass(tensor):
            return tensor
        memory = tensor.untyped_storage()
        # By the storage's identity: views of one memory are one copy.
        if memory._cdata in block.kept:
            return tensor
        storage = block.storages.get(memory._cdata)
        if storage is None or storage.version != tensor._version:  # new, or written to before it is saved once more
            # All of the storage: other tensors that are saved later may be other views of it.
            flat = tensor.as_strided((memory.nbytes() // tensor.itemsize,), (1,), 0)
            if storage is None:
                storage = block.storages[memory._cdata] = _Storage(memory, flat, tensor._version)
            storage.flat, storage.version = flat, tensor._version
            # The block is on its way already: what it saves late follows at once.
            if block.leaving:
                self._copy_out(storage)
        return _Saved(token, storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: _Saved | torch.Tensor) -> torch.Tensor:
        """Called by autograd in the backward pass."""
        if isinstance(saved, torch.Tensor):
            return saved
        block, storage = saved.token.block, saved.storage
        if not block.used:
            self._begin_backward(block)
        assert storage.flat is not None
        # Once for each storage: several operations read views of it.
        if storage.came is not None and not storage.awaited:
            self.copier.wait(storage.came)
            storage.awaited = True
        storage.check()
        flat = storage.flat if storage.flat.dtype == saved.dtype else storage.flat.view(saved.dtype)
        return flat.as_strided(saved.shape, saved.stride, saved.offset)

    def _begin_backward(self, block: _Block) -> None:
        """Bring the block's tensors to the device, and begin to fetch those of the next blocks."""
        block.used = True
        if block.away:
            self._make_room()
            self._fetch(block)
        for following in self._following(block):
            if len(self._live) >= self.horizon:
                return
            # As many as there is room for, so that their copies run while this block computes.
            if following.away:
                self._fetch(following)

    def _fetch(self, block: _Block) -> None:
        block.away, block.fetched = False, True
        self._arrive(block)
        for storage in block.storages.values():
            storage.flat, storage.awaited = storage.on_device(), False
            storage.came = self.copier.back(storage.on_host(), storage.flat, storage.gone)

    def _following(self, block: _Block) -> Iterator[_Block]:
        """Blocks in the order of the coming backward passes."""
        own = self._passes.get(block.key, [])
        yield from reversed(own[: own.index(block)])
        # Other micro-batches of a pipeline, in the order in which the schedule sends them back.
        if block.key in self._order:
            for key in self._order[self._order.index(block.key) + 1 :]:
                if key not in self._passes:
                    return  # its forward pass is yet to come, and ends with its activations on the device
                yield from reversed(self._passes[key])

    def _finish(self, block: _Block) -> None:
        """Free a block's buffers and storages after its backward pass."""
        if block in self._live:
            self._live.remove(block)
        own = self._passes[block.key]
        own.remove(block)
        if not own:
            del self._passes[block.key]
        for storage in block.storages.values():
            if storage.flat is not None and not storage.awaited and (copied := storage.came or storage.gone):
                self.copier.wait(copied)  # before its memory on the device is used for something else
            if storage.buffer is not None:
                self.pool.give(storage.buffer, storage.came or storage.gone)
        block.storages.clear()


@torch.no_grad()
def _addresses(nested: Any) -> set[int]:
    """Addresses of the memory of all tensors in lists, tuples, dictionaries and dataclasses."""
    if isinstance(nested, torch.Tensor):
        # A DTensor has no storage of its own; a gathered parameter is known by its local part.
        part = local_part(nested)
        return set() if is_traceable_wrapper_subclass(part) else {part.untyped_storage()._cdata}
    if isinstance(nested, Mapping):
        inner: Iterable[Any] = nested.values()
    elif isinstance(nested, (list, tuple)):
        inner = nested
    elif is_dataclass(nested):
        inner = [getattr(nested, item.name) for item in fields(nested)]
    else:
        return set()
    return set().union(*map(_addresses, inner))


def offload_of(config: ParallelConfig, copier: Copier) -> Offload | None:
    """The offload of --offload-activations, for all models of a run; None if it is not given."""
    if not config.offload_activations:
        return None
    size = 0 if config.recompute_granularity == "full" else config.min_offloaded_tensor_size
    return Offload(copier, horizon=config.activation_loading_horizon, min_tensor_size=size)


def offload_activations(
    blocks: Iterable[nn.Module],
    *,
    horizon: int = 2,
    recompute: bool = False,
    min_tensor_size: int = 2**20,
    device: torch.device | None = None,
    copier: Copier | None = None,
) -> Offload:
    """Let what ``blocks`` save for their backward pass wait for it in the host's memory.

    For the layers of anyone's model, before or after FSDP2's ``fully_shard`` or DDP; results do not change by a bit.
    On a CPU there is nothing to save, and copies are made all the same.

        from smp.sharding import offload_activations
        offload_activations(model.model.layers, recompute=True)

    Args:
        blocks: in the order in which they run. The first argument of each is its input; tensors among the others stay.
        horizon: most blocks that have something on the device at once; 1 has the backward pass wait for each copy.
        recompute: each block keeps only its input, and is computed again in the backward pass (without reentrance), as
            models do by ``gradient_checkpointing_enable()``, which is not for use with this. Any ``min_tensor_size``
            then counts as 0.
        min_tensor_size: elements; a saved tensor with fewer stays on the device.
        device: where the blocks compute; by default where their parameters are.
        copier: what copies; by default made for ``device``.

    Returns:
        The :class:`Offload` of these blocks, for its counters; the caller need not keep it.

    Raises:
        ValueError: there are no blocks, or the device is unknown.
    """
    blocks = list(blocks)
    if copier is None:
        device = device or next((p.device for block in blocks for p in block.parameters()), None)
        if device is None or device.type == "meta":
            raise ValueError("where the blocks will compute is not known yet: give device")
        copier = copier_of(device)
    offload = Offload(copier, horizon=horizon, min_tensor_size=0 if recompute else min_tensor_size)
    for block in blocks:
        run = partial(checkpoint, block.forward, use_reentrant=False) if recompute else block.forward
        block.forward = offload.around(block, run)
    return offload
