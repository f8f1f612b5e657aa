"""SIGKILL while a model that transformers computes is saved: the run that follows ends as one that nothing killed."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

import finetune
from smp.checkpoint import verify
from smp.checkpoint.folders.latest import complete
from tests.distributed import forkserver
from tests.training.any_model_lab import write_type

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
CRASH = ROOT / "tests/checkpoint/crash"
COMMON = (
    "--seq-length 48 --micro-batch-size 2 --global-batch-size 4 --lr 0.01 --train-iters 4 --save-interval 1 "
    "--model-implementation transformers --packing off --no-tensorboard --no-progress-bar --keep-last-k 2"
)
CASES = {
    "all weights": ("helium", ""),
    "all weights, in the background": ("helium", "--async-save"),
    "adapters": ("qwen3_next", "--lora-rank 4"),
    "adapters, in the background": ("qwen3_next", "--lora-rank 4 --async-save"),
}
KILLS = {"trainer": (11, 37), "writer": (9, 23)}
"""Calls that touch the folder, at which the process dies, in the middle of what it writes."""
FAST = [("all weights", "trainer", 37), ("adapters, in the background", "writer", 23)]
EVERY = [
    (case, victim, count)
    for case in CASES
    for victim, counts in KILLS.items()
    if victim == "trainer" or "background" in case
    for count in range(counts[0], 60, 7)
]


def _run(words: list[str], crash: str) -> None:
    """A run in a process of its own, which dies as ``crash`` says."""
    os.environ |= {"RANK": "0", "PYTHONPATH": os.pathsep.join((str(CRASH), str(ROOT)))}
    if crash:
        os.environ["CRASH"] = crash
        runpy.run_path(str(CRASH / "sitecustomize.py"))  # which the writer's interpreter runs by itself
    raise SystemExit(finetune.main(words))


def run(folder: Path, save: Path, more: str, crash: str = "") -> int | None:
    words = f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {save}-logs --save {save} {COMMON} {more}"
    process = forkserver().Process(target=_run, args=(words.split(), crash))
    process.start()
    process.join(200)
    process.kill()
    code: int | None = process.exitcode
    return code


class Whole:
    """Runs that nothing disturbs, by case, each made when it is asked for."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, bytes]()

    def folder(self, case: str) -> Path:
        kind = CASES[case][0]
        there = self._root / kind
        return there if there.is_dir() else write_type(there, kind)

    def last(self, case: str) -> bytes:
        if case not in self._made:
            save = self._root / f"{len(self._made)}"
            assert run(self.folder(case), save, CASES[case][1]) == 0
            self._made[case] = last(save)
        return self._made[case]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


def last(save: Path) -> bytes:
    """Weights, optimizer state and all else of the checkpoint at the end."""
    newest = save / complete(save)[0]
    assert newest.name == "iter_0000004" and verify(newest) == []
    return (newest / "shard_00000.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("case", "victim", "count"), [*FAST, *(pytest.param(*c, marks=pytest.mark.slow) for c in EVERY if c not in FAST)]
)
def test_a_run_that_was_killed_while_saving_ends_as_the_others(
    whole: Whole, tmp_path: Path, case: str, victim: str, count: int
) -> None:
    folder, save, more = whole.folder(case), tmp_path / "save", CASES[case][1]
    code = run(folder, save, more, f"{victim}:0:{count}:{save}")
    fired = Path(f"{save}.fired").exists()
    assert fired or count > 50, "the folder is touched so often"
    assert code == (-9 if fired and victim == "trainer" else code), code
    if (save / "latest").is_file():
        assert run(folder, save, f"{more} --resume") == 0
    else:  # it died before its first checkpoint was whole
        assert run(folder, save, more) == 0
    assert last(save) == whole.last(case)
