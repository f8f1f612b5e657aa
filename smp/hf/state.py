"""``smp.init`` and ``smp.state``: which ranks share what, for a script that brings its own training loop.

The one value of the process that is not passed in: SMP's interface is a module, so it is kept by the module. Nothing
outside of ``smp/hf`` reads it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.config.layout import Layout
from smp.config.schema import ConfigError
from smp.hf.sagemaker.checkpoint_queue import AsyncCallsQueue
from smp.hf.settings import DEGREES, NO_EFFECT, Settings, layout_of, read
from smp.parallel.agree import every_rank, gather, on_all_or_none
from smp.parallel.context import ParallelContext, build_context
from smp.parallel.network.topology import Topology
from smp.parallel.node_group import within_nodes


class State:
    """What ``smp.init`` decided. Reading it earlier raises ConfigError."""

    def __init__(self) -> None:
        self._made: tuple[Settings, ParallelContext] | None = None
        self._world: dist.ProcessGroup | None = None
        self._ranker: Ranker | None = None
        self._queue: AsyncCallsQueue | None = None
        self._set_before: dict[str, int] = {}
        self._kept: dict[Any, tuple[Any, ParallelContext, Ranker]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DEGREES and self._made is None:
            self._set_before[name] = value  # scripts that switch SMP v2's model off do this; init checks it
            return
        if not name.startswith("_"):
            raise AttributeError(f"smp.state.{name} cannot be set: give the key to smp.init")
        super().__setattr__(name, value)

    def reset(self) -> None:
        """Forget what ``smp.init`` decided: it may be called again. Models transformed before keep their ranks.

        Groups are kept for the next ``init`` with the same layout, so that a loop over models does not collect threads.
        They are not destroyed: DTensor's caches compare meshes by value, so a later model would get the groups of an
        earlier one.

        Groups stay for the next ``init`` that divides ranks in the same way, so that a loop over models has no more
        threads at its end. They are not destroyed: DTensor's caches hold meshes, which are equal whatever groups they
        have, so a later model would get those of an earlier one.
        """
        kept = self._kept
        self.__init__()  # type: ignore[misc]
        self._kept = kept

    @property
    def settings(self) -> Settings:
        """The keys of ``smp.init``."""
        return self._needed()[0]

    @property
    def context(self) -> ParallelContext:
        """Meshes and groups."""
        return self._needed()[1]

    def _needed(self) -> tuple[Settings, ParallelContext]:
        if self._made is None:
            raise ConfigError("call smp.init(...) first")
        return self._made

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``: where a model must be."""
        return self.context.tp.device_type

    def mean_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a number over the data ranks, for a log; every rank calls this."""
        return self.context.sum_loss(value.detach().clone()) / (self.dp_size * self.cp_size)

    @property
    def rank(self) -> int:
        """Number of this process among all."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return dist.get_world_size()

    def _degree(self, name: str) -> int:
        """A degree as given to ``init``; before ``init`` as assigned by the script."""
        if self._made is None and name in self._set_before:
            return self._set_before[name]
        return int(getattr(self.settings, name))

    @property
    def tensor_parallel_degree(self) -> int:
        """Ranks that share every matrix, as given to ``init``."""
        return self._degree("tensor_parallel_degree")

    @property
    def hybrid_shard_degree(self) -> int:
        """Ranks that share one copy of weights and optimizer state beyond tensor parallelism; never 0."""
        fsdp = self.context.fsdp
        assert fsdp is not None
        return fsdp.size(fsdp.ndim - 1)

    @property
    def context_parallel_degree(self) -> int:
        """Ranks that share every sequence."""
        return self._degree("context_parallel_degree")

    @property
    def expert_parallel_degree(self) -> int:
        """Ranks that have some of the experts each."""
        return self._degree("expert_parallel_degree")

    @property
    def ep_size(self) -> int:
        """Ranks that have some of the experts each."""
        return self.settings.expert_parallel_degree

    @property
    def ep_rank(self) -> int:
        """This rank's place among the expert-parallel ranks."""
        return 0 if self.context.ep is None else self.context.ep.get_local_rank()

    @property
    def sm_activation_offloading(self) -> bool:
        """Whether activations are offloaded, as given to ``init``. With it, scripts wrap the model in torch's
        ``offload_wrapper``."""
        return self.settings.sm_activation_offloading

    @property
    def world_process_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks."""
        return dist.group.WORLD

    @property
    def ranker(self) -> Ranker:
        """Which ranks hold copies of each other's shards."""
        self._needed()
        assert self._ranker is not None
        return self._ranker

    @property
    def checkpoint_queue(self) -> AsyncCallsQueue:
        """The queue of saves that were given none."""
        self._queue = self._queue or AsyncCallsQueue()
        return self._queue

    @property
    def tp_mesh(self) -> DeviceMesh:
        """1-D, the ranks that share every matrix."""
        return self.context.tp

    @property
    def data_mesh(self) -> DeviceMesh:
        """What ``fully_shard(module, mesh=...)`` takes: 1-D, or with replicas 2-D ``(dp_replicate, dp_shard)``."""
        fsdp = self.context.fsdp
        assert fsdp is not None
        return fsdp

    @property
    def expert_mesh(self) -> DeviceMesh:
        """What ``fully_shard(experts, mesh=...)`` takes: the data ranks that have the same experts."""
        mesh = self.context.expert_fsdp
        return self.data_mesh if mesh is None else mesh

    @property
    def tp_size(self) -> int:
        """Ranks that share every matrix."""
        return self.context.tp.size()

    @property
    def tp_rank(self) -> int:
        """This rank's place among the tensor-parallel ranks."""
        return self.context.tp.get_local_rank()

    @property
    def tp_process_group(self) -> dist.ProcessGroup | None:
        """Group of the tensor-parallel ranks; None without tensor parallelism."""
        return self.context.tp.get_group() if self.tp_size > 1 else None

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards; None when no other rank does."""
        mesh = self.data_mesh
        return mesh.get_group(0) if mesh.ndim == 2 else None

    @property
    def dp_rank(self) -> int:
        """Which share of every batch this rank reads. Ranks of one TP or CP group read the same."""
        return self.context.data_rank

    @property
    def dp_size(self) -> int:
        """Number of shares of a batch."""
        return self.context.data_size

    @property
    def cp_rank(self) -> int:
        """Which part of every sequence is this rank's."""
        return self.context.cp_rank

    @property
    def cp_size(self) -> int:
        """Number of parts of every sequence."""
        return self.context.cp_size

    @property
    def cp_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share every sequence; None without context parallelism."""
        return None if self.context.cp is None else self.context.cp.get_group()


@dataclass(frozen=True)
class Ranker:
    """Which ranks hold copies of each other's shards.

    Attributes:
        replica_size: ranks that together hold one copy of the model.
        world_size: all.
        writers: the ranks of the first copy, who write checkpoints; None where there is one copy.
    """

    replica_size: int
    world_size: int
    writers: dist.ProcessGroup | None

    def get_rep_rank(self, rank: int) -> int:
        """Number of the model copy of which ``rank`` has a part."""
        return rank // self.replica_size

    def get_rep_groups(self) -> list[list[int]]:
        """Ranks with the same shards, for every part of the model."""
        return [list(range(part, self.world_size, self.replica_size)) for part in range(self.replica_size)]


def _make_ranker(layout: Layout) -> Ranker:
    size = layout.dp_shard * layout.cp * layout.tp
    return Ranker(size, dist.get_world_size(), dist.new_group(list(range(size))) if layout.dp_replicate > 1 else None)


state = State()
"""The state of this process."""


def is_initialized() -> bool:
    """Whether ``smp.init`` (or a run of transformers' model) has set the state, and its process group still exists."""
    return state._made is not None and state._world is dist.group.WORLD


def init(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Decide which ranks share what. Every rank calls this, once, before ``smp.transform``.

    Makes the default process group if the script has not (under ``torchrun``, or alone without it).

    Args:
        config: the keys of :class:`smp.hf.settings.Settings`, or the path of a JSON file with them. Those of
            SageMaker's launcher (``SM_HP_MP_PARAMETERS``) override them.

    Raises:
        ConfigError: in one line, for an unknown key, a value that cannot work, keys that differ between ranks, or a
            second call.
    """
    if is_initialized():
        raise ConfigError("smp.init was called already; smp.state.reset() forgets that")
    if not dist.is_initialized():
        _make_process_group()
    device_type = "cuda" if torch.cuda.is_available() and _sends_from_gpus() else "cpu"
    if device_type == "cuda" and not torch.cuda.is_initialized():
        _use_own_gpu()  # NCCL sends what ranks compare from the current one
    # On all ranks or none: a wrong key on one rank would leave the others waiting.
    settings, unused = on_all_or_none(lambda: read(config, state._set_before), ConfigError, "smp.init")
    _check_same(settings)
    layout = layout_of(settings, dist.get_world_size())
    # Shared memory replaces gloo between CPU ranks of one host.
    on_cpu = device_type == "cpu" and "gloo" in str(dist.get_backend_config()) and dist.get_world_size() > 1
    context, state._ranker = _groups(layout, device_type, tuple(gather(socket.gethostname())) if on_cpu else ())
    state._made, state._world = (settings, context), dist.group.WORLD
    exchange = _exchange(state.tp_process_group) if on_cpu and layout.tp > 1 else ""
    if dist.get_rank() == 0:
        print(
            f"smp.init: {dist.get_world_size()} processes = tensor_parallel_degree {layout.tp} x hybrid_shard_degree "
            f"{layout.dp_shard * layout.cp} x {layout.dp_replicate} replicas"
            + (f", context_parallel_degree {layout.cp}" if layout.cp > 1 else "")
            + (f", expert_parallel_degree {layout.ep}" if layout.ep > 1 else "")
            + f", on {device_type}"
            + (f"; tensor-parallel ranks exchange through {exchange}" if exchange else ""),
            flush=True,
        )
        for key in unused:
            print(f"smp.init: {key} changes nothing here: {NO_EFFECT[key]}", flush=True)


def adopt(context: ParallelContext) -> None:
    """Set the state from a run that has its groups already, instead of ``smp.init``."""
    fsdp, tp, ep = context.fsdp, context.tp.size(), 1 if context.ep is None else context.ep.size()
    degree = 1 if fsdp is None else fsdp.size(fsdp.ndim - 1)
    settings = Settings(
        hybrid_shard_degree=degree,
        tensor_parallel_degree=tp,
        expert_parallel_degree=ep,
        sequence_parallel=context.sequence_parallel and tp > 1,
    )
    state._made, state._world = (settings, context), dist.group.WORLD


def _groups(layout: Layout, device_type: str, hosts: tuple[str, ...]) -> tuple[ParallelContext, Ranker]:
    """Groups and ranker of an earlier ``init`` with the same layout and default group, unless one of them failed; else
    new ones. CPU ranks on one of the ``hosts`` exchange through shared memory."""
    key = layout, device_type, hosts
    world, context, ranker = state._kept.get(key, (None, None, None))
    usable = world is dist.group.WORLD and context is not None and _is_sound(context)
    # Making groups is a collective: every rank must decide alike.
    if not every_rank(usable):
        backend = within_nodes(Topology.of(hosts)) if hosts else lambda ranks: None
        context, ranker = build_context(layout, device_type, backend=backend), _make_ranker(layout)
        state._kept[key] = dist.group.WORLD, context, ranker
    assert context is not None and ranker is not None
    return context, ranker


def _is_sound(context: ParallelContext) -> bool:
    """Whether no collective through shared memory has failed; torch does not tell for gloo and NCCL."""
    memories = [getattr(mesh.get_group(), "memory", None) for mesh in context.meshes().values()]
    return all(memory is None or memory.sound for memory in memories)


def _check_same(settings: Settings) -> None:
    """Check that all ranks have the same settings: else they would divide themselves differently and wait for each
    other."""
    ranks = gather(vars(settings))
    for rank, other in enumerate(ranks):
        for key, value in other.items():
            if value != ranks[0][key]:
                raise ConfigError(f"smp.init: {key} is {ranks[0][key]} on rank 0 and {value} on rank {rank}")


def _exchange(group: Any) -> str:
    """The name, for the user, of what tensor-parallel ranks exchange through; each group finds out whether it can share
    memory."""
    if not all(gather(hasattr(group, "memory"))):
        return "gloo (some are on different hosts)"
    without = [rank for rank, shares in enumerate(gather(group.memory is not None)) if not shares]
    if not without:
        return "shared memory"
    who = "" if len(without) == dist.get_world_size() else f" on ranks {', '.join(map(str, without))}"
    return f"gloo{who} (their memory is not shared)"


def _sends_from_gpus() -> bool:
    """Whether the default group has a GPU backend, such as NCCL or this project's. gloo is one for CPUs, although it
    can send some GPU tensors."""
    backends = dict(part.split(":", 1) for part in str(dist.get_backend_config()).split(",") if ":" in part)
    return backends.get("cuda", "gloo") != "gloo"


def _use_own_gpu() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def _make_process_group() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            _use_own_gpu()
        dist.init_process_group(backend)
    else:
        # Without torchrun: a group of one process, with a store in memory and no port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
