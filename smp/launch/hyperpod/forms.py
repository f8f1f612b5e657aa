"""Which form a HyperPod recipe has, and which have no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import did_you_mean
from smp.launch.hyperpod.checkpointless import CHECKPOINTLESS
from smp.launch.hyperpod.form import Form
from smp.launch.hyperpod.key import FeatureError, Key
from smp.launch.hyperpod.keys import KEYS, V1
from smp.launch.hyperpod.llmft import LLMFT
from smp.launch.hyperpod.verl import VERL
from smp.launch.hyperpod.verl_rl import VERL_RL

FORMS = {form.name: form for form in (V1, LLMFT, VERL, VERL_RL, CHECKPOINTLESS)}
_KINDS = tuple(name for name in FORMS if name != VERL_RL.name)
"""Values of run.model_type."""
_REFUSED = {
    "llm_as_judge": "no language model judges texts here",
    "evaluation": "it is no job here; tools/evaluate.py --tasks evaluates a model",
}
"""Sections for which a recipe is refused, and why."""


def form_of(tree: Mapping[str, Any]) -> Form | None:
    """The form of a recipe; None: it is one of this project's.

    Raises:
        FeatureError: it is for a trainer that this project has no counterpart of, which the line names.
        ConfigError: run.model_type is none.
    """
    run, trainer = _section(tree, "run"), _section(tree, "trainer")
    kind, accelerator = str(run.get("model_type") or ""), str(trainer.get("accelerator") or "")
    # Several marks: recipes for Trainium differ from release to release.
    if "neuron" in kind or accelerator.startswith(("neuron", "trn", "xla")) or "distributed_strategy" in tree:
        raise FeatureError(
            f"run.model_type: {kind or accelerator} is for Trainium, which smp does not run on; take one for GPUs"
        )
    model = str(_section(tree, "model").get("model_name") or "")
    if kind.startswith("amazon.") or kind == "nova" or model.startswith("nova"):
        name = model if model.startswith("nova") else kind
        raise FeatureError(
            f"run.model_type: {name} is Amazon's own model, which smp cannot have; take an open one's recipe"
        )
    if kind == "mtrl":
        raise FeatureError(
            "run.model_type: mtrl is reinforcement learning over several turns with tools, which smp does not do from "
            "a recipe"
        )
    for name, why in _REFUSED.items():
        if isinstance(tree.get(name), Mapping):
            raise FeatureError(f"{name}: {why}")
    if "mcore_gpt" in _section(tree, "model"):
        raise FeatureError("model.mcore_gpt: it is a recipe of NeMo's own trainer; take one of HyperPod's (hf)")
    # AWS's scripts set the model of a DPO recipe like that of GRPO: only the section "actor" tells
    # them apart.
    if kind == VERL.name and "actor" in _section(_section(tree, "training_config"), "actor_rollout_ref"):
        return VERL_RL
    if kind in _KINDS:
        return FORMS[kind]
    if kind:
        raise ConfigError(f"run.model_type: {kind} is none of {', '.join(_KINDS)}{did_you_mean(kind, _KINDS)}")
    if "training_config" in tree:
        raise ConfigError(f"run.model_type is missing next to training_config: one of {', '.join(_KINDS)}")
    return V1 if has_its_sections(tree) else None


def has_its_sections(tree: Mapping[str, Any]) -> bool:
    """Whether a recipe is HyperPod's: ``model`` is a section there, and a name in this project's."""
    return any(isinstance(tree.get(name), Mapping) for name in ("model", "exp_manager", "training_config"))


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def key_of(name: str) -> Key | None:
    """A key in any of the forms; V1 first, since its keys also work on this project's recipes."""
    if name in KEYS:
        return KEYS[name]
    return next((key for form in FORMS.values() if (key := form.find(name)) is not None), None)
