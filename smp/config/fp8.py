"""What FP8 asks of the other settings, and which layers it leaves alone."""

from __future__ import annotations

from smp.config.fields import given, require
from smp.config.layout import Layout
from smp.config.schema import Config, ConfigError, ModelConfig, ParallelConfig

_ONLY_WITH_FP8 = (
    *("fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_emulate", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
_BLOCKS = {"blockwise": 128, "mxfp8": 32}
"""Neighbouring numbers that share a scale."""
_ALIGNED = 16


def layers_in_bf16(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Numbers of the layers that do not compute in FP8 although others do."""
    if not parallel.first_last_layers_bf16:
        return []
    end = num_layers - parallel.num_layers_at_end_in_bf16
    return [layer for layer in range(num_layers) if layer < parallel.num_layers_at_start_in_bf16 or layer >= end]


def check_fp8(config: Config, layout: Layout) -> None:
    """Check the settings of a run with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    model, parallel = config.model, config.parallel
    if parallel.fp8_format is None:
        named = given(parallel, *_ONLY_WITH_FP8)
        require(not named, f"{', '.join(named)} has no effect without --fp8-format; leave it out")
        return
    flag = f"--fp8-format {parallel.fp8_format}"
    require(
        not parallel.compile,
        f"{flag} and --compile exclude each other: scales are exchanged between products, which a graph of a block "
        "cannot do yet; leave out --compile",
    )
    require(
        model.num_experts is None or parallel.fp8_recipe not in _BLOCKS,
        f"--fp8-recipe {parallel.fp8_recipe}: an expert has any number of tokens, not whole blocks of them; with "
        "--num-experts delayed, tensorwise and rowwise work",
    )
    require(
        not model.multi_latent_attention,
        f"{flag}: latent attention is not there in FP8 yet; leave it out, or --multi-latent-attention",
    )
    require(
        not config.judges_answers,
        f"{flag}: finetune.py trains in FP8 with --objective sft only; leave it out here",
    )
    require(
        config.lora is None or not config.lora.load_in_4bit,
        f"{flag} and --load-in-4bit exclude each other: products of weights in 4 bits are in bf16; leave one out",
    )
    _check_layers(model, parallel)
    groups = model.num_query_groups or 1
    require(
        groups % layout.tp == 0,
        f"{flag}: with --num-query-groups {groups} below --tensor-model-parallel-size {layout.tp} processes share a "
        f"key/value head, whose gradient they would round before it is summed; --tensor-model-parallel-size {groups} "
        "works",
    )
    _check_tokens(config, layout)
    _check_widths(model, parallel, layout.tp)


def _check_layers(model: ModelConfig, parallel: ParallelConfig) -> None:
    start, end = parallel.num_layers_at_start_in_bf16, parallel.num_layers_at_end_in_bf16
    if parallel.first_last_layers_bf16 and start + end >= model.num_layers:
        raise ConfigError(
            f"--first-last-layers-bf16 with --num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 "
            f"{end} leaves none of {model.num_layers} layers for FP8; give smaller numbers"
        )


def _check_tokens(config: Config, layout: Layout) -> None:
    """Rows that only fill up a slice of the tokens would take part in maxima."""
    length, micro = config.data.seq_length or 0, config.data.micro_batch_size
    if config.parallel.sequence_parallel and micro * length // layout.cp % layout.tp:
        cut = f" / --context-parallel-size {layout.cp}" if layout.cp > 1 else ""
        raise ConfigError(
            f"--fp8-format with --sequence-parallel needs --micro-batch-size {micro} x --seq-length {length}{cut} to "
            f"be divisible by --tensor-model-parallel-size {layout.tp}; change one of them"
        )
    piece = length if layout.cp == 1 else length // (2 * layout.cp)
    block = _BLOCKS.get(config.parallel.fp8_recipe, 1)
    if piece % block:
        cut = f" / (2 x --context-parallel-size {layout.cp})" if layout.cp > 1 else ""
        raise ConfigError(
            f"--fp8-recipe {config.parallel.fp8_recipe}: --seq-length {length}{cut} = {piece} is not a multiple of its "
            f"blocks of {block} tokens; --fp8-recipe rowwise takes any length"
        )


def _check_widths(model: ModelConfig, parallel: ParallelConfig, tp: int) -> None:
    head_dim, groups, ffn = model.kv_channels, model.num_query_groups, model.ffn_hidden_size
    assert head_dim is not None and groups is not None and ffn is not None, "filled in before"
    widths = {
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": ffn // tp,
        "--num-attention-heads x --kv-channels": model.num_attention_heads * head_dim // tp,
        "--num-query-groups x --kv-channels": groups * head_dim // tp,
    }
    experts = {
        "--moe-ffn-hidden-size": model.moe_ffn_hidden_size,
        "--moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size,
    }
    widths |= {name: width // tp for name, width in experts.items() if width is not None}
    shared = "" if tp == 1 else f" on each of {tp} tensor-parallel processes"
    multiple = _BLOCKS.get(parallel.fp8_recipe, 1 if parallel.fp8_emulate else _ALIGNED)
    for name, width in widths.items():
        place = "" if name == "--hidden-size" else shared
        require(
            width % multiple == 0,
            f"--fp8-recipe {parallel.fp8_recipe} takes widths that are multiples of {multiple}: {name} is {width}"
            f"{place}; change it",
        )
    if parallel.fp8_emulate:
        return
    require(
        parallel.fp8_recipe not in _BLOCKS,
        f"--fp8-recipe {parallel.fp8_recipe}: tensor cores are not used for it yet; --fp8-emulate computes it, and "
        "rowwise and tensorwise run on them",
    )
    require(
        parallel.bf16,
        f"--fp8-format {parallel.fp8_format} on tensor cores makes bf16 of its products: give --bf16, or "
        "--fp8-emulate where there are none",
    )
