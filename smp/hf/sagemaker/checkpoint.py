"""SMP v2's functions for checkpoints: the nested state of a script, in folders of :mod:`smp.checkpoint`.

Tensors are named by their keys, joined by ``/``; everything else is JSON. DTensors are whole tensors in the folder,
whatever the layout, so the subfolders per rank that SMP v2's scripts name (``tp2-0``, ``ep2-1``) are one folder, and
any layout reads it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from smp import checkpoint
from smp.checkpoint import AsyncSaver, CheckpointError, materialize_optimizer_state
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.format.manifest import read_manifest
from smp.config.schema import ConfigError
from smp.hf.sagemaker.checkpoint_queue import AsyncCallsQueue
from smp.hf.state import state
from smp.parallel.agree import on_rank_zero

# Subfolders of SMP v2's scripts that are one folder here.
_OF_ONE_RANK = re.compile(r"/(?:(?:tp|ep)\d+-\d+|tp\d+_ep\d+_fsdp\d+)/?$")


@dataclass(frozen=True)
class DistributedFileSystemReader:
    """The folder to read from."""

    path: str | Path


@dataclass(frozen=True)
class DistributedFileSystemWriter:
    """The folder to write to."""

    path: str | Path


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | Path | None = None,
    storage_writer: DistributedFileSystemWriter | None = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue | None = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Copy ``state_dict`` and write it in the background. The ranks whose ``smp.state.ranker.get_rep_rank`` is 0 call
    this. ``process_group`` and ``coordinator_rank``, which say so in SMP v2, and ``wait_error_handling`` and
    ``force_check_all_plans``, of its format, change nothing.

    Args:
        state_dict: nested; DTensors, plain tensors that are equal on all ranks, and what JSON or ``to_dict()`` can say.
        checkpoint_id: the folder, or ``storage_writer`` has it.
        planner: torch's default one, or none.
        queue: of the saves under way; by default one that :func:`maybe_finalize_async_calls` asks.
        sharded_strategy, s3_region, s3client_config: None.

    Raises:
        ConfigError: in one line, for an argument or a value that cannot work.
        CheckpointError: the save before failed, or this one cannot begin.
    """
    if sharded_strategy is not None:
        raise ConfigError("sharded_strategy: smp.checkpoint has one format: leave it out")
    _check(planner, DefaultSavePlanner, s3_region, s3client_config)
    _check_writer()
    # Saves without a queue of their own share one.
    queue = state.checkpoint_queue if queue is None else queue
    if queue.saver is None:
        queue.saver = AsyncSaver(group=state.ranker.writers)
    tensors, values = _flat(state_dict)
    folder = _folder(checkpoint_id, storage_writer)
    checkpoint.async_save(tensors, folder, saver=queue.saver, extra={"values": values})
    queue.number += 1


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | Path | None = None,
    storage_writer: DistributedFileSystemWriter | None = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Write ``state_dict`` as :func:`async_save` does; the folder is complete when this returns."""
    _check(planner, DefaultSavePlanner, s3_region, s3client_config)
    _check_writer()
    tensors, values = _flat(state_dict)
    folder = _folder(checkpoint_id, storage_writer)
    checkpoint.save(tensors, folder, extra={"values": values}, group=state.ranker.writers)


def maybe_finalize_async_calls(blocking: bool = True, process_group: dist.ProcessGroup | None = None) -> list[int]:
    """:meth:`AsyncCallsQueue.maybe_finalize_async_calls` of the saves that were given no queue."""
    return state.checkpoint_queue.maybe_finalize_async_calls(blocking)


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: str | Path | None = None,
    storage_reader: DistributedFileSystemReader | None = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Fill ``state_dict`` in place: its tensors, and everything else by its key. Every rank calls this; what the folder
    has beyond is left. ``process_group`` and ``coordinator_rank`` change nothing.

    Args:
        state_dict: with tensors of the right shapes, cut in any way.
        checkpoint_id: the folder, or ``storage_reader`` has it.
        planner: torch's default one, or none.
        check_keys_matched: False leaves what the folder lacks as it is.
        s3_region, s3client_config: None.

    Raises:
        ConfigError: in one line, for an argument that cannot work.
        CheckpointError: the folder lacks something, or is damaged.
    """
    _check(planner, DefaultLoadPlanner, s3_region, s3client_config)
    folder = _folder(checkpoint_id, storage_reader)
    tensors, _ = _flat(state_dict, values=False)
    if not check_keys_matched:
        known = on_rank_zero(lambda: list(read_manifest(open_folder(folder)).tensors), CheckpointError)
        tensors = {name: tensors[name] for name in known if name in tensors}
    values = checkpoint.load(tensors, folder, allow_unread=True).get("values", {})
    _fill(state_dict, "", values, folder, check_keys_matched)


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = False) -> None:
    """Make the state that the first step would make, as zeros, so that there is something to load into.

    Args:
        optimizer: one that :mod:`smp.checkpoint` knows.
        skip_empty_param: none for parameters of which FSDP1 gives this rank nothing.
    """
    materialize_optimizer_state(optimizer)
    if skip_empty_param:
        for parameter in [p for p in optimizer.state if p.numel() == 0]:
            del optimizer.state[parameter]


def SORT_BY_LAST_INT(name: str) -> int:  # noqa: N802 (SMP v2's name)
    """The last number in a name, as SMP v2 sorts folders."""
    return int(re.findall(r"\d+", name)[-1])


def limit_num_subdirs(
    folder: str | Path,
    max_num_subdirs: int,
    sort_fn: Callable[[str], Any] = SORT_BY_LAST_INT,
    regex: str = r"^.*\d+steps$",
    log: bool = True,
) -> list[str]:
    """Delete the folders in ``folder`` whose names match ``regex``, but the last ``max_num_subdirs`` by ``sort_fn``.

    Args:
        folder: it need not exist.
        max_num_subdirs: at least 1, or nothing would be left to resume from.
        sort_fn: of a name.
        regex: of the whole name.
        log: whether this rank is the one that deletes, and says so.

    Returns:
        The names that went.
    """
    if max_num_subdirs < 1:
        raise ConfigError(f"limit_num_subdirs: max_num_subdirs {max_num_subdirs}: at least 1")
    there = Path(folder)
    if not log or not there.is_dir():
        # Only the logging rank deletes: others would race with it.
        return []
    names = sorted((p.name for p in there.iterdir() if p.is_dir() and re.match(regex, p.name)), key=sort_fn)
    for name in names[:-max_num_subdirs]:
        shutil.rmtree(there / name)
        print(f"limit_num_subdirs: deleted {there / name}", flush=True)
    return names[:-max_num_subdirs]


def _check_writer() -> None:
    if state.ranker.get_rep_rank(state.rank):
        raise ConfigError(
            f"rank {state.rank} has a copy of what others write: only ranks whose smp.state.ranker.get_rep_rank is 0 "
            "save"
        )


def _check(planner: Any, default: type, s3_region: Any, s3client_config: Any) -> None:
    if planner is not None and type(planner) is not default:
        raise ConfigError(f"planner={type(planner).__name__}: smp.checkpoint plans itself: leave it out")
    for name, value in (("s3_region", s3_region), ("s3client_config", s3client_config)):
        if value is not None:
            raise ConfigError(f"{name}: what a store needs comes from the environment: leave it out")


def _folder(checkpoint_id: str | Path | None, storage: Any) -> str:
    """The folder without SMP v2's per-rank subfolders, so that all ranks name the same one."""
    given = checkpoint_id if storage is None else getattr(storage, "path", None)
    if given is None:
        raise ConfigError("give checkpoint_id, or a DistributedFileSystemReader or DistributedFileSystemWriter")
    address = str(given)
    # Several may be nested, such as tp2-0/ep2-1.
    while (shorter := _OF_ONE_RANK.sub("", address)) != address:
        address = shorter
    return address


def _flat(nested: Mapping[str, Any], values: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and, with ``values``, all other leaves, by their keys joined with "/"."""
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}

    def walk(inside: Mapping[Any, Any], path: str) -> None:
        for key, value in inside.items():
            name = f"{path}{key}"
            if name in tensors or name in others:
                raise ConfigError(f"two values are named {name}: keys that are joined by / must differ")
            if type(value).__name__ == "ShardedTensor":
                raise ConfigError(f"{name} is a ShardedTensor: give FullyShardedDataParallel a device_mesh")
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            # An empty dict has no leaves, and is stored as a value.
            elif isinstance(value, Mapping) and value:
                walk(value, f"{name}/")
            elif values:
                others[name] = _json(name, value)

    walk(nested, "")
    return tensors, others


def _json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=_plain))
    except TypeError as error:
        raise ConfigError(f"{name} ({type(value).__name__}) is neither a tensor nor JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Values that JSON does not know: configs (to_dict) and numpy's scalars (item)."""
    for method in ("to_dict", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _fill(nested: MutableMapping[Any, Any], path: str, values: Mapping[str, Any], folder: str, strict: bool) -> None:
    for key, value in nested.items():
        name = f"{path}{key}"
        if isinstance(value, MutableMapping) and value:
            _fill(value, f"{name}/", values, folder, strict)
        # Filled in place by load already.
        elif isinstance(value, torch.Tensor):
            continue
        elif name in values:
            nested[key] = values[name]
        elif strict:
            raise CheckpointError(f"{folder} has no {name}")
