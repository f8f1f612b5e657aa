"""The losses of reinforcement learning against numbers of TRL 1.16 (losses and gradients in fp64, made with its own
``_compute_loss``), and in every layout of completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config.objectives import ObjectiveConfig
from smp.config.rollouts import RolloutConfig
from smp.config.rules.online import fill_rollouts
from smp.config.schema import Config
from smp.layers.heads.answers import TokenValues
from smp.training.objectives.policy import Known, PolicyLoss

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "trl_policy_losses.json").read_text())
NOT_OURS = {
    "bnpo": "depends on how the batch is cut into micro-batches",
    "vespo": "not offered",
    "entropy": "not offered",
}
GIVEN = {name: torch.tensor(values) for name, values in RECORDED["inputs"].items()}


def cases() -> list[str]:
    return [name for name in RECORDED["cases"] if not any(part in name for part in NOT_OURS)]


def settings_of(name: str, options: dict[str, Any]) -> RolloutConfig:
    own = {key: options[key] for key in ("epsilon", "epsilon_high", "delta", "beta", "loss_type") if key in options}
    own |= {key: options[key] for key in ("use_bias_correction_kl", "off_policy_mask_threshold") if key in options}
    if mode := options.get("vllm_importance_sampling_mode"):
        own |= {
            "importance_sampling_mode": mode,
            "importance_sampling_clip_max": options["vllm_importance_sampling_clip_max"],
        }
        if options.get("vllm_importance_sampling_clip_min") is not None:
            own["importance_sampling_clip_min"] = options["vllm_importance_sampling_clip_min"]
    if level := options.get("importance_sampling_level"):
        own["importance_sampling_level"] = level
    objective = "rloo" if name.startswith("rloo") else "grpo"
    if objective == "rloo":
        own["beta"] = 0.0
    rollouts = RolloutConfig(
        reward_funcs="number", max_completion_length=options.get("max_completion_length", 8), **own
    )
    filled = fill_rollouts(Config(objective=ObjectiveConfig(objective=objective), rollouts=rollouts))
    assert filled is not None
    return filled


def judged(name: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    options = RECORDED["cases"][name]["options"]
    mask = GIVEN["completion_mask"].bool()
    if options.get("use_tool_mask"):
        mask &= GIVEN["tool_mask"].bool()
    counted = mask.clone()
    counted[options.get("rows_masked", [])] = False
    number = GIVEN["completion_ids"]
    logits = GIVEN["logits"].double().requires_grad_()
    values = logits.log_softmax(-1).gather(-1, number[..., None])[..., 0]
    steps = options.get("gradient_accumulation_steps", 1)
    known = Known(
        GIVEN["advantages"].double()[:, None],
        GIVEN["sampling_per_token_logps"].double(),
        GIVEN["old_per_token_logps"].double() if options["use_old_logps"] else None,
        GIVEN["ref_per_token_logps"].double() if options.get("beta") else None,
        # TRL's share of a generation's tokens that are those of this optimizer step
        int(options.get("num_items_in_batch", mask.sum()) * steps / options.get("steps_per_generation", 1)),
        len(counted) * steps,
    )
    found = PolicyLoss(settings_of(name, options)).judge(
        known, TokenValues(torch.where(counted, values.detach(), 0.0), counted)
    )
    slopes = torch.where(counted, found.slopes.double(), 0.0)
    (gradient,) = torch.autograd.grad((values * slopes).sum(), logits)
    return found.loss, gradient, found.metrics | {"slopes": slopes}


@pytest.mark.parametrize("name", cases())
def test_losses_and_gradients_are_trls(name: str) -> None:
    loss, gradient, metrics = judged(name)
    wanted = RECORDED["cases"][name]["output"]
    torch.testing.assert_close(loss.double(), torch.tensor(wanted["loss"]).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(metrics["slopes"], torch.tensor(wanted["grad_logps"]).double(), rtol=0, atol=1e-6)
    assert abs(float(gradient.norm()) - wanted["grad_logits_norm"]) < 1e-6


def test_there_are_recorded_numbers_of_most_of_it() -> None:
    assert len(cases()) >= 28
