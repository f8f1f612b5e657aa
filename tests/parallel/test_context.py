"""Who shares what with whom."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.config import Layout
from smp.parallel.context import ParallelContext
from tests.fake_group import fake_context

LAYOUT = Layout(dp_replicate=2, dp_shard=3, tp=2)


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    assert mesh is not None
    return dist.get_process_group_ranks(mesh.get_group())


def test_tp_is_fastest_then_the_shards_then_the_replicas() -> None:
    for rank in range(LAYOUT.world_size):
        with fake_context(LAYOUT, rank) as context:
            assert context.fsdp is not None and context.fsdp.mesh_dim_names == ("dp_replicate", "dp_shard")
            assert ranks_of(context.tp) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert list(context.fsdp.get_coordinate() or ()) == [rank // 6, rank // 2 % 3]
            assert context.data_rank == rank // 2 and context.data_size == 6
            assert context.counts_tokens is (rank % 2 == 0)


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
    with fake_context(layout) as context:
        assert context.fsdp is not None and context.fsdp.mesh_dim_names == names


def test_a_loss_is_summed_over_data_and_pipeline_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[list[int]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: summed.append(dist.get_process_group_ranks(group)))
    with fake_context(LAYOUT, rank=3) as context:
        context.sum_loss(torch.ones(()))
    assert summed == [[1, 3, 5], [3, 9]]
    with fake_context(Layout(tp=4)) as context:
        context.sum_loss(torch.ones(()))
    assert len(summed) == 2
    with fake_context(Layout(pp=2, dp_shard=2), rank=1) as context:
        context.sum_loss(torch.ones(()))
    assert summed[2:] == [[0, 1], [1, 3]]


def test_context_parallel_ranks_share_samples_and_shards_of_weights() -> None:
    """Hybrid FSDP shards over dp_shard x cp; a loss is summed over it; each rank holds tokens of its own."""
    layout = Layout(dp_shard=2, cp=2, tp=2)
    for rank in range(8):
        with fake_context(layout, rank) as context:
            first = rank // 4 * 4 + rank % 2
            assert ranks_of(context.cp) == [first, first + 2]
            assert context.data_rank == rank // 4 and context.data_size == 2
            assert context.fsdp is not None and context.fsdp.size() == 4
            assert ranks_of(context.loss_meshes[0]) == [rank % 2 + 2 * i for i in range(4)]
            assert (context.cp_rank, context.cp_size) == (rank // 2 % 2, 2) and context.cp_exchange is context.cp
            assert context.counts_tokens is (rank % 4 == 0), "they read the same samples"
    with fake_context(Layout(dp_shard=2)) as context:
        assert (context.cp_group, context.cp_exchange, context.cp_rank, context.cp_size) == (None, None, 0, 1)


def test_neighbours_exchange_heads_and_keys_travel_between_them() -> None:
    layout = Layout(pp=2, cp=4, tp=2)
    for rank in range(16):
        with fake_context(layout, rank, heads_group=2) as context:
            exchange = context.cp_exchange
            assert exchange is not None and exchange.mesh_dim_names == ("p2p", "a2a")
            first = rank // 8 * 8 + rank % 2
            cp = (rank - first) // 2
            assert ranks_of(context.cp) == [first + 2 * i for i in range(4)] and context.cp_rank == cp
            assert ranks_of(exchange["a2a"]) == [first + 2 * (cp // 2 * 2 + i) for i in range(2)]
            assert ranks_of(exchange["p2p"]) == [first + 2 * (cp % 2 + 2 * i) for i in range(2)]
    for heads_group in (1, 4):
        with fake_context(layout, heads_group=heads_group) as context:
            assert context.cp_exchange is context.cp


def test_experts_are_spread_over_neighbours_and_sharded_over_the_rest() -> None:
    layout = Layout(dp_replicate=2, dp_shard=4, ep=2)
    for rank in range(8):
        with fake_context(layout, rank) as context:
            assert ranks_of(context.ep) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert context.expert_fsdp is not None
            assert context.expert_fsdp.mesh_dim_names == ("dp_replicate", "expert_shard")
            assert list(context.expert_fsdp.get_coordinate() or ()) == [rank // 4, rank // 2 % 2]
    with fake_context(Layout(dp_shard=4)) as context:
        assert context.ep is None and context.expert_fsdp is None


def test_ranks_that_do_not_cut_an_expert_have_others() -> None:
    for rank in range(8):
        with fake_context(Layout(dp_shard=2, tp=4, ep=2, etp=2), rank) as context:
            assert context.ep_tp is not None and context.expert_fsdp is not None
            first, pair = rank // 4 * 4, rank // 2 * 2  # neighbours cut, the next two of a tp group hold others
            assert context.expert_tp_group.size == 2 and context.expert_tp_group.rank == rank % 2
            assert ranks_of(context.ep_tp["tp"]) == [pair, pair + 1]
            assert ranks_of(context.ep) == [first + rank % 2, first + rank % 2 + 2]
            assert ranks_of(context.expert_fsdp) == [rank % 4, rank % 4 + 4]
            assert context.secondary_parts(2)["experts"][1] == 2
    with fake_context(Layout(tp=2, etp=1)) as context:
        assert context.has_fsdp and context.ep is not None and context.ep.size() == 1
    with fake_context(Layout(tp=2, ep=2, etp=1)) as context:
        assert not context.has_fsdp and context.tp_group.size == 2 and context.expert_tp_group.size == 1


def test_a_plain_mesh_makes_a_context_of_tensor_parallelism() -> None:
    with fake_context(Layout(tp=2), rank=1) as context:
        plain = ParallelContext.of(context.tp)
        assert plain == ParallelContext(tp=context.tp) and ParallelContext.of(plain) is plain
        assert (plain.tp_group.size, plain.pp_size, plain.data_size, plain.shared_by) == (2, 1, 1, None)
        split = ParallelContext.of(context.tp, sequence_parallel=True)
        assert split.shared_by == split.tp_group
    with fake_context(Layout(dp_replicate=2, dp_shard=2)) as context:
        assert context.fsdp is not None
        with pytest.raises(ValueError, match="a one-dimensional mesh is needed"):
            ParallelContext.of(context.fsdp)
