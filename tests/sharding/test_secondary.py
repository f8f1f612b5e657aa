"""Secondary shards (hpZ): backward passes gather within a node, the same bits; what crosses uplinks is counted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed import run_distributed

WIDTH, BLOCKS, MICRO_BATCHES, STEPS = 256, 3, 2, 2
WAYS = ("flat", "hierarchical", "rounded")


class Model(nn.Module):
    """Blocks in bf16, the last of which is computed again in the backward pass; the last layer is in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[:-1]:
            x = block(x).tanh()
        x = checkpoint(lambda x: self.blocks[-1](x).tanh(), x, use_reentrant=False)
        return self.last(x)


def train(rank: int, world: int) -> dict[str, Any]:
    """Losses, and bytes that this rank sent to the other node in the last step, of every way with and without."""
    from torch.distributed.device_mesh import init_device_mesh

    from smp.parallel.network import group as group_module
    from smp.parallel.network.cost import Policy
    from smp.parallel.network.group import NetworkGroup
    from smp.parallel.network.quantize import Quantization
    from smp.parallel.network.secondary import secondary_shards
    from smp.parallel.network.select_collectives import SMALLEST, NetworkCollectives
    from smp.parallel.network.topology import Topology
    from smp.sharding.parallelize import shard

    mesh = init_device_mesh("cpu", (world,))
    name = mesh.get_group().group_name
    topology, crossed = Topology.of(["a", "a", "b", "b"]), [0]
    policy = Policy(topology, smallest=SMALLEST)  # the root unit's small collectives are flat
    network = NetworkGroup.of(mesh.get_group(), policy, timedelta(seconds=60))
    send = group_module._Messages.send

    def counted(self: Any, tensor: torch.Tensor, to: int) -> Any:
        crossed[0] += tensor.nbytes * (to in topology.beyond(rank))
        return send(self, tensor, to)

    group_module._Messages.send = counted  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for way in WAYS:
        for size in (1, 2):
            secondary = secondary_shards({"parameters": (mesh, size)})
            groups: dict[str, NetworkGroup] = {} if way == "flat" else {name: network}
            coded = Quantization(weights=True) if way == "rounded" else None
            torch.manual_seed(1)
            model = Model()
            chosen = NetworkCollectives(groups, quantization=coded, secondary=secondary)
            shard(model, list(model.blocks), mesh, bf16=True, collectives=chosen)
            optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
            for step in range(STEPS):
                crossed[0] = 0
                with torch.no_grad():  # an evaluation before the step gathers, too
                    model(torch.ones(1, WIDTH).bfloat16())
                evaluated, crossed[0] = crossed[0], 0
                for micro_batch in range(MICRO_BATCHES):
                    draw = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
                    loss = (model(torch.randn(8, WIDTH, generator=draw).bfloat16()).float() - 0.5).square().mean()
                    (loss / world).backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            held = sum(shards.nbytes for shards in secondary.values())
            found[f"{way} {size}"] = {"losses": losses, "sent": crossed[0], "evaluated": evaluated, "held": held}
    return found


def test_the_backward_pass_gathers_within_nodes_and_changes_no_bit() -> None:
    """On two nodes of two ranks. Each rank sends its part of everything that crosses its node's uplink once."""
    every = run_distributed(train, 4)
    block = WIDTH * WIDTH
    for way in WAYS:
        without, kept = ([found[f"{way} {size}"] for found in every] for size in (1, 2))
        assert [of["losses"] for of in kept] == [of["losses"] for of in without], "the same bits"
        assert len(set(kept[0]["losses"])) == MICRO_BATCHES * STEPS
        assert {of["held"] for of in kept} == {BLOCKS * 2 * block // 2} and without[0]["held"] == 0
    gather, reduce = 2 * block // 4, 4 * block // 4  # a rank's part in bf16; of sums in fp32
    for of in every:
        assert of["hierarchical 1"]["sent"] == MICRO_BATCHES * BLOCKS * (2 * gather + reduce)
        assert of["hierarchical 2"]["sent"] == MICRO_BATCHES * BLOCKS * (gather + reduce), "forward passes alone"
        assert of["hierarchical 2"]["evaluated"] == BLOCKS * gather
        coded = block // 4 * (128 + 4) // 128
        assert of["rounded 2"]["sent"] == MICRO_BATCHES * BLOCKS * (coded + reduce)
