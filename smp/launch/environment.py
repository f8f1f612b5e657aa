"""Kinds of machines, and the environment of a run. Both are data: users add machines by ``instances`` and override
variables by ``env_vars``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from smp.config import ConfigError
from smp.config.command_line.fields import did_you_mean
from smp.launch.library import collection, load_yaml


@dataclass(frozen=True)
class Instance:
    """A kind of machine.

    Attributes:
        name: as its provider calls it.
        devices: GPUs.
        memory_gib: of one GPU.
        efa: Elastic Fabric Adapters; 0: none.
        rdma: whether a GPU's memory is read through them without the host.
    """

    name: str
    devices: int
    memory_gib: int = 0
    efa: int = 0
    rdma: bool = False


When = Literal["several nodes", "several nodes with EFA", "several processes on a node"]


@dataclass(frozen=True)
class Variable:
    """One environment variable of a run.

    Attributes:
        value: what it is set to.
        when: for which runs.
        why: what happens without.
        source: where this is advised.
    """

    value: str
    when: When
    why: str
    source: str


VARIABLES: dict[str, Variable] = {
    "FI_PROVIDER": Variable(
        value="efa",
        when="several nodes with EFA",
        why="libfabric takes EFA and nothing slower in silence",
        source="aws-ofi-nccl, README; awsome-distributed-training, EFA cheat sheet",
    ),
    "FI_EFA_USE_HUGE_PAGE": Variable(
        value="0",
        when="several nodes with EFA",
        why="huge pages run out when data loaders fork, which ends in os.fork: cannot allocate memory",
        source="awsome-distributed-training, EFA cheat sheet",
    ),
    "NCCL_SOCKET_IFNAME": Variable(
        value="^lo,docker0,veth",
        when="several nodes",
        why="bootstrap over a network that the other nodes are on",
        source="NCCL, environment variables",
    ),
    "OMP_NUM_THREADS": Variable(
        value="1",
        when="several processes on a node",
        why="what torchrun would set with a warning: processes that each take all cores wait for each other",
        source="PyTorch, torch/distributed/run.py",
    ),
}
"""Variables that are set unless the user or the node has set them. PyTorch's own defaults (asynchronous error handling)
are left alone."""


def variables(instance: Instance | None, num_nodes: int, devices: int) -> dict[str, str]:
    """The environment variables of a run on nodes of this kind, with ``devices`` processes each."""
    several = num_nodes > 1
    given: dict[When, bool] = {
        "several nodes": several,
        "several nodes with EFA": several and instance is not None and instance.efa > 0,
        "several processes on a node": devices > 1,
    }
    return {name: variable.value for name, variable in VARIABLES.items() if given[variable.when]}


def known_instances() -> dict[str, Instance]:
    """The machines of recipes_collection/instances.yaml."""
    table = load_yaml(collection() / "instances.yaml")
    return {str(name): Instance(name=str(name), **table[name]) for name in table}


def find_instance(name: Any, own: Mapping[str, Any]) -> Instance | None:
    """A machine by name, with or without SageMaker's ``ml.``.

    Raises:
        ConfigError: it is in no table; the line says what to give.
    """
    if name is None:
        return None
    name = str(name).removeprefix("ml.")
    # The user's own entry wins over the table.
    if name in own:
        return _own(name, own[name])
    known = known_instances()
    if name in known:
        return known[name]
    if name.startswith(("trn", "inf")):
        raise ConfigError(f"instance_type: {name} is a machine of Trainium, which smp does not run on")
    raise ConfigError(
        f"instance_type: how many GPUs has {name}{did_you_mean(name, known, '?')} To tell: "
        f"+instances='{{{name}: {{devices: 8, efa: 0}}}}'"
    )


def _own(name: str, given: Any) -> Instance:
    known = {item.name: item for item in fields(Instance) if item.name != "name"}
    if not isinstance(given, Mapping) or "devices" not in given:
        raise ConfigError(f"instances.{name}: expected devices and, where known, memory_gib, efa and rdma")
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"instances.{name}.{key}: there is no such key{did_you_mean(str(key), known)}")
        if not isinstance(value, bool if key == "rdma" else int):
            raise ConfigError(
                f"instances.{name}.{key}: {value!r} is not {'true or false' if key == 'rdma' else 'a number'}"
            )
    return Instance(name=name, **given)
