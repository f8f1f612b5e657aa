"""An elastic run: which processes train, the layouts that it may have, spare processes, and how it ends."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from smp.checkpoint.peers import own_folder
from smp.checkpoint.spare_files import SpareNode, serving, spare_nodes
from smp.config import Config, ConfigError, Layout, resolve
from smp.config.batch import count_micro_batches
from smp.config.parallel import ParallelConfig
from smp.config.rules.elastic import Members, as_members, layouts, node_counts
from smp.parallel.agree import on_rank_zero
from smp.training.cost.predict import predicted_memory
from smp.training.process import Process

ENDED = "smp/ended"
"""Key in the launcher's store that tells spare processes that the run is over."""
LEFT = 75
"""Exit code of processes that stop because other nodes leave: torchrun restarts those that stay. (EX_TEMPFAIL of
sysexits.h.)"""
GIB = 2**30


def device_memory() -> int | None:
    """Bytes of this machine's first GPU; None without one: host memory is not checked."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def needed_memory(config: Config, world_size: int) -> int:
    """Bytes of the process that needs most, by the formula of a dry run.

    Raises:
        ConfigError: it cannot run on so many processes.
    """
    training = replace(config.training, dry_run=True)  # how long it is does not matter
    return predicted_memory(resolve(replace(config, training=training), world_size), world_size).total


def require_room(config: Config, process: Process) -> None:
    """Refuse to enter a layout for which a process has no memory.

    Raises:
        ConfigError: it needs more than there is.
    """
    limit = device_memory() if config.parallel.max_nodes is not None else None
    if limit is not None and (needed := needed_memory(config, process.world_size)) > limit:
        raise ConfigError(
            f"{process.world_size} processes: one needs {needed / GIB:,.1f} GiB of {limit / GIB:,.1f}; raise "
            "--min-nodes, or see --dry-run --suggest"
        )


def members(config: Config, process: Process) -> Process:
    """This process as a member of the run of those that train, without the spares; in a run that is not elastic,
    ``process`` itself."""
    _, active = as_members(config, process.world_size)
    return replace(process, world_size=active, spares=process.world_size - active)


def describe_layouts(config: Config, world_size: int) -> list[str]:
    """A line for each number of nodes that an elastic run may have; nothing for others.

    Args:
        world_size: processes that train now.
    """
    most = config.parallel.max_nodes
    if most is None:
        return []
    each, limit = Members.of(os.environ, world_size, most).each, device_memory()
    possible, lines = layouts(config.parallel, each), list[str]()
    for nodes in node_counts(config.parallel):
        found = possible.get(nodes)
        line = "no layout: the next smaller number of nodes is used"
        text = line if found is None else _layout_line(config, found, nodes * each, limit)
        lines.append(f"  {nodes} nodes: {text}{' (now)' if nodes * each == world_size else ''}")
    # The others count over what is computed at once, which changes with the layout.
    balancing = config.model.moe_router_load_balancing_type
    if config.model.num_experts is not None and config.model.moe_aux_loss_coeff and balancing != "seq_aux_loss":
        lines.append(
            f"  note: --moe-router-load-balancing-type {balancing} counts over micro-batches that are computed at "
            "once, so the balancing loss changes with the number of nodes; seq_aux_loss does not"
        )
    return [f"elastic: nodes of {each} processes may come and go; batch size and learning rate do not change", *lines]


def _layout_line(config: Config, parallel: ParallelConfig, world_size: int, limit: int | None) -> str:
    layout, config = Layout.from_config(parallel, world_size), replace(config, parallel=parallel)
    try:
        memory = needed_memory(config, world_size)
    except ConfigError as error:
        return f"not entered: {error}"
    micro_batches = count_micro_batches(config.data, layout.data_parallel)
    text = (
        f"dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard}, micro-batches {micro_batches}, "
        f"{memory / GIB:,.3f} GiB a process"
    )
    return f"{text}, more than its {limit / GIB:,.1f}: not entered" if limit is not None and memory > limit else text


def wait_as_spare(config: Config, process: Process) -> int:
    """Wait until the run ends, or the launcher ends this process to start it among those that train."""
    print(f"rank {process.rank}: spare, behind {process.world_size} processes that train", flush=True)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    try:
        # The store alone: a spare joins no process group.
        store, _, _ = next(
            dist.rendezvous("env://", process.rank, process.world_size + process.spares, timeout=timeout)
        )
        with _serving(config, process, store):
            while not store.check([ENDED]):
                time.sleep(0.5)
            # Rank 0 keeps the store until all spares have counted themselves.
            store.add(f"{ENDED}/heard", 1)
            return 0
    except RuntimeError as error:  # the process that kept it is gone: the launcher starts all again
        print(f"rank {process.rank}: spare: {error}", flush=True)
        return LEFT


def _serving(config: Config, process: Process, store: dist.Store) -> contextlib.AbstractContextManager[None]:
    """Serve what this node has of a copy in memory from when it trained: other nodes may need it."""
    # One process of a node serves its copies.
    if config.checkpoint.peer_snapshot_interval is None or process.local_rank:
        return contextlib.nullcontext()
    root = own_folder(Path(config.checkpoint.peer_snapshot_dir))
    return serving(root, store, process.rank, os.environ["MASTER_ADDR"])


def nodes_of_spares(process: Process, timeout: timedelta) -> list[SpareNode]:
    """Files of copies in memory that spare nodes have; the same on all ranks, which all call this.

    Raises:
        RuntimeError: one of them is lost.
    """
    if not process.spares:
        return []
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    first = range(process.world_size, process.world_size + process.spares, each)
    return on_rank_zero(lambda: spare_nodes(_launchers_store(), first, timeout), RuntimeError)


def _launchers_store() -> dist.Store:
    store = distributed_c10d._get_default_store()
    # The default store is wrapped in prefixes; spares use the launcher's keys without them.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def ended_for_spares(process: Process) -> None:
    """Tell spare processes that the run is done. Rank 0, which may host the store, waits until they have heard, at most
    10 s."""
    if process.rank or not process.spares or not dist.is_initialized():
        return
    store = _launchers_store()
    with contextlib.suppress(RuntimeError):
        store.set(ENDED, "")
        deadline = time.monotonic() + 10
        # ``add`` of 0 reads the counter.
        while store.add(f"{ENDED}/heard", 0) < process.spares and time.monotonic() < deadline:
            time.sleep(0.1)


def exit_code_of(config: Config, signalled: bool, code: int) -> int:
    """The exit code of this process: where nodes leave, those that stay have to be restarted, and to torchrun 0 is the
    end."""
    return LEFT if config.parallel.max_nodes is not None and signalled else code
