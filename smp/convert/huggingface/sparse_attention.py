"""Families with DeepSeek's sparse attention, DeepSeek-V3.2 and GLM-5. See ``families``, whose words these are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.convert.huggingface.families import DEEPSEEK_DEFAULTS, DEEPSEEK_FAMILY
from smp.convert.huggingface.family import ExpertKeys, Family, Own
from smp.convert.huggingface.reader import Reader

# The indexer that chooses keys (DeepSeek-V3.2).
_INDEXER = {
    "attention.indexer.queries": "self_attn.indexer.wq_b",
    "attention.indexer.keys": "self_attn.indexer.wk",
    "attention.indexer.weights": "self_attn.indexer.weights_proj",
    "attention.indexer.key_norm": "self_attn.indexer.k_norm",
}


def _read(reader: Reader, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check that keys for each layer agree with those for all layers."""
    layers = values["num_layers"]
    first = reader.get("first_k_dense_replace")
    usual: dict[str, list[str]] = {
        "mlp_layer_types": ["dense" if i < first else "sparse" for i in range(layers)],
        "layer_types": ["indexed_attention"] * layers,
        "indexer_types": ["full"] * layers,
    }
    for key, wanted in usual.items():
        said = reader.content.get(key)
        if said not in (None, wanted):
            shared = ": layers that share the keys of another one are not there" if key == "indexer_types" else ""
            raise ConfigError(f"{reader.where}: {key} is supported where it is {_words(wanted)}{shared}")
    return {}


def _words(kinds: list[str]) -> str:
    runs = list(dict.fromkeys(kinds))
    return " x ".join((str(kinds.count(runs[0])), repr(runs[0]))) + "".join(f", then {kind!r}" for kind in runs[1:])


def _write(config: ModelConfig) -> Mapping[str, Any]:
    return {}


_SPARSE = replace(
    DEEPSEEK_FAMILY,
    table=replace(DEEPSEEK_FAMILY.table, modules={**DEEPSEEK_FAMILY.table.modules, **_INDEXER}),
    fields=DEEPSEEK_FAMILY.fields
    | {"index_topk": "dsa_indexer_topk", "index_n_heads": "dsa_indexer_n_heads"}
    | {"index_head_dim": "dsa_indexer_head_dim"},
    # the norms of latents have this epsilon, whatever the others' is
    fixed=DEEPSEEK_FAMILY.fixed | {"experimental_attention_variant": "dsa", "latent_norm_epsilon": 1e-6},
    said={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    aliases={"n_routed_experts": "num_local_experts"},
    experts=ExpertKeys("n_routed_experts", "first_k", "multiple", "sigmoid", own_width=True),
    predicts=True,
    own=Own(_read, _write),
)
_REQUIRED = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1, "topk_method": "noaux_tc"}
_DEFAULTS = DEEPSEEK_DEFAULTS | {
    **{"num_experts_per_tok": 8, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048},
    **{"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"index_topk": 2048, "index_head_dim": 128},
}
SPARSE_FAMILIES: tuple[Family, ...] = (
    replace(
        _SPARSE,
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        defaults=_DEFAULTS
        | {"num_key_value_heads": 128, "max_position_embeddings": 163840, "n_group": 8, "topk_group": 4}
        | {"index_n_heads": 64},
        # Halves of channels are rotated in the indexer, neighbours in attention.
        fixed=_SPARSE.fixed | {"dsa_indexer_rope_interleaved": False},
        required=_REQUIRED | {"rope_interleave": True, "indexer_rope_interleave": False},
    ),
    replace(
        _SPARSE,
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        defaults=_DEFAULTS
        | {"num_key_value_heads": 64, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1}
        | {"rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32},
        # Neighbours in both.
        fixed=_SPARSE.fixed | {"dsa_indexer_rope_interleaved": True},
        required=_REQUIRED
        # Every layer has an indexer of its own.
        | {"rope_interleave": True, "indexer_rope_interleave": True, "index_topk_freq": 1, "index_topk_pattern": None},
    ),
)
