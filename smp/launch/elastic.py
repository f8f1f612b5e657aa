"""What an elastic job (``max_nodes``) needs of torchrun, which restarts workers when nodes join or are lost."""

from __future__ import annotations

from smp.config import ConfigError
from smp.config.rules.elastic import OWN_STORES
from smp.launch.recipe import Recipe

SHUTDOWN = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
"""Seconds that workers have to save at the end of a job before they are killed. Where nodes come or go torchrun 2.13
gives them 30, whatever this says."""
# Workers fail when a node is lost, which torchrun counts as a restart.
RESTARTS = 1000
MEETING = "last_call_timeout=30,keep_alive_interval=2,keep_alive_max_attempt=15"
"""Seconds to wait for more nodes than needed; a node that is silent for 15 x 2 seconds is lost."""


def is_elastic(recipe: Recipe) -> bool:
    """Whether nodes may come and go."""
    return recipe.task != "custom" and recipe.settings.get("max_nodes") is not None


def variables_of(recipe: Recipe) -> dict[str, str]:
    """Environment variables that torchrun needs for an elastic or in-process restarting run."""
    elastic = is_elastic(recipe)
    inside = recipe.task != "custom" and recipe.settings.get("inprocess_restart")
    return ({OWN_STORES: "1"} if elastic or inside else {}) | (SHUTDOWN if elastic else {})


def nodes_of(recipe: Recipe) -> str:
    """torchrun's arguments for the number of nodes.

    Raises:
        ConfigError: the job would start with a number of nodes that it must not have.
    """
    if not is_elastic(recipe):
        return f"--nnodes {recipe.num_nodes}"
    least, most = recipe.settings.get("min_nodes") or 1, recipe.settings["max_nodes"]
    if recipe.num_nodes < max(least, 2):
        raise ConfigError(
            f"trainer.num_nodes: {recipe.num_nodes} of an elastic job: it starts with 2 nodes or more, at least "
            f"min_nodes {least}"
        )
    return f"--nnodes {least}:{max(most, recipe.num_nodes)} --max-restarts {RESTARTS} --rdzv-conf {MEETING}"


def refuse(recipe: Recipe, where: str, why: str) -> None:
    """Raise ConfigError for an elastic job where nodes cannot come and go."""
    if is_elastic(recipe):
        raise ConfigError(
            f"max_nodes with {where}: {why}; take cluster=slurm, or cluster=k8s with kind=PyTorchJob or Job"
        )
