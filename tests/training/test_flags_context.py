"""Every setting of context parallelism: which tokens a process has, and what attention sends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.operations import recorded
from tests.training.flag_runs import TINY, Runs, proves

LENGTH = "--seq-length 16 "
CUTS = {
    "p2p": "--cp-comm-type p2p",
    "all_gather": "--cp-comm-type all_gather",
    "a2a": "--cp-comm-type a2a",
    "a2a+p2p": "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "auto": "",
    "a2a+p2p, all heads": "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1",
}
Measured = dict[str, dict[str, Any]]


def measure(flags: str, rank: int, world: int) -> dict[str, Any]:
    """Two steps: losses, tokens of the second, collectives, and what was said."""
    # gloo, whose messages can be counted.
    flags = f"{LENGTH} --context-parallel-size {world} --cpu-collectives gloo {flags}"
    config = read_settings([*TINY.split(), *flags.split()], PRESETS, world)
    said: list[str] = []
    kind = type("Saying", (Run,), {"say": lambda self, line: said.append(line)})
    run = kind(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())
    seen: list[Any] = []
    run.trainer.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    first = run.trainer.train_step(next(run.batches))
    seen.clear()
    with torch.profiler.profile() as profile:
        second = run.trainer.train_step(next(run.batches))
    indices = [batch.token_index.flatten().tolist() for batch in seen]
    evaluated = evaluate(run)
    run.close()
    counted = ("_c10d_functional::", "c10d::send")
    names = (event.name() for event in recorded(profile))
    ops = Counter(name.split("::")[1] for name in names if name.startswith(counted))
    weights = sum(p.to_local().numel() for p in run.trainer.model.parameters())
    return {
        "losses": [first.loss, second.loss],
        "evaluated": evaluated,
        "tokens": second.num_tokens,
        "samples": second.num_samples,
        "indices": indices,
        "ops": {name: ops[name] for name in ("all_to_all_single", "all_gather_into_tensor", "send")},
        "weights": weights,
        "said": [line for line in said if "context parallelism" in line],
    }


def evaluate(run: Run) -> float | None:
    """Loss on the first two batches."""
    batches = run._loader(run.datasets.train)
    loss = run.trainer.evaluate(batches, 2, lambda: False)
    batches.close()
    return loss


def measure_all(rank: int, world: int, folder: str) -> Measured:
    os.chdir(folder)
    return {name: measure(flags, rank, world) for name, flags in CUTS.items()}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    return run_distributed(measure_all, 4, str(tmp_path_factory.mktemp("four")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("alone"))


def test_every_exchange_trains_and_evaluates_like_one_process(four: list[Measured], runs: Runs) -> None:
    alone = runs.fresh(f"{LENGTH} --train-iters 2 --lr-decay-iters 3", probe=evaluate)
    for measured in four:
        for name, got in measured.items():
            assert got["losses"] == pytest.approx(alone.losses, rel=1e-5), name
            assert got["evaluated"] == pytest.approx(alone.probed, rel=1e-5), name


@proves("context_parallel_size")
def test_each_process_has_a_part_of_every_sequence(four: list[Measured]) -> None:
    """--context-parallel-size 4: four of 16 tokens of all sequences; a step counts each of its tokens once, and weights
    are sharded over all four."""
    whole = sum((Counter(index) for rank in four for index in rank["p2p"]["indices"]), Counter())
    assert set(whole.values()) == {1} and len(whole) == 4 * 16
    assert sorted(four[0]["p2p"]["indices"][0])[:4] == [64, 65, 78, 79], "a first and a last piece"
    assert {len(index) for rank in four for index in rank["p2p"]["indices"]} == {2 * 4}
    assert {(rank["p2p"]["tokens"], rank["p2p"]["samples"]) for rank in four} == {(4 * 16, 4)}
    assert len({rank["p2p"]["weights"] for rank in four}) == 1


@proves("cp_comm_type")
def test_the_exchange_is_the_one_that_was_asked_for(four: list[Measured]) -> None:
    """Of 2 layers and 2 micro-batches. --cp-comm-type all_gather gathers keys in both directions and scatters their
    gradients; p2p and a2a move parts from process to process: three hops of keys, and four of keys and gradients in the
    backward pass; once to the heads and once back, in both directions."""
    passes = 2 * 2
    ring, gathered, heads = (four[0][name]["ops"] for name in ("p2p", "all_gather", "a2a"))
    assert gathered["all_gather_into_tensor"] >= 2 * passes and gathered["all_to_all_single"] == 0
    assert ring["send"] == passes * (3 + 3 + 3) and ring["all_gather_into_tensor"] == ring["all_to_all_single"] == 0
    assert heads["all_to_all_single"] == passes * 4
    assert "ring of 4" in four[0]["p2p"]["said"][0]
    automatic = four[0]["auto"]["said"]
    assert len(automatic) == 2 and "one layer" in automatic[0], "a table, and the choice"


@proves("hierarchical_context_parallel_sizes")
def test_two_sizes_say_who_exchanges_heads(four: list[Measured]) -> None:
    """--hierarchical-context-parallel-sizes 2 2: heads within pairs, keys between them; 4 1 is a2a alone."""
    both, alone = four[0]["a2a+p2p"], four[0]["a2a+p2p, all heads"]
    a2a = four[0]["a2a"]["ops"]
    assert both["ops"]["all_to_all_single"] == a2a["all_to_all_single"] == alone["ops"]["all_to_all_single"]
    assert both["ops"]["send"] > 0 == a2a["send"] == alone["ops"]["send"]
    assert "ring of 2" in both["said"][0] and "ring" not in alone["said"][0]
