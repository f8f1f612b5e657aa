"""``config.json`` of a Hugging Face folder to settings of a model, and back. No torch here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from smp.config import Config, ConfigError, ModelConfig, TrainingConfig, resolve
from smp.convert.families import FAMILIES, REASONS, Family

CONFIG = "config.json"
FREE = {"model", "hidden_dropout", "attention_dropout", "init_method_std", "make_vocab_size_divisible_by"}
"""Settings that do not belong to the architecture: the same weights mean the same whatever they are."""
_SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position",
}
_REQUIRED = object()


def is_hf_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder that describes a Hugging Face model (an object store's URL is not)."""
    return (Path(path) / CONFIG).is_file()


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        ConfigError: it cannot be read, or is no JSON object.
    """
    path = Path(folder) / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The settings that decide what weights mean, by name. What has no effect beside the others is at its default."""
    default, values = ModelConfig(), {f.name: getattr(config, f.name) for f in fields(ModelConfig)}
    idle = []
    if config.position_embedding_type != "rope":
        idle += ["rotary_base", "rotary_percent"]
    if not config.use_rope_scaling:
        idle += list(_SCALING.values())
    if config.disable_bias_linear is False:
        idle += ["add_qkv_bias"]
    values |= {name: getattr(default, name) for name in idle}
    return {name: value for name, value in values.items() if name not in FREE}


def resolved(**values: Any) -> ModelConfig:
    """A model's settings with derived defaults filled in and checked.

    Raises:
        ConfigError: they do not fit together.
    """
    return resolve(Config(model=ModelConfig(**values), training=TrainingConfig(dry_run=True)), world_size=1).model


def family_of(content: Mapping[str, Any], where: str) -> Family:
    """The table of the architecture that a config.json names.

    Raises:
        ConfigError: there is none; the reason, if it is known, and the nearest architecture that there is.
    """
    names, kind = content.get("architectures") or [], str(content.get("model_type"))
    name = str(names[0]) if isinstance(names, list) and names else ""
    for family in FAMILIES.values():
        if (name and name == family.architecture) or (not name and kind == family.model_type):
            return family
    known = {f.architecture: f for f in FAMILIES.values()}
    near = difflib.get_close_matches(name or kind, [*known, *FAMILIES], n=1, cutoff=0.0)[0]
    nearest = known[near].architecture if near in known else FAMILIES[near].architecture
    reason = next((text for part, text in REASONS.items() if part in f"{kind} {name}".lower()), "")
    because = f" ({reason} do not exist here)" if reason else ""
    raise ConfigError(f"{where}: {name or kind} is not supported{because}; the nearest that is: {nearest}")


def from_hf(content: Mapping[str, Any], where: str = CONFIG) -> ModelConfig:
    """Settings of the model that a config.json describes, resolved.

    Args:
        content: of the file.
        where: its path, for messages.

    Raises:
        ConfigError: an architecture or a setting that our decoder does not have, or a value that is missing.
    """
    family = family_of(content, where)
    reader = _Reader(family, content, where)
    for key, value in family.required.items():
        reader.require(key, value)
    values = dict(family.fixed)
    for key, name in family.fields.items():
        values |= reader.field(key, name)
    values |= reader.activation()
    if family.rope_keys is not None:
        values |= reader.rope()
    if family.window_key is not None:
        values["window_size"] = reader.window(values["num_layers"])
    try:
        return resolved(**values)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


class _Reader:
    """One config.json with the defaults of its family."""

    def __init__(self, family: Family, content: Mapping[str, Any], where: str) -> None:
        self.family, self.content, self.where = family, content, where

    def get(self, key: str) -> Any:
        """The value, or what its absence means."""
        value = self.content.get(key, self.family.defaults.get(key, _REQUIRED))
        if value is _REQUIRED:
            raise ConfigError(f"{self.where}: {key} is missing")
        return value

    def require(self, key: str, value: Any) -> None:
        if self.content.get(key, value) != value:
            raise ConfigError(f"{self.where}: {key} {self.content[key]!r} is not supported, only {value!r}")

    def field(self, key: str, name: str) -> dict[str, Any]:
        """One of our settings, under its name."""
        value = self.get(key)
        if name == "tied":
            return {"untie_embeddings_and_output_weights": not value}
        if name == "bias":
            if bool(self.get("attention_bias")) != bool(self.get("mlp_bias")):
                raise ConfigError(
                    f"{self.where}: attention_bias and mlp_bias differ: here linear layers have all a bias or none"
                )
            return {"disable_bias_linear": not value}
        expected = float if name == "norm_epsilon" else bool if name == "parallel_residual" else int
        fits = isinstance(value, int | float) and (expected is not int or isinstance(value, int))
        if value is not None and not fits:
            raise ConfigError(f"{self.where}: {key} {value!r} is not a number")
        return {name: value}

    def activation(self) -> dict[str, Any]:
        key = self.family.activation_key
        value = self.get(key)
        if value not in self.family.activations:
            known = ", ".join(self.family.activations)
            raise ConfigError(f"{self.where}: {key} {value!r} is not supported, only {known}")
        return dict(self.family.activations[value])

    def rope(self) -> dict[str, Any]:
        """RoPE's settings, in the form of transformers 5 (``rope_parameters``) or of those before."""
        assert self.family.rope_keys is not None
        base_key, fraction_key = self.family.rope_keys
        given = self.content.get("rope_parameters") or self.content.get("rope_scaling") or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise ConfigError(f"{self.where}: RoPE of different kinds in different layers is not supported")
        default = self.family.defaults.get(fraction_key, 1.0)
        values: dict[str, Any] = {
            "rotary_base": float(given.get("rope_theta", self.content.get(base_key, self.get(base_key)))),
            "rotary_percent": float(given.get("partial_rotary_factor", self.content.get(fraction_key, default))),
        }
        if values["rotary_percent"] != 1.0 and fraction_key == "partial_rotary_factor":
            raise ConfigError(f"{self.where}: {fraction_key} is not a setting of {self.family.architecture}")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return values
        if kind != "llama3":
            raise ConfigError(f"{self.where}: RoPE of type {kind!r} is not supported, only default and llama3")
        scaling = {"original_max_position_embeddings": self.content.get("max_position_embeddings"), **given}
        missing = [key for key in _SCALING if scaling.get(key) is None]
        if missing:
            raise ConfigError(f"{self.where}: RoPE of type llama3 without {missing[0]}")
        return values | {"use_rope_scaling": True} | {name: scaling[key] for key, name in _SCALING.items()}

    def window(self, layers: int) -> int | None:
        """The sliding window, if all layers have it."""
        assert self.family.window_key is not None
        window = self.get(self.family.window_key)
        if self.family.model_type == "mistral":
            return window
        if not self.content.get("use_sliding_window", False) or window is None:
            return None
        first = self.content.get("max_window_layers", 28)
        kinds = self.content.get("layer_types") or [
            f"{'full' if i < first else 'sliding'}_attention" for i in range(layers)
        ]
        if set(kinds) == {"full_attention"}:
            return None
        if set(kinds) != {"sliding_attention"}:
            raise ConfigError(f"{self.where}: a sliding window in some layers only is not supported")
        return window


def to_hf(config: ModelConfig, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json for ``config``.

    Args:
        config: resolved, with its vocabulary.
        dtype: of the weights, as torch spells it.
        base: the config.json that the weights once came with. When it still describes them it is kept as it is, but for
            the dtype; else what does not belong to the architecture (ids of special tokens and the like) is taken over.

    Raises:
        ConfigError: no family of the table computes what this model does.
    """
    family = _family_for(config, base)
    wanted = architecture(config)
    if base is not None and _describes(base, wanted):
        out = dict(base)
    else:
        out = {key: base[key] for key in _CARRIED if base is not None and key in base} | _written(config, family)
    key = "torch_dtype" if "torch_dtype" in out else "dtype"  # its name before transformers 4.56
    return out | {key: dtype}


_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache")


def _describes(content: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    try:
        return architecture(from_hf(content)) == wanted
    except ConfigError:
        return False


def _family_for(config: ModelConfig, base: Mapping[str, Any] | None) -> Family:
    """The family of ``base`` if it can say it, else the first of the table that can."""
    first = [f for f in FAMILIES.values() if base is not None and f.model_type == base.get("model_type")]
    wanted, nearest = architecture(config), {}
    for family in [*first, *FAMILIES.values()]:
        try:
            said = architecture(from_hf(_written(config, family)))
        except (ConfigError, KeyError):
            continue
        different = [name for name, value in wanted.items() if said[name] != value]
        if not different:
            return family
        nearest[len(different)] = (family, different)
    problem = "no family"
    if nearest:
        family, different = nearest[min(nearest)]
        flags = ", ".join(f"--{name.replace('_', '-')} {wanted[name]}" for name in different)
        problem = f"the nearest, {family.architecture}, has no {flags}"
    raise ConfigError(f"no Hugging Face architecture of the table computes what this model does: {problem}")


def _written(config: ModelConfig, family: Family) -> dict[str, Any]:
    """``config`` in the words of a family, as far as it has words."""
    out: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for key, name in family.fields.items():
        if name == "tied":
            out[key] = not config.untie_embeddings_and_output_weights
        elif name == "bias":
            out[key] = not config.disable_bias_linear
        else:
            out[key] = getattr(config, name)
    chosen = {"tanh_gelu": config.tanh_gelu}
    names = [n for n, means in family.activations.items() if all(chosen[k] == v for k, v in means.items())]
    out[family.activation_key] = names[0]
    if family.rope_keys is not None:
        base_key, fraction_key = family.rope_keys
        out[base_key] = config.rotary_base
        if fraction_key in family.defaults:
            out[fraction_key] = config.rotary_percent
        out["rope_scaling"] = None
        if config.use_rope_scaling:
            out["rope_scaling"] = {"rope_type": "llama3"} | {k: getattr(config, n) for k, n in _SCALING.items()}
    if family.window_key is not None:
        out[family.window_key] = config.window_size
        if family.model_type != "mistral":
            out |= {"use_sliding_window": config.window_size is not None, "max_window_layers": 0}
    return out
