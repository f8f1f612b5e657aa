"""Objectives: what is minimised, one file for each family.

Begin with ``contract``: what the run asks of an objective, and what it gives. ``next_token`` is the shortest one,
``preference`` (DPO and its kin, ORPO), ``kto`` and ``reward`` judge answers, ``policy`` (GRPO and its kin) what the
model wrote itself, ``distillation`` follows a teacher, ``reference`` is a model to compare with.
What the configuration must know of each without torch is a row of ``smp.config.objectives``.
"""

from __future__ import annotations

from smp.config import Config
from smp.config.objectives import OBJECTIVES, ObjectiveFacts
from smp.config.rollouts import ONLINE
from smp.training.objectives import distillation, kto, next_token, policy, preference, reward
from smp.training.objectives.contract import Implementation, Objective, Surroundings

IMPLEMENTATIONS: dict[str, Implementation] = {
    "sft": next_token.IMPLEMENTATION,
    "distill": distillation.IMPLEMENTATION,
    "dpo": preference.DPO,
    "orpo": preference.ORPO,
    "kto": kto.IMPLEMENTATION,
    "reward": reward.IMPLEMENTATION,
    **dict.fromkeys(ONLINE, policy.IMPLEMENTATION),
}
"""By the name in ``OBJECTIVES``."""


def implementation_of(config: Config) -> Implementation:
    """The implementation of the run's objective; a pretraining run's is the next token."""
    return IMPLEMENTATIONS["sft" if config.objective is None else config.objective.objective]


def build_objective(config: Config, around: Surroundings) -> Objective:
    """The objective of a run."""
    return implementation_of(config).build(config, around)


def add(name: str, facts: ObjectiveFacts, implementation: Implementation) -> None:
    """Register an objective of another package under ``--objective name``, before a command line is read.

    Raises:
        ValueError: there is one of this name.
    """
    if name in OBJECTIVES:
        raise ValueError(f"there is an objective {name} already")
    OBJECTIVES[name], IMPLEMENTATIONS[name] = facts, implementation
