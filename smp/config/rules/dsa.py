"""Checks of DeepSeek's sparse attention and the loss of its indexers."""

from __future__ import annotations

from smp.config.command_line.fields import given, require
from smp.config.model import ModelConfig
from smp.config.schema import Config

INDEXER_LOSS = "indexer loss"
"""Name of the indexers' loss in logs: the sum over all layers, as it is added to the model's loss."""
_OF_THE_LOSS = "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "dsa_indexer_warmup"


def chooses_keys(model: ModelConfig) -> bool:
    """Whether attention layers have an indexer."""
    return model.experimental_attention_variant == "dsa"


def indexer_coefficient(model: ModelConfig) -> float:
    """Coefficient of the loss that trains the indexers; 0: they are not trained."""
    return model.dsa_indexer_loss_coeff if chooses_keys(model) else 0.0


def learns(model: ModelConfig, name: str) -> bool:
    """Whether a parameter of this name is trained: in the warm-up only indexers are, and without their loss everything
    else."""
    if ".indexer." in name:
        return indexer_coefficient(model) > 0
    return not (chooses_keys(model) and model.dsa_indexer_warmup)


def check_dsa_model(model: ModelConfig) -> None:
    """Check a model with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    if not chooses_keys(model):
        return
    said = "--experimental-attention-variant dsa"
    require(
        model.q_lora_rank is not None, f"{said} computes the indexer's queries from a latent vector: give --q-lora-rank"
    )
    require(
        model.position_embedding_type == "rope", f"{said} rotates the indexer's heads: --position-embedding-type rope"
    )
    named = given(model, "window_size", "attention_dropout")
    require(not named, f"{said} and {', '.join(named)} exclude each other; leave out one")
    # The indexer shares the rotary table of latent attention, which has this many channels.
    rotated = model.qk_pos_emb_head_dim
    require(
        model.dsa_indexer_head_dim >= rotated,
        f"--dsa-indexer-head-dim {model.dsa_indexer_head_dim} is below --qk-pos-emb-head-dim {rotated}, which are "
        "rotated; change one of them",
    )
    stages = given(model, "dsa_indexer_warmup", "dsa_indexer_use_sparse_loss")
    require(
        len(stages) < 2,
        f"{' and '.join(stages)} exclude each other: in the warm-up the loss is over all keys; leave out one",
    )
    require(
        model.dsa_indexer_loss_coeff > 0 or not stages,
        f"{''.join(stages)} has no effect with --dsa-indexer-loss-coeff 0; leave it out",
    )


def check_dsa(config: Config) -> None:
    """Check the settings of a run with its defaults filled in; raises as :func:`check_dsa_model`."""
    model, parallel = config.model, config.parallel
    if not chooses_keys(model):
        return
    said = "--experimental-attention-variant dsa"
    flags = given(parallel, "fp8_format", "compile")
    require(not flags, f"{said} and {', '.join(flags)} exclude each other; leave out one")
    if config.objective is None:  # pretraining trains indexers with the rest
        return
    idle = given(model, *_OF_THE_LOSS)
    require(
        not (config.has_adapters and idle),
        f"{', '.join(idle)} has no effect with adapters: the indexers stay as they are; leave it out",
    )
    require(
        not (config.objective_facts.of_answers and idle),
        f"{', '.join(idle)}: pairs of answers (--objective {config.objective.objective}) leave the indexers as they "
        "are; leave it out",
    )
    require(
        not (config.has_adapters and config.lora is not None and config.lora.lora_dropout),
        f"{said} reads the up projection of keys and values as one matrix, to which a mask per token cannot "
        "be applied; leave out --lora-dropout",
    )
    require(
        not (config.writes and parallel.context_parallel_size > 1),
        f"{said}: text is not written with --context-parallel-size {parallel.context_parallel_size}; leave it out",
    )
