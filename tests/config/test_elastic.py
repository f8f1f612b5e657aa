"""Layouts of runs whose nodes come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.config import Config, ConfigError, Layout, ParallelConfig
from smp.config.rules.elastic import OWN_STORES, as_members, layouts, with_shards
from smp.config.schema import CheckpointConfig, DataConfig


def config(**values: int) -> Config:
    return Config(
        parallel=ParallelConfig(**values),  # type: ignore[arg-type]
        data=DataConfig(global_batch_size=8),
        checkpoint=CheckpointConfig(peer_snapshot_interval=1),
    )


def environment(nodes: int, each: int) -> dict[str, str]:
    return {"LOCAL_WORLD_SIZE": str(each), "WORLD_SIZE": str(nodes * each), "TORCHELASTIC_RUN_ID": "x", OWN_STORES: "1"}


@given(st.integers(1, 40), st.integers(0, 12))
def test_shards_never_need_more_memory_if_another_degree_does_not(world: int, asked: int) -> None:
    found = Layout.from_config(with_shards(ParallelConfig(hybrid_shard_degree=asked), world), world)
    wanted = asked or world
    assert found.world_size == world
    larger = [d for d in range(wanted, world + 1) if world % d == 0]
    assert found.dp_shard == (larger[0] if larger else world)


def test_tp_pp_cp_and_ep_stay() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2, max_nodes=5
    )
    found = layouts(parallel, each=4)
    assert sorted(found) == [2, 4]  # experts over two processes: an odd number of data-parallel ones has no layout
    for nodes, each in found.items():
        layout = Layout.from_config(each, 4 * nodes)
        assert (layout.tp, layout.pp, layout.ep, layout.data_parallel) == (2, 2, 2, nodes)


def test_nodes_that_no_layout_takes_are_spare_ones() -> None:
    asked = config(max_nodes=6, min_nodes=2, replica_increment_step=2)
    for nodes, train in ((2, 2), (3, 2), (4, 4), (5, 4), (6, 6), (9, 6)):
        found, world = as_members(asked, 2 * nodes, environment(nodes, 2))
        assert world == 2 * train and found.parallel.hybrid_shard_degree == 0
    replicas = replace(asked, parallel=replace(asked.parallel, hybrid_shard_degree=5))
    assert as_members(replicas, 12, environment(6, 2))[0].parallel.hybrid_shard_degree == 6
    assert as_members(replicas, 8, environment(4, 2))[0].parallel.hybrid_shard_degree == 0


def test_what_cannot_be_elastic_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 nodes of 2 processes are there, --min-nodes is 2"):
        as_members(config(max_nodes=4, min_nodes=2), 2, environment(1, 2))
    with pytest.raises(ConfigError, match="--min-nodes 5 is above --max-nodes 4"):
        as_members(config(max_nodes=4, min_nodes=5), 2, environment(1, 2))
    with pytest.raises(ConfigError, match="--max-nodes needs --global-batch-size"):
        as_members(replace(config(max_nodes=4), data=DataConfig()), 2, environment(1, 2))
    with pytest.raises(ConfigError, match="--max-nodes needs --peer-snapshot-interval or --save"):
        as_members(replace(config(max_nodes=4), checkpoint=CheckpointConfig()), 2, environment(1, 2))
    with pytest.raises(ConfigError, match=f"--max-nodes needs {OWN_STORES}=1"):
        as_members(config(max_nodes=4), 2, environment(1, 2) | {OWN_STORES: "0"})
    with pytest.raises(ConfigError, match="2 processes are not divisible by --tensor-model-parallel-size 4"):
        as_members(config(max_nodes=4, tensor_model_parallel_size=4), 4, environment(2, 2))


def test_a_run_that_is_not_elastic_stays_as_it_is() -> None:
    asked = config(hybrid_shard_degree=3)
    assert as_members(asked, 7, {}) == (asked, 7)
