from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.config import ConfigError
from smp.models.part import ModelPart
from smp.pipeline.placement import balance, parse_layout
from tests.pipeline.formulas import format_layout

costs = st.integers(0, 20)


def counts(placement: tuple[ModelPart, ...]) -> list[int]:
    return [stage.count for stage in placement]


def stage_costs(placement: Sequence[ModelPart], layers: Sequence[int], embedding: int, head: int) -> tuple[int, ...]:
    """What each stage costs."""
    return tuple(sum(layers[i] for i in s.layers) + embedding * s.embedding + head * s.head for s in placement)


def all_placements(layers: int, stages: int) -> list[tuple[ModelPart, ...]]:
    """Every way to cut layers into consecutive stages, also empty ones."""
    placements = []
    for bars in combinations(range(layers + stages - 1), stages - 1):
        edges = [-1, *bars, layers + stages - 1]
        sizes = [after - before - 1 for before, after in pairwise(edges)]
        text = "|".join("t" * size for size in sizes)
        placements.append(parse_layout(f"E{text}L", layers, stages))
    return placements


@settings(max_examples=150, deadline=None)
@given(st.lists(costs, max_size=8), st.integers(1, 4), costs, costs)
def test_no_placement_has_a_cheaper_slowest_stage(
    layer_costs: list[int], stages: int, embedding: int, head: int
) -> None:
    found = stage_costs(balance(layer_costs, stages, embedding, head), layer_costs, embedding, head)
    others = [stage_costs(other, layer_costs, embedding, head) for other in all_placements(len(layer_costs), stages)]
    assert max(found) == min(map(max, others))
    as_good = [other for other in others if max(other) == max(found)]
    assert sum(cost**2 for cost in found) == min(sum(cost**2 for cost in other) for other in as_good)


@settings(deadline=None)
@given(st.lists(costs, max_size=24), st.integers(1, 12), costs, costs)
def test_every_layer_has_its_place(layer_costs: list[int], stages: int, embedding: int, head: int) -> None:
    placement = balance(layer_costs, stages, embedding, head)
    layers = [layer for stage in placement for layer in range(stage.first, stage.first + stage.count)]
    assert len(placement) == stages and layers == list(range(len(layer_costs)))
    assert [stage.embedding for stage in placement] == [True] + [False] * (stages - 1)
    assert [stage.head for stage in placement] == [False] * (stages - 1) + [True]
    assert parse_layout(format_layout(placement), len(layer_costs), stages) == placement


def test_embedding_and_head_count() -> None:
    assert counts(balance([1] * 32, 4)) == [8, 8, 8, 8]
    assert counts(balance([1] * 32, 4, head_cost=4)) == [9, 9, 9, 5]
    assert counts(balance([1] * 14, 4, embedding_cost=1, head_cost=1)) == [3, 4, 4, 3]
    assert counts(balance([1, 1, 1, 5], 2)) == [3, 1]


def test_layers_that_are_over_go_to_the_end() -> None:
    """The first rank holds the activations of most micro-batches."""
    assert counts(balance([1] * 7, 4)) == [1, 2, 2, 2]


def test_more_stages_than_layers_leave_stages_empty() -> None:
    placement = balance([1, 1], 4, head_cost=1)
    assert counts(placement)[-1] == 0 and sum(counts(placement)) == 2
    assert str(placement[0]) == "embedding" and str(placement[-1]) == "head"
    assert str(ModelPart(3, 0)) == "nothing"
    assert str(ModelPart(3, 1)) == "layer 3"
    assert str(ModelPart(0, 3, embedding=True)) == "embedding, layers 0-2"


@pytest.mark.parametrize(("stages", "layer_costs"), [(0, [1]), (2, [1, -1])])
def test_impossible_costs_are_refused(stages: int, layer_costs: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        balance(layer_costs, stages)


@pytest.mark.parametrize(
    ("layout", "layers", "expected"),
    [
        ("Et*3|(tt|)*29L", 61, [3] + [2] * 29 + [0]),  # Megatron's example for DeepSeek-V3, without its m
        ("Ettt|t,t|tL", 6, [3, 2, 1]),
        ("E|(t|)*3L", 3, [0, 1, 1, 1, 0]),
        ("E||tt||L", 2, [0, 0, 2, 0, 0]),
        ("E(t*2|)*2t*2L", 6, [2, 2, 2]),
        ("Et*10|t*12L", 22, [10, 12]),
        ("E(tt|t|)*2L", 6, [2, 1, 2, 1, 0]),
        ("EtL", 1, [1]),
        ("Et*007|t*0L", 7, [7, 0]),
    ],
)
def test_megatrons_notation(layout: str, layers: int, expected: list[int]) -> None:
    assert counts(parse_layout(layout, layers, len(expected))) == expected


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et*15|t*16L", "names 31 layers of 32"),
        ("Et*16|t*17L", "names 33 layers of 32"),
        ("Et*16|t*8|t*8L", "names 3 stages, but --pipeline-model-parallel-size x"),
        ("Et*32L", "names 1 stages"),
        ("Et*16|t*16,m|L", "has 'm'; it is made of E, t, L, |, x*n and (...)*n"),
        ("E(t*16|t*16L", "has '(';"),
        ("E(t)*|t*16L", "has '(', ')', '*';"),
        ("t*16E|t*16L", "begin with its one E"),
        ("t*16|Et*16L", "begin with its one E"),
        ("Et*16|Lt*16", "end with its one L"),
        ("Et*16L|t*16L", "its one L"),
        ("t*16|t*16", "begin with its one E"),
        ("", "names 1 stages"),
        ("E t*16 | t*16 L", "has ' ';"),
        ("E((t)*4|)*2t*28L", "no group is inside of another"),
        ("Et*99999999999999|L", "repeats 't' more than 34 times"),
        ("Et*" + "9" * 5000 + "|L", "repeats 't' more than 34 times"),
        ("E(tt)*35|L", "repeats 'tt' more than 34 times"),
    ],
)
def test_a_wrong_layout_is_one_line(layout: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_layout(layout, 32, 2)
    assert f"--pipeline-model-parallel-layout {layout!r}" in str(error.value)
    assert message in str(error.value) and "\n" not in str(error.value)
