"""Single keys of a ``config.json`` as settings of ``ModelConfig``. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import skip_pattern, windowed
from smp.config.rules.positions import longrope_factors
from smp.convert.huggingface.family import Factor, Family

_FACTOR = {"factor": "rope_scaling_factor"}
_ORIGINAL = {"original_max_position_embeddings": "rope_original_max_position"}
_YARN = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
SCALINGS: dict[str, dict[str, str]] = {
    "llama3": _FACTOR
    | {"low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor"}
    | _ORIGINAL,
    "linear": _FACTOR,
    "dynamic": _FACTOR | _ORIGINAL,
    "yarn": _FACTOR | _ORIGINAL | {name: f"yarn_{name}" for name in _YARN},
    "longrope": _ORIGINAL
    | {"short_factor": "longrope_short_factor", "long_factor": "longrope_long_factor"}
    | {"attention_factor": "longrope_attention_factor"},
}
"""RoPE scalings by --rope-scaling-type, whose values are Hugging Face's names: key in the file -> setting."""
WINDOW_IN_ALL = ("mistral", "mixtral", "phi3", "starcoder2")
"""Families whose sliding window is in all layers or in none."""
OLD_LONGROPE = {"phi3": ("su", "yarn")}
"""Families whose files may call LongRoPE by older names."""
LAYERED_ROPE = ("gemma3_text", "olmo3")
"""Families whose layers with a window may have a RoPE of their own."""
NULL_ROPE = ("olmo_hybrid",)
"""Families in which a base of null means that there is no RoPE."""
_BOOLEANS = ("parallel_residual", "add_qkv_bias", "qk_layernorm")
"""Settings that are booleans in files and here."""
_REQUIRED = object()
# No number of a model is larger; comparisons with NaN are false, so it fails as well.
_LARGEST = 1 << 63  # no number of a model; nor is NaN below it
_KINDS = {int: "an integer", float: "a number", bool: "true or false"}


class Reader:
    """One config.json with the defaults of its family. Its methods raise ConfigError for impossible values.

    Args:
        family: whose configuration it is.
        content: of the file.
        where: its path, for messages.
    """

    def __init__(self, family: Family, content: Mapping[str, Any], where: str) -> None:
        self.family, self.content, self.where = family, content, where

    def get(self, key: str) -> Any:
        """The value of a key, or its default in transformers if it is absent."""
        # An alias counts where the key itself is missing.
        default = self.content.get(self.family.aliases.get(key, key), self.family.defaults.get(key, _REQUIRED))
        value = self.content.get(key, default)
        if value is _REQUIRED:
            raise ConfigError(f"{self.where}: {key} is missing")
        return value

    def require(self, key: str, value: Any) -> None:
        if self.content.get(key, value) != value:
            raise ConfigError(f"{self.where}: {key} {self.content[key]!r} is not supported, only {value!r}")

    def field(self, key: str, name: str) -> dict[str, Any]:
        """The setting ``name`` with the value of ``key``."""
        value = self.get(key)
        if name == "tied":
            # Negated: files say that matrices are tied.
            return {"untie_embeddings_and_output_weights": not value}
        if name == "bias":
            return self._biases()
        if name == "all_biases":
            self.check_number(key, value, bool)
            return {"disable_bias_linear": not value}
        # ``bool`` is checked exactly: 1 is not true.
        expected = float if name == "norm_epsilon" else bool if name in _BOOLEANS else int
        if value is not None:
            self.check_number(key, value, expected)
        return {name: value}

    def _biases(self) -> dict[str, Any]:
        """Biases of attention and MLPs; where a file has no key for the latter, the family decides. Where both are
        equal, only the common setting is set."""
        found = []
        for key in ("attention_bias", "mlp_bias"):
            value = self.get(key) if key in self.family.fields else self.family.defaults.get(key, False)
            self.check_number(key, value, bool)
            found.append(value)
        attention, mlp = found
        both = attention and mlp
        one = {"add_qkv_bias": attention, "add_attention_output_bias": attention, "add_mlp_bias": mlp}
        return {"disable_bias_linear": not both} | {name: value and not both for name, value in one.items()}

    def check_number(self, key: str, value: Any, expected: type = float) -> None:
        """Raise ConfigError unless ``value`` is a finite number of type ``expected``."""
        fits = type(value) is expected or (type(value) is int and expected is float)
        if not fits or not abs(value) < _LARGEST:
            raise ConfigError(f"{self.where}: {key} {value!r} is not {_KINDS[expected]}")

    def factor(self, key: str) -> dict[str, Any]:
        """A multiplier or cap, under its setting's name."""
        name, kind = self.family.factors[key]
        value = self.get(key)
        if value is None and kind == "same":
            return {name: None}
        self.check_number(key, value)
        if value <= 0:
            raise ConfigError(f"{self.where}: {key} {value} is not supported, only above 0")
        return {name: {"same": float(value), "inverse": 1 / value, "inverse_root": value**-0.5}[kind]}

    def activation(self) -> dict[str, Any]:
        key = self.family.activation_key
        if key is None:
            return {}
        value = self.get(key)
        if not isinstance(value, str) or value not in self.family.activations:
            known = ", ".join(self.family.activations)
            raise ConfigError(f"{self.where}: {key} {value!r} is not supported, only {known}")
        return dict(self.family.activations[value])

    def rope(self) -> dict[str, Any]:
        """RoPE's settings, from ``rope_parameters`` (transformers 5) or the keys of older versions."""
        assert self.family.rope_keys is not None
        base_key, fraction_key = self.family.rope_keys
        given = self.content.get("rope_parameters") or self.content.get("rope_scaling") or {}
        # The layers with full attention; ``own`` reads the others.
        if self.family.model_type in LAYERED_ROPE and isinstance(given, dict) and "full_attention" in given:
            given = given["full_attention"] or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise ConfigError(f"{self.where}: RoPE of different kinds in different layers is not supported")
        default = self.family.defaults.get(fraction_key, 1.0)
        # A base inside of rope_parameters wins.
        base = given.get("rope_theta", self.get(base_key))
        if base is None and self.family.model_type in NULL_ROPE:
            return {"position_embedding_type": "none"}
        fraction = given.get("partial_rotary_factor", self.content.get(fraction_key, default))
        self.check_number(base_key, base)
        self.check_number(fraction_key, fraction)
        values: dict[str, Any] = {"rotary_base": float(base), "rotary_percent": float(fraction)}
        if values["rotary_percent"] != 1.0 and fraction_key not in self.family.defaults:
            raise ConfigError(f"{self.where}: {fraction_key} is not a setting of {self.family.architecture}")
        kind = given.get("rope_type", given.get("type", "default"))
        # Phi-3's first files say "su" or "yarn".
        if kind in OLD_LONGROPE.get(self.family.model_type, ()):
            kind = "longrope"
        if kind == "default":
            return values
        if kind not in SCALINGS:
            known = ", ".join(["default", *SCALINGS])
            raise ConfigError(f"{self.where}: RoPE of type {kind!r} is not supported, only {known}")
        return values | {"use_rope_scaling": True, "rope_scaling_type": kind} | self._scaling(kind, given)

    def _scaling(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        """RoPE's scaling. The original length may be outside of it or default to the model's; YaRN's other settings
        have defaults."""
        longest = self.content.get("max_position_embeddings")
        default = self.family.defaults.get("original_max_position_embeddings")
        # Phi-3 has the original length next to rope_scaling, not in it.
        original = self.content.get("original_max_position_embeddings", default)
        scaling = {"original_max_position_embeddings": longest, **given}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        original = scaling["original_max_position_embeddings"]
        if kind == "yarn" and given.get("factor") is None and None not in (longest, original):
            self.check_number("max_position_embeddings", longest)
            self.check_number("original_max_position_embeddings", original)
            # transformers computes a missing factor so.
            scaling["factor"] = longest / original
        if kind == "longrope":
            scaling |= self._longrope(given, longest, original)
        if kind == "dynamic":  # there the original length is always this one
            scaling["original_max_position_embeddings"] = self.get("max_position_embeddings")
        optional = {"yarn": _YARN, "longrope": ("attention_factor",)}.get(kind, ())
        missing = [key for key in SCALINGS[kind] if scaling.get(key) is None and key not in optional]
        if missing:
            raise ConfigError(f"{self.where}: RoPE of type {kind} without {missing[0]}")
        values = {name: scaling[key] for key, name in SCALINGS[kind].items() if scaling.get(key) is not None}
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if values.get(f"yarn_{key}") == 0:  # transformers tests them as booleans: 0 counts as absent
                del values[f"yarn_{key}"]
        usable = "yarn_mscale" in values and "yarn_attention_factor" not in values
        if self.family.fixed.get("multi_latent_attention") and "yarn_mscale_all_dim" in values and not usable:
            raise ConfigError(f"{self.where}: mscale_all_dim is supported with mscale, without attention_factor")
        # mscale counts only in pairs, and not next to an explicit attention factor.
        if "yarn_attention_factor" in values or not {"yarn_mscale", "yarn_mscale_all_dim"} <= values.keys():
            values = {name: value for name, value in values.items() if not name.startswith("yarn_mscale")}
        return values

    def _longrope(self, given: Mapping[str, Any], longest: Any, original: Any) -> dict[str, Any]:
        """LongRoPE's factors as texts. A ``factor`` that differs from the ratio of lengths only affects attention's
        scale."""
        out: dict[str, Any] = {}
        for key in ("short_factor", "long_factor"):
            numbers = given.get(key)
            if not isinstance(numbers, list):
                raise ConfigError(f"{self.where}: RoPE of type longrope without a list {key}")
            for number in numbers:
                self.check_number(key, number)
            out[key] = " ".join(str(float(number)) for number in numbers)
        factor = given.get("factor")
        if factor is not None and given.get("attention_factor") is None:
            for key, value in (("factor", factor), ("max_position_embeddings", longest)):
                self.check_number(key, value)
            self.check_number("original_max_position_embeddings", original, int)
            if factor != longest / max(original, 2):
                # transformers' formula: sqrt(1 + ln(factor) / ln(original length)).
                scale = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
                out["attention_factor"] = scale
        return out

    def windows(self, layers: int) -> dict[str, Any]:
        """The sliding window, and which layers have it."""
        assert self.family.window_key is not None
        window = self.get(self.family.window_key)
        if window is not None:
            self.check_number(self.family.window_key, window, int)
        kinds = self._windowed(layers)
        if window is None or not any(kinds):
            return {"window_size": None}
        return {"window_size": window, "window_attn_skip_freq": skip_pattern(kinds, ones=True)}

    def _windowed(self, layers: int) -> list[bool]:
        """Whether each layer has the window, if the model has one."""
        if self.family.model_type in WINDOW_IN_ALL:
            return [True] * layers
        if self.family.window_period is not None:
            every = self.content.get("sliding_window_pattern", self.family.window_period)
            self.check_number("sliding_window_pattern", every, int)
            # The last layer of each period sees everything.
            default = [(i + 1) % max(every, 1) != 0 for i in range(layers)]
        else:
            # Qwen: windows from layer max_window_layers on, by default 28.
            first = self.content.get("max_window_layers", 28)
            self.check_number("max_window_layers", first, int)
            default = [i >= first for i in range(layers)]
            if not self.content.get("use_sliding_window", False):
                return [False] * layers
        kinds = self.content.get("layer_types") or [f"{'sliding' if kind else 'full'}_attention" for kind in default]
        if not isinstance(kinds, list):
            raise ConfigError(f"{self.where}: layer_types {kinds!r} is not a list")
        known = ("full_attention", "sliding_attention")
        if len(kinds) != layers or not all(kind in known for kind in kinds):
            raise ConfigError(f"{self.where}: layer_types {kinds!r} is not one of {', '.join(known)} for each layer")
        return [kind == "sliding_attention" for kind in kinds]


def written_scaling(config: ModelConfig) -> dict[str, Any] | None:
    """The config.json entry for RoPE's scaling; None: RoPE is not scaled."""
    if not config.use_rope_scaling:
        return None
    kind = config.rope_scaling_type
    said = {key: getattr(config, name) for key, name in SCALINGS[kind].items()}
    if kind == "dynamic":
        del said["original_max_position_embeddings"]  # which is max_position_embeddings
    if kind == "longrope":
        short, long = longrope_factors(config)
        said |= {"short_factor": list(short), "long_factor": list(long)}
    return {"rope_type": kind} | {key: value for key, value in said.items() if value is not None}


def is_longrope_family(family: Family) -> bool:
    """Whether the family's files have LongRoPE's original length next to the scaling."""
    return "original_max_position_embeddings" in family.defaults


def written_rope(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The config.json keys for RoPE."""
    assert family.rope_keys is not None
    base_key, fraction_key = family.rope_keys
    if family.model_type in NULL_ROPE and config.position_embedding_type == "none":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    out: dict[str, Any] = {base_key: config.rotary_base}
    if fraction_key in family.defaults:
        out[fraction_key] = config.rotary_percent
    scaling = written_scaling(config)
    if scaling is None or config.rope_scaling_type != "longrope" or not is_longrope_family(family):
        return out | {"rope_scaling": scaling}
    key = "original_max_position_embeddings"
    # transformers 4 takes exactly the keys type, short_factor and long_factor for Phi-3
    return out | {key: scaling.pop(key), "rope_scaling": {"type": scaling.pop("rope_type"), **scaling}}


def written_windows(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The config.json keys for the sliding window."""
    assert family.window_key is not None
    kinds = windowed(config)
    out: dict[str, Any] = {family.window_key: config.window_size}
    if family.model_type in WINDOW_IN_ALL:
        return out
    if family.window_period is None:
        # max_window_layers 0: all layers, unless layer_types says otherwise.
        out |= {"use_sliding_window": config.window_size is not None, "max_window_layers": 0}
    if family.window_period is not None or (any(kinds) and not all(kinds)):
        out["layer_types"] = [f"{'sliding' if kind else 'full'}_attention" for kind in kinds]
    return out


def written_number(config: ModelConfig, name: str, kind: Factor) -> float | None:
    """The number that config.json has for a multiplier.

    Raises:
        KeyError: no number there means exactly this setting.
    """
    value = getattr(config, name)
    if name == "softmax_scale" and value is None:
        assert config.kv_channels is not None, "resolved before"
        value = config.kv_channels**-0.5
    if kind == "same" or value is None:
        return value
    number = 1 / value if kind == "inverse" else value**-2
    # 1 / (1 / 16) may be off by a rounding: a whole number close by is taken.
    whole = round(number)
    number = whole if math.isclose(whole, number, rel_tol=1e-9) else number
    # Only a number from which reading gets exactly this setting.
    if (1 / number if kind == "inverse" else number**-0.5) != value:
        raise KeyError(name)
    return number
