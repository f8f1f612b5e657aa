"""Multi-token prediction: its layers, which follow the last one, and their checks."""

from __future__ import annotations

from smp.config.command_line.fields import given, require
from smp.config.model import ModelConfig
from smp.config.schema import Config

MTP_LOSS = "mtp loss"
"""Name of the loss of multi-token prediction in logs: the sum over its layers, as it is added to the total."""


def mtp_layers(model: ModelConfig) -> range:
    """Numbers of the layers after the last, each of which predicts one token further ahead. They are built like the
    last layer."""
    return range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0))


def check_mtp_model(model: ModelConfig) -> None:
    """Check a model with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    if model.mtp_num_layers is None:
        return
    said = f"--mtp-num-layers {model.mtp_num_layers}"
    # A prediction layer reads the next token's embedding, in which a learned position would already be.
    require(
        model.position_embedding_type in ("rope", "none"),
        f"{said} and --position-embedding-type {model.position_embedding_type} exclude each other: a token's embedding "
        "is used at another position; take rope or none",
    )
    alone = given(model, "hidden_dropout", "attention_dropout", "embedding_layernorm")
    require(not alone, f"{said} and {', '.join(alone)} exclude each other; leave out one")
    require(not model.scalar_head, f"{said}: a reward model predicts no tokens; leave it out")


def check_mtp(config: Config) -> None:
    """Check the settings of a run with its defaults filled in; raises as :func:`check_mtp_model`."""
    model, parallel = config.model, config.parallel
    if model.mtp_num_layers is None:
        return
    said = f"--mtp-num-layers {model.mtp_num_layers}"
    flags = given(parallel, "fp8_format")
    require(not flags, f"{said} and {', '.join(flags)} exclude each other; leave out one")
    length = config.data.seq_length
    # The k-th of these layers predicts the token k + 1 ahead.
    require(
        length is None or length > model.mtp_num_layers,
        f"{said}: a sequence of --seq-length {length} has no token so far ahead; give a longer one",
    )
