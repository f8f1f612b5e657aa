"""The same texts, to the token, with the trainer's log-probabilities, in every layout; training goes on after that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from smp.config import Config, Layout, ModelConfig
from smp.generation import Generator, Request, Sampling
from smp.layers import Normal, add_adapters, init_weights
from smp.layers.adapters.lora import adapters_of
from smp.layers.adapters.quantized import fill, quantize_layers, quantized_layers, read_blocks, whole_shape
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.optim.optimizer import build_optimizer
from smp.parallel.context import build_context
from smp.parallel.region import Region
from smp.parallel.rng import keyed_normal
from smp.pipeline.stage_plan import plan_pipeline
from smp.sharding.parallelize import parallelize
from smp.training.build import RunSetup, assemble, build_forward_backward, build_generator, choose_backends
from smp.training.objectives.next_token import NextToken
from smp.training.trainer import Progress, Trainer
from tests.distributed import run_distributed
from tests.generation.models import MODELS
from tests.parity.cases import Case, Problem, Spread, config_of
from tests.parity.data import share

PROMPTS = [[3, 1, 4, 1, 5], [7], [2, 9, 11, 3, 8, 6, 12, 10, 1, 30, 31, 4], [13, 2], [1, 2, 3, 4, 5, 6, 7, 8]]
SAMPLING = Sampling(temperature=1.3, top_k=0, seed=5)
Texts = dict[tuple[int, int], tuple[list[int], list[float]]]
SPREADS = {
    "one rank": Spread(),
    "tp2": Spread(tp=2),
    "tp4 sp": Spread(tp=4, sp=True),
    "tp2 sp, shard2": Spread(tp=2, sp=True, shard=2),
    "pp2, shard2": Spread(pp=2, shard=2),
    "pp4": Spread(pp=4),
    "pp2 interleaved, tp2": Spread(pp=2, tp=2, schedule="interleaved"),
    "pp2 v, shard2": Spread(pp=2, shard=2, schedule="zb-v"),
    "tp2 sp, pp2": Spread(tp=2, sp=True, pp=2),
    "cp4": Spread(cp=4),
    "cp2, tp2 sp": Spread(cp=2, tp=2, sp=True),
    "cp2, pp2": Spread(cp=2, pp=2),
    "ep4, shard4": Spread(ep=4, shard=4),
    "ep2, tp2 sp, shard2": Spread(ep=2, tp=2, sp=True, shard=2),
    "ep2, pp2, shard2": Spread(ep=2, pp=2, shard=2),
    "tp2 sp compile, shard2": Spread(tp=2, sp=True, shard=2, compile=True),
}
EXPERTS = "gpt-oss", "llama4"


def requests() -> list[Request]:
    """Two samples of each prompt, and more texts than a batch has."""
    return [Request(prompt, 9 + i, i, sample) for i, prompt in enumerate(PROMPTS) for sample in range(2)]


def written(generator: Generator, asked: Sequence[Request]) -> Texts:
    """By prompt and sample: ids and log-probabilities."""
    return {(c.request.index, c.request.sample): (c.ids, c.log_probs) for c in generator.write(asked, SAMPLING)}


def settings(name: str, spread: Spread) -> tuple[Config, Layout]:
    """Of a run of a model in a layout."""
    layers = 4 if name.split(" with ")[0].endswith(" 4") else 2
    experts = "mixtral" if spread.ep > 1 else ""  # they are those of the model
    problem = Problem(length=40, layers=layers, vocab=(50, 2), micro_batches=4, experts=experts)
    exchange = "a2a" if "bloom" in name else "p2p"  # the one that knows ALiBi
    config = config_of(Case(problem, replace(spread, accumulation=4 // spread.data_parallel, exchange=exchange)))
    model = ModelConfig(**MODELS[name.split(" with ")[0].removesuffix(" 4")] | {"num_layers": layers})
    if model.hybrid_layer_pattern is not None:
        model = replace(model, hybrid_layer_pattern=model.hybrid_layer_pattern[:layers])
    return replace(config, model=model), Layout.from_config(config.parallel, spread.world_size)


def build(config: Config, layout: Layout, name: str) -> tuple[GPT, RunSetup]:
    """The model of a run, as it trains: with LoRA or QLoRA if its name says so."""
    context = build_context(layout, "cpu", sequence_parallel=config.parallel.sequence_parallel)
    plan, device = plan_pipeline(config, layout) if layout.pp > 1 else None, torch.device("cpu")
    kernels, _ = choose_backends(config, context, device, documents=False)
    setup = RunSetup(context, device, kernels, plan)
    model = assemble(config, setup)
    if "lora" in name:  # that changes something
        add_adapters(model, ["*"], rank=3, alpha=6.0)
        for adapter in adapters_of(model).values():
            adapter.initializers["b"] = Normal(0.3)
    if "qlora" in name:
        quantize_layers(model, double=False)
    parallelize(model, context, config.parallel, eager_rounding=True)  # as of runs that write texts
    model.to_empty(device=device)
    init_weights(model, 1)
    for key, layer in quantized_layers(model).items():
        fill(layer, read_blocks(layer, partial(_drawn, key, whole_shape(layer)), torch.float32))
    return model, setup


def _drawn(name: str, shape: tuple[int, int], offsets: Sequence[int], out: torch.Tensor) -> None:
    """Part of a weight before it is rounded to 4 bits."""
    out.copy_(keyed_normal(1, name, shape, Region(tuple(offsets), tuple(out.shape)), 0.1))


def log_probs(model: GPT, prompt: list[int], ids: list[int]) -> list[float]:
    """Of ``ids`` behind the prompt, by the training forward pass; with dynamic NTK by one for each, since a longer text
    has other frequencies."""
    whole = torch.tensor([[*prompt, *ids]])
    ends = range(len(prompt), whole.shape[1])
    with torch.no_grad():
        if model.config.rope_scaling_type == "dynamic":
            logits = torch.stack([model(MicroBatch(whole[:, :end])).logits[0, -1] for end in ends])
        else:
            logits = model(MicroBatch(whole[:, :-1])).logits[0, len(prompt) - 1 :]
    return (
        (logits.float() / SAMPLING.temperature).log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0].tolist()
    )


def one_rank(rank: int, world: int, names: list[str]) -> dict[str, tuple[Texts, Texts]]:
    """Texts of each model by one process, and the same with the log-probabilities of the training forward pass."""
    out = {}
    for name in names:
        config, layout = settings(name, Spread())
        model, setup = build(config, layout, name)
        texts = written(build_generator(config, setup, model, batch_size=4), requests())
        model.eval()
        out[name] = texts, {key: (ids, log_probs(model, PROMPTS[key[0]], ids)) for key, (ids, _) in texts.items()}
    return out


def in_layouts(rank: int, world: int, cases: list[tuple[str, str]]) -> list[Texts]:
    """Of each case: what this rank wrote."""
    out = []
    for name, spread in cases:
        config, layout = settings(name, SPREADS[spread])
        model, setup = build(config, layout, name)
        generator, context = build_generator(config, setup, model, batch_size=4), setup.context
        frozen = next(module for module in model.modules() if not list(module.children()))
        frozen.eval()
        before = {key: module.training for key, module in model.named_modules()}
        # Not as many on each data-parallel rank, and none on some.
        own = [r for i, r in enumerate(requests()) if (0, 0, 1, 0, 2)[i % 5] % context.data_size == context.data_rank]
        out.append(written(generator, own))
        assert before == {key: module.training for key, module in model.named_modules()}
    return out


def check(found: list[list[Texts]], cases: list[tuple[str, str]], exact: dict[str, tuple[Texts, Texts]]) -> None:
    """All texts of all ranks are those of one rank."""
    for number, (name, spread) in enumerate(cases):
        texts: Texts = {}
        for rank in found:
            for key, (ids, log_prob) in rank[number].items():
                wanted, by_training = exact[name][1][key]
                assert ids == wanted, (name, spread, key)
                assert log_prob == pytest.approx(by_training, abs=1e-5, rel=0), (name, spread, key)
                texts[key] = ids, log_prob
        assert len(texts) == 2 * len(PROMPTS), (name, spread)


def layouts_of(name: str, spreads: Sequence[str]) -> list[tuple[str, str]]:
    """Cases, of models that go through the layout."""
    deep = ("pp4", "pp2 interleaved, tp2", "pp2 v, shard2")
    base, *adapters = name.split(" with ")
    return [(" with ".join((base + " 4" * (spread in deep), *adapters)), spread) for spread in spreads]


FAST = [
    *layouts_of("rope", ["tp2 sp, shard2", "pp2, shard2", "tp2 sp, pp2", "cp4", "cp2, pp2"]),
    *layouts_of("rope with lora", ["tp2 sp, pp2"]),
    *layouts_of("wide with qlora", ["tp2 sp, shard2"]),
    *layouts_of("latent", ["tp2 sp, pp2", "cp2, tp2 sp"]),
    *layouts_of("gemma", ["cp2, tp2 sp"]),
    *layouts_of("llama4", ["ep2, tp2 sp, shard2", "cp2, tp2 sp"]),
    *layouts_of("gpt-oss", ["ep2, pp2, shard2", "cp4"]),
    *layouts_of("longrope", ["cp2, pp2"]),
    *layouts_of("dynamic", ["cp2, pp2"]),
    *layouts_of("bloom", ["cp4"]),
    *layouts_of("hybrid", ["tp2 sp, pp2", "cp2, tp2 sp"]),
]
SLOW = {
    name: [
        case
        for case in layouts_of(name, list(SPREADS))
        if case not in FAST
        and SPREADS[case[1]].world_size == 4
        and (SPREADS[case[1]].ep == 1 or name.split()[0] in EXPERTS)
        and (SPREADS[case[1]].cp == 1 or name != "dsa")  # refused
        and ("qlora" not in name or SPREADS[case[1]].tp < 4)  # rows of whole blocks of 64
    ]
    for name in [*MODELS, *(f"{name} with lora" for name in ("rope", "gpt-oss", "latent")), "wide with qlora"]
}


@pytest.mark.parametrize(
    "cases", [FAST, *(pytest.param(cases, marks=pytest.mark.slow) for cases in SLOW.values())], ids=["fast", *SLOW]
)
def test_texts_and_log_probs_are_those_of_one_rank(cases: list[tuple[str, str]]) -> None:
    (exact,) = run_distributed(one_rank, 1, list(dict.fromkeys(name for name, _ in cases)))
    for name, (texts, by_training) in exact.items():
        for key, (_, log_prob) in texts.items():
            assert log_prob == pytest.approx(by_training[key][1], abs=1e-5, rel=0), (name, key)
    check(run_distributed(in_layouts, 4, cases), cases, exact)


def trained(rank: int, world: int, spreads: list[str]) -> list[tuple[bool, int]]:
    """Whether two training steps give the same weights with and without texts written before, between and after."""
    out = []
    for name in spreads:
        ends: list[dict[str, Any]] = []
        for writes in (False, True):
            config, layout = settings("rope", SPREADS[name])
            model, setup = build(config, layout, "rope")
            context, device = setup.context, setup.device
            optimizer = build_optimizer(model, config.optim, context.fsdp, context.expert_fsdp)
            run = build_forward_backward(config, setup, model)
            generator = build_generator(config, setup, model, batch_size=4)
            objective = NextToken(device, context.cp_group)
            trainer = Trainer(config, model, run, objective, optimizer, context, device, Progress())
            problem = Problem(length=40, vocab=(50, 2), micro_batches=4)
            spread = replace(SPREADS[name], accumulation=4 // SPREADS[name].data_parallel)
            for step in range(2):
                texts = written(generator, requests()) if writes else {}
                trainer.train_step(share(problem, spread, context.data_rank, step))
            ends.append({key: getattr(p, "_local_tensor", p).clone() for key, p in model.named_parameters()})
        same = all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
        out.append((same, len(texts)))
    return out


def test_training_goes_on_as_if_nothing_was_written() -> None:
    for rank in run_distributed(trained, 4, ["tp2 sp, shard2", "pp2, shard2"]):
        assert rank == [(True, 10), (True, 10)]
