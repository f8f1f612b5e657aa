"""Bytes per token of mixers with a linear recurrence, by formula, without torch; K are the numbers of a token's queries
on a process, and of its keys, V those of its values."""

from __future__ import annotations

from smp.config.layer_specs import KimiDeltaMixer, MambaMixer, Recurrence

CHUNK = 64
"""Tokens that :mod:`smp.kernels.recurrences.chunks`, which needs torch, computes at once."""


def kept_by_recurrence(mixer: Recurrence, tp: int, b: int, recompute: str) -> int:
    """Bytes that stay for the backward pass. selective: results of matrix products and of the rule.

    A gated delta net: input and output of the convolution 2 (2 K + V), queries and keys for each head of values, output
    of the rule and of the gate's product, and the gate, 3 V; in fp32 queries and keys before they are divided by their
    length 2 K, output and gate of the gate's product 3 V (with b = 4 the first already exists), rates and decays, and
    of the rule a state for each chunk and the inverses.

    Kimi delta attention: the same, but of the gate's product its sigmoid instead of the gate; in fp32 decays three
    times, before and after softplus and of the rule; and what is between narrow projections.

    Mamba-2: input and output of the convolution and the norm's result; in fp32 output, gate, SiLU of it, their product
    and what the norm multiplies, 5 V, four numbers for each head, and a state for each chunk. Without a norm two of
    the 5 V are not kept.
    """
    # Of the (key_dim, value_dim) state of each head, one per chunk of 64 tokens.
    heads, k, v = mixer.value_heads // tp, mixer.own_keys(tp), mixer.own_values(tp)
    states = heads * mixer.key_dim * mixer.value_dim // CHUNK
    if isinstance(mixer, MambaMixer):
        if recompute == "selective":
            return b * (2 * k + 3 * v + heads) + 4 * states
        return b * (2 * (2 * k + v) + v) + 4 * ((5 if mixer.norm else 3) * v + 4 * heads + states)
    # And of each chunk a (64, 64) inverse for each head: 64 numbers per token.
    rule = states + heads * CHUNK
    if isinstance(mixer, KimiDeltaMixer):
        if recompute == "selective":
            return b * (2 * k + 4 * v + heads + 2 * mixer.key_dim) + 4 * rule
        # In fp32 runs (b = 4) casts to fp32 are no copies.
        wide = (2 * k + 2 * v if b < 4 else v) + 3 * k + 3 * heads
        return b * (2 * (2 * k + v) + 2 * k + 2 * v + 2 * mixer.key_dim) + 4 * (wide + rule)
    if recompute == "selective":
        return b * (2 * k + 3 * v + 2 * heads) + 4 * rule
    wide = (2 * k + 3 * v if b < 4 else v) + 6 * heads
    return b * (2 * (2 * k + v) + 2 * heads * mixer.key_dim + 3 * v) + 4 * (wide + rule)


def pending_of_recurrence(mixer: Recurrence, tp: int) -> int:
    """Numbers between both parts of a split backward pass: inputs of products and gradients of their results."""
    decays = 2 * (mixer.own_keys(tp) + 2 * mixer.key_dim) if isinstance(mixer, KimiDeltaMixer) else 0
    return 4 * (mixer.own_keys(tp) + mixer.own_values(tp)) + decays


def in_flight_of_recurrence(mixer: Recurrence, tp: int) -> int:
    """Bytes in the rule's backward pass, in fp32 for each head of values: of a delta rule what it takes and three times
    more of queries, keys and values, gradients of states, and five matrices of a chunk; where channels fade apart G in
    fp64, decays, gradients and what pairs of halves are made of, twelve times keys. Mamba-2's queries and keys are
    a group's; six times values, four matrices of a chunk, states and their gradients."""
    heads, state = mixer.value_heads // tp, mixer.key_dim * mixer.value_dim // CHUNK
    if isinstance(mixer, MambaMixer):
        return 4 * (4 * mixer.own_keys(tp) + heads * (6 * mixer.value_dim + 4 * CHUNK + 2 * state))
    fading = 12 * mixer.key_dim if isinstance(mixer, KimiDeltaMixer) else 0
    return 4 * heads * (4 * (2 * mixer.key_dim + mixer.value_dim) + fading + 5 * CHUNK + state)
