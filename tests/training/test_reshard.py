"""A checkpoint of any layout goes on in any other: the same tensors to the last bit, the same losses."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.checkpoint import load, read_manifest
from smp.checkpoint.folders.folder import open_folder
from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.training.flag_runs import TINY

SAVED_AT, STEPS = 2, 2
COMMON = "--seq-length 24 --num-layers 3 --micro-batch-size 2 --global-batch-size 12 --lr 0.003 "
COMMON += f"--train-iters {SAVED_AT + STEPS} "
MODELS = {"untied": "", "tied": "--no-untie-embeddings-and-output-weights "}
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2 zb-v": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "shard3": (3, ""),
    "cp2": (2, "--context-parallel-size 2 --cp-comm-type p2p"),
    "cp2 tp2": (4, "--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2 v2 shard2": (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "tp2 pp2 replicate2": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --hybrid-shard-degree 1",
    ),
    "tp4 shard2": (8, "--tensor-model-parallel-size 4"),
    "cp2 pp2 replicate2": (
        8,
        "--context-parallel-size 2 --cp-comm-type all_gather --pipeline-model-parallel-size 2 --hybrid-shard-degree 1",
    ),
}
"""With 97 token ids, which nothing divides, and 3 layers, which two stages cannot share evenly."""
FEW = [name for name, (world, _) in LAYOUTS.items() if world < 8]
MET = ("pp2", "cp2", "pp2 v2 shard2")
"""Layouts of a few processes that others of them contain; the slow tests have all."""
Losses = dict[str, list[float]]


def start(flags: str, rank: int, world: int) -> Run:
    config = read_settings([*TINY.split(), *COMMON.split(), *flags.split()], PRESETS, world)
    return Run(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())


def losses(run: Run, steps: int) -> list[float]:
    return [run.trainer.train_step(next(run.batches)).loss for _ in range(steps)]


def train_and_save(rank: int, world: int, folder: str, layout: str) -> Losses:
    """The losses after the save, by model."""
    os.chdir(folder)
    out = {}
    for model, flags in MODELS.items():
        run = start(f"{flags} {LAYOUTS[layout][1]} --save {model}/{layout.replace(' ', '-')}", rank, world)
        losses(run, SAVED_AT)
        run.save()
        out[model] = losses(run, STEPS)
        run.close()
    return out


def go_on(rank: int, world: int, folder: str, layout: str, sources: list[str]) -> dict[tuple[str, str], list[float]]:
    """The losses in ``layout`` from each source's checkpoint; what was loaded is saved again."""
    os.chdir(folder)
    out = {}
    for (model, flags), source in itertools.product(MODELS.items(), sources):
        names = (layout.replace(" ", "-"), source.replace(" ", "-"))
        paths = f"--load {model}/{names[1]} --save {model}/{names[0]}-from-{names[1]}"
        run = start(f"{flags} {LAYOUTS[layout][1]} {paths}", rank, world)
        run.save()
        out[model, source] = losses(run, STEPS)
        run.close()
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshard")


class Saved(dict[str, Losses]):
    """Losses of the uninterrupted run of a layout, which all ranks agree about; made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, layout: str) -> Losses:
        self[layout] = run_distributed(train_and_save, LAYOUTS[layout][0], str(self.folder), layout)[0]
        return self[layout]


@pytest.fixture(scope="module")
def saved(folder: Path) -> Saved:
    return Saved(folder)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's checkpoint, whole."""
    checkpoint = run / f"iter_{SAVED_AT:07d}"
    entries = read_manifest(open_folder(str(checkpoint))).tensors
    state = {name: torch.empty(entry.shape, dtype=torch.float32) for name, entry in entries.items()}
    load(state, checkpoint)
    return state


@pytest.mark.parametrize("layout", [name for name in FEW if name not in MET])
def test_own_and_another_checkpoint_go_on(saved: Saved, folder: Path, layout: str) -> None:
    names = [*FEW, *FEW]
    at = names.index(layout)
    check_going_on(saved, folder, layout, [layout, names[at + 3]])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_checkpoint_goes_on(saved: Saved, folder: Path, layout: str) -> None:
    check_going_on(saved, folder, layout, list(LAYOUTS))


def check_going_on(saved: Saved, folder: Path, layout: str, sources: list[str]) -> None:
    """Bit-equal in the same layout, within 1e-5 in others; all tensors, whole, bit-equal after load and save."""
    world, _ = LAYOUTS[layout]
    expected = {source: saved[source] for source in sources}
    gone_on = run_distributed(go_on, world, str(folder), layout, sources)[0]
    for (model, source), found in gone_on.items():
        if source == layout:
            assert found == expected[layout][model]
        assert found == pytest.approx(expected[source][model], rel=1e-5), (model, source)
        names = (layout.replace(" ", "-"), source.replace(" ", "-"))
        before, after = (tensors(folder / model / name) for name in (names[1], f"{names[0]}-from-{names[1]}"))
        assert before.keys() == after.keys() and any(name.startswith("optim.exp_avg_sq.") for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before), (model, source)


def go_on_with_parts(rank: int, world: int, folder: str) -> list[float]:
    """Two more losses of a run whose sequences are cut over all ranks, which goes on from what it saved."""
    os.chdir(folder)
    cut = "" if world == 1 else f"--context-parallel-size {world} --cp-comm-type p2p"
    run = start(f"{cut} --save parts --load auto", rank, world)
    out = losses(run, 2)
    run.save()
    run.close()
    return out


def test_the_number_of_parts_of_a_sequence_may_change(tmp_path: Path) -> None:
    (tmp_path / "straight").mkdir()
    straight = [run_distributed(go_on_with_parts, 1, str(tmp_path / "straight"))[0] for _ in range(3)]
    changing = [run_distributed(go_on_with_parts, world, str(tmp_path))[0] for world in (1, 4, 2)]
    assert changing[0] == straight[0]
    for found, expected in zip(changing, straight, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def samples_of(rank: int, world: int, folder: str, flags: str, steps: int) -> list[Any]:
    """Numbers and tokens of the samples of each step on this rank, (micro-batches, micro-batch) of them."""
    os.chdir(folder)
    run, seen = start(flags, rank, world), []
    for _ in range(steps):
        batch = next(run.batches)
        seen.append((batch.sample_index.tolist(), batch.input_ids.tolist()))
        run.trainer.train_step(batch)
    run.save()
    run.close()
    return seen


def in_order(ranks: list[list[Any]]) -> list[list[Any]]:
    """Of each step, all samples: in a micro-batch, rank after rank."""
    steps = []
    for parts in zip(*ranks, strict=True):
        order = [zip(*(part[kind] for part in parts), strict=True) for kind in (0, 1)]
        rows = [[row for ranks_of in kind for micro in ranks_of for row in micro] for kind in order]
        steps.append(list(zip(*rows, strict=True)))
    return steps


def test_data_go_on_in_the_same_order_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    straight = in_order(run_distributed(samples_of, 1, str(tmp_path), "", 6))
    found = []
    for world in (2, 3, 1):
        found += in_order(run_distributed(samples_of, world, str(tmp_path), "--save ck --load auto", 2))
    assert found == straight
    assert [number for step in found for number, _ in step] == list(range(6 * 12))
