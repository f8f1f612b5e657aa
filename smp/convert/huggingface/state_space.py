"""Architectures of transformers with Mamba-2: names of their tensors, and what their ``config.json`` say under keys of
their own. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import ATTENTION, EXPERTS, MAMBA, MLP, linear, skip_pattern
from smp.convert.huggingface.experts import read_experts, write_experts
from smp.convert.huggingface.families import LLAMA_DEFAULTS, LLAMA_ENDS, LLAMA_FIELDS, LLAMA_MODULES, NO_BIAS
from smp.convert.huggingface.family import ExpertKeys, Family, Own
from smp.convert.huggingface.reader import Reader
from smp.convert.layout import Fused, Table

Values = Mapping[str, Any]
_CONVOLVED: tuple[Literal["query", "key", "value"], ...] = ("query", "key", "value")
_PROJECTED: tuple[Literal["query", "key", "value", "gate", "step"], ...] = (*_CONVOLVED, "gate", "step")


def mamba_modules(name: str, module: str = "attention") -> dict[str, str | Fused]:
    """Table entries of Mamba-2's tensors: ``name`` is the external module, ``module`` this project's."""
    return {
        # in_proj's rows: gate z, values x, keys B, queries C, steps dt.
        **{f"{module}.{part}": Fused(f"{name}.in_proj", "mamba", part) for part in _PROJECTED},
        **{f"{module}.{part}_conv": Fused(f"{name}.conv1d.weight", "mamba_conv", part) for part in _CONVOLVED},
        **{f"{module}.{part}_conv_bias": Fused(f"{name}.conv1d.bias", "mamba_conv", part) for part in _CONVOLVED},
        f"{module}.decay_log": f"{name}.A_log",
        f"{module}.step_bias": f"{name}.dt_bias",
        # D, the direct path from values to output.
        f"{module}.skip": f"{name}.D",
        f"{module}.norm": f"{name}.norm",
        f"{module}.output": f"{name}.out_proj",
    }


def read_mamba(reader: Reader, keys: Mapping[str, str], width: int = 0) -> dict[str, Any]:
    """Sizes of the mixer, by key, and the limits of its steps; ``width`` is that of all heads, for a head_dim of
    "auto"."""
    found = {name: reader.get(key) for key, name in keys.items()}
    if width and found["mamba_head_dim"] == "auto":
        reader.check_number("mamba_n_heads", found["mamba_num_heads"], int)
        # max(1, ..): a size of 0 is refused by the check that follows.
        found["mamba_head_dim"] = width // max(1, found["mamba_num_heads"])
    for (key, _), value in zip(keys.items(), found.values(), strict=True):
        reader.check_number(key, value, int)
    # transformers' default of (0, inf).
    limits = reader.get("time_step_limit") or (0.0, "Infinity")
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ConfigError(f"{reader.where}: time_step_limit {limits!r} is not two numbers")
    least, largest = limits
    reader.check_number("time_step_limit", least)
    if isinstance(largest, dict):  # transformers 5 writes infinity, which JSON lacks, as an object
        largest = largest.get("__float__")
    if largest in ("Infinity", float("inf"), None):
        return {**found, "mamba_dt_min": float(least), "mamba_dt_max": None}
    reader.check_number("time_step_limit", largest)
    return {**found, "mamba_dt_min": float(least), "mamba_dt_max": float(largest or 0.0)}


def written_mamba(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    largest = config.mamba_dt_max
    limits = [config.mamba_dt_min, {"__float__": "Infinity"} if largest is None else largest]
    # Without limits the key is left out: older releases cannot read the written infinity.
    limited = {} if limits[0] == 0 and largest is None else {"time_step_limit": limits}
    return {key: getattr(config, name) for key, name in keys.items()} | limited


def _expansion(config: ModelConfig) -> int:
    """Width of all heads relative to the residual stream: transformers has it as a whole number."""
    width = (config.mamba_num_heads or 0) * config.mamba_head_dim
    if width % config.hidden_size:
        raise ConfigError(f"--mamba-num-heads x --mamba-head-dim {width} is no multiple of --hidden-size")
    return width // config.hidden_size


def _check_expansion(reader: Reader, key: str, values: Values) -> None:
    width, expand = values["mamba_num_heads"] * values["mamba_head_dim"], reader.get(key)
    if expand * reader.get("hidden_size") != width:
        raise ConfigError(f"{reader.where}: {key} {expand} times hidden_size is not the width of all heads, {width}")


_MAMBA2_KEYS = {
    **{"num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state_size": "mamba_state_dim"},
    **{"n_groups": "mamba_num_groups", "conv_kernel": "linear_conv_kernel_dim"},
}


def _read_mamba2(reader: Reader, values: Values) -> Values:
    found = read_mamba(reader, _MAMBA2_KEYS)
    _check_expansion(reader, "expand", found)
    # Every layer is a mixer alone, without an MLP.
    return {**found, "hybrid_layer_pattern": MAMBA * values["num_layers"]}


def _write_mamba2(config: ModelConfig) -> Values:
    return {**written_mamba(config, _MAMBA2_KEYS), "expand": _expansion(config)}


GRANITE_KEYS = {
    **{"mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_d_state": "mamba_state_dim"},
    **{"mamba_n_groups": "mamba_num_groups", "mamba_d_conv": "linear_conv_kernel_dim"},
}
_GRANITE_EXPERTS = ExpertKeys("num_local_experts")
_LETTERS = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION}
_LETTERS |= {"mlp": MLP, "moe": EXPERTS}
"""Letters of the kinds of layers, by their names in different releases of transformers."""


def _letters(reader: Reader, kinds: Any, known: str, count: int | None) -> str:
    """One letter for each layer, from a list of kinds of layers."""
    found = [_LETTERS.get(kind, "") if isinstance(kind, str) else "" for kind in kinds] if kinds else []
    if not isinstance(kinds, list) or not all(letter and letter in known for letter in found):
        names = ", ".join(name for name, letter in _LETTERS.items() if letter in known)
        raise ConfigError(f"{reader.where}: layer_types {kinds!r} is not one of {names} for each layer")
    if count is not None and len(found) != count:
        raise ConfigError(f"{reader.where}: layer_types names {len(found)} layers of {count} (num_hidden_layers)")
    return "".join(found)


def _read_granite(reader: Reader, values: Values) -> Values:
    """Granite 4. Without experts the layer's MLP is the one that is the shared expert otherwise."""
    layers = values["num_layers"]
    # Two releases, two names.
    kinds = reader.content.get("layer_types", reader.content.get("layers_block_type")) or ["mamba"] * layers
    recurs = [letter == MAMBA for letter in _letters(reader, kinds, MAMBA + ATTENTION, layers)]
    width = reader.get("shared_intermediate_size")
    reader.check_number("shared_intermediate_size", width, int)
    rope = reader.get("position_embedding_type") == "rope"
    found: dict[str, Any] = {"position_embedding_type": "rope" if rope else "none"}
    if any(recurs):
        # head_dim "auto" needs the width.
        found |= read_mamba(reader, GRANITE_KEYS, reader.get("mamba_expand") * values["hidden_size"])
        _check_expansion(reader, "mamba_expand", found)
        found |= {"linear_attention_type": "mamba2", "linear_attention_freq": skip_pattern(recurs, ones=True)}
    if reader.get("num_local_experts"):
        found |= read_experts(reader, _GRANITE_EXPERTS, layers) | {"moe_shared_expert_intermediate_size": width}
        expert = reader.get("intermediate_size")
        reader.check_number("intermediate_size", expert, int)
        # ffn_hidden_size has no meaning in a model of experts only; both are the experts' width.
        return found | {"moe_ffn_hidden_size": expert, "ffn_hidden_size": expert}
    return found | {"ffn_hidden_size": width}


def _write_granite(config: ModelConfig) -> Values:
    kinds = ["mamba" if recurs else "attention" for recurs in linear(config)]
    rope = "rope" if config.position_embedding_type == "rope" else "nope"
    out: dict[str, Any] = {"layer_types": kinds, "position_embedding_type": rope}
    if any(linear(config)):
        out |= {**written_mamba(config, GRANITE_KEYS), "mamba_expand": _expansion(config)}
    if config.num_experts is None:
        return out | {"num_local_experts": 0, "shared_intermediate_size": config.ffn_hidden_size}
    return (
        out
        | write_experts(config, _GRANITE_EXPERTS)
        | {"shared_intermediate_size": config.moe_shared_expert_intermediate_size}
    )


_NEMOTRON_KEYS = {
    **{"mamba_num_heads": "mamba_num_heads", "mamba_head_dim": "mamba_head_dim", "ssm_state_size": "mamba_state_dim"},
    **{"n_groups": "mamba_num_groups", "conv_kernel": "linear_conv_kernel_dim"},
}
_NEMOTRON_EXPERTS = ExpertKeys("n_routed_experts", router="sigmoid", own_width=True)


def _read_nemotron(reader: Reader, values: Values) -> Values:
    """Nemotron-H. The kinds of layers are a list in transformers 5, and before a text of letters, which are
    Megatron's."""
    kinds = reader.content.get("layers_block_type", reader.content.get("layer_types"))
    letters = reader.content.get("hybrid_override_pattern", "ME*-")
    if kinds is not None or not isinstance(letters, str):
        letters = _letters(reader, kinds, MAMBA + ATTENTION + MLP + EXPERTS, None)
    found: dict[str, Any] = {"hybrid_layer_pattern": letters, "num_layers": len(letters)}
    if MLP not in letters and EXPERTS not in letters:  # without MLPs and experts their keys have no effect
        found |= {"ffn_hidden_size": None, "swiglu": True, "squared_relu": False}
    if MAMBA in letters:
        found |= read_mamba(reader, _NEMOTRON_KEYS)
    if EXPERTS in letters:
        shared = reader.get("moe_shared_expert_intermediate_size")
        reader.check_number("moe_shared_expert_intermediate_size", shared, int)
        # The letters say which layers have experts.
        found |= read_experts(reader, _NEMOTRON_EXPERTS, len(letters)) | {"moe_layer_freq": "1"}
        found["moe_shared_expert_intermediate_size"] = shared
    return found


def _write_nemotron(config: ModelConfig) -> Values:
    letters = config.hybrid_layer_pattern
    if letters is None:
        raise ConfigError("its layers are one part alone")
    out: dict[str, Any] = {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)}
    if MAMBA in letters:
        out |= written_mamba(config, _NEMOTRON_KEYS)
    if EXPERTS in letters:
        out |= write_experts(config, _NEMOTRON_EXPERTS)
        out["moe_shared_expert_intermediate_size"] = config.moe_shared_expert_intermediate_size
    return out


_PLAIN: dict[str, Any] = {"normalization": "RMSNorm", "swiglu": True}
_BACKBONE = {"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"}
_MAMBA2 = Family(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    table=Table("backbone.layers.{}.", {"attention_norm": "norm", **mamba_modules("mixer")}, _BACKBONE),
    fields={
        **{"vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers"},
        **{"layer_norm_epsilon": "norm_epsilon", "tie_word_embeddings": "tied"},
        "max_position_embeddings": "max_position_embeddings",
    },
    defaults={
        **{"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5},
        # transformers has no such key: a recurrence has no longest sequence
        **{"tie_word_embeddings": False, "max_position_embeddings": 2**20},
        **{"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2},
        "time_step_limit": None,
    },
    fixed=_PLAIN | NO_BIAS,
    required={"hidden_act": "silu", "use_bias": False, "use_conv_bias": True},
    activation_key=None,
    rope_keys=None,
    own=Own(_read_mamba2, _write_mamba2),
)
# Both names here are one module there: a model has one of the two.
_SHARED_MLP: dict[str, str | Fused] = {
    f"mlp.{prefix}{part}": target
    for prefix in ("", "shared_experts.")
    for part, target in (
        ("gate", Fused("shared_mlp.input_linear", "halves", "gate")),
        ("up", Fused("shared_mlp.input_linear", "halves", "up")),
        ("down", "shared_mlp.output_linear"),
    )
}
_GRANITE_EXPERT: dict[str, str | Fused] = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.experts.gate": Fused("block_sparse_moe.input_linear.weight", "halves", "gate"),
    "mlp.experts.up": Fused("block_sparse_moe.input_linear.weight", "halves", "up"),
    "mlp.experts.down": "block_sparse_moe.output_linear.weight",
}
_GRANITE = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    table=Table(
        "model.layers.{}.",
        LLAMA_MODULES | _SHARED_MLP | _GRANITE_EXPERT,
        LLAMA_ENDS,
        recurrent=mamba_modules("mamba"),
        # Files that transformers 5 has saved.
        stacked={
            "mlp.router": "block_sparse_moe.router",
            "mlp.experts.gate": Fused("block_sparse_moe.experts.gate_up_proj", "halves", "gate"),
            "mlp.experts.up": Fused("block_sparse_moe.experts.gate_up_proj", "halves", "up"),
            "mlp.experts.down": "block_sparse_moe.experts.down_proj",
        },
    ),
    fields={key: name for key, name in LLAMA_FIELDS.items() if key not in ("intermediate_size", "head_dim")},
    defaults=LLAMA_DEFAULTS
    | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 11008, "shared_intermediate_size": 1024}
    | {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4}
    | {"mamba_expand": 2, "time_step_limit": None, "position_embedding_type": None},
    fixed=_PLAIN | NO_BIAS,
    required={"attention_bias": False, "hidden_act": "silu", "mamba_conv_bias": True, "mamba_proj_bias": False},
    activation_key=None,
    factors={
        "embedding_multiplier": ("embedding_multiplier", "same"),
        # Granite's multipliers for embeddings, residual branches, scores and logits.
        "residual_multiplier": ("residual_multiplier", "same"),
        "attention_multiplier": ("softmax_scale", "same"),
        "logits_scaling": ("logit_scale", "inverse"),
    },
    own=Own(_read_granite, _write_granite),
)
# A layer is one part alone: all parts are called "mixer", with one norm.
_NEMOTRON_PARTS: dict[str, str | Fused] = {
    "attention_norm": "norm",
    "mlp_norm": "norm",
    **{f"attention.{part}": f"mixer.{part[0]}_proj" for part in _CONVOLVED},
    "attention.output": "mixer.o_proj",
    "mlp.router": "mixer.gate",
    "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
    **{f"mlp.{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"mlp.experts.{part}": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
    **{f"mlp.shared_experts.{part}": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
}
_NEMOTRON = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    table=Table(
        "backbone.layers.{}.",
        _NEMOTRON_PARTS,
        _BACKBONE,
        recurrent=mamba_modules("mixer"),
        stacked={f"mlp.experts.{part}": f"mixer.experts.{part}_proj" for part in ("up", "down")},
    ),
    fields={key: name for key, name in LLAMA_FIELDS.items() if key not in ("num_hidden_layers", "rms_norm_eps")}
    | {"layer_norm_epsilon": "norm_epsilon"},
    defaults={
        **{"vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"head_dim": 128, "max_position_embeddings": 4096, "intermediate_size": 21504, "layer_norm_epsilon": 1e-5},
        **{"tie_word_embeddings": False, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128},
        **{"n_groups": 8, "conv_kernel": 4, "time_step_limit": None, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "norm_topk_prob": True},
        **{"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    },
    fixed=NO_BIAS
    # relu(x)^2, no position embedding.
    | {"normalization": "RMSNorm", "swiglu": False, "squared_relu": True, "position_embedding_type": "none"},
    required={
        **{"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        **{"use_bias": False, "use_conv_bias": True, "mamba_proj_bias": False, "moe_latent_size": None},
        **{"sliding_window": None, "n_shared_experts": 1},
    },
    activation_key=None,
    rope_keys=None,
    skipped=("mtp.",),
    # transformers 5 has renamed the backbone.
    renamed={"backbone": "model"},
    own=Own(_read_nemotron, _write_nemotron),
)
STATE_SPACE_FAMILIES = (_MAMBA2, _GRANITE, _NEMOTRON)
