"""What a ``config.json`` says of experts, as settings of ``ModelConfig``, and back. No torch here."""

from __future__ import annotations

from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.layer_pattern import with_experts
from smp.convert.huggingface.family import ExpertKeys
from smp.convert.huggingface.reader import Reader


def read_experts(reader: Reader, keys: ExpertKeys, layers: int) -> dict[str, Any]:
    """The settings of experts that a config.json gives.

    Raises:
        ConfigError: it asks for a router that there is not, or says what cannot be.
    """
    values: dict[str, Any] = {
        "num_experts": _number(reader, keys.count),
        "moe_router_topk": _number(reader, "num_experts_per_tok"),
        "moe_ffn_hidden_size": _number(reader, "moe_intermediate_size") if keys.own_width else None,
        "moe_layer_freq": _layer_freq(_pattern(reader, keys, layers)),
    }
    # Two names that releases of transformers have for it.
    scoring = reader.content.get("scoring_func", reader.content.get("score_function"))
    wanted = "sigmoid" if keys.router == "sigmoid" else "softmax"
    if scoring not in (None, wanted):
        raise ConfigError(f"{reader.where}: a router that scores by {scoring!r} is not supported, only {wanted!r}")
    return values | _router(reader, keys) | _shared(reader, keys, values["moe_ffn_hidden_size"])


def _number(reader: Reader, key: str) -> int:
    """A whole number of at least 1."""
    value = reader.get(key)
    reader.check_number(key, value, int)
    if value < 1:
        raise ConfigError(f"{reader.where}: {key} {value} is not supported, only 1 and more")
    return int(value)


def _router(reader: Reader, keys: ExpertKeys) -> dict[str, Any]:
    if keys.router == "softmax":
        return {"moe_router_pre_softmax": False}
    if keys.router == "topk_method":
        return _router_by_method(reader)
    # Qwen's norm_topk_prob: normalizing the chosen probabilities equals a softmax over the chosen
    # logits.
    normalised = reader.get("norm_topk_prob")
    reader.check_number("norm_topk_prob", normalised, bool)
    if keys.router == "norm_topk_prob":
        return {"moe_router_pre_softmax": not normalised}
    one = _number(reader, "num_experts_per_tok") == 1  # a single score is not normalized here: it would be 1
    if normalised == one:
        raise ConfigError(
            f"{reader.where}: norm_topk_prob {str(normalised).lower()} is not supported with a router of sigmoids and "
            f"num_experts_per_tok {'1' if one else 'above 1'}"
        )
    # DeepSeek-V3 (arXiv 2412.19437): biases decide which experts are chosen, not their weights.
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": _scaling_factor(reader),
        **_groups(reader),
    }


def _scaling_factor(reader: Reader) -> float:
    factor = reader.get("routed_scaling_factor")
    reader.check_number("routed_scaling_factor", factor)
    return float(factor)


def _router_by_method(reader: Reader) -> dict[str, Any]:
    """DeepSeek-V2's routers: a softmax over all experts; with groups, each counts by its best expert (arXiv
    2405.04434)."""
    values: dict[str, Any] = {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": _scaling_factor(reader)}
    method = reader.get("topk_method")
    if method == "greedy":
        return values
    if method != "group_limited_greedy":
        raise ConfigError(
            f"{reader.where}: topk_method {method!r} is not supported, only 'greedy' and 'group_limited_greedy'"
        )
    groups, best = _number(reader, "n_group"), _number(reader, "topk_group")
    if best >= groups:
        return values
    return values | {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": best,
        "moe_router_group_score": "max",
    }


def _groups(reader: Reader) -> dict[str, Any]:
    """Groups of experts: Hugging Face scores a group by its two best experts, this project by its topk / group_topk
    best ones."""
    groups, best, k = (_number(reader, key) for key in ("n_group", "topk_group", "num_experts_per_tok"))
    if best >= groups:
        return {}
    # Hugging Face's groups count two experts each whatever k is; this project's k / groups. Only where these are the
    # same can both mean one model.
    if k != 2 * best:
        raise ConfigError(
            f"{reader.where}: topk_group {best} of n_group {groups} is not supported with num_experts_per_tok {k}, "
            f"only with {2 * best}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best}


def _shared(reader: Reader, keys: ExpertKeys, width: int | None) -> dict[str, Any]:
    name = "moe_shared_expert_intermediate_size"
    if keys.shared == "gated":
        return {name: _number(reader, "shared_expert_intermediate_size"), "moe_shared_expert_gate": True}
    if keys.shared == "multiple":
        assert width is not None, "such a family has a width of experts"
        # n shared experts are one MLP of n times the width.
        return {name: _number(reader, "n_shared_experts") * width}
    return {}


def _pattern(reader: Reader, keys: ExpertKeys, layers: int) -> list[bool]:
    """Which layers have experts."""
    if keys.dense == "first_k":
        first = reader.get("first_k_dense_replace")
        reader.check_number("first_k_dense_replace", first, int)
        return [i >= first for i in range(layers)]
    if keys.dense == "sparse_step":
        # Qwen-MoE: every step-th layer has experts, except those in mlp_only_layers.
        step, dense = _number(reader, "decoder_sparse_step"), reader.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ConfigError(f"{reader.where}: mlp_only_layers {dense!r} is not a list")
        return [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    return [True] * layers


# The short spelling where all layers have experts.
def _layer_freq(pattern: list[bool]) -> str:
    return "1" if all(pattern) else str([int(layer) for layer in pattern]).replace(" ", "")


def _pattern_of(config: ModelConfig) -> list[bool]:
    return list(with_experts(config))


def write_experts(config: ModelConfig, keys: ExpertKeys) -> dict[str, Any]:
    """The keys of ``config``'s experts, as far as these keys can express them."""
    pattern, width = _pattern_of(config), config.moe_ffn_hidden_size or 0
    out: dict[str, Any] = {keys.count: config.num_experts, "num_experts_per_tok": config.moe_router_topk}
    out["moe_intermediate_size" if keys.own_width else "intermediate_size"] = width
    if keys.dense == "first_k":
        # Other patterns than "first k dense" are found out when the file is read back.
        out["first_k_dense_replace"] = pattern.index(True) if any(pattern) else len(pattern)
    elif keys.dense == "sparse_step":
        out |= {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, layer in enumerate(pattern) if not layer]}
    if keys.router == "norm_topk_prob":
        out["norm_topk_prob"] = not config.moe_router_pre_softmax
    elif keys.router == "topk_method":
        grouped = config.moe_router_num_groups is not None
        out["topk_method"] = "group_limited_greedy" if grouped else "greedy"
        out["routed_scaling_factor"] = config.moe_router_topk_scaling_factor or 1.0
        out |= {"n_group": config.moe_router_num_groups or 1, "topk_group": config.moe_router_group_topk or 1}
    elif keys.router == "sigmoid":
        # With one expert this project's router leaves the score as it is.
        out["norm_topk_prob"] = config.moe_router_topk > 1
        out["routed_scaling_factor"] = config.moe_router_topk_scaling_factor or 1.0
        out |= {"n_group": config.moe_router_num_groups or 1, "topk_group": config.moe_router_group_topk or 1}
    shared = config.moe_shared_expert_intermediate_size or 0
    if keys.shared == "gated":
        out["shared_expert_intermediate_size"] = shared
    elif keys.shared == "multiple":
        out["n_shared_experts"] = shared // max(width, 1)
    return out


def canonical(values: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Settings of an architecture in their canonical spelling, for comparison."""
    if config.num_experts is None:
        return values
    pattern = _pattern_of(config)
    out = values | {"moe_layer_freq": _layer_freq(pattern)}
    if all(pattern):  # there is no dense layer
        out["ffn_hidden_size"] = config.moe_ffn_hidden_size
    if config.moe_router_topk_scaling_factor == 1.0:
        out["moe_router_topk_scaling_factor"] = None
    # All groups may be chosen: there might as well be none.
    if config.moe_router_num_groups is not None and config.moe_router_num_groups == config.moe_router_group_topk:
        out |= {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_group_score": "sum"}
    return out
