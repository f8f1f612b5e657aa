"""Checkpoints on top of the backend ``smp``, and what is left of a group of it that was destroyed."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import run_distributed


def threads_and_connections() -> tuple[Counter[str], int]:
    """Names of this process's threads, and how many sockets it has open."""
    threads = Counter(
        Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")
    )
    sockets = 0
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        sockets += os.path.lexists(path) and os.readlink(path).startswith("socket:")
    return threads, sockets


def once_threads_left(before: Counter[str], seconds: float = 20.0) -> tuple[Counter[str], int]:
    """What is there once gloo's threads are as many as before: Linux lists one for a moment after it was joined."""
    deadline = time.monotonic() + seconds
    while True:
        found = threads_and_connections()
        if found[0]["gloo_tcp_loop"] <= before["gloo_tcp_loop"] or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def destroyed(rank: int) -> dict[str, Any]:
    """A group makes a hierarchical collective on its thread and is destroyed; no garbage collector helps."""
    gc.collect()
    gc.disable()
    before = threads_and_connections()
    group: Any = dist.new_group(backend="smp")
    work = dist.all_reduce(torch.ones(40_001), group=group, async_op=True)
    assert work is not None and work.wait()
    during = threads_and_connections()
    named = [thread.name for thread in threading.enumerate()]
    dist.barrier()
    dist.destroy_process_group(group)
    ended = [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="destroyed"):
        group.network.all_reduce(torch.ones(40_001), group.network.way("all-reduce", torch.ones(40_001)))
    del group, work
    after = once_threads_left(before[0])
    gc.enable()
    return {"threads": (named, ended), "all": (before, during, after)}


def sharded_model(mesh: Any, seed: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(301, 256), nn.Tanh(), nn.Linear(256, 301))
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def saved_and_loaded(folder: str) -> dict[str, Any]:
    """Weights that torch's distributed checkpoints and smp's give back to a model that was made otherwise."""
    import torch.distributed.checkpoint as dcp

    from smp import checkpoint

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded_model(mesh, seed=1)
    model(torch.ones(2, 301)).sum().backward()
    wanted = {name: value.full_tensor() for name, value in model.state_dict().items()}
    same = {}
    for kind in ("dcp", "smp"):
        path = f"{folder}/{kind}"
        state, other = model.state_dict(), sharded_model(mesh, seed=2).state_dict()
        assert not torch.equal(other["0.weight"].full_tensor(), wanted["0.weight"])
        if kind == "dcp":
            dcp.save(state, checkpoint_id=path)
            dcp.load(other, checkpoint_id=path)
        else:
            checkpoint.save(state, path, extra={"iteration": 3})
            checkpoint.load(other, path)
        same[kind] = all(torch.equal(other[name].full_tensor(), wanted[name]) for name in wanted)
    return {"same": same, "counts": dict(mesh.get_group().counts)}  # type: ignore[attr-defined]


def on_top(rank: int, world: int, folder: str) -> dict[str, Any]:
    import smp.parallel.backend  # noqa: F401

    warnings.simplefilter("ignore")
    os.environ["SMP_NETWORK_TOPOLOGY"] = f"{folder}/nodes.json"
    left = destroyed(rank)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world)
    store.set_timeout(timedelta(seconds=60))
    dist.init_process_group("smp", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return left | saved_and_loaded(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "nodes.json").write_text(json.dumps({"nodes": [[0, 1], [2, 3]]}))
    return run_distributed(on_top, 4, str(folder))


def test_a_destroyed_group_leaves_no_thread_and_no_connection(found: list[dict[str, Any]]) -> None:
    for of in found:
        named, ended = of["threads"]
        assert "collectives" in named and "collectives" not in ended, "while the group is still referred to"
        before, during, after = of["all"]
        assert during[0]["gloo_tcp_loop"] > before[0]["gloo_tcp_loop"] and during[1] > before[1]
        assert after[0]["gloo_tcp_loop"] == before[0]["gloo_tcp_loop"], "gloo has ended its thread"
        assert after[1] <= before[1], "and closed its connections (one of the start may have gone meanwhile)"


def test_checkpoints_are_saved_and_loaded(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["same"] == {"dcp": True, "smp": True}
        assert of["counts"]["hierarchical all-gather"] > 0
