"""Layouts of a run while nodes come and go: TP, PP, CP and EP stay, and data parallelism changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from smp.config.layout import Layout
from smp.config.parallel import ParallelConfig
from smp.config.schema import Config, ConfigError

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With it torchrun makes a store for every start of the workers. Without it (torch 2.13) nodes look for the store of
the node that was rank 0 first, even after it has gone."""
LAUNCHER = "SMP_LAUNCHER"
"""Environment variable with the process id of the launcher, whose copies in memory are used, where another process
(--inprocess-restart) is between it and this one."""


@dataclass(frozen=True)
class Members:
    """The processes that were started.

    Attributes:
        each: processes of a node.
        nodes: that are there.
    """

    each: int
    nodes: int

    @staticmethod
    def of(environment: Mapping[str, str], world_size: int, max_nodes: int) -> Members:
        """The members by torchrun's variables; without a launcher, as in a dry run, ``max_nodes`` nodes."""
        each = int(environment.get("LOCAL_WORLD_SIZE", max(world_size // max_nodes, 1)))
        return Members(each, world_size // each)


def node_counts(parallel: ParallelConfig) -> list[int]:
    """Numbers of nodes that an elastic run may have.

    Raises:
        ConfigError: there are none.
    """
    least, most, step = parallel.min_nodes or 1, parallel.max_nodes or 1, parallel.replica_increment_step
    if least > most:
        raise ConfigError(f"--min-nodes {least} is above --max-nodes {most}")
    return list(range(least, most + 1, step))


def with_shards(parallel: ParallelConfig, world_size: int) -> ParallelConfig:
    """The settings for this number of processes: --hybrid-shard-degree if it divides the data-parallel processes, else
    the next larger degree that does, which needs no more memory, else the next smaller one.

    Raises:
        ConfigError: as ``Layout.from_config``, where no degree works.
    """
    # ep 1: whether experts fit is tried with each degree below.
    whole = Layout.from_config(replace(parallel, hybrid_shard_degree=0, expert_model_parallel_size=1), world_size)
    asked = parallel.hybrid_shard_degree or whole.data_parallel
    divisors = [d for d in range(1, whole.data_parallel + 1) if whole.data_parallel % d == 0]
    errors: list[ConfigError] = []
    # False sorts before True: larger degrees first, the nearest of them first.
    for degree in sorted(divisors, key=lambda d: (d < asked, abs(d - asked))):
        found = replace(parallel, hybrid_shard_degree=0 if degree == whole.data_parallel else degree)
        try:
            Layout.from_config(found, world_size)
        except ConfigError as error:
            errors.append(error)
            continue
        return found
    # The first error is about the degree that was asked for.
    raise errors[0]


def layouts(parallel: ParallelConfig, each: int) -> dict[int, ParallelConfig]:
    """Settings for every possible number of nodes, by that number.

    Args:
        each: processes of a node.
    """
    found = {}
    for nodes in node_counts(parallel):
        # Numbers of nodes without a layout are left out, not refused.
        with suppress(ConfigError):
            found[nodes] = with_shards(parallel, nodes * each)
    return found


def as_members(config: Config, world_size: int, environment: Mapping[str, str] = os.environ) -> tuple[Config, int]:
    """Settings for the nodes that are there, and the number of processes that train; the others are spares. A run that
    is not elastic is returned unchanged.

    Raises:
        ConfigError: there is no such layout, or what must stay is not said.
    """
    parallel = config.parallel
    if parallel.max_nodes is None:
        return config, world_size
    if config.data.global_batch_size is None and config.data.step_batch_size_schedule is None:
        # Batch and learning rate must not depend on how many nodes happen to be there.
        raise ConfigError("--max-nodes needs --global-batch-size: the default would change with the number of nodes")
    if config.checkpoint.peer_snapshot_interval is None and config.checkpoint.save is None:
        raise ConfigError(
            "--max-nodes needs --peer-snapshot-interval or --save: a change of nodes would lose all steps"
        )
    if config.objective is None and config.checkpoint.save is not None and config.checkpoint.load is None:
        raise ConfigError("--max-nodes and --save need --load auto: a change of nodes starts the run again, from there")
    if "TORCHELASTIC_RUN_ID" in environment and environment.get(OWN_STORES) != "1":
        raise ConfigError(
            f"--max-nodes needs {OWN_STORES}=1 in the environment of torchrun: otherwise nodes keep using the store "
            "of a node that has left"
        )
    least, members = parallel.min_nodes or 1, Members.of(environment, world_size, parallel.max_nodes)
    possible = layouts(parallel, members.each)
    if least not in possible:
        with_shards(parallel, least * members.each)  # raises, with the reason
    there = [nodes for nodes in possible if nodes <= members.nodes]
    if not there:
        raise ConfigError(f"{members.nodes} nodes of {members.each} processes are there, --min-nodes is {least}")
    return replace(config, parallel=possible[max(there)]), max(there) * members.each
