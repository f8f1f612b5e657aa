"""Values of HyperPod's keys are of the kind that a key takes: another one is an error and no guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp.config import ConfigError
from smp.launch.cli import describe, prepare
from smp.launch.hyperpod import FORMS, translate
from smp.launch.hyperpod.key import FLAG
from smp.launch.recipe import Recipe
from tests.launch.test_hyperpod_forms import ARGS, DATA, MODEL, TEXTS, TRAINER, A
from tests.launch.test_recipes import V1

OURS = "training/llama/hf_llama3_8b_seq16k_gpu_p5x16_pretrain"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in {**TEXTS, "v1": V1}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def recipe(files: Path, name: str, *words: str) -> Recipe:
    source = name if name == OURS else f"{files}/{name}.yaml"
    return prepare([f"recipes={source}", "cluster=slurm", "base_results_dir=/fsx", *words])[0].recipe


NO = "expected true or false, got 'no'"


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("llmft", ARGS + "packing_samples=no", "training_args.packing_samples: " + NO),
        ("llmft", ARGS + "packing_samples=maybe", "expected true or false, got 'maybe'"),
        ("llmft", ARGS + "packing_samples=1", "expected true or false, got '1'"),
        ("llmft", ARGS + "gradient_checkpointing=flase", "expected true or false, got 'flase'"),
        ("llmft", "+" + MODEL + "peft_config.use_dora=no", "peft_config.use_dora: " + NO),
        ("llmft", "+" + ARGS + "use_tensorboard=no", "use_tensorboard: no cannot be had: take true, false or a folder"),
        ("llmft", "+recipes.elastic_policy.is_elastic=no", "elastic_policy.is_elastic: " + NO),
        ("llmft", ARGS + "learning_rate=1e-4x", "learning_rate: expected a finite number, got '1e-4x'"),
        ("llmft", ARGS + "learning_rate=nan", "learning_rate: expected a finite number, got 'nan'"),
        ("llmft", ARGS + "learning_rate=true", "learning_rate: expected a finite number, got 'true'"),
        ("llmft", ARGS + "train_batch_size=None", "train_batch_size: 'None' is a text; null unsets a key"),
        ("llmft", "+" + ARGS + "save_steps=false", "save_steps: expected an integer, got 'false'"),
        ("llmft", "+" + ARGS + "save_steps=2.5", "save_steps: expected an integer, got '2.5'"),
        ("llmft", "+" + ARGS + "ring_attn_size=false", "ring_attn_size: expected an integer, got 'false'"),
        ("llmft", "+" + ARGS + "aux_loss_coef=false", "aux_loss_coef: expected a finite number, got 'false'"),
        ("llmft", ARGS + "adam_betas='09'", "adam_betas: expected a list of two numbers, got '09'"),
        ("llmft", ARGS + "adam_betas=[0.9]", "adam_betas: expected a list of two numbers, got '[0.9]'"),
        ("llmft", MODEL + "attn_implementation=eagre", "attn_implementation: eagre cannot be had: take one of eager"),
        ("llmft", "recipes.training_config.training_args=5", "training_args: it is a section, and cannot be 5"),
        ("verl", DATA + "use_dynamic_bsz=off", "use_dynamic_bsz: expected true or false, got 'off'"),
        ("verl", "+" + TRAINER + "test_freq=sometimes", "test_freq: expected an integer or after_each_epoch"),
        (
            "verl",
            "+recipes.training_config.checkpoint.save_contents=[hf_modle]",
            "hf_modle is none of model, optimizer",
        ),
        ("grpo", A + "actor.use_kl_loss=no", "actor.use_kl_loss: " + NO),
        ("grpo", A + "rollout.val_kwargs.do_sample=no", "val_kwargs.do_sample: " + NO),
        ("grpo", A + "actor.use_dynamic_bsz=no", "actor.use_dynamic_bsz: " + NO),
        ("nemo", "recipes.log.name=llama3_70b_finetue", "must say which it is, pretraining or finetune"),
        ("v1", "recipes.model.fp8=no", "model.fp8: " + NO),
        ("v1", "+recipes.use_smp_model=no", "use_smp_model: " + NO),
        ("v1", "recipes.model.do_finetune=no", "model.do_finetune: " + NO),
        ("v1", "recipes.trainer.max_steps=ten", "trainer.max_steps: expected an integer, got 'ten'"),
        (OURS, "recipes.model.fp8=no", "model.fp8: " + NO),
        (OURS, "recipes.model.activation_checkpointing=off", "expected true or false, got 'off'"),
    ],
)
def test_a_value_of_another_kind_is_one_line(files: Path, name: str, word: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        recipe(files, name, word)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_yamls_words_for_true_and_false_are_those_of_omegaconf(files: Path) -> None:
    """YAML 1.1: in a file a bare word no is false. On a command line Hydra takes it for a text."""
    text = TEXTS["llmft"].replace("packing_samples: false", "packing_samples: yes")
    assert text != TEXTS["llmft"]
    (files / "yes.yaml").write_text(text)
    assert recipe(files, "yes").settings["packing"] == "best-fit"
    assert recipe(files, "llmft", ARGS + "packing_samples=TRUE").settings["packing"] == "best-fit"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_key_that_is_read_says_what_its_values_are(form: Any) -> None:
    for name, key in form.keys.items():
        constant = key.text.startswith(("changes nothing", "refused"))
        assert constant or key.kind or key.setting or key.is_text, name
        if key.kind is FLAG:
            leaf = name.replace("*.", "x.").replace(".*", ".x")
            for word in ("no", "off", "flase", "", " ", 0, 1, "none"):
                if word != "":  # a variable that a script was not given
                    with pytest.raises(ConfigError, match="expected true or false"):
                        translate({leaf: word}, form)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("llmft", ARGS + "learning_rate="),
        ("llmft", ARGS + "train_batch_size="),
        ("llmft", ARGS + "packing_samples="),
        ("llmft", ARGS + "adam_betas="),
        ("verl", DATA + "train_batch_size="),
        ("grpo", A + "rollout.n="),
        ("v1", "recipes.model.optim.lr="),
        ("v1", "recipes.model.train_batch_size="),
        ("v1", "recipes.trainer.max_steps="),
        (OURS, "recipes.model.optim.lr="),
    ],
)
def test_an_empty_value_is_no_default(files: Path, name: str, word: str) -> None:
    with pytest.raises(ConfigError, match="a value is missing; leave the word out, or give null to take the key away"):
        recipe(files, name, word)


def test_a_variable_that_a_script_was_not_given_is_left_out(files: Path) -> None:
    words = [ARGS + "training_dir=", "recipes.training_config.datasets.train_data.file_path=", "recipes.run.name="]
    assert recipe(files, "llmft", *words).settings == recipe(files, "llmft").settings


@pytest.mark.parametrize(
    ("name", "word", "line"),
    [
        ("llmft", "~" + ARGS + "learning_rate", "lr 0.0001 has become 2e-05"),
        ("llmft", ARGS + "learning_rate=null", "lr 0.0001 has become 2e-05"),
        ("llmft", "~" + ARGS + "train_batch_size", "global_batch_size 16 is unset now"),
        ("v1", "~recipes.model.optim.lr", "lr 0.0001 has become 0.0003"),
        (OURS, "~recipes.global_batch_size", "global_batch_size 256 is unset now"),
        ("llmft", MODEL + "peft_config=null", "lora_rank 16 is unset now, lora_alpha 32.0 is unset now, "),
        ("llmft", "~" + ARGS + "use_tensorboard", None),
    ],
)
def test_a_key_that_is_taken_away_says_what_is_used(files: Path, name: str, word: str, line: str | None) -> None:
    source = name if name == OURS else f"{files}/{name}.yaml"
    made = prepare([f"recipes={source}", "cluster=slurm", "base_results_dir=/fsx", word])
    lines = [said for said in describe(*made) if "takes away" in said]
    assert lines == [] if line is None else lines[0].startswith(f"{word} takes away what the recipe says: {line}")


def test_a_key_whose_reference_cannot_be_resolved_may_be_taken_away(files: Path) -> None:
    text = (files / "llmft.yaml").read_text()
    (files / "llmft.yaml").write_text(text.replace("learning_rate: 0.0001", "learning_rate: ${oc.env:SMP_NO_SUCH}"))
    with pytest.raises(ConfigError, match="SMP_NO_SUCH"):
        recipe(files, "llmft")
    assert "lr" not in recipe(files, "llmft", "~" + ARGS + "learning_rate").settings
