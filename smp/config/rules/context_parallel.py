"""Checks of context parallelism."""

from __future__ import annotations

from smp.config.command_line.fields import flag_of, given
from smp.config.layer_pattern import DELTA_RULES, attends, linear
from smp.config.layout import Layout
from smp.config.parallel import ParallelConfig
from smp.config.schema import Config, ConfigError


def check_context_parallel(config: Config, layout: Layout) -> None:
    """Check the settings of a run with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    parallel, cp = config.parallel, layout.cp
    named = given(parallel, "cp_comm_type", "hierarchical_context_parallel_sizes")
    if cp == 1:
        if named:
            raise ConfigError(
                f"{', '.join(named)}: sequences are not cut; give --context-parallel-size above 1 or leave it out"
            )
        return
    _check_length(config.data.seq_length or 0, cp)
    a2a, ring = exchange_sizes(parallel)
    documents, kind = config.data.reset_attention_mask, parallel.cp_comm_type
    # Compiled code is specialized for shapes, and documents differ in every batch.
    if parallel.compile and documents and kind != "auto" and ring > 1:
        raise ConfigError(
            f"--cp-comm-type {kind} computes documents block by block, which --compile would trace anew for every "
            "batch; --cp-comm-type a2a works"
        )
    if config.model.position_embedding_type == "alibi" and kind != "a2a":
        raise ConfigError(
            f"--cp-comm-type {kind} merges blocks of keys, which --position-embedding-type alibi is not written for; "
            "--cp-comm-type a2a works"
        )
    _check_recurrence(config, layout)
    if not any(attends(config.model)):
        return
    heads = config.model.num_attention_heads // layout.tp
    # Each all-to-all group divides a rank's heads.
    if heads % a2a:
        shared = f" / --tensor-model-parallel-size {layout.tp}" if layout.tp > 1 else ""
        groups = "" if a2a == cp else f" in groups of {a2a}"
        raise ConfigError(
            f"--cp-comm-type {parallel.cp_comm_type}{groups} needs a multiple of {a2a} query heads on each process, "
            f"not --num-attention-heads {config.model.num_attention_heads}{shared} = {heads}; "
            "--cp-comm-type p2p and all_gather work"
        )


def _check_recurrence(config: Config, layout: Layout) -> None:
    """Check a2a with recurrences: all-to-all gives each process some heads, so key heads must be divisible."""
    model = config.model
    if not any(linear(model)) or config.parallel.cp_comm_type != "a2a":
        return
    # Value heads are a multiple of key heads, so key heads decide. A whole head goes to one process.
    name = "linear_num_key_heads" if model.linear_attention_type in DELTA_RULES else "mamba_num_groups"
    count = getattr(model, name)
    if count // layout.tp and count // layout.tp % layout.cp == 0:
        return
    raise ConfigError(
        f"--cp-comm-type a2a needs a multiple of {layout.cp} key heads of the recurrence on each process, not "
        f"{flag_of(name)} {count} / --tensor-model-parallel-size {layout.tp} = {count / layout.tp:g}; --cp-comm-type "
        "p2p and all_gather work"
    )


def _check_length(length: int, cp: int) -> None:
    """Check that a sequence has 2 x cp equal chunks. Each process has two, an early and a late one, so that all have
    the same work under a causal mask."""
    if length % (2 * cp):
        below, above = length // (2 * cp) * 2 * cp, -(-length // (2 * cp)) * 2 * cp
        works = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size {cp} = {2 * cp}; {works} works"
        )


def exchange_sizes(parallel: ParallelConfig) -> tuple[int, int]:
    """Processes per all-to-all group and per ring; their product is --context-parallel-size.

    Raises:
        ConfigError: --hierarchical-context-parallel-sizes is missing, or does not fit.
    """
    cp, kind, text = (
        parallel.context_parallel_size,
        parallel.cp_comm_type,
        parallel.hierarchical_context_parallel_sizes,
    )
    if kind != "a2a+p2p":
        if text is not None:
            raise ConfigError(
                f"--hierarchical-context-parallel-sizes {text} is for --cp-comm-type a2a+p2p, not {kind}; leave it out"
            )
        return (cp, 1) if kind == "a2a" else (1, cp)
    # Groups exchange heads, and rings go between groups (USP: Fang and Zhao 2024, arXiv 2405.07719).
    words = (text or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[0]) * int(words[1]) != cp:
        said = "is missing" if text is None else f"{text} does not fit"
        raise ConfigError(
            f"--cp-comm-type a2a+p2p: --hierarchical-context-parallel-sizes {said}: give two numbers, processes of an "
            f"all-to-all group and of a ring, whose product is --context-parallel-size {cp}"
        )
    return int(words[0]), int(words[1])
