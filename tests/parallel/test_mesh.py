"""Who stands where on the mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from smp.config import Layout
from smp.parallel.mesh import MESH_DIMS, data_mesh, data_rank, sum_over_parts
from tests.fake_group import fake_mesh

LAYOUT = Layout(dp_replicate=2, dp_shard=3, tp=2)


def test_dimensions_keep_their_place_and_tp_is_fastest() -> None:
    for rank in range(LAYOUT.world_size):
        with fake_mesh(LAYOUT, rank) as mesh:
            assert mesh.mesh_dim_names == MESH_DIMS == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
            assert tuple(mesh.shape) == (1, 2, 3, 1, 2)
            assert mesh.get_local_rank("tp") == rank % 2
            assert mesh.get_local_rank("dp_shard") == rank // 2 % 3
            assert mesh.get_local_rank("dp_replicate") == rank // 6
            assert dist.get_process_group_ranks(mesh.get_group("tp")) == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_a_tensor_parallel_group_reads_the_same_data() -> None:
    ranks = []
    for rank in range(LAYOUT.world_size):
        with fake_mesh(LAYOUT, rank) as mesh:
            ranks.append(data_rank(mesh))
    assert ranks == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(dp_shard=4), ("dp_shard",)),
        (Layout(tp=2), ("dp_shard",)),
        (Layout(dp_replicate=2, dp_shard=2), ("dp_replicate", "dp_shard")),
        (Layout(dp_replicate=2), ("dp_replicate", "dp_shard")),
    ],
)
def test_fsdp_sees_replicas_only_where_there_are_some(layout: Layout, names: tuple[str, ...]) -> None:
    with fake_mesh(layout) as mesh:
        assert data_mesh(mesh).mesh_dim_names == names


def test_data_sum_goes_over_both_data_dimensions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[list[int]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: summed.append(dist.get_process_group_ranks(group)))
    with fake_mesh(LAYOUT, rank=3) as mesh:
        sum_over_parts(torch.ones(()), mesh)
    assert summed == [[1, 3, 5], [3, 9]]
    with fake_mesh(Layout(tp=4)) as mesh:
        sum_over_parts(torch.ones(()), mesh)
    assert len(summed) == 2
