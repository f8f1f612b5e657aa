"""A teacher in a layout of its own: TP, PP and CP other than those of the model that is trained, like one rank."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from smp.config import ConfigError
from smp.training.tuning.settings import read_finetune_settings, teacher_config
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.any_model_lab import write_type
from tests.training.flag_runs import proves
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")
STEPS = (
    "--objective distill --train-iters 2 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 "
    "--optimizer sgd --load {0} --teacher {0}/big --data-path {0}/sft.jsonl --log-dir {0}/logs --eval-interval 1 "
    "--eval-iters 1 --split 80,20,0"
)
TP, PP, CP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
ITS_TP, ITS_PP, ITS_CP = (flag.replace("--", "--teacher-") for flag in (TP, PP, CP))
METHODS = {
    "odd": "--load {0}/odd --packing off",
    "plain": "",
    "off": "--packing off",
    "uneven": "--packing off --global-batch-size 6",
    "on policy": "--lmbda 1 --max-completion-length 7",
    "experts": "--teacher {0}/experts",
    "fp8": "--fp8-format hybrid --fp8-emulate --fp8-recipe tensorwise",
    "delayed fp8": "--fp8-format hybrid --fp8-emulate",
    "transformers": "--teacher {0}/helium",  # which computes it
    "compiled": "--compile",
}
LAYOUTS = {
    "shard 2, tp 2": (2, f"{ITS_TP} 2", "plain"),
    "tp 2 sp, pp 2": (2, f"{TP} 2 --sequence-parallel {ITS_TP} 1 {ITS_PP} 2", "off"),
    "pp 2, cp 2": (2, f"{PP} 2 {ITS_PP} 1 {ITS_CP} 2", "plain"),
    "cp 2, shard 2": (2, f"{CP} 2 {ITS_CP} 1", "off"),
    "tp 2, shard 2": (2, f"{TP} 2 {ITS_TP} 1", "on policy"),
    "shard 2, pp 2": (2, f"{ITS_PP} 2", "on policy"),
    # a vocabulary that two ranks cannot share: the student's output matrix is whole on both
    "tp 2, tp 2, odd": (2, f"{TP} 2", "odd"),
    "tp 2 sp, shard 2, odd": (2, f"{TP} 2 --sequence-parallel {ITS_TP} 1", "odd"),
    "shard 4, tp 2 x pp 2": (4, f"{ITS_TP} 2 {ITS_PP} 2", "uneven"),
    "tp 2 x pp 2, cp 2 x shard 2": (
        4,
        f"{TP} 2 --sequence-parallel {PP} 2 --pipeline-schedule zb-v {ITS_TP} 1 {ITS_PP} 1 {ITS_CP} 2",
        "plain",
    ),
    "cp 2 x shard 2, tp 2 x shard 2 x experts on 2": (
        4,
        f"{CP} 2 {ITS_CP} 1 {ITS_TP} 2 --teacher-expert-model-parallel-size 2",
        "experts",
    ),
    "tp 2 x shard 2, cp 4": (4, f"{TP} 2 {ITS_TP} 1 {ITS_CP} 4", "plain"),
    "shard 2, tp 2 in fp8": (2, f"{ITS_TP} 2", "fp8"),
    "tp 2 sp, pp 2 in fp8": (2, f"{TP} 2 --sequence-parallel {ITS_TP} 1 {ITS_PP} 2", "delayed fp8"),
    "pp 2, transformers' tp 2": (2, f"{PP} 2 {ITS_PP} 1 {ITS_TP} 2", "transformers"),
    "shard 2, tp 2 of compiled": (2, f"{ITS_TP} 2", "compiled"),
    "cp 2, transformers' shard 2": (2, f"{CP} 2 {ITS_CP} 1", "transformers"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a deeper teacher of another family that caps its logits, one with experts, and a student that
    transformers computes."""
    folder = tmp_path_factory.mktemp("layouts")
    write_samples(folder)
    for name, family, layers in ((".", "llama", 2), ("big", "gemma2", 3), ("experts", "qwen2-moe", 2)):
        (folder / name).mkdir(exist_ok=True)
        write_tokenizer(folder / name)
        write_model(folder / name, family, layers=layers)
    write_type(folder / "odd", "helium", vocab_size=301, num_key_value_heads=2)
    write_type(folder / "helium", "helium")
    return folder


FAST = (
    "tp 2, tp 2, odd",
    "tp 2 sp, shard 2, odd",
    "shard 2, tp 2",
    "tp 2 sp, pp 2",
    "pp 2, cp 2",
    "shard 4, tp 2 x pp 2",
)
SLOW = tuple(name for name in LAYOUTS if name not in FAST)


@proves("teacher_tensor_model_parallel_size", "teacher_pipeline_model_parallel_size", "teacher_context_parallel_size")
@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def test_layout_equals_one_rank(folder: Path, names: tuple[str, ...]) -> None:
    methods = dict.fromkeys(LAYOUTS[name][2] for name in names)
    cases = {f"alone, {name}": (1, "", name) for name in methods} | {name: LAYOUTS[name] for name in names}
    found: dict[str, Any] = {}
    for world in (1, 2, 4):
        here = [name for name, (size, *_) in cases.items() if size == world]
        lines = [f"{STEPS} {METHODS[cases[name][2]]} {cases[name][1]}".format(folder) for name in here]
        ranks = run_distributed(tune_all, world, lines)
        for i, name in enumerate(here):
            found[name] = together([rank[i] for rank in ranks])
    for name in names:
        got, want = found[name], found[f"alone, {LAYOUTS[name][2]}"]
        assert got["losses"] == pytest.approx(want["losses"], rel=TOLERANCE), name
        assert got["norms"] == pytest.approx(want["norms"], rel=TOLERANCE), name
        for step, gradients in enumerate(want["gradients"]):
            assert max(tensor_errors(got["gradients"][step], gradients, gradients).values()) <= TOLERANCE, name
        assert max(tensor_errors(got["final"], want["final"], want["final"]).values()) <= TOLERANCE, name


REFUSED = {
    f"{ITS_TP} 3": "2 processes are not divisible by --teacher-tensor-model-parallel-size 3",
    f"{ITS_PP} 0": "--teacher-pipeline-model-parallel-size 0 must be above 0",
    f"--seq-length 50 {ITS_CP} 2": "--seq-length 50",
    f"--teacher {{0}}/helium {ITS_PP} 2": f"{ITS_PP} 2: only this project's decoder has it",
    f"--teacher {{0}}/helium {CP} 2": f"transformers computes this model (--model-implementation; docs/any-model.md); "
    f"leave it out, or give {ITS_CP} 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_one_line(folder: Path, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_finetune_settings(shlex.split(f"{STEPS} {words}".format(folder)), 2)
    assert REFUSED[words].format(folder) in str(error.value) and "\n" not in str(error.value)
    assert "--teacher" in str(error.value)


def test_settings_of_the_run_s_layout_are_not_the_teacher_s(folder: Path) -> None:
    words = f"{TP} 2 --sequence-parallel {PP} 2 --pipeline-schedule zb-v {ITS_PP} 1 --hybrid-shard-degree 1 {ITS_TP} 2"
    config, _ = read_finetune_settings(shlex.split(f"{STEPS} {words}".format(folder)), 4)
    parallel = teacher_config(config, 4).parallel
    assert (parallel.pipeline_schedule, parallel.hybrid_shard_degree, parallel.sequence_parallel) == (None, 0, True)
