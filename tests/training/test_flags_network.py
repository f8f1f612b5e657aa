"""--data-parallel-collectives and --network-topology: real runs on four processes that stand for two nodes."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import ConfigError
from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.training.flag_runs import proves

SMALL = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 16 --vocab-size 1000 "
    "--mock-data --micro-batch-size 1 --train-iters 2 --init-method-std 0.1 --clip-grad 0.5 --no-tensorboard "
    "--no-progress-bar --log-interval 1 "
)
NODES = {"nodes": [[0, 1], [2, 3]]}
LINKS = {"between": {"gbit_per_s": 0.1, "latency_us": 100}, "inside": {"gbit_per_s": 8, "latency_us": 20}}
FAST = {"between": {"gbit_per_s": 1e4, "latency_us": 1}, "inside": {"gbit_per_s": 0.5, "latency_us": 1}}
FILES: dict[str, Any] = {
    "nodes": NODES,
    "slow": {**NODES, **LINKS},
    "fast": {"nodes": [[0, 1, 2], [3]], **FAST},
    "one": {"nodes": [[0, 1, 2, 3]]},
    "three": {"nodes": [[0, 1, 2], [3]]},
    "crossed": {"nodes": [[0, 2], [1, 3]]},
    "halves": {"nodes": [[0, 1, 2, 3], [4, 5, 6, 7]]},
    "eight": {"nodes": [[0, 1, 2, 3, 4], [5, 6, 7]]},
}
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --global-batch-size 8 --cpu-collectives gloo"
APART = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
HIERARCHICAL = "--data-parallel-collectives hierarchical --network-topology nodes.json"
CASES = {
    "flat": "--cpu-collectives gloo",
    "two nodes": HIERARCHICAL,
    "again": HIERARCHICAL,
    "unequal": "--data-parallel-collectives hierarchical --network-topology three.json",
    "auto": "--data-parallel-collectives auto --network-topology slow.json",
    "auto fast": "--data-parallel-collectives auto --network-topology fast.json",
    "auto measured": "--data-parallel-collectives auto --network-topology nodes.json",
    "auto one": "--data-parallel-collectives auto --cpu-collectives gloo",
    "rounded weights": f"{HIERARCHICAL} --zero-quantized-weights",
    "rounded gradients": f"{HIERARCHICAL} --zero-quantized-gradients",
    "nothing to round": f"{HIERARCHICAL} --zero-quantized-weights --hybrid-shard-degree 1 --global-batch-size 8",
    "secondary": f"{HIERARCHICAL} --zero-hpz-partition-size 2",
    "secondary flat": "--zero-hpz-partition-size 2 --network-topology nodes.json",
    "secondary across": "--zero-hpz-partition-size 2 --network-topology crossed.json",
    "secondary on one": "--zero-hpz-partition-size 2",
    "context flat": "--context-parallel-size 2 --cp-comm-type p2p",
    "context": f"--context-parallel-size 2 --cp-comm-type p2p {HIERARCHICAL}",
    "replicas flat": "--hybrid-shard-degree 1 --global-batch-size 8",
    "replicas": "--hybrid-shard-degree 1 --data-parallel-collectives hierarchical --network-topology nodes.json "
    "--global-batch-size 8",
}
LARGER = {
    "hybrid flat": "--hybrid-shard-degree 4 --bf16 --global-batch-size 16",
    "hybrid": "--hybrid-shard-degree 4 --bf16 --global-batch-size 16 --data-parallel-collectives hierarchical "
    "--network-topology eight.json",
    "experts flat": EXPERTS,
    "experts": f"{EXPERTS} --data-parallel-collectives hierarchical --network-topology eight.json",
    "experts secondary": f"{EXPERTS} --zero-hpz-partition-size 4 --network-topology halves.json",
    "experts with one": f"{EXPERTS} --zero-hpz-partition-size 2 --network-topology halves.json",
    "apart flat": f"{EXPERTS} {APART}",
    "apart secondary": f"{EXPERTS} {APART} --zero-hpz-partition-size 2 --network-topology halves.json",
    "pipeline flat": "--pipeline-model-parallel-size 2 --global-batch-size 8",
    "pipeline": "--pipeline-model-parallel-size 2 --global-batch-size 8 --data-parallel-collectives hierarchical "
    "--network-topology eight.json",
}
"""On eight ranks, of which eight.json puts five and three on a node."""


def train(rank: int, world: int, folder: str, cases: dict[str, str]) -> dict[str, Any]:
    """Of each case: weights, calls of hierarchical collectives by group, and what rank 0 said."""
    os.chdir(folder)
    return {name: run_case(rank, world, name, flags) for name, flags in cases.items()}


def run_case(rank: int, world: int, name: str, flags: str) -> Any:
    words = [*SMALL.split(), *flags.split(), "--log-dir", name.replace(" ", "-")]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            config = read_settings(words, PRESETS, world)
            run = Run(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())
        except ConfigError as error:
            return str(error)
        assert run.run().status == "done"
    collectives = run.context.collectives
    calls = {} if collectives is None else {n: g.hierarchical_calls for n, g in collectives.groups.items()}
    weights = torch.cat([p.to_local().flatten() for p in run.trainer.model.parameters()])  # type: ignore[operator]
    run.close()
    return {
        "weights": weights,
        "calls": sum(calls.values()),
        "errors": logged(words[-1]) if rank == 0 else [],
        "noted": [line for line in said.getvalue().splitlines() if "rounded to int8" in line],
        "lines": [line for line in said.getvalue().splitlines() if line.startswith("data-parallel collectives")],
        "secondary": [line for line in said.getvalue().splitlines() if line.startswith("secondary shards")],
    }


def logged(folder: str) -> list[dict[str, float]]:
    """Errors of each step in the metrics of a run."""
    steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in step.items() if "quantization" in name} for step in steps if "lm loss" in step
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("network")
    write_files(folder)
    return run_distributed(train, 4, str(folder), CASES)


def write_files(folder: Path) -> None:
    for name, said in FILES.items():
        (folder / f"{name}.json").write_text(json.dumps(said))


def near(a: torch.Tensor, b: torch.Tensor, most: float = 2e-5) -> bool:
    return bool((a - b).norm() / b.norm() < most)


@proves("data_parallel_collectives", "network_topology")
def test_weights_are_gathered_and_gradients_summed_once_over_each_uplink(found: list[dict[str, Any]]) -> None:
    for of in found:
        flat, nodes, unequal = of["flat"], of["two nodes"], of["unequal"]
        assert flat["calls"] == 0 and nodes["calls"] > 0 and unequal["calls"] > 0
        assert near(nodes["weights"], flat["weights"]) and near(unequal["weights"], flat["weights"])
        assert torch.equal(nodes["weights"], of["again"]["weights"]), "the same sums in every run"
    lines = found[0]["two nodes"]["lines"]
    assert lines == [
        "data-parallel collectives of parameters, sharded over 2 nodes of 2 ranks: hierarchical from 64 KiB on, as "
        "asked for"
    ]
    assert found[0]["flat"]["lines"] == []


@proves("data_parallel_collectives", "network_topology")
def test_auto_picks_by_links_and_says_so(found: list[dict[str, Any]]) -> None:
    of = found[0]
    assert of["auto"]["calls"] > of["auto fast"]["calls"], "its gathers are flat"
    assert near(of["auto fast"]["weights"], of["flat"]["weights"])
    (line,) = of["auto"]["lines"]
    assert "all-gather of 16 MiB hierarchical by mesh, " in line and "ms, flat " in line
    assert "(predicted; links of slow.json: between nodes 0.1 Gbit/s, 100 us and inside 8 Gbit/s, 20 us)" in line
    (line,) = of["auto fast"]["lines"]
    assert "all-gather of 16 MiB flat " in line and "reduce-scatter of 16 MiB hierarchical" in line
    (line,) = of["auto measured"]["lines"]
    assert "links measured in " in line
    seconds = float(line.split("links measured in ")[1].split()[0])
    assert seconds < 20.0, "on a machine that does other things; less than 2 s on a quiet one"
    assert of["auto one"]["lines"] == [
        "data-parallel collectives: flat: by hostnames, no data-parallel group has several ranks on one of several "
        "nodes"
    ]
    assert of["auto one"]["calls"] == 0 and torch.equal(of["auto one"]["weights"], of["flat"]["weights"])


@proves("zero_quantized_weights", "zero_quantized_gradients")
def test_what_is_rounded_between_nodes_is_near_and_its_error_is_logged(found: list[dict[str, Any]]) -> None:
    for what in ("weights", "gradients"):
        for of in found:
            rounded, exact = of[f"rounded {what}"], of["two nodes"]
            assert not torch.equal(rounded["weights"], exact["weights"])
            assert near(rounded["weights"], exact["weights"], 0.02) and rounded["calls"] == exact["calls"]
        of = found[0][f"rounded {what}"]
        name = f"{what[:-1]} quantization error"
        assert set(of["errors"][0]) == {name} and all(0.002 < step[name] < 0.02 for step in of["errors"])
        assert any(f"of {what} are rounded to int8 between nodes" in line for line in of["noted"])
    assert found[0]["two nodes"]["errors"] == [{}, {}]
    assert found[0]["nothing to round"] == (
        "--zero-quantized-weights: no group that shards weights has several ranks on one of several nodes; leave out"
    )


@proves("zero_hpz_partition_size")
def test_backward_passes_gather_within_nodes(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert torch.equal(of["secondary"]["weights"], of["two nodes"]["weights"])
        assert torch.equal(of["secondary flat"]["weights"], of["flat"]["weights"])
        assert of["secondary"]["calls"] == of["two nodes"]["calls"] - 2 * 2, "of two blocks in two steps"
        assert of["secondary across"] == (
            "--zero-hpz-partition-size: by --network-topology rank 0 on node0 and rank 1 on node1 would share "
            "secondary shards of parameters"
        )
        assert "by hostnames all processes that share weights are on one node" in of["secondary on one"]
    assert found[0]["secondary flat"]["secondary"] == [
        "secondary shards of parameters: 2 neighbours in a node hold the weights once more; forward passes gather over "
        "4 ranks, backward passes over these 2"
    ]


@pytest.mark.parametrize("name", ["replicas", "context"])
def test_sums_over_replicas_and_parts_of_sequences_go_once_over_each_uplink(
    name: str, found: list[dict[str, Any]]
) -> None:
    for of in found:
        assert of[f"{name} flat"]["calls"] == 0 < of[name]["calls"]
        assert near(of[name]["weights"], of[f"{name} flat"]["weights"])


@pytest.mark.slow
def test_hybrid_shards_experts_and_pipelines(tmp_path: Path) -> None:
    """On eight ranks; the gathers of a pipeline are asked for ahead."""
    write_files(tmp_path)
    larger = run_distributed(train, 8, str(tmp_path), LARGER)
    for name in ("hybrid", "experts", "pipeline"):
        assert any(of[name]["calls"] > 0 for of in larger)
        for of in larger:
            assert near(of[name]["weights"], of[f"{name} flat"]["weights"], 2e-4 if name == "hybrid" else 2e-5)
    assert any("experts, sharded over 2 nodes" in line for line in larger[0]["experts"]["lines"])
    for kind, name, said in (
        ("experts", "secondary", "2 neighbours in a node hold"),
        ("experts", "with one", "none: of each node's neighbours"),
        ("apart", "secondary", "2 neighbours in a node hold"),  # of the TP ranks that hold whole experts, too
    ):
        for of in larger:
            assert torch.equal(of[f"{kind} {name}"]["weights"], of[f"{kind} flat"]["weights"])
        assert f"secondary shards of experts: {said}" in larger[0][f"{kind} {name}"]["secondary"][1]


LONG = f"{HIERARCHICAL} --num-layers 1 --seq-length 32 --micro-batch-size 2 --train-iters 300 --lr 1e-3 "
LONG += "--lr-warmup-iters 20"


@pytest.mark.slow
def test_300_steps_with_rounded_weights_and_gradients_end_at_the_same_loss(tmp_path: Path) -> None:
    write_files(tmp_path)
    cases = {"exact": LONG, "rounded": f"{LONG} --zero-quantized-weights --zero-quantized-gradients"}
    run_distributed(train, 4, str(tmp_path), cases)
    losses = {}
    for name in cases:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [step["lm loss"] for step in map(json.loads, lines) if "lm loss" in step]
        assert len(losses[name]) == 300 and losses[name][-1] < 0.8 * losses[name][0], "it learns"
    last = {name: sum(of[-50:]) / 50 for name, of in losses.items()}
    assert abs(last["rounded"] / last["exact"] - 1) < 0.01 and last["rounded"] != last["exact"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    words = [*SMALL.split(), "--network-topology", "nodes.json"]
    with pytest.raises(ConfigError, match="--network-topology nodes.json has no effect without --data-parallel-coll"):
        read_settings(words, PRESETS, 2)
    for flag in ("--zero-quantized-weights", "--zero-quantized-gradients"):
        words = [*SMALL.split(), flag, "--data-parallel-collectives", "auto"]
        with pytest.raises(ConfigError, match=f"{flag} .*has no effect without --data-parallel-collectives hierarch"):
            read_settings(words, PRESETS, 2)
    words = [*SMALL.split(), "--deterministic-mode", "--data-parallel-collectives", "auto"]
    with pytest.raises(ConfigError, match="--deterministic-mode and --data-parallel-collectives auto exclude"):
        read_settings(words, PRESETS, 2)
