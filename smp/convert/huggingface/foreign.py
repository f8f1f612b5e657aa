"""Which implementation computes the model that a config.json describes: this project's decoder, or transformers.

No torch is imported here, though transformers may do so by itself when it is asked for a configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.rules.foreign import transformers_config
from smp.convert.huggingface.config import CONFIG, family_of, from_hf, read_json
from smp.convert.huggingface.text_part import text_config

CLASSIFIER = "ForSequenceClassification"
"""Suffix of classes that score a text."""
UNLIMITED = 2**20
"""Longest sequence for architectures that name none (recurrent ones)."""
_OF_FILES = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of config.json that do not belong to the architecture."""
# Spellings in transformers' configurations; the first that is there counts.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")
_WIDTH = ("hidden_size", "d_model", "n_embd", "dim")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


def read_model_config(path: str | Path) -> tuple[dict[str, Any], str]:
    """(content, where) of a config.json, or of the one in a folder.

    Raises:
        DamageError, ConfigError: it is no JSON object, or cannot be read.
    """
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    content = read_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content, str(file)


def choose_model(content: Mapping[str, Any], where: str, implementation: str = "auto") -> ModelConfig:
    """Settings of the model that a config.json describes.

    Args:
        content: of the file, whole.
        where: its path, for messages.
        implementation: --model-implementation.

    Raises:
        ConfigError: the one that is asked for does not have this architecture, or with auto neither.
    """
    if implementation == "transformers":
        return foreign_model(content, where)
    ours = text_config(content)
    if implementation == "smp":
        return from_hf(ours, where)
    try:
        family_of(ours, where)
    except ConfigError as unknown:
        return _theirs_or(content, where, unknown)
    return from_hf(ours, where)


def _theirs_or(content: Mapping[str, Any], where: str, unknown: ConfigError) -> ModelConfig:
    """The model as transformers computes it, if it has such a type; else raise ``unknown``, which names the nearest
    known one."""
    # Only names are looked at: no model code is imported.
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:
        raise unknown from None
    kind = content.get("model_type")
    sees_images = "vision_config" in content and kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    reads_two = kind in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if not sees_images and not reads_two and kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unknown
    return foreign_model(content, where)


def foreign_model(content: Mapping[str, Any], where: str) -> ModelConfig:
    """A model that transformers computes. The settings hold the sizes that a run itself needs; the rest stays in the
    JSON.

    Raises:
        ConfigError: transformers is not installed, has no such type or no language model of it, it is an encoder with a
            decoder that runs do not train, or its weights are quantized.
    """
    config = transformers_config(content, where)
    if content.get("quantization_config"):
        raise ConfigError(f"{where}: its weights are quantized: --model-implementation transformers reads none such")
    layers = _number(config.get_text_config(decoder=True), _LAYERS, 1) or 1
    if getattr(config, "is_encoder_decoder", False):
        _require_texts(config, where)
        content = {**content, "is_encoder_decoder": True}  # classes have it where a file does not
        layers = _layers_of_both(config)
    # Of a model with images: its language model.
    text = config.get_text_config(decoder=True)
    heads = _number(text, _HEADS, 1)
    width = _number(text, _WIDTH, None)
    vocabulary = getattr(text, "vocab_size", None)
    if width is None or not isinstance(vocabulary, int):
        raise ConfigError(f"{where}: {config.model_type} names no width or no vocabulary: it is no language model")
    head = _number(text, ("head_dim",), None)
    return ModelConfig(
        # Sorted keys: equal descriptions are equal texts.
        transformers_config=json.dumps(content, sort_keys=True),
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=4 * width,
        num_attention_heads=heads or 1,
        num_query_groups=heads or 1,
        kv_channels=head or max(width // (heads or 1), 1),
        max_position_embeddings=_longest(text) or UNLIMITED,
        vocab_size=vocabulary,
        untie_embeddings_and_output_weights=not getattr(text, "tie_word_embeddings", False),
        scalar_head=_gives_scores(content, where),
    )


_LANGUAGES = ("mbart", "m2m_100", "plbart", "nllb-moe")
"""Types whose tokenizers put a language in front of or after each text."""


def _require_texts(config: Any, where: str) -> None:
    """Raise ConfigError for an encoder with a decoder that is not trained on texts alone."""
    from transformers.models.auto import modeling_auto

    kind = config.model_type
    if kind not in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES or hasattr(config, "vision_config"):
        raise ConfigError(f"{where}: {kind} is an encoder with a decoder, and does not read texts alone")
    if getattr(config, "ngram", None):  # ProphetNet
        raise ConfigError(f"{where}: {kind} learns several next tokens at once, which runs here do not")
    if kind == "marian":
        raise ConfigError(
            f"{where}: the tokenizer of {kind} has a model for each language, runs here have one for both"
        )
    if kind in _LANGUAGES:
        raise ConfigError(f"{where}: the tokenizer of {kind} marks languages, which samples here do not name")


def _layers_of_both(config: Any) -> int:
    """Layers of an encoder and of its decoder."""
    parts: list[Any] = [getattr(config, name, None) for name in ("encoder", "decoder")]
    if None not in parts:  # an encoder that could see images has its texts' part inside
        return sum(_number(part.get_text_config(), _LAYERS, 1) or 1 for part in parts)
    count = _number(config, ("encoder_layers", "num_encoder_layers", "num_layers"), 1) or 1
    return count + (_number(config, ("decoder_layers", "num_decoder_layers"), count) or count)


def _gives_scores(content: Mapping[str, Any], where: str) -> bool:
    """Whether the config.json is of a reward model.

    Raises:
        ConfigError: they are of a classifier.
    """
    # An empty list counts as none.
    [name, *_] = content.get("architectures") or [""]
    if not name.endswith(CLASSIFIER):
        return False
    if content.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: {name} is an encoder with a decoder: reward models are decoders here")
    count = content.get("num_labels", len(content.get("id2label") or "12"))  # transformers' default is two
    if count != 1:
        raise ConfigError(f"{where}: a classifier of {count} labels is not supported, only a reward model of one")
    return True


def require_classifier(model: ModelConfig) -> None:
    """Raise ConfigError where transformers has no class of this type that scores texts."""
    from transformers.models.auto import modeling_auto

    kind = json.loads(model.transformers_config or "{}").get("model_type")
    if model.sees_images or kind not in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ConfigError(f"--objective reward: transformers has no {CLASSIFIER} of {kind} for texts")


def _number(config: Any, names: tuple[str, ...], otherwise: int | None) -> int | None:
    found = (_largest(config, name) for name in names)
    return next((number for number in found if isinstance(number, int) and number > 0), otherwise)


def _largest(config: Any, name: str) -> Any:
    """A setting; the largest of all layers where layers differ (Gemma 4), which transformers then refuses to name."""
    if name not in (getattr(config, "per_layer_attributes", None) or ()):
        return getattr(config, name, None)
    return max(getattr(layer, name) for layer in config.per_layer_config)


def _longest(config: Any) -> int | None:
    """Positions that the type of ``config`` has; None: as many as one likes.

    Only fields of its class count. T5's files have an n_positions, which nothing reads: its positions are relative.
    """
    own = (name for name in _LENGTH if hasattr(type(config), name) or name in config.attribute_map)
    return _number(config, tuple(own), None)


def differences(trained: ModelConfig, asked: ModelConfig) -> list[str]:
    """How the architecture of ``asked`` differs, as ``rope_theta 10000 -> 500000``, where transformers computes at
    least one of them."""
    if trained.is_foreign != asked.is_foreign:
        return [f"implementation {implementation(trained)} -> {implementation(asked)}"]
    before, now = (json.loads(model.transformers_config or "{}") for model in (trained, asked))
    keys = [key for key in dict.fromkeys((*before, *now)) if key not in _OF_FILES]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def implementation(model: ModelConfig) -> str:
    """The value of --model-implementation for this model."""
    return "transformers" if model.is_foreign else "smp"
