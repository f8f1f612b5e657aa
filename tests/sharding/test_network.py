"""FSDP with hierarchical collectives in anyone's module: bits of gathers, bytes, and what is waited for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.parallel.network.quantize import decode, encode
from tests.distributed import run_distributed


def train(rank: int, world: int) -> dict[str, Any]:
    """Losses of 20 steps by flat collectives and with hierarchical gathers, of 4 with all hierarchical, twice."""
    from datetime import timedelta

    from torch.distributed.device_mesh import init_device_mesh

    from smp.parallel.network.cost import Policy
    from smp.parallel.network.group import NetworkGroup
    from smp.parallel.network.select_collectives import NetworkCollectives
    from smp.parallel.network.topology import Topology
    from smp.sharding.network import GatherWeights
    from smp.sharding.parallelize import shard

    mesh = init_device_mesh("cpu", (world,))
    group = mesh.get_group()
    network = NetworkGroup.of(group, Policy(Topology.of(["a", "a", "b", "b"])), timedelta(seconds=60))
    returned: list[Any] = []
    original = GatherWeights.__call__

    def watched(self: GatherWeights, *args: Any, **options: Any) -> Any:
        returned.append(original(self, *args, **options))
        return returned[-1]

    GatherWeights.__call__ = watched  # type: ignore[method-assign]
    collectives = NetworkCollectives({group.group_name: network})
    losses: dict[str, list[float]] = {}
    for name in ("flat", "gathers", "all", "again"):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(61, 61), nn.Tanh()) for _ in range(2)))
        shard(model, [model[0]], mesh, bf16=True, collectives=collectives if name in ("all", "again") else None)
        for module in model.modules() if name == "gathers" else ():
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(GatherWeights(network))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[name] = []
        for step in range(20 if name in ("flat", "gathers") else 4):
            x = torch.randn(8, 61, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()
            loss = (model(x).float() - 0.5).square().mean()
            (loss / world).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    works = {isinstance(work, dist.Work) for work in returned}
    return {"losses": losses, "works": works, "coded": [gather_codes(network, dtype, rank) for dtype in DTYPES]}


DTYPES = (torch.float32, torch.bfloat16)


def gather_codes(network: Any, dtype: torch.dtype, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has given to a quantized gather of 301 numbers from each, and what it has then of all."""
    from smp.parallel.network.quantize import Quantization

    given = torch.randn(301, generator=torch.Generator().manual_seed(rank)).to(dtype)
    output = torch.empty(4 * 301, dtype=dtype)
    way = network.way_quantized(given)
    assert way.route is not None
    network.all_gather_quantized(output, given, way, Quantization(weights=True)).wait()
    return given, output


def tune_a_strangers_module(rank: int, world: int, file: str) -> dict[str, Any]:
    """Losses of a module of torch's own, sharded as docs/collectives.md says; calls and bytes of one step, by kind."""
    from torch.distributed.device_mesh import init_device_mesh

    from smp.parallel.network.group import Running
    from smp.parallel.network.select_collectives import choose_collectives
    from smp.sharding.parallelize import shard

    mesh, counted, losses = init_device_mesh("cpu", (world,)), Counter[str](), {}
    begin = Running.__init__

    def counting(self: Running, group: Any, kind: Any, execution: Any, size: int) -> None:
        counted.update({f"{kind}s": 1, f"{kind} bytes": size})
        begin(self, group, kind, execution, size)

    Running.__init__ = counting  # type: ignore[method-assign]
    for setting in ("flat", "hierarchical"):
        torch.manual_seed(1)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True), 2)
        model = nn.Sequential(model, nn.Linear(64, 1024))
        chosen = choose_collectives({"parameters": mesh}, setting, topology_file=file)  # type: ignore[arg-type]
        shard(model, list(model[0].layers), mesh, collectives=chosen)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[setting] = []
        for step in range(3):
            counted.clear()
            x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
            loss = model(x).square().mean()
            (loss / world).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[setting].append(loss.item())
        assert bool(counted) == (setting == "hierarchical")
    held = [sum(4 * p.numel() for p in unit) for unit in units_of(model)]  # fp32; four divides all first dimensions
    return {"losses": losses, "counted": dict(counted), "bytes": held}


def units_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters of both layers, and of the rest."""
    layers = [list(layer.parameters()) for layer in model[0].layers]  # type: ignore[index,union-attr]
    return [*layers, list(model[1].parameters())]  # type: ignore[index]


def test_a_strangers_module_is_sharded_over_nodes(tmp_path: Path) -> None:
    """Layers are gathered twice, the rest once; all gradients are reduced once."""
    (tmp_path / "nodes.json").write_text('{"nodes": [[0, 1, 2], [3]]}')
    for found in run_distributed(tune_a_strangers_module, 4, str(tmp_path / "nodes.json")):
        first, second, rest = found["bytes"]
        assert found["counted"] == {
            "all-gathers": 5,
            "all-gather bytes": 2 * (first + second) + rest,
            "reduce-scatters": 3,
            "reduce-scatter bytes": first + second + rest,
        }
        for loss, other in zip(*found["losses"].values(), strict=True):
            assert abs(loss - other) < 1e-5 * other


def test_gathers_change_no_bit_and_sums_repeat() -> None:
    every = run_distributed(train, 4)
    for rank, found in enumerate(every):
        losses = found["losses"]
        assert losses["gathers"] == losses["flat"], "bit for bit over 20 steps"
        assert losses["again"] == losses["all"]
        assert max(abs(a - b) / b for a, b in zip(losses["all"], losses["flat"], strict=False)) < 1e-3
        assert found["works"] == {True}, "torch waits for nothing else"
        for (given, output), (_, of_first) in zip(found["coded"], every[0]["coded"], strict=True):
            assert torch.equal(output, of_first), "all ranks compute with the same weights, the owner too"
            own = torch.empty_like(given)
            decode(encode(given), own)
            assert torch.equal(output.view(4, -1)[rank], own) and not torch.equal(own, given)
