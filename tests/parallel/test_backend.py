"""The backend ``smp``: every collective of torch.distributed as on gloo, on four ranks that stand for two nodes."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.fake_group import lone_context
from tests.parallel.sync_batch_norm import error_of_sync_batch_norm

N = 40_001
"""Elements: above the size from which collectives are hierarchical, and divisible by nothing."""


def numbers(rank: int, count: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers: sums have the same bits in any order."""
    return (torch.arange(count) % 7 + rank).to(dtype)


def each_collective(rank: int, world: int, group: Any) -> dict[str, Any]:
    """What every collective gives, by name."""
    out: dict[str, Any] = {}
    ops = dist.ReduceOp
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        x = numbers(rank, dtype=dtype)
        for op in (ops.SUM, ops.MAX, ops.MIN, ops.PRODUCT):
            y = x.clone()
            dist.all_reduce(y, op, group=group)
            out[f"all_reduce {op} {dtype}"] = y
        gathered = torch.empty(N * world, dtype=dtype)
        dist.all_gather_into_tensor(gathered, x, group=group)
        out[f"all_gather_into_tensor {dtype}"] = gathered
        part = torch.empty(N, dtype=dtype)
        dist.reduce_scatter_tensor(part, x.repeat(world), group=group)
        out[f"reduce_scatter_tensor {dtype}"] = part
    for shape in ((0,), (1,), (3, 5), (N, 2)):
        y = torch.full(shape, float(rank))
        dist.all_reduce(y, group=group)
        whole = torch.empty(shape[0] * world, *shape[1:])
        dist.all_gather_into_tensor(whole, torch.full(shape, float(rank)), group=group)
        out[f"shape {shape}"] = (y, whole)
    out |= lists_and_objects(rank, world, group)
    work = dist.all_reduce(x := numbers(rank), group=group, async_op=True)
    assert work is not None and work.wait()
    out["async all_reduce"] = x
    works = [
        dist.all_gather_into_tensor(o := torch.empty(N * world), numbers(rank + i), group=group, async_op=True)
        for i in range(2)
    ]
    assert all(work is not None and work.wait() for work in works)
    out["async all_gather"] = o
    strided = numbers(rank, 2 * N)[::2].clone().view(1, -1).t()
    dist.all_reduce(strided, group=group)
    out["strided"] = strided
    return out


def lists_and_objects(rank: int, world: int, group: Any) -> dict[str, Any]:
    """What is left to gloo."""
    out: dict[str, Any] = {}
    x = numbers(rank)
    listed = [torch.empty(N) for _ in range(world)]
    dist.all_gather(listed, x, group=group)
    out["all_gather"] = listed
    y = numbers(rank)
    dist.broadcast(y, 1, group=group)
    dist.reduce(z := numbers(rank), 2, group=group)
    out["broadcast, reduce"] = (y, z if rank == 2 else None)
    part = torch.empty(N)
    dist.scatter(part, [numbers(i) for i in range(world)] if rank == 0 else None, 0, group=group)
    collected = [torch.empty(N) for _ in range(world)] if rank == 3 else None
    dist.gather(x, collected, 3, group=group)
    out["scatter, gather"] = (part, collected)
    swapped = torch.empty(4 * world)
    dist.all_to_all_single(swapped, numbers(rank, 4 * world), group=group)
    out["all_to_all_single"] = swapped
    got: list[Any] = [None] * world
    dist.all_gather_object(got, {"rank": rank}, group=group)
    said = [rank]
    dist.broadcast_object_list(said, 2, group=group)
    out["objects"] = (got, said)
    out |= other_options(rank, world, group)
    dist.barrier(group=group)
    into = torch.empty(N)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % world, group), dist.P2POp(dist.irecv, into, (rank - 1) % world, group)]
    )
    for work in works:
        work.wait()
    out["batch_isend_irecv"] = into
    return out


def other_options(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Other operations and dtypes, unequal parts, messages, and objects of one rank."""
    out: dict[str, Any] = {}
    ops = dist.ReduceOp
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        dist.all_reduce(x := torch.tensor([rank + 1]), op, group=group)
        out[str(op)] = x
    dist.all_reduce(flag := torch.tensor([rank == 0]), ops.MAX, group=group)
    dist.all_reduce(both := torch.full((N,), complex(rank, 1)), group=group)
    out["bool, complex"] = (flag, both)
    sizes = [rank + i for i in range(world)]
    sent = torch.arange(float(sum(sizes))) + rank
    dist.all_to_all_single(swapped := torch.empty(sum(sizes)), sent, sizes, sizes, group=group)
    part = torch.empty(N)
    dist.reduce_scatter(part, [numbers(rank + i) for i in range(world)], group=group)
    out["all_to_all_single, reduce_scatter"] = (swapped, part)
    message = numbers(rank)
    if rank < 2:
        dist.send(message, rank + 2, group=group)
    else:
        dist.recv(message, rank - 2, group=group)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {i}" for i in range(world)], 1, group=group)
    every: list[Any] | None = [None] * world if rank == 2 else None
    dist.gather_object({"of": rank}, every, 2, group=group)
    out["send, objects"] = (message, got, every)
    return out


def refused_at_once(rank: int, world: int, group: Any) -> None:
    """What gloo refuses: sums of what torch cannot add, where a rank with nothing to add would wait for those that
    have failed, and results of another dtype."""
    for dtype in (torch.uint16, torch.float8_e4m3fn):
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            dist.all_reduce(torch.zeros(2 * N).to(dtype), group=group)
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            dist.reduce_scatter_tensor(torch.empty(N).to(dtype), torch.zeros(N * world).to(dtype), group=group)
    wide = torch.float64
    with pytest.raises(RuntimeError, match="invalid tensor type"):
        dist.all_gather_into_tensor(torch.empty(N * world, dtype=wide), numbers(rank), group=group)
    with pytest.raises(RuntimeError):
        dist.reduce_scatter_tensor(torch.empty(N, dtype=wide), torch.zeros(N * world), group=group)


def autograd_and_modes(rank: int, world: int, group: Any) -> list[Any]:
    """Tensors that autograd or inference mode watches, sizes that do not fit, and tensors without data."""
    out: list[Any] = []
    average = getattr(dist.ReduceOp, "AVG" if group.name() == "smp" else "SUM")
    leaf = numbers(rank).requires_grad_()
    dist.all_reduce(leaf, group=group)
    parameter = nn.Parameter(numbers(rank))
    with torch.no_grad():
        dist.all_reduce(parameter, average, group=group)
    part = torch.empty(N)
    dist.reduce_scatter_tensor(part, numbers(rank, N * world).requires_grad_(), group=group)
    with torch.inference_mode():
        inferred, gathered = numbers(rank), torch.empty(N * world)
        dist.all_reduce(inferred, group=group)
        dist.all_gather_into_tensor(gathered, inferred, group=group)
        out += [inferred.clone(), gathered.clone()]
    scale = world if group.name() == "smp" else 1
    out += [leaf.detach(), parameter.detach() * scale, part.detach()]
    for wrong in (lambda: torch.empty(N * world + 3), lambda: torch.empty(2, N)):
        with pytest.raises(RuntimeError):
            dist.all_gather_into_tensor(wrong(), numbers(rank), group=group)
    with pytest.raises(RuntimeError):
        dist.reduce_scatter_tensor(torch.empty(N + 1), numbers(rank, N * world), group=group)
    dist.all_reduce(torch.empty(N, device="meta"), group=group)
    return out


def gathered_bits(rank: int, world: int, group: Any) -> bool:
    """Whether a gather of 8- and 16-bit dtypes, of which gloo's own takes only some, gives what was given."""
    right = True
    for dtype in (torch.uint16, torch.float8_e4m3fn, torch.bool, torch.int16):
        output = torch.empty(N * world, dtype=dtype)
        dist.all_gather_into_tensor(output, torch.full((N,), rank % 2).to(dtype), group=group)
        right = right and output[::N].float().tolist() == [0.0, 1.0, 0.0, 1.0]
    return right


def libraries(rank: int, world: int, group: Any) -> dict[str, Any]:
    """DTensor, functional collectives, a compiled graph, FSDP1, FSDP2 and DDP on top."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    out: dict[str, Any] = {}
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = numbers(0, 64 * 1024).view(256, 256)
    out["S->R"] = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
    partial = torch.distributed.tensor.DTensor.from_local(whole + rank, mesh, [Partial()])
    out["P->R"] = partial.redistribute(mesh, [Replicate()]).to_local()
    out["P->S"] = partial.redistribute(mesh, [Shard(0)]).to_local()
    out["functional"] = functional.all_reduce(whole + rank, "sum", group) + 1
    compiled = torch.compile(lambda x: functional.all_reduce(x, "sum", group) * 2, fullgraph=True, backend="eager")
    out["compiled"] = compiled(whole + rank)

    def train(wrap: Callable[[nn.Module], nn.Module]) -> torch.Tensor:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            draw = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(4, 256, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        result = model(torch.ones(1, 256)).detach()
        return result

    def sharded(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh)  # type: ignore[return-value]

    out["DDP"] = train(lambda model: nn.parallel.DistributedDataParallel(model, process_group=group))
    out["FSDP1"] = train(
        lambda model: FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"))
    )
    out["FSDP2"] = train(sharded)
    return out


def compare(rank: int, world: int, topology: str) -> dict[str, Any]:
    """Everything on gloo and on smp, which is the default group in the end."""
    import smp.parallel.backend  # noqa: F401

    warnings.simplefilter("ignore")
    os.environ["SMP_NETWORK_TOPOLOGY"] = topology
    torch.set_num_threads(1)
    gloo, group = dist.new_group(), dist.new_group(backend="smp")
    pairs = each_collective(rank, world, gloo), each_collective(rank, world, group)
    wrong = [name for name in pairs[0] if not same(pairs[0][name], pairs[1][name])]
    counted = dict(group.counts)
    built = libraries(rank, world, gloo), libraries(rank, world, group)
    exact = ("S->R", "P->R", "P->S", "functional", "compiled")
    wrong += [name for name in exact if not same(built[0][name], built[1][name])]
    wrong += [
        name for name in ("DDP", "FSDP1", "FSDP2") if not torch.allclose(built[0][name], built[1][name], rtol=1e-5)
    ]
    mean = torch.full((N,), float(rank))
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    part = torch.empty(N)
    dist.reduce_scatter_tensor(part, torch.full((N * world,), float(rank)), dist.ReduceOp.AVG, group=group)
    if not same(autograd_and_modes(rank, world, gloo), autograd_and_modes(rank, world, group)):
        wrong.append("autograd and modes")
    refused_at_once(rank, world, gloo)
    refused_at_once(rank, world, group)
    dist.all_reduce(small := torch.full((3,), float(rank)), dist.ReduceOp.AVG, group=group)
    random = torch.randn(N, generator=torch.Generator().manual_seed(rank))
    sums = []
    for _ in range(2):
        dist.all_reduce(sum_ := random.clone(), group=group)
        sums.append(sum_)
    pieces = [random.clone() for _ in range(world)]
    dist.all_gather(pieces, random)
    return {
        "wrong": wrong,
        "counted": counted,
        "later": {name: group.counts[name] - counted.get(name, 0) for name in group.counts},
        "means": (set(mean.tolist()), set(part.tolist()), set(small.tolist())),
        "bits": gathered_bits(rank, world, group),
        "batch norm": error_of_sync_batch_norm(rank, world, group),
        "repeats": torch.equal(*sums),
        "error": (sums[0].double() - torch.stack(pieces).double().sum(0)).abs().max().item(),
        "unlike": unlike_files(rank, topology),
        "default": default_group(rank, world, topology),
    }


def unlike_files(rank: int, topology: str) -> list[str]:
    """Ranks that would run different schedules say so, all of them, when a group is made."""
    said = []
    other = Path(f"{topology}.{rank}")
    other.write_text('{"nodes": [[0, 1], [2, 3]]}')
    for files in ([topology, None], [None, topology], [topology, str(other)], [topology, f"{topology}.none"]):
        file = files[rank == 1]
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("SMP_NETWORK_TOPOLOGY") if file is None else patch.setenv("SMP_NETWORK_TOPOLOGY", file)
            with pytest.raises(ConfigError) as caught:
                dist.new_group(backend="smp")
        said.append(str(caught.value))
    return said


def default_group(rank: int, world: int, topology: str) -> Any:
    """The same as the backend of a whole program, by both names, and its subgroups."""
    store = dist.FileStore(f"{topology}.store", world)
    store.set_timeout(timedelta(seconds=60))
    out = []
    for name in ("smp", "smddp"):
        dist.destroy_process_group()
        dist.init_process_group(
            name, store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        dist.all_reduce(x := numbers(rank))
        pair = dist.new_group([0, 3])
        y = numbers(rank)
        if rank in (0, 3):
            dist.all_reduce(y, group=pair)
        mesh = dist.init_device_mesh("cpu", (2, 2))
        dist.all_reduce(z := numbers(rank), group=mesh.get_group(0))
        model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
        model(torch.full((1, 256), float(rank))).sum().backward()
        slope = model.module.weight.grad[0, 0].item()
        dist.barrier()
        out.append((dist.get_backend(), x[0].item(), y[0].item(), z[0].item(), slope, type(pair).__name__))
    return out


def small_ones(rank: int, world: int) -> list[float]:
    """Thousands of calls that gloo runs, each while gloo's thread may still hold the tensors of the one before."""
    import smp.parallel.backend  # noqa: F401

    group = dist.new_group(backend="smp")
    x, y = torch.ones(4), torch.zeros(4)
    for _ in range(20_000):
        dist.broadcast(x, 0, group=group)
    for _ in range(5_000):
        dist.all_to_all_single(y, x, group=group)
        dist.reduce_scatter(y, [x], group=group)
        dist.barrier(group=group)
    return y.tolist()


def test_inherited_collectives_do_not_hang() -> None:
    """They did, where gloo was called with the interpreter lock held; one rank in a few thousand calls is enough."""
    assert run_distributed(small_ones, 1, timeout=60.0) == [[1.0] * 4]


def test_no_method_is_left_that_torch_calls_with_the_interpreter_lock_held() -> None:
    """The header that defines what torch looks for in a subclass comes with torch."""
    from smp.parallel.backend import NetworkProcessGroup

    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    text = header.read_text().split("using ProcessGroup::ProcessGroup;")[1]
    looked_for = set(re.findall(r"WORK_OVERRIDE\([^;]*?(\w+), +/\* Name of function", text))
    looked_for |= set(re.findall(r"get_override\([^;]*?\"(\w+)\"\)", text))
    assert {"allgather", "allreduce", "barrier", "broadcast", "send"} <= looked_for
    assert looked_for - set(vars(NetworkProcessGroup)) == set()


def test_a_timeout_that_is_changed_holds_for_schedules_too() -> None:
    """torch changes that of the gloo backend, for trainers that wait longer for the first step than for others."""
    import smp.parallel.backend  # noqa: F401

    with lone_context():
        group: Any = dist.new_group(backend="smp", timeout=timedelta(seconds=9))
        assert group.network.timeout == timedelta(seconds=9)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), group)
        assert group.network.timeout == timedelta(seconds=4)


def test_cuda_tensors_go_to_nccl() -> None:
    """On tensors without memory, in a group whose NCCL is a stand-in: also where a CPU's would be hierarchical."""
    import smp.parallel.backend  # noqa: F401
    from smp.parallel.network.cost import Policy
    from smp.parallel.network.topology import Topology

    with lone_context():
        group: Any = dist.new_group(backend="smp")
        group.network.policy = Policy(Topology.of(["left", "left", "right", "right"]))
        group._nccl = Mock()
        with FakeTensorMode():
            x, whole = torch.empty(100_000, device="cuda"), torch.empty(400_000, device="cuda")
            assert group.network.way("all-reduce", x).route is not None
            group.allreduce([x])
            group.all_gather_single(whole, x)
            group.reduce_scatter_single(x, whole)
        called = [name for name, *_ in group._nccl.mock_calls]
        assert called == ["allreduce", "_allgather_base", "_reduce_scatter_base"]
        assert group.counts == {"nccl all-reduce": 1, "nccl all-gather": 1, "nccl reduce-scatter": 1}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("backend") / "nodes.json"
    path.write_text(json.dumps({"nodes": [[0, 2], [1, 3]]}))
    return run_distributed(compare, 4, str(path))


def test_everything_is_as_on_gloo(found: list[dict[str, Any]]) -> None:
    assert [of["wrong"] for of in found] == [[]] * 4


def test_large_sums_and_gathers_are_hierarchical_and_the_rest_is_counted(found: list[dict[str, Any]]) -> None:
    counted, later = found[0]["counted"], found[0]["later"]
    assert counted["hierarchical all-reduce"] == 4 + 4, (
        "sums in 4 dtypes (uint8 is small), complex, shape, async, strided"
    )
    assert counted["hierarchical all-gather"] >= 6 and counted["hierarchical reduce-scatter"] == 5
    assert counted["gloo all-reduce"] >= 15, "maxima, minima, products, small ones"
    assert all(later[f"hierarchical {kind}"] > 0 for kind in ("all-reduce", "all-gather", "reduce-scatter"))


def test_averages_and_bits_of_sums(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["means"] == ({1.5}, {1.5}, {1.5})
        assert of["repeats"] and of["error"] < 4 * 4 * 2**-24 * 4


def test_other_dtypes_and_batch_norms(found: list[dict[str, Any]]) -> None:
    """Gathers move any bits; SyncBatchNorm normalizes over all ranks, whose sums above 64 KiB are hierarchical."""
    for of in found:
        assert of["bits"] and of["batch norm"] < 2e-4


def test_ranks_with_unlike_files_are_told_so(found: list[dict[str, Any]]) -> None:
    for of in found:
        *unlike, missing = of["unlike"]
        assert [text.split(" of 4 ")[1] for text in unlike] == [
            f"{what}, unlike rank 0; all need the same" for what in ("has none", "has a file", "has another file")
        ]
        assert missing.startswith("SMP_NETWORK_TOPOLOGY of rank 1 in a group of 4: ") and "No such file" in missing


def test_it_is_a_backend_of_a_whole_program(found: list[dict[str, Any]]) -> None:
    assert found[0]["default"] == [(name, 6.0, 3.0, 2.0, 1.5, "NetworkProcessGroup") for name in ("smp", "smddp")]
