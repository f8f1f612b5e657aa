"""A model computed by transformers: settings that need this project's decoder are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from smp.config.command_line.commands import pip_install
from smp.config.command_line.fields import flag_of, given, require
from smp.config.model import ModelConfig
from smp.config.schema import Config, ConfigError

CHOICE = ("model_implementation", "model_config")
"""Settings of a model that do not belong to its architecture."""

_ONLY_OURS = {
    "parallel": (
        *("pipeline_model_parallel_size", "context_parallel_size"),
        "expert_tensor_parallel_size",
        *("fp8_format", "attention_backend"),
    ),
    "rollouts": ("rollout_engine",),
}
"""Settings of a run, by group, that need layers of this project."""


def check_foreign(config: Config) -> None:
    """Raise ConfigError for settings that a model computed by transformers does not support."""
    for group, names in _ONLY_OURS.items():
        settings = getattr(config, group)
        flags = [] if settings is None else given(settings, *names)
        require(not flags, f"{', '.join(flags)}: {_ONLY_HERE}; leave it out")
    require(
        not (config.has_adapters and config.checkpoint.save_hf),
        "--save-hf: adapters of a model that transformers computes stay apart, in <save>/adapter: leave it out; peft "
        "merges them afterwards (docs/any-model.md)",
    )
    if config.model.reads_apart:
        _check_apart(config)
    kernels = config.parallel.kernels
    require(kernels != "apex", f"--kernels {kernels}: {_ONLY_HERE}; leave it out")
    data = config.data
    if config.objective is None:
        # transformers derives document masks from positions that start again.
        require(
            data.reset_attention_mask == data.reset_position_ids,
            "--reset-attention-mask and --reset-position-ids go together with --model-implementation transformers, "
            "whose masks follow from positions; give both or none",
        )


_APART = "the model is an encoder with a decoder, which read a prompt and its answer apart"


def _check_apart(config: Config) -> None:
    """Raise ConfigError for settings that need prompt and answer in one sequence."""
    objective, data, parallel = config.objective, config.data, config.parallel
    # The encoder reads prompts, the decoder answers: two sequences of their own lengths for each sample.
    require(objective is not None, f"pretrain_gpt.py has no prompts, and {_APART}: fine-tune it (finetune.py)")
    assert objective is not None
    name = objective.objective
    require(name == "sft", f"--objective {name}: {_APART}, which goes with --objective sft")
    require(data.packing == "off", f"--packing {data.packing}: {_APART}; give --packing off")
    require(data.mask_prompt, f"--no-mask-prompt: {_APART}; leave it out")
    require(data.truncation_side == "right", f"--truncation-side {data.truncation_side}: {_APART}; leave it out")
    require(not parallel.sequence_parallel, f"--sequence-parallel: {_APART}; leave it out")
    require(not parallel.compile, f"--compile: {_APART}, of other lengths in every batch; leave it out")
    dropout = config.lora is not None and config.lora.lora_dropout
    require(not dropout, f"--lora-dropout {dropout}: masks go by tokens of one sequence, and {_APART}; give 0")


_ONLY_HERE = (
    "only this project's decoder has it, and transformers computes this model (--model-implementation; "
    "docs/any-model.md)"
)


def require_implementation(config: Config) -> None:
    """Raise ConfigError where --model-implementation is not what computes the model."""
    model, load = config.model, config.checkpoint.load
    # A checkpoint says by itself what computes it, so the flag can only agree or be an error.
    asked, is_ours = model.model_implementation, not model.is_foreign
    if asked == "auto" or (asked == "smp") == is_ours:
        return
    where = f"--load {load} is a checkpoint of" if load is not None else "this is"
    whose = "this project's decoder" if is_ours else "transformers' module"
    raise ConfigError(
        f"--model-implementation {asked}: {where} {whose}; leave it out"
        + ("" if load is not None or not is_ours else ", or give --model-config or the --load of a Hugging Face folder")
    )


def refuse_architecture(given: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ConfigError for ``given`` architecture settings that differ from those ``found`` in the config.json, which
    describes the architecture completely."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    own = [name for name in given if name in defaults and name not in CHOICE]
    # Defaults of the schema are values, too: a flag equal to them changes nothing.
    flags = [flag_of(name) for name in own if given[name] != found.get(name, defaults[name])]
    require(
        not flags,
        f"{', '.join(flags)}: the architecture is that of config.json, which transformers computes; leave it out",
    )


def transformers_config(content: Mapping[str, Any], where: str) -> Any:
    """transformers' configuration object of a config.json.

    Raises:
        ConfigError: transformers is not installed, or does not know it.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigError(
            f"{where}: --model-implementation transformers needs transformers: {pip_install('transformers')}"
        ) from None
    values = dict(content)
    kind = values.pop("model_type", None)
    require(isinstance(kind, str), f"{where} has no model_type: it is no config.json of transformers'")
    try:
        return AutoConfig.for_model(kind, **_plain(values))
    except Exception as error:  # of any kind: each configuration checks its own values
        raise ConfigError(f"{where}: {' '.join(str(error).split())[:300]}") from None


def _plain(value: Any) -> Any:
    """The value with transformers' notation for numbers that JSON lacks, {"__float__": "Infinity"}, resolved."""
    if isinstance(value, Mapping):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {k: _plain(v) for k, v in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
