"""Megatron-LM's flags and what becomes of each here: data that the command line, its error messages and the page
docs/differences-from-megatron.md read. Names are those of the groups of arguments of its training programs in 2026, and
of older versions, which scripts still give; a name that the table lacks is told to be unknown."""

from __future__ import annotations

from smp.config.megatron.model_rows import MODEL
from smp.config.megatron.newer_rows import NEWER
from smp.config.megatron.parallel_rows import PARALLEL
from smp.config.megatron.rows import Fate, Row
from smp.config.megatron.run_rows import CHECKPOINTS, DATA, LOGS, OTHERS, TRAINING

TABLE: tuple[Row, ...] = (*MODEL, *PARALLEL, *TRAINING, *DATA, *CHECKPOINTS, *LOGS, *OTHERS, *NEWER)

ROWS: dict[str, Row] = {flag: row for row in TABLE for flag in row.arities}
"""Row by flag."""

DEFAULTS = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": "false",
    "untie_embeddings_and_output_weights": "false",
    "disable_bias_linear": "false",
    "hidden_dropout": "0.1",
    "attention_dropout": "0.1",
    "lr_decay_style": "linear",
    "weight_decay": "0.01",
    "adam_beta2": "0.999",
    "sgd_momentum": "0.9",
    "muon_momentum": "0.9",
    "muon_use_nesterov": "false",
    "muon_extra_scale_factor": "1.0",
    "eval_iters": "100",
    "log_interval": "100",
    "log_format": "megatron",
    "profile_step_start": "10",
    "profile_step_end": "12",
    "fp8_amax_history_len": "1",
    "fp8_amax_compute_algo": "most_recent",
}
"""Megatron's defaults that differ from this project's, by setting. A --load without a checkpoint stays an error."""

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
"""Settings of the model without a default in Megatron, which has none for --micro-batch-size and --lr either."""


def fate_of(flag: str) -> Fate:
    """What becomes of a flag of Megatron's."""
    return ROWS[flag].fate


def answer_of(flag: str) -> str | None:
    """The answer to a flag of Megatron's that this project lacks; None: it is no such flag."""
    row = ROWS.get(flag)
    if row is None or row.fate == "same":
        return None
    if row.fate == "left out":
        return f"leave it out: {row.answer}"
    return row.answer or f"write {row.words.format('N')}"
