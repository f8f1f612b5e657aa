"""What a folder says about its model, also when an older version of this program wrote it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from smp.config import Config, ConfigError, ModelConfig
from smp.config.command_line.cli import load_config
from smp.config.layers import effective
from smp.config.rules.checks import check_effects
from smp.config.schema import TrainingConfig
from smp.convert.describe import read_architecture


def write(folder: Path, model: ModelConfig, without: str = "") -> str:
    saved = {name: value for name, value in asdict(model).items() if not without or not name.startswith(without)}
    (folder / "manifest.json").write_text(json.dumps({"extra": {"config": saved}}))
    return str(folder)


@pytest.mark.parametrize("newer", ["", "rope_scaling_type", "yarn"])
def test_settings_that_a_checkpoint_is_too_old_for_are_at_their_default(newer: str, tmp_path: Path) -> None:
    model = ModelConfig(num_layers=3, hidden_size=96, use_rope_scaling=True, rope_scaling_factor=4.0)
    found = read_architecture(write(tmp_path, model, newer))
    assert found is not None and (found["num_layers"], found["hidden_size"]) == (3, 96)
    assert (found["use_rope_scaling"], found["rope_scaling_factor"], found["rope_scaling_type"]) == (
        True,
        4.0,
        "llama3",
    )
    assert read_architecture(write(tmp_path, model, "num_layers")) is None


def test_what_needs_something_without_effect_has_none_either() -> None:
    """A named size's scaling of RoPE goes when RoPE goes, with all that belongs to it."""
    size = {"use_rope_scaling": True, "rope_scaling_type": "yarn", "rope_scaling_factor": 32.0, "yarn_beta_fast": 8.0}
    argv = ["--model", "m", "--position-embedding-type", "none", "--vocab-size", "9"]
    config = load_config(argv, {"m": size})
    check_effects(config)
    assert config.model == ModelConfig(model="m", position_embedding_type="none", vocab_size=9)
    assert effective(ModelConfig(**size)) == ModelConfig(**size)
    assert {f.name for f in fields(ModelConfig)} > size.keys()


def test_a_missing_setting_is_one_of_the_same_program() -> None:
    tuned = Config(training=TrainingConfig(eval_iters=5))
    with pytest.raises(ConfigError, match="--eval-iters 5 has no effect without --eval-interval or --test-data-path"):
        check_effects(tuned)
