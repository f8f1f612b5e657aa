"""In bf16 the log-probabilities of sampling are those of the training forward pass, to the distance that two bf16
layouts have from each other."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from smp.config import Config, Layout, ModelConfig
from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.layers.heads.answers import AnswerLoss
from smp.training.build import build_forward_backward, build_generator
from smp.training.objectives.contract import answer_micro_batches
from smp.training.objectives.reference import ModelReference
from smp.training.rollouts.rollout import fill_table
from tests.distributed import run_distributed
from tests.generation.models import MODELS
from tests.generation.test_layouts import PROMPTS, SAMPLING, Texts, build, requests, written
from tests.parity.cases import Case, Problem, Spread, config_of

LENGTH = 40
SPREADS = {
    "one rank": Spread(),
    "tp2 sp": Spread(tp=2, sp=True),
    "pp2": Spread(pp=2),
    "cp2": Spread(cp=2),
    "ep2": Spread(ep=2, shard=2),
    "tp2 sp, pp2": Spread(tp=2, sp=True, pp=2),
    "compile": Spread(compile=True),
    "tp2 sp, compile": Spread(tp=2, sp=True, compile=True),
}
FAST = {  # gemma and gpt-oss have windows
    "rope": ["one rank", "tp2 sp", "pp2", "cp2"],
    "rope with lora": ["one rank", "tp2 sp", "pp2"],
    "latent": ["one rank", "tp2 sp", "pp2", "cp2"],
    "gemma": ["one rank", "tp2 sp", "cp2"],
    "gpt-oss": ["one rank", "tp2 sp", "ep2"],
}
SLOW = {
    "rope": ["tp2 sp", "tp2 sp, pp2", "compile", "tp2 sp, compile"],
    "gemma": ["tp2 sp", "tp2 sp, pp2", "compile"],
    "latent": ["tp2 sp", "tp2 sp, pp2"],
}


class Found(NamedTuple):
    """Log-probabilities of the tokens of some texts, all after each other: of sampling and of the training pass."""

    texts: Texts
    sampled: torch.Tensor
    trained: torch.Tensor


def settings(name: str, spread: Spread) -> tuple[Config, Layout]:
    """As users have it: padded rows, all texts in one micro-batch of each data-parallel rank."""
    experts = "mixtral" if spread.ep > 1 else ""  # they are those of the model
    problem = Problem(length=LENGTH, vocab=(50, 2), micro_batch=len(requests()), experts=experts)
    problem = replace(problem, micro_batches=spread.data_parallel)
    config = config_of(Case(problem, spread))
    model = ModelConfig(**MODELS[name.split(" with ")[0]])
    return replace(config, model=model), Layout.from_config(config.parallel, spread.world_size)


def batch_of(texts: Texts) -> RankBatch:
    """The texts as a step trains them."""
    ids = torch.zeros(1, len(texts), LENGTH, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, ((index, _), (written_ids, _)) in enumerate(sorted(texts.items())):
        whole, begin = torch.tensor([*PROMPTS[index], *written_ids]), len(PROMPTS[index])
        ids[0, row, : len(whole)] = whole
        labels[0, row, begin - 1 : len(whole) - 1] = whole[begin:]
    return RankBatch(ids, labels, torch.arange(len(texts))[None])


def measured(rank: int, world: int, cases: list[tuple[str, str, Texts | None]]) -> list[Found]:
    """Of each case: the texts that are given, or those that it writes. What another rank has is 0 in ``trained``."""
    out = []
    for name, spread, given in cases:
        torch.manual_seed(0)
        torch._dynamo.reset()  # a run has one layout, whose sizes are constants
        config, layout = settings(name, replace(SPREADS[spread], bf16=True))
        model, setup = build(config, layout, name)
        run = build_forward_backward(config, setup, model)
        texts = written(build_generator(config, setup, model, batch_size=4), requests()) if given is None else given
        cp, device = setup.context.cp_group, setup.device
        reference, batch = ModelReference(model, run, device, cp=cp, temperature=SAMPLING.temperature), batch_of(texts)
        table = torch.zeros(len(texts) * LENGTH)
        asked = answer_micro_batches(batch, lambda _: AnswerLoss(), device, cp)
        values = reference.of_tokens(batch)
        if values:
            fill_table(table, asked, values)
        trained = table[batch.labels.flatten() != IGNORE_INDEX]
        sampled = torch.tensor([p for _, (_, log_probs) in sorted(texts.items()) for p in log_probs])
        out.append(Found(texts, sampled, trained))
    return out


def together(ranks: list[Found]) -> Found:
    """With what any rank has: all that have a token have the same number."""
    trained = torch.zeros_like(ranks[0].trained)
    for found in ranks:
        assert found.texts == ranks[0].texts
        trained = torch.where(trained == 0, found.trained, trained)
    return ranks[0]._replace(trained=trained)


def figures(names: dict[str, list[str]]) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Of each case, for each token: the distance of sampling from the training pass, and that of the training passes of
    two layouts, one rank and two tensor-parallel ones, on the texts of the latter."""
    cases = [(name, spread) for name, spreads in names.items() for spread in spreads]
    found: dict[tuple[str, str], Found] = {}
    alone: dict[str, Found] = {}
    for world in (2, 4, 1):
        here = [case for case in cases if SPREADS[case[1]].world_size == world]
        asked: list[tuple[str, str, Texts | None]] = [(*case, None) for case in here]
        if world == 1:
            asked += [(name, "one rank", found[name, "tp2 sp"].texts) for name in names]
        ranks = run_distributed(measured, world, asked) if asked else []
        made = [together([rank[i] for rank in ranks]) for i in range(len(asked))]
        found |= dict(zip(here, made, strict=False))
        alone |= dict(zip(names, made[len(here) :], strict=False))
    apart = {name: (alone[name].trained - found[name, "tp2 sp"].trained).abs() for name in names}
    return {case: ((of.sampled - of.trained).abs(), apart[case[0]]) for case, of in found.items()}


@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_sampling_differs_from_training_less_than_two_layouts_do(names: dict[str, list[str]]) -> None:
    """The mean over tokens: single ones lie on either side of a rounding. Latents are multiplied in another order where
    they are kept: about as much as a layout (docs/generation.md has the figures)."""
    for case, (own, layouts) in figures(names).items():
        print(f"{case}: mean {own.mean():.5f} of {layouts.mean():.5f}, largest {own.max():.4f} of {layouts.max():.4f}")
        allowed = layouts.mean() * (1.5 if case[0] == "latent" else 1.0)
        assert 0 < layouts.mean() < 0.03 and own.mean() <= allowed, case
