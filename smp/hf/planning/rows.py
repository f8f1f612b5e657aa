"""Rows: which module of a Hugging Face model is cut how. Rows come from transformers, from this file, and from the
caller.

A row is a pattern of a module's name, ``*`` standing for numbers of layers, and a style:

================================  =============================================================================
style                             what the ranks do
================================  =============================================================================
colwise                           each computes some of the output columns and keeps them
colwise_gather_output             ... and all get all columns
rowwise                           each has some of the input columns; the results are summed
rowwise_split_input               ... of an input that all have
embedding_rowwise                 each has some rows of a table, the results are summed
embedding_colwise                 each has some columns of a table and keeps them
replicated_with_grad_allreduce    all have the weight and use it on their own heads: gradients are summed
experts                           each has some of the experts of a stack (:mod:`smp.hf.experts`)
sorted_experts                    each has some of a stack's matrices, whose rows are sorted by expert; the results are
                                  joined
sorted_experts_in                 ... and keeps the results of its own experts
sorted_experts_out                ... of these, and the results are joined
mla_kv_a_proj                     all have the weight; of its last columns, which bypass the layers after it, each
                                  uses some heads' gradient: that is summed
replicate                         all compute the same, in the module and all below it
divide                            the pattern names a number that a module keeps (of heads): it is divided
================================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smp.config.command_line.fields import did_you_mean
from smp.config.schema import ConfigError

COLUMN = ("colwise", "colwise_gather_output")
ROW = ("rowwise", "rowwise_split_input")
EMBEDDING = "embedding_rowwise"
SUMMED = "replicated_with_grad_allreduce"
EMBEDDING_COLUMNS = "embedding_colwise"
EXPERTS = "experts"
SORTED, SORTED_IN, SORTED_OUT = "sorted_experts", "sorted_experts_in", "sorted_experts_out"
SORTED_EXPERTS = (SORTED, SORTED_IN, SORTED_OUT)
LATENT = "mla_kv_a_proj"
OWN_PARAMETERS = "own parameters"
"""A style that no row has: for parameters that a module has itself, such as attention sinks."""
REPLICATE = "replicate"
DIVIDE = "divide"
STYLES = (*COLUMN, *ROW, EMBEDDING, EMBEDDING_COLUMNS, EXPERTS, *SORTED_EXPERTS, LATENT, SUMMED, REPLICATE, DIVIDE)
# Names that transformers' plans use or used for the same styles.
_OTHER_NAMES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "moe_tp_experts": EXPERTS,  # transformers cuts each expert, this project between experts
    "ep_dispatch_experts": EXPERTS,
}


def _attention(where: str, output: str, heads: str | None, names: str = "q_proj k_proj v_proj") -> dict[str, str]:
    rows = {f"{where}.{name}": "colwise" for name in names.split()} | {f"{where}.{output}": "rowwise"}
    return rows | ({f"{where}.{heads}": DIVIDE} if heads else {})


def _vision(layers: str, output: str, heads: str) -> dict[str, str]:
    """Rows of a vision tower; ``layers``: several patterns. An MLP has a gate or not: rows that match nothing do no
    harm."""
    rows: dict[str, str] = {}
    for layer in layers.split():
        for name in ("attention", "self_attn"):
            rows |= _attention(f"{layer}.{name}", output, heads)
        rows |= dict.fromkeys((f"{layer}.mlp.{name}" for name in ("fc1", "gate_proj", "up_proj")), "colwise")
        rows |= dict.fromkeys((f"{layer}.mlp.{name}" for name in ("fc2", "down_proj")), "rowwise")
    return rows


def _t5(side: str, width: str | None = None) -> dict[str, str]:
    """``width``: a number that its attention keeps, of all heads."""
    layer = f"{side}.block.*.layer.*"
    dense = dict.fromkeys((f"{layer}.DenseReluDense.{name}" for name in ("wi", "wi_0", "wi_1")), "colwise")
    rows = {f"{side}.embed_tokens": EMBEDDING, f"{layer}.DenseReluDense.wo": "rowwise"} | dense
    for attention in ("SelfAttention", "EncDecAttention", "LocalSelfAttention"):
        rows |= _attention(f"{layer}.{attention}", "o", "n_heads", "q k v")
        rows |= {f"{layer}.{attention}.{width}": DIVIDE} if width else {}
        # The table is (buckets, heads): its columns go with the heads.
        rows[f"{layer}.{attention}.relative_attention_bias"] = EMBEDDING_COLUMNS  # a column per head
    return rows


def _mlp(up: str, down: str) -> dict[str, str]:
    return {up: "colwise", down: "rowwise"}


def _whisper(layer: str) -> dict[str, str]:
    rows = {f"{layer}.fc1": "colwise", f"{layer}.fc2": "rowwise", f"{layer}.final_layer_norm": REPLICATE}
    # Rows of norms next to columns: they see whole hidden states.
    for attention in ("self_attn", "encoder_attn"):
        rows |= _attention(f"{layer}.{attention}", "out_proj", "num_heads")
        rows |= {f"{layer}.{attention}_layer_norm": REPLICATE}
    return rows


def _bert(base: str, head: str) -> dict[str, str]:
    """Rows of BERT's kind. The embedding is whole because of the head, whose bias is also another module's
    parameter."""
    layer = f"{base}.encoder.layer.*"
    return {
        **dict.fromkeys((f"{layer}.attention.self.{name}" for name in ("query", "key", "value")), "colwise"),
        f"{layer}.attention.self.num_attention_heads": DIVIDE,
        f"{layer}.attention.self.all_head_size": DIVIDE,
        f"{layer}.attention.output.dense": "rowwise",
        f"{layer}.intermediate.dense": "colwise",
        f"{layer}.output.dense": "rowwise",
        f"{base}.embeddings.word_embeddings": REPLICATE,
        head: REPLICATE,
    }


def _jetmoe(layer: str) -> dict[str, str]:
    """Queries are experts' outputs, which attention needs of all experts."""
    return {
        f"{layer}.mlp.input_linear": "sorted_experts_in",
        f"{layer}.mlp.output_linear": "sorted_experts_out",
        f"{layer}.self_attention.experts.input_linear": "sorted_experts",
        f"{layer}.self_attention.experts.output_linear": "sorted_experts",
    }


_WHOLE_SHARED_EXPERTS = {"model.layers.*.mlp.shared_experts": REPLICATE}

OWN: dict[str, dict[str, str]] = {
    "apertus": {"model.layers.*.mlp.act_fn": SUMMED},
    "doge": {
        **dict.fromkeys((f"model.layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise_gather_output"),
        "model.layers.*.self_attn.o_proj": "rowwise_split_input",
        "model.layers.*.self_attn.dt_proj": REPLICATE,
    },
    # Its other way through both, which reads their weights, is for checkpoints that were trained in parts.
    "bloom": dict.fromkeys(
        ("transformer.h.*.self_attention.dense", "transformer.h.*.mlp.dense_4h_to_h"), "rowwise_split_input"
    ),
    "jetmoe": _jetmoe("model.layers.*") | _jetmoe("layers.*"),
    "inkling_text": _WHOLE_SHARED_EXPERTS,
    "longcat_flash": {"model.layers.*.mlp.experts": REPLICATE},
    "bert": _bert("bert", "cls.predictions.decoder"),
    **dict.fromkeys(
        (f"{kind}{tower}" for kind in ("clip", "siglip", "siglip2") for tower in ("", "_vision_model", "_text_model")),
        _vision("encoder.layers.* vision_model.encoder.layers.* text_model.encoder.layers.*", "out_proj", "num_heads"),
    ),
    "dinov2": _vision("dinov2.encoder.layer.* encoder.layer.*", "o_proj", "num_attention_heads"),
    "dinov2_with_registers": _vision(
        "dinov2_with_registers.encoder.layer.* encoder.layer.*", "o_proj", "num_attention_heads"
    ),
    "dinov3_vit": _vision("dinov3_vit.model.layer.* model.layer.*", "o_proj", "num_heads"),
    "gpt2": {
        # Fused q, k, v lie in thirds: a rank's slice of columns would mix them, so outputs are
        # gathered and every rank computes all heads.
        "transformer.h.*.attn.c_attn": "colwise_gather_output",
        "transformer.h.*.attn.c_proj": "rowwise_split_input",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    "opt": {
        "model.decoder.layers.*.self_attn.q_proj": "colwise",
        "model.decoder.layers.*.self_attn.k_proj": "colwise",
        "model.decoder.layers.*.self_attn.v_proj": "colwise",
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.self_attn.num_heads": "divide",
        "model.decoder.layers.*.self_attn_layer_norm": "replicate",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
        "model.decoder.layers.*.final_layer_norm": "replicate",
    },
    **dict.fromkeys(("t5", "mt5", "umt5"), _t5("encoder") | _t5("decoder")),
    "longt5": _t5("encoder", "inner_dim") | _t5("decoder", "inner_dim"),
    "gpt_neo": {
        **_attention("transformer.h.*.attn.attention", "out_proj", "num_heads"),
        **_mlp("transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_proj"),
    },
    "gptj": {
        **_attention("transformer.h.*.attn", "out_proj", "num_attention_heads"),
        **_mlp("transformer.h.*.mlp.fc_in", "transformer.h.*.mlp.fc_out"),
    },
    "biogpt": {
        **_attention("biogpt.layers.*.self_attn", "out_proj", "num_heads"),
        **_mlp("biogpt.layers.*.fc1", "biogpt.layers.*.fc2"),
        "biogpt.layers.*.self_attn_layer_norm": REPLICATE,
        "biogpt.layers.*.final_layer_norm": REPLICATE,
    },
    # Norms of a head's width, which transformers' plan leaves out.
    "qwen3_vl_moe": {f"model.language_model.layers.*.self_attn.{norm}_norm": SUMMED for norm in "qk"},
    "roberta": _bert("roberta", "lm_head"),
    "xlm-roberta": _bert("roberta", "lm_head"),
    "camembert": _bert("roberta", "lm_head"),
    "data2vec-text": _bert("data2vec_text", "lm_head"),
    "electra": _bert("electra", "generator_lm_head"),
    **dict.fromkeys(
        ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"),
        _whisper("model.encoder.layers.*") | _whisper("model.decoder.layers.*"),
    ),
    "vit": _vision("vit.layers.* layers.*", "o_proj", "num_attention_heads"),
    "vit_mae": _vision("vit.layers.* layers.* decoder.decoder_layers.*", "o_proj", "num_attention_heads"),
    "whisper": _whisper("model.encoder.layers.*") | _whisper("model.decoder.layers.*"),
}
"""Rows by model_type: families for which transformers has no plan, or one that is not enough (parameters of an
activation, attention with more than heads in it, stacks with another interface). GPT-2's fused query, key and value lie
in thirds, so each rank computes some columns of the product and all compute the attention."""


def pattern_of(name: str) -> str:
    """A module's name with layer numbers replaced: ``model.layers.3.mlp`` -> ``model.layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether it computes what nn.Linear does and nothing else: subclasses may add more."""
    kind = type(module)
    return kind is nn.Linear or is_conv1d(module) or (kind.__name__ == "FalconLinear" and isinstance(module, nn.Linear))


def rows_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """Style by pattern for ``model``. The caller's rows win over this file's, and these over transformers'.

    Raises:
        ConfigError: a row of the caller's that is wrong or does nothing; of transformers' none that fits the names; or
            a class of neither transformers nor diffusers, without rows.
    """
    given = dict(given or {})
    planned = _planned(model, "_tp_plan")
    kind = getattr(getattr(model, "config", None), "model_type", "")
    # Merged key by key: a row of this file replaces only the same row of transformers' plan.
    known = planned | OWN.get(kind, {})
    rows = known | given
    if not rows and not hasattr(model, "config"):
        raise no_rows(model)
    _check_known(model, known)
    check_given(model, given, rows)
    return rows


def no_rows(model: nn.Module) -> ConfigError:
    """The error for a model of which nothing would be cut."""
    return ConfigError(
        f"{type(model).__name__} has no tensor-parallel plan in transformers nor here: give transform(model, "
        'rows={"layers.*.mlp.up": "colwise", ...}), see docs/transform.md'
    )


def _planned(model: nn.Module, plan: str) -> dict[str, str]:
    """Rows of transformers' own plan with this file's style names. diffusers' plans have objects for fused layers,
    whose rows depend on each other: such a plan is not used."""
    styles = (getattr(model, plan, None) or {}).values()
    if not all(isinstance(style, str) for style in styles):
        return {}
    named = (getattr(model, plan, None) or {}).items()
    return {name: _OTHER_NAMES.get(style, style) for name, style in named if style != "local_params"}


def expert_rows_of(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """Rows of experts only, for a single tensor-parallel rank, and what the caller replicates."""
    known = _planned(model, "_tp_plan") | _planned(model, "_ep_plan") | dict(given or {})
    return {name: style for name, style in known.items() if style in (EXPERTS, REPLICATE)}


def _check_known(model: nn.Module, known: Mapping[str, str]) -> None:
    """Raise ConfigError where a plan matches no module: a wrapper that renames modules (peft) would leave the model
    whole without an error."""
    if known and known.keys().isdisjoint(pattern_of(name) for name, _ in model.named_modules()):
        raise ConfigError(
            f"{type(model).__name__} has no module {next(iter(known))} nor any other of its tensor-parallel plan: "
            "transform the model before a wrapper renames its modules"
        )


def check_given(model: nn.Module, given: Mapping[str, str], rows: Mapping[str, str]) -> None:
    """Check that every row of the caller's is valid and has an effect.

    Args:
        model: not transformed yet.
        given: the caller's rows.
        rows: all rows.

    Raises:
        ConfigError: with the first that does not.
    """
    modules: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        modules.setdefault(pattern_of(name), []).append(module)
    for pattern, style in given.items():
        if style not in STYLES:
            raise ConfigError(f"rows: {pattern}: no style {style}{did_you_mean(style, STYLES)}; {', '.join(STYLES)}")
        if pattern != pattern_of(pattern):
            raise ConfigError(f"rows: {pattern}: a row is for all layers: write {pattern_of(pattern)}")
        target, _, attribute = pattern.rpartition(".") if style == DIVIDE else (pattern, "", "")
        if target not in modules:
            raise ConfigError(f"rows: no module is named {target}{did_you_mean(target, modules)}")
        # With dots: "layers.1" is not above "layers.10".
        above = [top for top, other in rows.items() if other == REPLICATE and f"{pattern}.".startswith(f"{top}.")]
        if above := [top for top in above if top != pattern and top in modules]:
            raise ConfigError(f"rows: {pattern} does nothing, {above[0]} is replicated: leave one of the two out")
        if style == DIVIDE:
            value = getattr(modules[target][0], attribute, None)
            if not isinstance(value, int):
                raise ConfigError(f"rows: {pattern} is {value!r}, no number that could be divided")
        elif not any(True for module in modules[target] for _ in module.parameters(recurse=style == REPLICATE)):
            raise ConfigError(f"rows: {pattern}: {style} does nothing: the module has no parameters of its own")
