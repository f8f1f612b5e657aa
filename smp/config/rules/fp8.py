"""Checks of FP8, and the layers that it leaves out."""

from __future__ import annotations

from smp.config.command_line.fields import given, require
from smp.config.layer_pattern import linear
from smp.config.layout import Layout
from smp.config.model import ModelConfig
from smp.config.parallel import ParallelConfig
from smp.config.schema import Config, ConfigError

_ONLY_WITH_FP8 = (
    *("fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_emulate", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_param_gather"),
)
_BLOCKS = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Neighbouring numbers that share a scale."""
_TOKENS = {"blockwise": 128, "mxfp8": 32}
"""Neighbouring tokens that share a scale in the product of a weight's gradient."""
# cuBLASLt's FP8 products need dimensions that are multiples of 16.
_ALIGNED = 16
_NOT_GROUPED = "products of experts take one scale of a matrix, or scales of its rows"


def layers_in_bf16(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Numbers of the layers that stay out of FP8."""
    if not parallel.first_last_layers_bf16:
        return []
    end = num_layers - parallel.num_layers_at_end_in_bf16
    return [layer for layer in range(num_layers) if layer < parallel.num_layers_at_start_in_bf16 or layer >= end]


def check_fp8(config: Config, layout: Layout) -> None:
    """Check the settings of a run with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    model, parallel, recipe = config.model, config.parallel, config.parallel.fp8_recipe
    if parallel.fp8_format is None:
        named = given(parallel, *_ONLY_WITH_FP8)
        require(not named, f"{', '.join(named)} has no effect without --fp8-format; leave it out")
        return
    flag = f"--fp8-format {parallel.fp8_format}"
    require(
        (parallel.fp8_format == "e2m1") == (parallel.fp8_recipe == "nvfp4"),
        f"{flag} with --fp8-recipe {parallel.fp8_recipe}: e2m1 is the format of nvfp4, and its only one; give both, or "
        "neither",
    )
    # Blocks of tokens would span experts.
    require(
        model.num_experts is None or parallel.fp8_recipe not in _BLOCKS,
        f"--fp8-recipe {parallel.fp8_recipe}: "
        + ("an expert has any number of tokens, not whole blocks of them" if recipe in _TOKENS else _NOT_GROUPED)
        + "; with --num-experts delayed, tensorwise and rowwise work",
    )
    require(
        config.lora is None or not config.lora.load_in_4bit,
        f"{flag} and --load-in-4bit exclude each other: products of weights in 4 bits are in bf16; leave one out",
    )
    require(
        not any(linear(model)),
        f"{flag} and {', '.join(given(model, 'linear_attention_type', 'hybrid_layer_pattern'))} exclude each other: "
        "rates and decays of a recurrence need more than 8 bits, and the projections next to them share their input; "
        "leave one out",
    )
    _check_layers(model, parallel)
    _check_gather(parallel, layout)
    groups = model.num_query_groups or 1
    require(
        # The rounded gradients would not add up to the rounded sum.
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


def _check_gather(parallel: ParallelConfig, layout: Layout) -> None:
    # FSDP2 takes one custom all-gather for a unit; each setting below would bring another one.
    if not parallel.fp8_param_gather:
        return
    require(
        layout.dp_shard * layout.cp * layout.expert_shard > 1,
        "--fp8-param-gather: no weights are sharded, so none are gathered; leave it out, or take more processes and "
        "--hybrid-shard-degree 0",
    )
    require(
        parallel.data_parallel_collectives == "flat",
        f"--fp8-param-gather: --data-parallel-collectives {parallel.data_parallel_collectives} has gathers of its own; "
        "flat works",
    )
    require(
        parallel.zero_hpz_partition_size == 1,
        f"--fp8-param-gather: --zero-hpz-partition-size {parallel.zero_hpz_partition_size} has gathers of its own; "
        "leave out one of them",
    )


def _check_tokens(config: Config, layout: Layout) -> None:
    """Refuse lengths with padding rows, which would take part in maxima, or that are not whole blocks."""
    length, micro = config.data.seq_length or 0, config.data.micro_batch_size
    if config.parallel.sequence_parallel and micro * length // layout.cp % layout.tp:
        cut = f" / --context-parallel-size {layout.cp}" if layout.cp > 1 else ""
        raise ConfigError(
            f"--fp8-format with --sequence-parallel needs --micro-batch-size {micro} x --seq-length {length}{cut} to "
            f"be divisible by --tensor-model-parallel-size {layout.tp}; change one of them"
        )
    # Context parallelism: each of a rank's two chunks must be whole blocks.
    piece = length if layout.cp == 1 else length // (2 * layout.cp)
    block = _TOKENS.get(config.parallel.fp8_recipe, 1)
    if piece % block:
        cut = f" / (2 x --context-parallel-size {layout.cp})" if layout.cp > 1 else ""
        raise ConfigError(
            f"--fp8-recipe {config.parallel.fp8_recipe}: --seq-length {length}{cut} = {piece} is not a multiple of its "
            f"blocks of {block} tokens; --fp8-recipe rowwise takes any length"
        )
    slices = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    own = micro * length // layout.cp // slices
    require(
        own % block == 0 or not config.model.multi_latent_attention,
        f"--fp8-recipe {config.parallel.fp8_recipe}: with --sequence-parallel a process projects {own} tokens to the "
        f"latents of --multi-latent-attention, which are not whole blocks of {block}; --fp8-recipe rowwise takes any",
    )


def _check_widths(model: ModelConfig, parallel: ParallelConfig, tp: int) -> None:
    assert model.ffn_hidden_size is not None, "filled in before"
    experts = {
        "--moe-ffn-hidden-size": model.moe_ffn_hidden_size,
        "--moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size,
    }
    cut = {"--ffn-hidden-size": model.ffn_hidden_size, **_widths_of_heads(model)}
    cut |= {name: width for name, width in experts.items() if width is not None}
    whole = {"--hidden-size": model.hidden_size, **_widths_of_latents(model)}
    shared = "" if tp == 1 else f" on each of {tp} tensor-parallel processes"
    multiple = _BLOCKS.get(parallel.fp8_recipe, 1 if parallel.fp8_emulate else _ALIGNED)
    # Widths per tensor-parallel process for cut dimensions.
    for name, width in (whole | {name: width // tp for name, width in cut.items()}).items():
        whose = "" if name in whole else shared
        require(
            width % multiple == 0,
            f"--fp8-recipe {parallel.fp8_recipe} takes widths that are multiples of {multiple}: {name} is {width}"
            f"{whose}; change it",
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
        f"--fp8-format {parallel.fp8_format} on tensor cores gives results in bf16: give --bf16, or "
        "--fp8-emulate where there are none",
    )


def _widths_of_heads(model: ModelConfig) -> dict[str, int]:
    """Widths of attention's projections that TP cuts."""
    heads, groups, head_dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    assert head_dim is not None and groups is not None, "filled in before"
    if not model.multi_latent_attention:
        return {
            "--num-attention-heads x --kv-channels": heads * head_dim,
            "--num-query-groups x --kv-channels": groups * head_dim,
        }
    # TP cuts the projections from latents to heads; the latents are whole on every process.
    return {
        "--num-attention-heads x (--qk-head-dim + --qk-pos-emb-head-dim)": heads
        * (model.qk_head_dim + model.qk_pos_emb_head_dim),
        "--num-attention-heads x (--qk-head-dim + --v-head-dim)": heads * (model.qk_head_dim + model.v_head_dim),
        "--num-attention-heads x --v-head-dim": heads * model.v_head_dim,
    }


def _widths_of_latents(model: ModelConfig) -> dict[str, int]:
    """Widths of latent attention's projections that every process has whole."""
    if not model.multi_latent_attention:
        return {}
    found = {
        "--kv-lora-rank": model.kv_lora_rank,
        "--kv-lora-rank + --qk-pos-emb-head-dim": model.kv_lora_rank + model.qk_pos_emb_head_dim,
    }
    return found if model.q_lora_rank is None else found | {"--q-lora-rank": model.q_lora_rank}
