"""A global batch trains alike on any number of data-parallel processes, whether or not they divide it, in micro-batches
of any size: losses, all gradients, weights, validation and counters equal those of one process."""

from __future__ import annotations

import random
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from smp.config import ConfigError
from smp.models.auxiliary import EXPERT_LOAD
from smp.models.presets import PRESETS
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import pretrain_all, together, tune_all

pytest.importorskip("transformers")

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size 97 --mock-data "
    "--seq-length 16 --init-method-std 0.2"
)
COMMON = "--no-tensorboard --no-progress-bar --log-interval 1 --optimizer sgd --lr 0.02"
STEPS, RAMP = 2, 3
"""With a ramp one more, whose batch is another one."""
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02 "
    "--moe-z-loss-coeff 0.01"
)
BIAS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.1"
)
PRETRAINING = {
    "dense": f"{MODEL} --hidden-dropout 0.1 --eval-interval 2 --eval-iters 1",
    "ramp": f"{MODEL} --rampup-batch-size 2 1 9",
    "experts": f"{MODEL} {EXPERTS}",
    "expert bias": f"{MODEL} {BIAS}",
    "predictions": f"{MODEL} --mtp-num-layers 1",
}
TUNING = {
    "packed sft": "--data-path {0}/sft.jsonl --eval-interval 2",
    "lora": "--data-path {0}/sft.jsonl --packing off --lora-rank 4 --lora-dropout 0.25",
    "dpo": "--data-path {0}/dpo.jsonl --objective dpo",
    "dpo table": "--data-path {0}/dpo.jsonl --objective dpo --lora-rank 4 --dpo-reference precomputed",
    "kto": "--data-path {0}/kto.jsonl --objective kto --lora-rank 4",
    "reward": "--data-path {0}/dpo.jsonl --objective reward --eval-interval 2",
}
SPLIT = {
    "": 1,
    "--data-parallel-sharding-strategy optim": 1,
    "--hybrid-shard-degree 1": 1,
    "--pipeline-model-parallel-size 2": 2,
    "--tensor-model-parallel-size 2 --sequence-parallel": 2,
    "--context-parallel-size 2": 2,
}
"""Ways to split a model, and processes of each data-parallel one."""
Case = tuple[str, int, int, int, str]
"""Kind, samples of a step, processes, rows of a micro-batch, flags of the layout."""
FIXED: tuple[Case, ...] = (
    ("dense", 8, 3, 1, ""),
    ("dense", 2, 3, 2, ""),
    ("dense", 5, 1, 3, ""),
    ("ramp", 5, 3, 2, ""),
    ("packed sft", 7, 3, 2, ""),
    ("dpo", 5, 3, 1, ""),
    ("kto", 7, 2, 2, "--hybrid-shard-degree 1"),
    ("reward", 5, 2, 2, ""),
    ("dpo table", 5, 2, 1, "--pipeline-model-parallel-size 2"),
    ("experts", 7, 2, 2, "--expert-model-parallel-size 2"),
    ("experts", 5, 4, 1, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ("expert bias", 7, 4, 1, "--expert-model-parallel-size 2"),
    ("dense", 7, 4, 2, "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved"),
    ("predictions", 7, 4, 1, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
)


def drawn(count: int, seed: int = 0) -> list[Case]:
    """Random cases that processes or micro-batches do not divide."""
    rng, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        kind, flags = rng.choice([*PRETRAINING, *TUNING]), rng.choice(list(SPLIT))
        world, batch, rows = rng.randint(SPLIT[flags], 4), rng.randint(1, 11), rng.randint(1, 4)
        if world % SPLIT[flags] or batch % (rows * world // SPLIT[flags]) == 0:
            continue
        if kind in ("experts", "expert bias") and "optim" not in flags and world == 4:
            flags += " --expert-model-parallel-size 2"
        case = kind, batch + 2 * (kind == "ramp"), world, rows, flags
        if kind in TUNING or _is_taken(case):
            cases.append(case)
    return cases


def _is_taken(case: Case) -> bool:
    """Whether there is such a run."""
    try:
        read_settings(shlex.split(_flags(Path(), case)), PRESETS, case[2])
    except ConfigError:
        return False
    return True


Results = dict[Case, dict[str, Any]]


def alone(case: Case) -> Case:
    """The same on one process, in micro-batches that divide the batch."""
    return case[0], case[1], 1, 1, ""


@pytest.fixture(scope="module", params=[FIXED, pytest.param(30, marks=pytest.mark.slow)], ids=["fixed", "drawn"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of all cases and of each on one process, one start per number of processes."""
    folder = tmp_path_factory.mktemp("hf")
    write_tokenizer(folder)
    write_model(folder, layers=2)
    write_samples(folder)
    asked = FIXED if request.param is FIXED else drawn(request.param)
    starts = defaultdict[tuple[int, bool], list[Case]](list)
    for case in dict.fromkeys([*asked, *map(alone, asked)]):
        starts[case[2], case[0] in TUNING].append(case)
    out: Results = {}
    for (world, tunes), cases in starts.items():
        flags = [_flags(folder, case) for case in cases]
        ranks = run_distributed(tune_all if tunes else pretrain_all, world, flags)
        out |= {case: together([r[i] for r in ranks]) for i, case in enumerate(cases)}
    return out


def _flags(folder: Path, case: Case) -> str:
    kind, batch, _, rows, layout = case
    own = TUNING[kind].format(folder) + f" --load {folder} --seq-length 48" if kind in TUNING else PRETRAINING[kind]
    steps = RAMP if kind == "ramp" else STEPS
    own += f" --log-dir {folder}/logs --train-iters {steps}"
    return f"{COMMON} {own} --global-batch-size {batch} --micro-batch-size {rows} {layout}"


def test_uneven_shares_equal_one_process(results: Results) -> None:
    for case in [case for case in results if case != alone(case)]:
        got, want = results[case], results[alone(case)]
        assert len(want["losses"]) == (RAMP if case[0] == "ramp" else STEPS) and got["tokens"] == want["tokens"], case
        for name in ("losses", "norms"):
            assert got[name] == pytest.approx(want[name], rel=TOLERANCE), (case, name)
        for step, gradients in enumerate(want["gradients"]):
            errors = tensor_errors(got["gradients"][step], gradients, gradients)
            assert max(errors.values()) <= TOLERANCE, (case, max(errors.items(), key=lambda item: item[1]))
        errors = tensor_errors(got["final"], want["final"], want["final"])
        assert max(errors.values()) <= TOLERANCE, case
        for one, other in zip(got["more"], want["more"], strict=True):
            # Its largest load is of those that are computed at the same time.
            names = set(other) - {EXPERT_LOAD}
            if abs(other.get("reward margin", 1.0)) < TOLERANCE:  # of rounding: a table before the first step
                names -= {"reward accuracy"}
            assert {n: one[n] for n in names} == pytest.approx(
                {n: other[n] for n in names}, rel=10 * TOLERANCE, abs=TOLERANCE
            ), case
        assert (got["validation"] is None) == (want["validation"] is None)
        if want["validation"] is not None:
            assert got["validation"][1] == pytest.approx(want["validation"][1], rel=TOLERANCE), case
