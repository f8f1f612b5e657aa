"""A teacher with experts, which ranks divide in a layout of its own: each layout like one rank."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import finetune
from smp.parallel.dtensor_region import local_part
from smp.training.tuning.kinds import tuning_kind
from smp.training.tuning.settings import read_finetune_settings, teacher_config
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.distill_lab import divergence
from tests.training.flag_runs import clean_process, proves
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import QUIET, Recording, observe, together, tune_all

pytest.importorskip("transformers")
STEPS = (
    "--objective distill --train-iters 2 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 "
    "--optimizer sgd --load {0} --teacher {0}/experts --data-path {0}/sft.jsonl --log-dir {0}/logs"
)
LAYOUTS = {
    "shard 2": (2, ""),
    "experts on 2": (2, "--teacher-expert-model-parallel-size 2"),
    "tp 2 + sp, experts whole": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "cp 2, experts on 2": (
        2,
        "--context-parallel-size 2 --cp-comm-type all_gather --teacher-expert-model-parallel-size 2",
    ),
    "both have experts": (2, "--load {0}/mixed --expert-model-parallel-size 2"),
    "experts on 2, those of the student whole": (
        2,
        "--load {0}/mixed --teacher-expert-model-parallel-size 2",
    ),
    "both have experts, whole on tp 2": (
        4,
        "--load {0}/mixed --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        "--teacher-expert-model-parallel-size 2",
    ),
    "tp 2 x shard 2, experts on 2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --teacher-expert-model-parallel-size 2",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder)
    (folder / "experts").mkdir()
    write_tokenizer(folder / "experts")
    write_model(folder / "experts", "qwen2-moe", layers=2)
    (folder / "mixed").mkdir()
    write_tokenizer(folder / "mixed")
    write_model(folder / "mixed", "qwen2-moe", layers=3)
    return folder


def distil(rank: int, world_size: int, lines: list[str]) -> list[dict[str, Any]]:
    """Runs, and how many numbers of the teacher's experts this rank holds."""
    out = []
    for line in lines:
        config, data = read_finetune_settings(shlex.split(f"{QUIET} {line}"), world_size)
        assert data is not None
        held: list[int] = []

        class Watching(Recording):
            def run(self, held: list[int] = held) -> Any:
                teacher: Any = self.trainer.objective.teacher  # type: ignore[attr-defined]
                experts = [p for name, p in teacher.model.named_parameters() if ".experts." in name]
                held.append(sum(local_part(p).numel() for p in experts))
                return super().run()

        out.append(observe(tuning_kind(config, data), rank, world_size, Watching) | {"experts": held[0]})
    return out


@proves("teacher_expert_model_parallel_size")
def test_layout_equals_one_rank(folder: Path) -> None:
    found = {}
    alone = {"alone": (1, ""), "both, alone": (1, "--load {0}/mixed")}
    for world in (1, 2, 4):
        here = [name for name, (size, _) in (alone | LAYOUTS).items() if size == world]
        lines = [f"{STEPS} {(alone | LAYOUTS)[name][1]}".format(folder) for name in here]
        ranks = run_distributed(distil, world, lines)
        for i, name in enumerate(here):
            found[name] = together([rank[i] for rank in ranks])
    for name, got in found.items():
        own_experts = "--load {0}/mixed" in (alone | LAYOUTS)[name][1]
        want = found["both, alone" if own_experts else "alone"]
        assert got["losses"] == pytest.approx(want["losses"], rel=TOLERANCE), name
        assert max(tensor_errors(got["final"], want["final"], want["final"]).values()) <= TOLERANCE, name
    # Each rank holds other experts, whole, in place of a share of every one.
    assert found["experts on 2"]["experts"] * 2 == found["alone"]["experts"]
    assert found["tp 2 x shard 2, experts on 2"]["experts"] * 4 == found["alone"]["experts"]


def test_the_loss_is_that_of_transformers_models(folder: Path) -> None:
    """Of one step over all samples."""
    more = "--train-iters 1 --global-batch-size 60 --split 100,0,0 --packing off"
    ((found,),) = run_distributed(tune_all, 1, [f"{STEPS} {more}".format(folder)])
    value, _ = divergence(folder, folder / "experts", 0.5, 1.0)
    assert found["losses"][0] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(("more", "wanted"), [("", (1, 1)), ("--teacher-expert-model-parallel-size 2", (2, 1))])
def test_experts_of_both_are_cut_alike_within(folder: Path, more: str, wanted: tuple[int, int]) -> None:
    words = "--load {0}/mixed --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    config, _ = read_finetune_settings(shlex.split(f"{STEPS} {words} {more}".format(folder)), 4)
    parallel = teacher_config(config, 4).parallel
    assert (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size) == wanted


def test_a_dense_teacher_has_none(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = STEPS.replace("--teacher {0}/experts", "--teacher {0}").format(folder)
    with clean_process():
        assert finetune.main(shlex.split(f"{line} --teacher-expert-model-parallel-size 2")) == 2
    assert f"--teacher {folder} has no experts; leave it out" in capfd.readouterr().err
