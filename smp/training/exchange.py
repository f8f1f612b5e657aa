"""The exchange of a context-parallel run: --cp-comm-type, or for auto the best one by the cost model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from smp.config import Config, ConfigError
from smp.config.layer_specs import KimiDeltaMixer, MambaMixer, Recurrence
from smp.config.layers import layer_specs
from smp.config.rules.context_parallel import exchange_sizes
from smp.layers.context_parallel.auto import CPU, H100, Seen, choose_comm_type
from smp.layers.context_parallel.cost import Exchanged
from smp.layers.context_parallel.make_core import CommType

DOCUMENT = 1024
"""Assumed tokens of a document, for the cost model, which chooses before data are read."""


@dataclass(frozen=True)
class Exchange:
    """The exchange of a run.

    Attributes:
        kind: what is exchanged.
        heads_group: processes that exchange heads, of those that share a sequence; 1: none.
        lines: why, for the user.
    """

    kind: CommType
    heads_group: int = 1
    lines: tuple[str, ...] = ()


def exchange_of(config: Config, device_type: str) -> Exchange:
    """Choose the exchange; the same on every process.

    Args:
        config: resolved settings.
        device_type: cuda or cpu, whose links and rates the cost model takes.

    Raises:
        ConfigError: nothing takes the model.
    """
    parallel, data = config.parallel, config.data
    heads, ring = exchange_sizes(parallel)
    if parallel.cp_comm_type != "auto":
        kind = parallel.cp_comm_type
        if kind == "a2a+p2p" and min(heads, ring) == 1:  # groups of one, or one group
            kind = "a2a" if ring == 1 else "p2p"
        return Exchange(kind, heads)
    if parallel.context_parallel_size == 1:
        return Exchange("p2p")
    assert data.seq_length is not None, "resolved before"
    machine = H100 if device_type == "cuda" else CPU
    try:
        choice = choose_comm_type(
            exchanged(config),
            data.seq_length,
            # Tensor parallelism takes GPUs of the node: fewer ring neighbours are on it.
            replace(machine, local=max(1, machine.local // parallel.tensor_model_parallel_size)),
            _seen(config),
            whole_only=parallel.compile and data.reset_attention_mask,
        )
    except ValueError as error:
        raise ConfigError(f"--cp-comm-type auto: {error}; leave out --compile") from None
    return Exchange(choice.best.kind, choice.best.heads_group, choice.lines)  # type: ignore[arg-type]


def _seen(config: Config) -> Counter[Seen]:
    """Layers by what a token of them sees: window and length of a document or chunk."""
    model, data = config.model, config.data
    assert data.seq_length is not None, "resolved before"
    document = min(DOCUMENT, data.seq_length) if data.reset_attention_mask else None
    found = Counter[Seen]()
    for attention in (mixer for spec in layer_specs(model) for mixer in spec.mixers):
        # Recurrences exchange states, not keys; a mixer from outside that sees no pairs of tokens has neither.
        if isinstance(attention, Recurrence) or not hasattr(attention, "chunk"):
            continue
        chunk = None if attention.chunk is None or attention.chunk >= data.seq_length else attention.chunk
        # A document inside a chunk ends first, or the chunk does.
        shorter = min((size for size in (document, chunk) if size is not None), default=None)
        found[Seen(attention.window, shorter)] += 1
    return found


def exchanged(config: Config) -> Exchanged:
    """Sizes of one layer's attention on one process."""
    model, data, parallel = config.model, config.data, config.parallel
    groups, head_dim, length = model.num_query_groups, model.kv_channels, data.seq_length
    assert groups is not None and head_dim is not None and length is not None, "resolved before"
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return Exchanged(
        tokens=config.rows_per_micro_batch * length // cp,
        heads=model.num_attention_heads // tp,
        groups=max(1, groups // tp),
        head_dim=head_dim,
        element=2 if parallel.bf16 else 4,
        cp=cp,
        heads_group=exchange_sizes(parallel)[0],
    )


def recurrence_exchange(config: Config) -> tuple[Literal["states", "heads"], list[str]]:
    """What layers with a recurrence exchange, and a line for the user where sequences are cut. --cp-comm-type a2a:
    heads for tokens; auto: what sends fewer bytes; all others: states."""
    parallel, kind = config.parallel, config.parallel.cp_comm_type
    mixers = (mixer for spec in layer_specs(config.model) for mixer in spec.mixers)
    mixer = next((mixer for mixer in mixers if isinstance(mixer, Recurrence)), None)
    cp = parallel.context_parallel_size
    # Attention only, or whole sequences: nothing is exchanged for recurrences.
    if mixer is None or cp == 1:
        return "states", []
    states, heads = recurrence_bytes(config, mixer)
    own = mixer.key_heads // parallel.tensor_model_parallel_size
    # Each rank needs whole heads.
    shared = own > 0 and own % cp == 0
    by_heads = kind == "a2a" or (kind == "auto" and shared and heads < states)
    what = "heads for tokens" if by_heads else "states"
    line = f"context parallelism of recurrences: {what}; of a layer and micro-batch a process sends "
    line += f"{2 * states / 2**20:.1f} MiB of states, {2 * heads / 2**20:.1f} MiB for heads"
    return "heads" if by_heads else "states", [line]


def recurrence_bytes(config: Config, mixer: Recurrence) -> tuple[int, int]:
    """Bytes that a process sends for a layer and micro-batch in the forward pass, and in the backward pass once more:
    of states, where a sequence is one document, and for heads. What multiplies a state is a matrix, of Mamba-2 a
    number."""
    parallel, length = config.parallel, config.data.seq_length
    assert length is not None, "resolved before"
    cp, tp, b = parallel.context_parallel_size, parallel.tensor_model_parallel_size, 2 if parallel.bf16 else 4
    rows, heads = config.rows_per_micro_batch, mixer.value_heads // tp
    channels = 2 * mixer.own_keys(tp) + mixer.own_values(tp)
    # A state is passed on as a decay times the state: for delta rules a (key_dim, key_dim) matrix.
    factor = 1 if isinstance(mixer, MambaMixer) else mixer.key_dim**2
    # States are fp32: 4 bytes.
    state = 4 * heads * (mixer.key_dim * mixer.value_dim + factor)
    pieces = 2 * rows * (cp - 1)  # two on each process, of each sequence
    numbers = 1 + (mixer.key_dim if isinstance(mixer, KimiDeltaMixer) else 1)  # of a head in fp32: rate and decays
    # Both inputs and outputs of the recurrence are exchanged: heads for tokens, and back.
    there, back = b * channels + 4 * numbers * heads, b * heads * mixer.value_dim
    # The convolution's last conv - 1 tokens of a piece are sent as well.
    return pieces * (state + (mixer.conv - 1) * channels * b), rows * length // cp * (cp - 1) * (there + back) // cp
