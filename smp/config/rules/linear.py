"""What layers with a linear recurrence ask of the other settings."""

from __future__ import annotations

from smp.config.command_line.fields import given, require
from smp.config.layer_pattern import OF_ATTENTION, linear
from smp.config.model import ModelConfig


def check_linear(model: ModelConfig, tp: int) -> None:
    """Check a model with its defaults filled in, whose heads ``tp`` processes share.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    if model.linear_attention_type is None:
        return
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    require(
        model.layer_types is None,
        f"--layer-types {model.layer_types} and --linear-attention-type {model.linear_attention_type} both say what "
        "layers are; leave out one",
    )
    require(
        values % keys == 0,
        f"--linear-num-value-heads {values} is not divisible by --linear-num-key-heads {keys}; change one of them",
    )
    require(
        keys % tp == 0,
        f"--linear-num-key-heads {keys} is not divisible by --tensor-model-parallel-size {tp}; change one of them",
    )
    if all(linear(model)):
        _check_without_attention(model)


def _check_without_attention(model: ModelConfig) -> None:
    """Of a model whose layers are all recurrent."""
    named = given(model, *OF_ATTENTION)
    if model.num_query_groups != model.num_attention_heads:
        named += given(model, "num_query_groups")
    if model.kv_channels != model.hidden_size // model.num_attention_heads:
        named += given(model, "kv_channels")
    if model.position_embedding_type == "alibi":
        named += given(model, "position_embedding_type")
    require(
        not named,
        f"{', '.join(named)}: all layers have --linear-attention-type {model.linear_attention_type}, none has "
        "attention; leave it out, or give some attention with --linear-attention-freq",
    )
