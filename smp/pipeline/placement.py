"""Which layers a stage holds: balanced by cost, or given by the user.

    balance      [e | 1 2 3 | 4 5 6 | ... | 30 31 h]    the slowest stage as fast as it can be
    parse_layout "Et*3|(tt|)*14tL"                      Megatron's notation

Stages are numbered along the way of a token. The embedding is in the first stage and the head (final norm, output
matrix, loss) in the last; other stages may be empty: they pass on what they get.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from smp.config import ConfigError
from smp.models.part import ModelPart

FLAG = "--pipeline-model-parallel-layout"


def balance(
    layer_costs: Sequence[float], stages: int, embedding_cost: float = 0, head_cost: float = 0
) -> tuple[ModelPart, ...]:
    """Consecutive layers for each stage so that the most expensive stage is as cheap as possible.

    Among the placements with the same most expensive stage the one with the smallest sum of squares is taken, that is
    the most even; among those the one with fewer layers in front, where most activations wait.

    Args:
        layer_costs: cost of each layer in any unit, such as seconds or FLOPs of a forward and backward.
        stages: pipeline ranks x chunks.
        embedding_cost: added to the first stage.
        head_cost: added to the last stage.

    Raises:
        ValueError: no stage, or a cost is negative.
    """
    costs = [*layer_costs, embedding_cost, head_cost]
    if stages < 1 or min(costs) < 0:
        raise ValueError(f"balance needs a stage and costs of at least 0, not {stages} stages with costs {costs}")
    # Prefix sums: the cost of any run of layers is a difference of two of them.
    before = [0, *accumulate(layer_costs)]

    def cost(stage: int, start: int, end: int) -> float:
        return before[end] - before[start] + embedding_cost * (stage == 0) + head_cost * (stage == stages - 1)

    # First the lowest maximum; then, among placements that keep to it, the lowest sum of squares. Both passes add the
    # same floats in the same order, so the bound is met exactly and ``<=`` needs no tolerance.
    bound, _ = _cheapest(cost, len(layer_costs), stages, max)
    _, counts = _cheapest(cost, len(layer_costs), stages, lambda total, one: total + one**2 if one <= bound else inf)
    return _from_counts(counts)


def _cheapest(
    cost: Callable[[int, int, int], float], layers: int, stages: int, add: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Lowest value, joined by ``add`` over stages, and its layers per stage: dynamic programming over how many layers
    the stages so far hold. ``cost(stage, start, end)`` is that of layers start to end - 1 in a stage."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        best = {
            # Tuples compare by value and then by counts: of equal values the one with fewer layers in front wins.
            end: min(
                (add(value, cost(stage, start, end)), (*counts, end - start))
                for start, (value, counts) in best.items()
                if start <= end
            )
            for end in range(layers + 1)
        }
    return best[layers]


def _from_counts(counts: Sequence[int]) -> tuple[ModelPart, ...]:
    firsts = [0, *accumulate(counts)]
    last = len(counts) - 1
    return tuple(ModelPart(firsts[s], count, embedding=s == 0, head=s == last) for s, count in enumerate(counts))


def parse_layout(layout: str, num_layers: int, stages: int) -> tuple[ModelPart, ...]:
    """A placement in Megatron's notation, ``--pipeline-model-parallel-layout``.

    E is the embedding, t a transformer layer, L the head with the loss, | begins the next stage; ``x*n`` repeats a
    character and ``(...)*n`` a group; commas do nothing. ``Et*3|(tt|)*14tL`` has 3 layers, 14 times 2, 1.

    Raises:
        ConfigError: not of this form, or of another size than ``num_layers`` and ``stages`` (ranks x chunks).
    """
    # From the coarse to the fine: characters, stages, layers, ends. Each message names what to change.
    rows = _repeat(layout, num_layers + stages).split("|")
    text = "".join(rows)
    unknown = sorted(set(text) - set("EtL"))
    if unknown:
        known = "E, t, L, |, x*n and (...)*n, where no group is inside of another"
        raise ConfigError(f"{FLAG} {layout!r} has {', '.join(map(repr, unknown))}; it is made of {known}")
    if len(rows) != stages:
        raise ConfigError(
            f"{FLAG} {layout!r} names {len(rows)} stages, but --pipeline-model-parallel-size x "
            f"--num-virtual-stages-per-pipeline-rank is {stages}"
        )
    if text.count("t") != num_layers:
        raise ConfigError(f"{FLAG} {layout!r} names {text.count('t')} layers of {num_layers} (--num-layers)")
    if text.count("E") != 1 or text.count("L") != 1 or not rows[0].startswith("E") or not rows[-1].endswith("L"):
        raise ConfigError(f"{FLAG} {layout!r} has to begin with its one E and to end with its one L")
    return _from_counts([row.count("t") for row in rows])


def _repeat(layout: str, most: int) -> str:
    """Write out repetitions: groups first, so that a group may hold repetitions. None is longer than ``most``, the
    characters of a layout that fits."""

    def repeated(match: re.Match[str]) -> str:
        digits = match[2].lstrip("0")
        # The number of digits first: Python refuses to read numbers of thousands of digits, with an error of its own.
        if len(digits) > len(str(most)) or int(digits or "0") > most:
            raise ConfigError(
                f"{FLAG} {layout!r} repeats {match[1]!r} more than {most} times, layers and stages together"
            )
        return match[1] * int(digits or "0")

    written = layout.replace(",", "")
    # A group within a group is not matched: its parentheses stay, and are refused as unknown
    # characters.
    for pattern in (r"\(([^()]*)\)\*([0-9]+)", r"([^*])\*([0-9]+)"):
        written = re.sub(pattern, repeated, written)
    return written
