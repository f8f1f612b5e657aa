"""FP8 in compiled code: the scales and the 8-bit numbers of uncompiled code, in as many graphs as there are kinds of
steps, and a history that recompute does not advance."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from smp.config import Layout, ModelConfig, ParallelConfig
from smp.layers.fp8.apply import Fp8, fp8_history, use_fp8
from smp.layers.fp8.scales import Scales
from smp.layers.fp8.scaling import Precision, Recipe
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group
from smp.parallel.context import ParallelContext, build_context
from smp.sharding.fp8_gather import gather_in_fp8
from tests.distributed import run_distributed
from tests.fake_group import fake_context, lone_context
from tests.sharding.model import MODEL, build

WIDE = replace(MODEL, hidden_size=128, ffn_hidden_size=256, kv_channels=64, max_position_embeddings=128)
"""Of blocks of 128 numbers, on two tensor-parallel ranks too."""
MIXED = replace(
    WIDE,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=64,
    moe_layer_freq="[0,1]",
)
"""The second layer has experts."""
DEPTH = torch._dynamo.config.recompile_limit + 3
RECIPES: tuple[Recipe, ...] = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def micro_batch(step: int) -> MicroBatch:
    ids = (torch.arange(128).view(1, 128) * (2 * step + 3)) % 64
    return MicroBatch(ids, ids.flip(1), torch.full((1, 128), 1.0 / 128), token_index=ids.new_tensor(range(128))[None])


def model_of(
    context: ParallelContext, recipe: Recipe, parallel: ParallelConfig, config: ModelConfig = WIDE, length: int = 2
) -> GPT:
    """In FP8. Scales know their layers before FSDP asks them for those of gathers."""
    model = build(context, config, replace(parallel, fp8_param_gather=False))
    precision = Precision(recipe, "e2m1" if recipe == "nvfp4" else "hybrid", emulate=True)
    use_fp8(model, Fp8(precision, length), context, torch.device("cpu"))
    if parallel.fp8_param_gather:
        gather_in_fp8(model)
    return model


def advance(model: GPT) -> dict[str, torch.Tensor]:
    """The end of a step: the history after it."""
    if (history := fp8_history(model)) is None:
        return {}
    history.checked(torch.ones(()))
    history.advance(torch.tensor(True))
    return {name: maxima.clone() for name, maxima in history.state().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "tp", "recompute", "graphs"),
    [
        ("delayed", 2, "full", 2),
        ("tensorwise", 1, "none", 1),
        ("rowwise", 2, "none", 1),
        ("blockwise", 1, "selective", 1),
        ("mxfp8", 2, "none", 1),
        ("nvfp4", 1, "full", 1),
    ],
)
def test_blocks_are_one_graph(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, tp: int, recompute: str, graphs: int
) -> None:
    """However many they are (two of them in the fast test below); delayed scaling has one more of the step without a
    history."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with fake_context(Layout(tp=tp)) as context:
        parallel: Any = ParallelConfig(
            tp,
            sequence_parallel=tp > 1,
            compile=True,
            recompute_granularity=recompute,  # type: ignore[arg-type]
        )
        model = model_of(context, recipe, parallel, replace(WIDE, num_layers=DEPTH))
        for step in range(3):
            model(micro_batch(step)).loss.backward()
            advance(model)
        assert counters["stats"]["unique_graphs"] == graphs
        with torch.no_grad():
            model.eval()(micro_batch(3))
        assert counters["stats"]["unique_graphs"] == graphs + 1, "evaluation has one of its own"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_experts_rows_need_no_number_when_a_graph_is_made(recipe: Recipe) -> None:
    """As under expert parallelism, where each step has another one."""
    key = Scales(Precision(recipe, "hybrid", emulate=True), (Group("", 1, 0),)).key
    ops = torch.ops.smp
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        rows = mode.shape_env.create_unbacked_symint()
        torch._check(rows >= 0)
        x, weight, grad = torch.empty(rows, 16), torch.empty(3, 24, 16), torch.empty(rows, 24)
        numbers, scales, *_ = ops.fp8_operands(x, [weight], [], key)
        gradient, its_scales = ops.fp8_gradients([grad], [], key)
    assert numbers.shape == x.shape and gradient.shape == grad.shape
    assert scales.ndim == its_scales.ndim == (0 if recipe == "tensorwise" else 2)


def trained(model: GPT) -> dict[str, torch.Tensor]:
    """Of three steps, in the last of which two forward passes come before their backward pass, and an evaluation."""
    out = dict[str, torch.Tensor]()
    for step in range(3):
        model.zero_grad()
        losses = [model(micro_batch(step + more)).loss for more in range(1 + (step == 2))]
        sum(losses[1:], losses[0]).backward()
        out |= {f"loss {step} {i}": loss.detach() for i, loss in enumerate(losses)}
        out |= {f"{name} {step}": p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]
        out |= {f"{name} {step}": maxima for name, maxima in advance(model).items()}
    with torch.no_grad():
        out["evaluation"] = model.eval()(micro_batch(3)).loss
    return out


def differences(
    context: ParallelContext, recipe: Recipe, parallel: ParallelConfig, config: ModelConfig = WIDE
) -> list[str]:
    """Names of what is other bits compiled than uncompiled, which keeps all activations."""
    torch._dynamo.reset()
    plain = trained(model_of(context, recipe, replace(parallel, recompute_granularity="none"), config))
    ours = trained(model_of(context, recipe, replace(parallel, compile=True), config))
    assert plain.keys() == ours.keys()
    assert config.num_experts is None or any("mlp.experts" in name for name in plain)
    return [name for name, x in plain.items() if not torch.equal(ours[name], x)]


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (WIDE, 1),
        pytest.param(replace(MIXED, num_layers=4, moe_layer_freq="[0,1,0,1]"), 2, marks=pytest.mark.slow),
    ],
    ids=["dense", "with experts"],
)
def test_a_compiled_model_has_the_bits_of_an_uncompiled_one(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, kinds: int
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with lone_context() as context:
        assert differences(context, "delayed", ParallelConfig(recompute_granularity="selective"), config) == []
    # Of each kind of block, whatever their number: without a history, with one, and in evaluation.
    assert counters["stats"]["unique_graphs"] == 3 * kinds


LAYOUTS: dict[str, tuple[Layout, ParallelConfig, tuple[Recipe, ...]]] = {
    "experts, tp and sp": (Layout(tp=2), ParallelConfig(2, sequence_parallel=True), ("tensorwise", "rowwise")),
    "experts, shard, full recompute": (
        Layout(dp_shard=2),
        ParallelConfig(hybrid_shard_degree=2, recompute_granularity="full"),
        ("delayed",),
    ),
    "tp and sp": (Layout(tp=2), ParallelConfig(2, sequence_parallel=True), RECIPES),
    "tp, full recompute": (Layout(tp=2), ParallelConfig(2, recompute_granularity="full"), ("delayed", "rowwise")),
    "shard": (Layout(dp_shard=2), ParallelConfig(hybrid_shard_degree=2), ("delayed", "blockwise")),
    "8-bit gathers": (
        Layout(dp_shard=2),
        ParallelConfig(hybrid_shard_degree=2, fp8_param_gather=True),
        ("delayed", "tensorwise"),
    ),
}


def compare_layouts(rank: int, world: int, name: str) -> dict[str, list[str]]:
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    layout, parallel, recipes = LAYOUTS[name]
    context, config = build_context(layout, "cpu"), MIXED if name.startswith("experts") else WIDE
    return {recipe: differences(context, recipe, parallel, config) for recipe in recipes}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_the_bits_of_uncompiled_ones(name: str) -> None:
    for measured in run_distributed(compare_layouts, 2, name):
        assert measured == {recipe: [] for recipe in LAYOUTS[name][2]}
