"""A custom mixer trains in every layout, with packed documents, and goes on from a checkpoint in another one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smp.config.layer_specs import MLPSpec
from smp.data.indexed_dataset import IndexedDatasetWriter
from smp.models.mixers import register_mixer
from tests.programs import run_program
from tests.training.flag_runs import TINY
from tests.training.tiny_hf import WORDS, write_tokenizer

ROOT = Path(__file__).parents[2]
PACKED = "--no-mock-data --data-path text --split 1,0,0 --reset-attention-mask --reset-position-ids"
FLAGS = f"{TINY} {PACKED} --num-layers 4 --layer-types ema attention --train-iters 4 --lr-decay-style constant"


def losses(folder: Path, processes: int, flags: str) -> list[float]:
    """Of each step, on documents of 1 to 9 tokens."""
    with IndexedDatasetWriter(folder / "text", np.uint16) as writer:
        for document in range(200):
            writer.add_document([(document * 7 + i * i) % 97 for i in range(1 + document % 9)])
    run = run_program(ROOT / "examples/own_mixer.py", [*FLAGS.split(), *flags.split()], folder, processes)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [record["lm loss"] for record in records if "lm loss" in record]


def test_every_layout_is_one_process(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "tp", "pp")]
    for folder in folders:
        folder.mkdir()
    alone = losses(folders[0], 1, "")
    sliced = losses(folders[1], 2, "--tensor-model-parallel-size 2 --sequence-parallel --save kept --exit-interval 2")
    assert sliced == pytest.approx(alone[:2], rel=1e-5)
    staged = losses(folders[2], 2, f"--pipeline-model-parallel-size 2 --load {folders[1] / 'kept'}")
    assert staged == pytest.approx(alone[2:], rel=1e-5)


def smp(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """``python -m smp`` in a folder."""
    command, path = [sys.executable, "-m", "smp", *words.split()], os.pathsep.join([str(ROOT), *sys.path])
    settings = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)


def test_every_command_knows_what_a_module_of_ones_own_registers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": " ".join(WORDS)}))
    words = f"pretrain {TINY} --vocab-size 500 --layer-types ema attention --train-iters 1 --save kept"
    trained = smp(tmp_path, f"--import examples.own_mixer {words}")
    assert trained.returncode == 0, trained.stderr
    assert "in 1 of 2 layers a moving average of 32 channels" in trained.stdout, "its first line"
    reads = "evaluate --load kept --tokenizer-model . --data-path texts.jsonl"
    known, refused = smp(tmp_path, f"--import examples.own_mixer {reads}"), smp(tmp_path, reads)
    assert known.stderr == "error: a moving average keeps nothing between tokens: it cannot generate text\n"
    assert refused.returncode == 2 and "imported by python -m smp --import MODULE COMMAND" in refused.stderr
    unknown = smp(tmp_path, words)
    assert unknown.returncode == 2 and "imported by python -m smp --import MODULE COMMAND" in unknown.stderr
    for wrong, message in (
        ("--import", "--import takes a module and a command"),
        (
            "--import examples.my_mixer generate",
            "--import examples.my_mixer: there is no such module here or on PYTHONPATH",
        ),
        (
            "--import examples/own_mixer.py generate",
            "there is no such module here or on PYTHONPATH; write examples.own_mixer",
        ),
        ("--import examples.own_mixer generat", "generat: there is no such command"),
    ):
        run = smp(tmp_path, wrong)
        assert run.returncode == 2 and message in run.stderr and run.stderr.count("\n") == 1, run.stderr


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    for words, message in (
        ("--layer-types ema lstm", "'lstm' is no kind of layer; known: attention, ema"),
        ("--layer-types ema ema attention", "names 3 layers, which do not divide --num-layers 4"),
    ):
        run = run_program(ROOT / "examples/own_mixer.py", [*TINY.split(), "--num-layers", 4, *words.split()], tmp_path)
        assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr


def test_what_a_mixer_cannot_do_is_one_line(tmp_path: Path) -> None:
    words = f"{TINY} --num-layers 4 --layer-types ema attention --context-parallel-size 2 --seq-length 16"
    run = run_program(ROOT / "examples/own_mixer.py", words.split(), tmp_path, 2)
    assert run.returncode != 0 and "AttributeError" not in run.stderr
    assert "error: --context-parallel-size: a moving average does not pass its state" in run.stderr


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'attention'.* is registered already"):
        register_mixer("attention", MLPSpec, resolve=None, build=None, parameters=None)  # type: ignore[arg-type]


def test_the_page_shows_the_example() -> None:
    section = (ROOT / "docs/layers.md").read_text().partition("## A new kind of layer")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    example = (ROOT / "examples/own_mixer.py").read_text()
    assert len(blocks) == 4 and all(block in example for block in blocks)
