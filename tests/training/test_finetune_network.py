"""Fine-tuning with hierarchical collectives on ranks that stand for two nodes: the losses and gradients of flat ones,
for weights, adapters, pairs, and experts that are sharded over ranks of their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune

pytest.importorskip("transformers")

STEPS = "--train-iters 2 --seq-length 48 --micro-batch-size 1 --lr 0.02 --optimizer sgd --data-path {0}/{1}.jsonl"
DENSE = {
    "sft": ("sft", ""),
    "lora": ("sft", "--lora-rank 4"),
    "lora, replicas": ("sft", "--lora-rank 4 --hybrid-shard-degree 1 --global-batch-size 8"),
    "dpo, lora": ("dpo", "--objective dpo --lora-rank 4"),
}
EXPERTS = {
    "sft": ("sft", "--expert-model-parallel-size 2"),
    "lora, experts": ("sft", "--expert-model-parallel-size 2 --lora-rank 3 --lora-target-modules value,*.experts.*"),
}
LINKS = {"between": {"gbit_per_s": 0.1, "latency_us": 100}, "inside": {"gbit_per_s": 8, "latency_us": 20}}
"""With links given, ``hierarchical`` is so at every size: adapters are smaller than what is flat by default."""
NODES = {4: [[0, 1], [2, 3]], 6: [[0, 1, 2, 3], [4, 5]]}
"""Of the six, ranks 0, 2 and 4 have the same experts, and the others have; each three are on both nodes."""


def tune_over_nodes(rank: int, world: int, flags: list[str]) -> list[dict[str, Any]]:
    """Runs of one start, each with the calls and bytes of hierarchical collectives, by (kind, ranks of the group)."""
    from smp.parallel.network.group import Running

    counted: Counter[tuple[str, str, int]] = Counter()
    begin = Running.__init__

    def counting(self: Running, group: Any, kind: Any, execution: Any, size: int) -> None:
        for what, number in (("calls", 1), ("bytes", size)):
            counted[what, kind, len(group.ranks)] += number
        begin(self, group, kind, execution, size)

    Running.__init__ = counting  # type: ignore[method-assign]
    out = []
    for each in flags:
        counted.clear()
        out.append({**tune(rank, world, each), "counted": dict(counted)})
    return out


def both(folder: Path, cases: dict[str, tuple[str, str]], world: int) -> dict[str, tuple[Any, Any]]:
    """Of each case what happens with flat and with hierarchical collectives."""
    file = folder / f"nodes{world}.json"
    file.write_text(json.dumps({"nodes": NODES[world], **LINKS}))
    ways = ("", f"--data-parallel-collectives hierarchical --network-topology {file}")
    common = f"--load {folder} --log-dir {folder}/logs {STEPS}"
    flags = [f"{common.format(folder, data)} {more} {way}" for data, more in cases.values() for way in ways]
    ranks = run_distributed(tune_over_nodes, world, flags)
    found = [together([rank[number] for rank in ranks]) for number in range(len(flags))]
    return {name: (found[2 * i], found[2 * i + 1]) for i, name in enumerate(cases)}


def check_same(flat: dict[str, Any], nodes: dict[str, Any]) -> None:
    """The same training, whose sums are in another order."""
    assert len(flat["losses"]) == 2 and len(set(flat["losses"])) == 2 and flat["counted"] == {}
    for loss, other in zip(nodes["losses"], flat["losses"], strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)
    for step, gradients in enumerate(flat["gradients"]):
        errors = tensor_errors(nodes["gradients"][step], gradients, gradients)
        assert max(errors.values()) <= TOLERANCE, max(errors.items(), key=lambda item: item[1])
    assert nodes["final"].keys() == flat["final"].keys() != set()


def check_counted(of: dict[str, Any], kind: str, ranks: int, what: str = "") -> None:
    """At least each step's gradients (fp32) or, of a gather, trained weights of parameters with ``what`` in their name
    went through hierarchical collectives of groups of so many ranks."""
    trained = 4 * sum(value.numel() for name, value in of["final"].items() if what in name)
    assert of["counted"].get(("bytes", kind, ranks), 0) >= 2 * trained > 0, (kind, ranks, of["counted"])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("dense")
    write_tokenizer(folder)
    write_model(folder, "llama", layers=2)
    write_samples(folder)
    return both(folder, DENSE, 4)


@pytest.mark.parametrize("method", DENSE)
def test_dense_models_are_tuned_as_with_flat_collectives(dense: dict[str, tuple[Any, Any]], method: str) -> None:
    flat, nodes = dense[method]
    check_same(flat, nodes)
    for kind in ["all-reduce"] if "replicas" in method else ["all-gather", "reduce-scatter"]:
        check_counted(nodes, kind, 4)


@pytest.mark.slow
def test_experts_over_ranks_of_their_own_are_tuned_as_with_flat_collectives(tmp_path: Path) -> None:
    """Nodes of four and two ranks."""
    write_tokenizer(tmp_path)
    write_model(tmp_path, "qwen2-moe", layers=2)
    write_samples(tmp_path)
    for flat, nodes in both(tmp_path, EXPERTS, 6).values():
        check_same(flat, nodes)
        for kind in ("all-gather", "reduce-scatter"):
            check_counted(nodes, kind, 6, "attention.value")
        # of each group of three half of the experts
        experts = 4 * sum(value.numel() for name, value in nodes["final"].items() if ".experts." in name)
        for kind in ("all-gather", "reduce-scatter"):
            assert nodes["counted"]["bytes", kind, 3] >= 2 * experts // 2 > 0
