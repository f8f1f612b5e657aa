"""``config.json`` of a Hugging Face folder to settings of a model, and back. No torch here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from smp.config import Config, ConfigError, ModelConfig, TrainingConfig, resolve
from smp.config.command_line.command import DamageError
from smp.config.layer_pattern import linear, no_rope, skip_pattern, windowed
from smp.config.layers import effective, mixer_kinds
from smp.config.rules.multipliers import as_text, mlp_multipliers, ssm_multipliers
from smp.config.rules.positions import longrope_factors
from smp.convert.huggingface.experts import canonical, read_experts, write_experts
from smp.convert.huggingface.families import REASONS
from smp.convert.huggingface.family import Family
from smp.convert.huggingface.more_families import FAMILIES
from smp.convert.huggingface.reader import Reader, is_longrope_family, written_number, written_rope, written_windows
from smp.convert.huggingface.text_part import text_config

CONFIG = "config.json"
_CONTRADICTIONS = {"use_rope_scaling", "squared_relu", "tanh_gelu", "relu", "geglu", "quick_geglu"}
"""Settings that may not be given where they have no effect: the model would lack what the file asks for. Sizes of
absent parts are harmless, and other programs always write them."""
NEXT_N = "num_nextn_predict_layers"
"""The key for the number of multi-token prediction layers, which transformers does not read."""
FREE = {
    *(
        "model",
        "model_implementation",
        "model_config",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "make_vocab_size_divisible_by",
    ),
    "mtp_loss_scaling_factor",
    *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "dsa_indexer_warmup"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_router_bias_update_rate"),
}
"""Settings that do not belong to the architecture: the same weights mean the same model whatever these are."""


_OWN_NORMS = (
    ("latent_norm_epsilon", "norm_epsilon"),
    ("linear_norm_epsilon", "norm_epsilon"),
    ("linear_norm_placement", "norm_placement"),
)
"""Settings of some norms, each with the setting of the other norms that is its default."""


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        DamageError: it is no JSON, as after a download that was cut off.
        ConfigError: it cannot be read; its cause is the system's error, which decides the exit code.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is damaged or cut off: it is no JSON ({error})") from None


def is_hf_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder that describes a Hugging Face model (an object store's URL is not)."""
    return (Path(path) / CONFIG).is_file()


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The content of ``config.json``; for a model that also sees images, that of its text part, where that can be read.

    Raises:
        DamageError: it is no JSON.
        ConfigError: it cannot be read, or holds something else than an object.
    """
    path = Path(folder) / CONFIG
    content = read_json(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return text_config(content)


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The settings that decide what weights mean, by name, in a canonical form where several spellings mean the same:
    for comparing two models."""
    return {name: value for name, value in in_one_form(config).items() if name not in FREE}


def in_one_form(config: ModelConfig) -> dict[str, Any]:
    """All settings in the canonical form of :func:`architecture`. Settings without an effect are at their default."""
    # Settings without an effect would make two descriptions of one model differ.
    return canonical(vars(effective(config)) | _of_layers(config), config)


def _of_layers(config: ModelConfig) -> dict[str, Any]:
    """Settings that can be spelled in several ways, in one spelling."""
    # Per layer: a window, and whether RoPE rotates ("turned").
    windows, turned = windowed(config), [not skipped for skipped in no_rope(config)]
    with_both = any(window and rope for window, rope in zip(windows, turned, strict=True))
    local = config.rotary_base_local
    # A local base equal to the global one is no setting, unless the global one is scaled.
    same = local == config.rotary_base and not config.use_rope_scaling
    factors: tuple[str | None, ...] = (None, None)
    if config.use_rope_scaling and config.rope_scaling_type == "longrope":
        factors = tuple(" ".join(map(str, numbers)) for numbers in longrope_factors(config))
    chunk, tuned = config.attention_chunk_size, config.attn_temperature_tuning and not all(turned)
    kinds = mixer_kinds(config)
    parts = ("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias")
    all_biases = not config.disable_bias_linear or all(getattr(config, name) for name in parts)
    # 1 / sqrt(head_dim) is the default scale of scores.
    usual = config.kv_channels is not None and config.softmax_scale == config.kv_channels**-0.5
    return {
        # A list of only attention layers is the default.
        "layer_types": None if config.layer_types is None or set(kinds) == {"attention"} else " ".join(kinds),
        "linear_attention_freq": skip_pattern(linear(config), ones=True) if config.linear_attention_type else None,
        "window_attn_skip_freq": skip_pattern(windows, ones=True) if any(windows) else None,
        "no_rope_freq": skip_pattern(turned, ones=False) if any(turned) else None,
        "rotary_base_local": None if same or not with_both else local,
        # A chunk as long as the longest sequence splits nothing.
        "attention_chunk_size": chunk if chunk is not None and chunk < config.max_position_embeddings else None,
        "attn_temperature_tuning": tuned,
        "attn_scale": config.attn_scale if tuned else ModelConfig.attn_scale,
        "floor_scale": config.floor_scale if tuned else ModelConfig.floor_scale,
        "longrope_short_factor": factors[0],
        "longrope_long_factor": factors[1],
        "softmax_scale": None if usual else config.softmax_scale,
        "ssm_multipliers": as_text(ssm_multipliers(config)),
        "mlp_multipliers": as_text(mlp_multipliers(config)),
        **{
            name: None if getattr(config, name) == getattr(config, other) else getattr(config, name)
            for name, other in _OWN_NORMS
        },
        # Biases on all parts have two spellings.
        "disable_bias_linear": not all_biases,
        **{name: getattr(config, name) and not all_biases for name in parts},
    }


def resolved(**values: Any) -> ModelConfig:
    """A model's settings with derived defaults filled in and checked.

    Raises:
        ConfigError: a value is not of its setting's kind, or they do not fit together.
    """
    model = effective(of_kinds(values), keep=_CONTRADICTIONS)
    # dry_run: no number of training steps is needed.
    return resolve(Config(model=model, training=TrainingConfig(dry_run=True)), world_size=1).model


def of_kinds(values: Mapping[str, Any]) -> ModelConfig:
    """Settings from a file, each checked to be of its setting's type; else ConfigError."""
    for name, value in values.items():
        kinds, words = _kinds()[name]
        if value not in words and not _is_of(value, kinds):
            raise ConfigError(f"--{name.replace('_', '-')} {value!r} is not a value of this setting")
    return ModelConfig(**values)


@cache
def _kinds() -> dict[str, tuple[tuple[Any, ...], list[Any]]]:
    """Types of each setting of a model, and words that it may be."""
    found = {}
    for name, hint in get_type_hints(ModelConfig).items():
        # ``int | None`` -> (int, NoneType)
        kinds = get_args(hint) or (hint,)
        found[name] = kinds, [word for kind in (hint, *kinds) if get_origin(kind) is Literal for word in get_args(kind)]
    return found


def resolved_external(values: Mapping[str, Any], where: str) -> ModelConfig:
    """:func:`resolved` for values from another program's file, ``where``."""
    try:
        config = resolved(**values)
    except (ConfigError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def _is_of(value: Any, kinds: tuple[Any, ...]) -> bool:
    if type(value) in (int, float) and not abs(value) < 1 << 63:  # NaN fails it, too
        return False
    # bool is not int here: ``type``, not isinstance.
    return type(value) in kinds or (type(value) is int and float in kinds)


def family_of(content: Mapping[str, Any], where: str) -> Family:
    """The table of the architecture that a config.json names.

    Raises:
        ConfigError: there is none; the reason, if it is known, and the nearest architecture that there is.
    """
    names, kind = content.get("architectures") or [], str(content.get("model_type"))
    name = str(names[0]) if isinstance(names, list) and names else ""
    for family in FAMILIES.values():
        # Without ``architectures`` the model_type decides.
        if (name and name in (family.architecture, family.classifier)) or (not name and kind == family.model_type):
            if content.get("model_type", family.model_type) != family.model_type:
                # transformers would go by the model_type
                raise ConfigError(f"{where}: {name} with the model_type {kind} is a contradiction")
            return family
    known = {f.architecture: f for f in FAMILIES.values()}
    # cutoff 0: some name is always nearest.
    near = difflib.get_close_matches(name or kind, [*known, *FAMILIES], n=1, cutoff=0.0)[0]
    nearest = known[near].architecture if near in known else FAMILIES[near].architecture
    reason = next((text for part, text in REASONS.items() if part in f"{kind} {name}".lower()), "")
    because = f" (it has {reason}, not converted here)" if reason else ""
    raise ConfigError(f"{where}: {name or kind} is not supported{because}; the nearest that is: {nearest}")


def block_of(quantization: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Rows and columns of a block, from a config.json's ``quantization_config``.

    Raises:
        ConfigError: the weights are in another format.
    """
    kind, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    sizes = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if kind != "fp8" or quantization.get("fmt", "e4m3") != "e4m3" or not sizes:
        raise ConfigError(
            f"{where}: its weights are quantized (quantization_config, {kind}): read are experts in MXFP4, of GPT-OSS, "
            "and E4M3 with a weight_block_size"
        )
    rows, columns = block  # type: ignore[misc]
    return rows, columns


def from_hf(content: Mapping[str, Any], where: str = CONFIG) -> ModelConfig:
    """Settings of the model that a config.json describes, resolved.

    Args:
        content: of the file.
        where: its path, for messages.

    Raises:
        ConfigError: an architecture or a setting that smp does not have, or a value that is missing.
    """
    family = family_of(content, where)
    reader = Reader(family, content, where)
    quantized = content.get("quantization_config")
    if quantized and (family.quantized is None or quantized.get("quant_method") != "mxfp4"):
        block_of(quantized, where)
    # Fixed properties of the family first, so that the message names the cause.
    for key, value in family.required.items():
        reader.require(key, value)
    for key, other in family.same_as.items():
        reader.require(key, reader.get(other))
    values = dict(family.fixed)
    for key, name in family.fields.items():
        values |= reader.field(key, name)
    for key in family.factors:
        values |= reader.factor(key)
    values |= reader.activation()
    if family.rope_keys is not None:
        values |= reader.rope()
    if family.window_key is not None:
        values |= reader.windows(values["num_layers"])
    if family.experts is not None:
        values |= read_experts(reader, family.experts, values["num_layers"])
    if family.predicts and (number := content.get(NEXT_N)):
        reader.check_number(NEXT_N, number, int)
        values["mtp_num_layers"] = number
    # Last: what a family says under keys of its own may rest on the settings before.
    if family.own is not None:
        values |= family.own.read(reader, values)
    if family.classifier in (content.get("architectures") or []):
        count = content.get("num_labels", len(content.get("id2label") or "12"))  # transformers' default is two
        if count != 1:
            raise ConfigError(f"{where}: a classifier of {count} labels is not supported, only a reward model of one")
        values |= {"scalar_head": True, "untie_embeddings_and_output_weights": True}
    return resolved_external(values, where)


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
    family = _family_for(replace(config, scalar_head=False), base)
    if config.scalar_head and family.classifier is None:
        raise ConfigError(
            f"{family.architecture} has no ...ForSequenceClassification: a reward model cannot be written"
        )
    wanted = architecture(config)
    predicted = {NEXT_N: config.mtp_num_layers}
    # The exact file of the model's authors is worth more than an equivalent one.
    if base is not None and _describes({**base, **predicted}, wanted):
        # transformers writes the key also where the files have no such layers
        base = base if config.mtp_num_layers is None else {**base, **predicted}
        # Written weights are not quantized.
        out = {name: value for name, value in base.items() if name != "quantization_config"}
    else:
        # an id that is missing would be the one that transformers has for the family, of another tokenizer
        out = dict.fromkeys(_IDS) | {key: base[key] for key in _CARRIED if base is not None and key in base}
        out |= _written(config, family)
    key = "torch_dtype" if "torch_dtype" in out else "dtype"  # the key's name before transformers 4.56
    return out | {key: dtype}


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CARRIED = (*_IDS, "initializer_range", "use_cache")


def _describes(content: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    try:
        return architecture(from_hf(content)) == wanted
    except ConfigError:
        return False


def _family_for(config: ModelConfig, base: Mapping[str, Any] | None) -> Family:
    """The first family that can express the model: that of ``base``, then those of LongRoPE's own kind if it has that,
    then the others in order."""
    first = [f for f in FAMILIES.values() if base is not None and f.model_type == base.get("model_type")]
    if config.use_rope_scaling and config.rope_scaling_type == "longrope":
        first += [family for family in FAMILIES.values() if is_longrope_family(family)]
    wanted, nearest = architecture(config), {}
    for family in [*first, *FAMILIES.values()]:
        try:
            # Written and read back: only a family whose words say all of it will do.
            said = architecture(from_hf(_written(config, family)))
        except (ConfigError, KeyError):
            continue
        different = [name for name, value in wanted.items() if said[name] != value]
        if not different:
            return family
        # Of equal distance the last one counts; any serves the message.
        nearest[len(different)] = (family, different)
    problem = "no family"
    if nearest:
        family, different = nearest[min(nearest)]
        flags = ", ".join(f"--{name.replace('_', '-')} {wanted[name]}" for name in different)
        problem = f"the nearest, {family.architecture}, has no {flags}"
    raise ConfigError(f"no Hugging Face architecture of the table computes what this model does: {problem}")


def _written(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of a family for ``config``, as far as it has keys."""
    out: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    if config.scalar_head:
        # transformers takes num_labels from id2label.
        out |= {"architectures": [family.classifier], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    for key, name in family.fields.items():
        if name == "tied":
            out[key] = not config.untie_embeddings_and_output_weights
        elif name == "bias":
            part = config.add_mlp_bias if key == "mlp_bias" else config.add_attention_output_bias
            out[key] = part or not config.disable_bias_linear
        elif name == "all_biases":
            out[key] = not config.disable_bias_linear
        else:
            out[key] = getattr(config, name)
    for key, (name, factor) in family.factors.items():
        out[key] = written_number(config, name, factor)
    if family.activation_key is not None:
        out |= _written_activation(config, family, family.activation_key)
    if family.rope_keys is not None:
        out |= written_rope(config, family)
    if family.window_key is not None:
        out |= written_windows(config, family)
    if family.experts is not None:
        out |= write_experts(config, family.experts)
    if family.predicts and config.mtp_num_layers is not None:
        out[NEXT_N] = config.mtp_num_layers
    if family.own is not None:
        out |= family.own.write(config)
    # ``said`` last: constants for other programs.
    return out | dict(family.said)


def _written_activation(config: ModelConfig, family: Family, key: str) -> dict[str, Any]:
    # The first activation that matches is the one that is written.
    for name, means in family.activations.items():
        if all(getattr(config, setting) == value for setting, value in means.items()):
            return {key: name}
    raise KeyError(key)
