"""--train-samples is what is trained in all, whatever batch sizes, ramps and processes a run goes on with."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from smp.config import Config, load_config, resolve
from smp.config.batch import BatchSizes
from smp.config.resolve import with_rest
from smp.models.presets import PRESETS
from smp.optim.lr_scheduler import learning_rate
from smp.training.tuning.settings import read_finetune_settings
from tests.programs import run_program
from tests.training.flag_runs import TINY
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def settings(draw: random.Random, samples: int) -> Config:
    """A random batch on a random number of processes."""
    world, micro = draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
    each = world * micro
    batch = each * draw.randint(1, 6)
    flags = f"--model debug --mock-data --vocab-size 97 --train-samples {samples} --lr-warmup-fraction 0.1 "
    flags += f"--lr-decay-style linear --micro-batch-size {micro} --global-batch-size {batch}"
    if draw.random() < 0.4 and batch > each:
        flags += f" --rampup-batch-size {each} {each} {draw.randint(1, samples)}"
    return resolve(load_config(flags.split(), PRESETS), world)


def chain(draw: random.Random, samples: int, run: Callable[[], Config]) -> int:
    """How many samples a chain of runs trains in all: each goes on from the one before with other settings, the last
    one to the end. The learning rate is a function of the samples before it."""
    iteration, consumed, runs, largest = 0, 0, draw.randint(1, 5), 0
    rates: dict[int, float] = {}
    for number in range(runs):
        config = with_rest(run(), iteration, consumed)
        sizes, last = BatchSizes.of(config.data).ending(samples, consumed), config.training.train_iters
        assert last is not None
        stop = last if number == runs - 1 else min(last, iteration + draw.randint(1, 8))
        largest = max(largest, sizes.largest)
        while iteration < stop:
            rate = learning_rate(config.optim, iteration + 1, consumed)
            assert rates.setdefault(consumed, rate) == rate == learning_rate(config.optim, 999, consumed)
            iteration, consumed = iteration + 1, consumed + sizes(consumed)
    assert samples <= consumed < samples + largest
    return consumed


def test_chains_of_runs_train_as_many_samples_as_were_asked_for() -> None:
    """200 chains of random batches, ramps and processes."""
    draw = random.Random(0)
    for _ in range(200):
        samples = draw.randint(20, 400)
        chain(draw, samples, lambda samples=samples: settings(draw, samples))  # type: ignore[misc]


@pytest.mark.parametrize("chains", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_chains_of_epochs(chains: int, tmp_path: Path) -> None:
    """The same of fine-tuning by epochs, parts of one among them."""
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    write_model(tmp_path, layers=1)
    write_samples(tmp_path, count=40)
    draw, fixed = random.Random(1), f"--load {tmp_path} --data-path {tmp_path}/sft.jsonl --split 1,0,0 --seq-length 48"

    def run(epochs: float, seen: list[int]) -> Config:
        world, micro = draw.choice((1, 2, 4)), draw.choice((1, 2))
        flags = f"{fixed} --packing off --train-epochs {epochs} --lr-decay-style linear --lr-warmup-fraction 0.1 "
        flags += f"--micro-batch-size {micro} --global-batch-size {world * micro * draw.randint(1, 5)}"
        config, data = read_finetune_settings(flags.split(), world)
        assert data is not None and config.training.train_samples == math.ceil(epochs * data.samples_per_epoch)
        seen.append(data.samples_per_epoch)
        return config

    for _ in range(chains):
        seen: list[int] = []
        epochs = draw.choice((0.3, 0.5, 1.0, 1.7, 2.0, 3.0))
        consumed = chain(draw, math.ceil(epochs * 40), lambda epochs=epochs, seen=seen: run(epochs, seen))  # type: ignore[misc]
        assert set(seen) == {40} and consumed >= epochs * 40


def test_the_last_step_of_a_ramp_takes_what_is_left() -> None:
    ramp = BatchSizes(((0, 4), (11, 8), (22, 12), (32, 16)))
    assert ramp.ending(64, 16)(52) == 12 and ramp.ending(63, 16) is ramp and ramp.steps(64, 16) == 4


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("--global-batch-size 4", "--global-batch-size 8"),
        ("--global-batch-size 8", "--global-batch-size 4"),
        ("--global-batch-size 2", "--global-batch-size 8 --rampup-batch-size 2 2 16"),
    ],
)
def test_a_run_that_goes_on_trains_the_rest(tmp_path: Path, first: str, then: str) -> None:
    flags = TINY.replace("--train-iters 3", "--train-samples 32").split()
    for more in (f"{first} --exit-interval 2", then):
        words = [ROOT / "pretrain_gpt.py", *flags, *more.split(), "--load", "auto", "--save", "kept"]
        run = run_program(Path(words[0]), words[1:], tmp_path)
        assert run.returncode == 0, run.stderr
    (newest,) = sorted(tmp_path.glob("kept/iter_*/manifest.json"))[-1:]
    assert json.loads(newest.read_text())["extra"]["progress"]["consumed_samples"] == 32
    assert json.loads((tmp_path / "logs" / "status.json").read_text())["status"] == "done"
