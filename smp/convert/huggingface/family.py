"""What the tables say of an architecture of Hugging Face's transformers. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from smp.config import ModelConfig
from smp.convert.layout import Table


@dataclass(frozen=True)
class ExpertKeys:
    """How a config.json speaks of experts, see :mod:`smp.convert.huggingface.experts`.

    Attributes:
        count: key of their number.
        dense: which layers have none: ``none``; by ``decoder_sparse_step`` and ``mlp_only_layers``; by
            ``first_k_dense_replace``.
        shared: an MLP next to them: ``none``; of a width, with a gate; of ``n_shared_experts`` experts' width.
        router: ``softmax``; one that ``norm_topk_prob`` decides about; DeepSeek-V2's ``topk_method``; or DeepSeek-V3's
            ``sigmoid``.
        own_width: they have a width of their own, ``moe_intermediate_size``.
    """

    count: str
    dense: Literal["none", "sparse_step", "first_k"] = "none"
    shared: Literal["none", "gated", "multiple"] = "none"
    router: Literal["softmax", "norm_topk_prob", "topk_method", "sigmoid"] = "softmax"
    own_width: bool = False


CLASSIFIERS: dict[str, str | None] = {
    **dict.fromkeys(("olmoe", "glm4_moe", "granite", "cohere", "cohere2")),
    **dict.fromkeys(("mamba2", "granitemoehybrid", "nemotron_h", "falcon_h1", "kimi_linear", "olmo_hybrid")),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa")),
    "llama4_text": None,
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
    "qwen3_5_moe_text": None,
}
"""Families whose ...ForSequenceClassification in transformers does not exist (None), or has another name."""

Factor = Literal["same", "inverse", "inverse_root"]
"""How a setting follows from the number in config.json: equal, 1 / it, or 1 / its square root."""


@dataclass(frozen=True)
class Own:
    """Reading and writing of the keys that only one architecture has.

    Attributes:
        read: (:class:`~smp.convert.huggingface.reader.Reader` of a config.json, settings so far) -> settings that
            replace those.
        write: the keys for a model.
    """

    read: Callable[..., Mapping[str, Any]]
    write: Callable[[ModelConfig], Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture, model_type: its names in config.json.
        table: names of its tensors.
        fields: key in config.json -> the setting of ``ModelConfig``, the same value in both.
        defaults: what a key means that config.json leaves out; keys that have none must be there.
        fixed: settings that the architecture implies.
        required: keys that must have this value, or be absent.
        said: keys that transformers does not read, which other programs do, and what is written under them.
        activation_key, activations: a key, and its value -> settings; None: there is one activation.
        rope_keys: under which keys RoPE's base and rotated fraction were before transformers 5; None: no RoPE.
        window_key: the key of the sliding window.
        window_period: where ``layer_types`` is missing every layer of that number has no window; None: the family has
            another rule.
        same_as: keys that must have the value of another key, or be absent.
        ignored: ends of names of tensors that hold no weights (tables that old versions saved).
        skipped: beginnings of names of tensors that only multi-token prediction uses, which are left out.
        renamed: modules that have another name in some files; between dots a part of names.
        aliases: keys of config.json and the other name that transformers takes for them.
        experts: its keys about experts; None: its layers are dense.
        predicts: files may have layers after the last for multi-token prediction.
        factors: keys of numbers that something is multiplied by -> the setting, and how one follows from the other.
        own: what its keys say beyond all this.
        quantized: names of its tensors in files whose experts are in MXFP4; None: there are no such files.
    """

    architecture: str
    model_type: str
    table: Table
    fields: dict[str, str]
    defaults: dict[str, Any]
    fixed: dict[str, Any]
    required: Mapping[str, Any] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    activation_key: str | None = "hidden_act"
    activations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rope_keys: tuple[str, str] | None = ("rope_theta", "partial_rotary_factor")
    window_key: str | None = None
    window_period: int | None = None
    same_as: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertKeys | None = None
    predicts: bool = False
    factors: Mapping[str, tuple[str, Factor]] = field(default_factory=dict)
    own: Own | None = None
    quantized: Table | None = None

    @property
    def classifier(self) -> str | None:
        """The architecture's name with a head of scores; None: transformers has none."""
        if self.model_type in CLASSIFIERS:
            return CLASSIFIERS[self.model_type]
        return self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "ForSequenceClassification"
