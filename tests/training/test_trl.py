"""Losses of answers in every layout beside TRL's own trainers: steps of SGD of the same tiny models on the same rows.

TRL's numbers are recorded, see ``trl_numbers``; where trl is installed, they are computed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smp.data.tuning.encode import Encoder
from smp.data.tuning.tokenizer import open_tokenizer
from tests.distributed import run_distributed
from tests.parity.worker import fp64
from tests.training.trl_cases import LOSSES, LR, MODELS, ROWS, SEED, STEPS, rows_of, write_folders
from tests.training.trl_numbers import FILE, numbers_of_all
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")

RUN = (
    f"--train-iters {STEPS} --seq-length 24 --global-batch-size {ROWS} --optimizer sgd --sgd-momentum 0 --lr {LR} "
    f"--weight-decay 0 --lr-warmup-iters 0 --split 1,0,0 --packing off --seed {SEED}"
)
SPARSE = "--moe-aux-loss-coeff 0"
LAYOUTS = {
    "alone": (1, "llama", "--micro-batch-size 3"),
    "tp 2": (2, "llama", "--tensor-model-parallel-size 2 --micro-batch-size 2"),
    "tp 2 + sp": (2, "llama", "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 6"),
    "pp 2": (2, "llama", "--pipeline-model-parallel-size 2 --micro-batch-size 2"),
    "shard 2": (2, "llama", "--micro-batch-size 1"),
    "cp 2": (2, "llama", "--context-parallel-size 2 --cp-comm-type p2p --micro-batch-size 3"),
    "moe, alone": (1, "moe", f"{SPARSE} --micro-batch-size 2"),
    "moe, ep 2": (2, "moe", f"{SPARSE} --expert-model-parallel-size 2 --micro-batch-size 3"),
}
FAST = {
    "tp 2": ("ipo",),
    "tp 2 + sp": ("hinge",),
    "pp 2": ("reward",),
    "shard 2": ("orpo",),
    "cp 2": ("kto",),
    "moe, ep 2": ("sigmoid",),
}
SLOW = {layout: tuple(loss for loss in LOSSES if loss not in FAST.get(layout, ())) for layout in LAYOUTS}
LAST_BIT = 4e-6  # of an answer's log-probability, some -40 in fp32; KTO's divergence is a mean of their differences
Results = dict[tuple[str, str], dict[str, Any]]


def tune_wide(rank: int, world_size: int, flags: list[str]) -> list[dict[str, Any]]:
    """In fp64, as TRL's numbers are: sums of log-probabilities are some tens, which fp32 rounds by more than 1e-6."""
    with fp64():
        return tune_all(rank, world_size, flags)


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    return load_file(FILE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    write_folders(folder)
    return folder


@pytest.fixture(scope="module", params=[FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def results(request: pytest.FixtureRequest, root: Path) -> Results:
    """Runs by layout and loss, one start per number of processes."""
    out: Results = {}
    for world in (1, 2):
        cases = [(layout, loss) for layout, losses in request.param.items() for loss in losses]
        cases = [case for case in cases if LAYOUTS[case[0]][0] == world]
        if not cases:
            continue
        ranks = run_distributed(tune_wide, world, [flags_of(root, *case) for case in cases])
        out |= {case: together([rank[i] for rank in ranks]) for i, case in enumerate(cases)}
    return out


def flags_of(root: Path, layout: str, loss: str) -> str:
    _, model, flags = LAYOUTS[layout]
    folder = root / (f"{model}-reward" if loss == "reward" else model)
    return (
        f"--load {folder} --tokenizer-model {root / model} --data-path {root}/{loss}.jsonl --log-dir {root}/logs "
        f"{RUN} {LOSSES[loss].flags} {flags}"
    )


def test_losses_and_gradients_are_trls(results: Results, recorded: dict[str, torch.Tensor]) -> None:
    for (layout, loss), found in results.items():
        want = {what: recorded[f"{LAYOUTS[layout][1]}.{loss}.{what}"] for what in ("losses", "norms", "kl", "gradient")}
        close(found["losses"], want["losses"], 1e-6, (layout, loss))
        close(found["norms"], want["norms"], 1e-5, (layout, loss, "norms"))
        if loss == "kto":
            kl = torch.tensor([more["KL"] for more in found["more"]]) - want["kl"]
            assert kl.abs().max() <= LAST_BIT, (layout, kl)
        rows = recorded[f"{LAYOUTS[layout][1]}.{loss}.rows"]
        gradient = found["gradients"][-1]["embedding.weight"]
        assert sorted(gradient.any(1).nonzero()[:, 0].tolist()) == rows.tolist()
        error = (gradient[rows] - want["gradient"]).norm() / want["gradient"].norm()
        assert error <= 1e-5, (layout, loss, error)


def close(found: list[float], wanted: torch.Tensor, limit: float, case: object) -> None:
    assert len(found) == len(wanted) == STEPS
    for number, other in zip(found, wanted.tolist(), strict=True):
        assert abs(number - other) <= limit * abs(other), (case, number, other)


def test_the_recorded_steps_say_something(recorded: dict[str, torch.Tensor]) -> None:
    """Losses move away from where policy and reference are the same, and KTO's divergence is not cut off at 0."""
    for model in MODELS:
        for loss in LOSSES:
            assert len(set(recorded[f"{model}.{loss}.losses"].tolist())) == STEPS
            assert recorded[f"{model}.{loss}.norms"].min() > 1e-2
        assert recorded[f"{model}.kto.kl"].max() > 1e-3


def test_tokens_are_trls(recorded: dict[str, torch.Tensor], root: Path) -> None:
    encoder = Encoder(open_tokenizer(root / "llama"), None)
    for loss in ("sigmoid", "orpo"):
        ours = [answer for row in rows_of(LOSSES[loss]) for answer in encoder.pair(row)]
        ids_of, masks = recorded[f"llama.{loss}.ids"].numpy(), recorded[f"llama.{loss}.mask"].numpy()
        for (ids, trained), theirs, mask in zip(ours, ids_of, masks, strict=True):
            assert ids.tolist() == theirs[: len(ids)].tolist()
            assert np.flatnonzero(trained).tolist() == np.flatnonzero(mask).tolist()


def test_the_recorded_numbers_are_those_of_the_installed_trl(recorded: dict[str, torch.Tensor], root: Path) -> None:
    """Needs trl and datasets: ``pip install -e ".[test-trl]"``."""
    pytest.importorskip("trl")
    found = numbers_of_all(root)
    assert found.keys() == recorded.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, recorded[name], rtol=1e-5, atol=1e-6)
