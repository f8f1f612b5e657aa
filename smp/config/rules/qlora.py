"""Checks of 4-bit weights."""

from __future__ import annotations

from smp.config.command_line.fields import require
from smp.config.layer_pattern import DELTA_RULES, attends, has_mlp, linear
from smp.config.layout import Layout
from smp.config.schema import Config

BLOCK, NESTED = 64, 256
"""Elements of a block with one scale, and blocks whose scales share a second one."""


def packed_row_bytes(in_features: int, *, double: bool) -> int:
    """Bytes of a row of a matrix (out, in) in 4 bits, see ``smp.kernels.precision.nf4``.

    Raises:
        ValueError: a row is not made of whole blocks.
    """
    k, rest = divmod(in_features, BLOCK)
    if rest:
        raise ValueError(f"rows of {in_features} elements are not made of blocks of {BLOCK}")
    # 32 k: 64 elements of half a byte. Scales: 8-bit ones padded to 4 bytes, their mean, an offset
    # and nested scales; or fp32 ones.
    return 32 * k + (k + -k % 4 + 8 + 4 * nested_of_row(k) if double else 4 * k)


def nested_of_row(k: int) -> int:
    """Nested scales that a row of k blocks may touch, wherever it begins."""
    return -(-k // NESTED) + 1


def check_qlora(config: Config, layout: Layout) -> None:
    """Check the settings of a run with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    model, lora = config.model, config.lora
    if lora is None or not lora.load_in_4bit:
        return
    assert model.kv_channels is not None and model.ffn_hidden_size is not None, "resolved before"
    require(
        not config.parallel.compile,
        "--compile: weights of --load-in-4bit are dequantized outside of compiled code; leave it out",
    )
    require(
        not config.parallel.zero_quantized_weights,
        "--zero-quantized-weights: weights of --load-in-4bit have four bits as they are; leave it out",
    )
    if model.is_foreign:  # whose widths its modules say (smp.layers.adapters.quantized)
        return
    # Latent attention's output projection reads values of their own width.
    values = model.v_head_dim if model.multi_latent_attention else model.kv_channels
    widths = {"hidden size": (model.hidden_size, 1), "attention": (model.num_attention_heads * values, layout.tp)}
    if model.multi_latent_attention:
        widths |= {"keys and values": (model.kv_lora_rank, 1), "queries": (model.q_lora_rank or BLOCK, 1)}
    if not any(attends(model)):
        del widths["attention"]
    if model.linear_attention_type in DELTA_RULES:
        widths["recurrence"] = (model.linear_num_value_heads * model.linear_value_head_dim, layout.tp)
        if model.linear_attention_type == "kda":
            widths["decays and gates of the recurrence"] = (model.linear_key_head_dim, 1)
    elif any(linear(model)):
        widths["recurrence"] = ((model.mamba_num_heads or 0) * model.mamba_head_dim, layout.tp)
    if any(has_mlp(model)):
        widths["MLP"] = (model.ffn_hidden_size, layout.tp)
    if model.moe_shared_expert_intermediate_size is not None:
        widths["shared expert"] = (model.moe_shared_expert_intermediate_size, layout.tp)
    for what, (width, ranks) in widths.items():
        cut = f", cut by --tensor-model-parallel-size {ranks}" if ranks > 1 else ""
        # Only a width that tensor parallelism makes too narrow can be helped by fewer ranks.
        less = "; take fewer processes" if ranks > 1 and width % BLOCK == 0 else "; leave it out"
        require(
            width % (ranks * BLOCK) == 0,
            f"--load-in-4bit rounds blocks of {BLOCK} elements of a row: rows of width {width} ({what}){cut} are not "
            f"made of them{less}",
        )
