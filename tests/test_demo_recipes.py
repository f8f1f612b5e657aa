"""The flat recipes that the demo passes to --config: settings that load and fit together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from smp.config import ModelConfig, load_config, resolve
from smp.config.command_line.cli import build_tree, read_values
from smp.config.command_line.entry_points import FINETUNE
from smp.config.rules.finetune import fill_in
from smp.models.arithmetic import count_parameters
from smp.models.presets import PRESETS
from tools.demo import EXPERTS

RECIPES = Path(__file__).parents[1] / "recipes_collection/recipes/laptop"


def test_the_recipe_of_fine_tuning_fits_together() -> None:
    path = str(RECIPES / "finetune_demo.yaml")
    values = read_values(["--config", path, "--load", "model", "--data-path", "samples.jsonl"], FINETUNE, "")
    config = fill_in(build_tree(FINETUNE, values))
    assert resolve(replace(config, model=ModelConfig(vocab_size=4096)), world_size=2).training.train_iters


def test_the_quick_start_resolves() -> None:
    path = str(RECIPES / "quickstart.yaml")
    flags = ["--config", path, "--mock-data", "--vocab-size", "4096", "--tensor-model-parallel-size", "2"]
    config = resolve(load_config(flags, PRESETS), world_size=2)
    assert config.training.train_iters is not None


def test_the_experts_of_the_demo_have_as_many_active_parameters_as_its_dense_model() -> None:
    flags = ["--config", str(RECIPES / "experts_demo.yaml"), "--mock-data", "--vocab-size", "4096"]
    dense = resolve(load_config(flags, PRESETS), world_size=2).model
    experts = resolve(load_config([*flags, *EXPERTS, "--expert-model-parallel-size", "2"], PRESETS), world_size=2).model
    one, other = (count_parameters(model, 4096) for model in (dense, experts))
    routers = experts.num_layers * 8 * experts.hidden_size
    assert other.active == one.active + routers and other.total > 1.4 * one.total
