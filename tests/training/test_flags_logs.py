"""What a run tells of its folders and its progress, and that two runs do not meet in one folder unawares."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

import pytest

from smp.config import Config, DataConfig, Layout, ParallelConfig, TrainingConfig
from smp.config.rules.checks import notes_on_effects
from smp.models.presets import PRESETS
from smp.training.cost.describe import describe
from smp.training.cost.meter import Meter
from smp.training.reporting.console import LONGEST, short_line
from smp.training.settings import read_settings
from tests.training.flag_runs import proves, run_here
from tests.training.test_metrics import RECORD
from tests.training.tiny_hf import WORDS, write_model, write_tokenizer


def lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


@proves("log_format")
def test_a_log_line_is_short_and_has_the_epoch_and_the_time_that_is_left(tmp_path: Path) -> None:
    texts = "".join(f'{{"text": "{word}"}}\n' for word in WORDS * 20)
    tmp_path.joinpath("texts.jsonl").write_text(texts)
    write_tokenizer(tmp_path / "folder")
    data = "--no-mock-data --data-path texts.jsonl --tokenizer-model folder/tokenizer.json --vocab-size 300 "
    run = run_here(tmp_path, data)
    first, *_, last = lines(run.out, "lm loss: ")
    assert all(len(line) <= LONGEST for line in lines(run.out, "lm loss: "))
    assert re.search(r"iteration 1/3 \| epoch 0\.\d\d \| lm loss: [\d.E+-]+ \| grad norm: ", first)
    assert re.search(r"left: 0:00:0\d ", first) and "left: 0:00:00 " in last
    long = run_here(tmp_path, data + "--log-format megatron")
    assert long.losses == run.losses
    assert "consumed samples: " in lines(long.out, "lm loss: ")[0] and "epoch" not in lines(long.out, "lm loss: ")[0]


def test_no_line_is_longer_whatever_is_measured() -> None:
    config = Config(data=DataConfig(global_batch_size=256), training=TrainingConfig(train_iters=10**7))
    metrics = {f"rewards of kind {i}": 1.0 for i in range(9)}
    large = RECORD | {"tokens/s": 1e9, "grad norm": 12345.6, "seconds per iteration": 100.0}
    line = short_line(config, 10**6, large, 1234.5, metrics)
    assert LONGEST - 40 < len(line) <= LONGEST
    assert "left: 10416 days, 16:00:00 |" in line and "skipped: 1" in line
    usual = short_line(config, 5, RECORD | {"skipped iterations": 0}, 1.0)
    assert len(usual) <= LONGEST and "skipped" not in usual
    assert "global batch size" not in usual, "it does not change"
    growing = Config(data=DataConfig(global_batch_size=256, rampup_batch_size="2 2 6"))
    assert f"global batch size: {RECORD['global batch size']:.0f} |" in short_line(growing, 5, RECORD)
    measured = short_line(config, 5, RECORD | {"skipped iterations": 0}, None, metrics)
    assert "rewards of kind 0: 1.0000" in measured and "tokens/s: " in measured, "speed is in every line"


def test_a_log_dir_in_use_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "metrics.jsonl").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run = run_here(tmp_path, "--save run")
    assert run.code == 2 and "--log-dir logs is in use by another run; give another" in run.errors[0]
    assert "kernels: " not in run.out and not (tmp_path / "run").exists()


def test_records_of_an_earlier_run_move_and_it_is_told(tmp_path: Path) -> None:
    assert run_here(tmp_path, "--save one").code == 0
    second = run_here(tmp_path, "--save two")
    said = "note: --log-dir logs holds 3 records of an earlier run: they move to metrics.superseded.jsonl"
    assert said in second.out
    assert len((tmp_path / "logs" / "metrics.superseded.jsonl").read_text().splitlines()) == 3


def test_a_run_behind_the_records_of_another_is_told(tmp_path: Path) -> None:
    assert run_here(tmp_path, "--save one --log-dir first").code == 0
    assert run_here(tmp_path, "--save other").code == 0
    goes_on = run_here(tmp_path, "--save one --load auto --train-iters 4")
    assert "WARNING: --log-dir logs holds records of another run, with --save other" in goes_on.out
    same = run_here(tmp_path, "--save one --load auto --train-iters 5")
    assert same.code == 0 and "holds records" not in same.out


def test_the_size_of_a_checkpoint_is_told_before_the_first(tmp_path: Path) -> None:
    run = run_here(tmp_path, "--save run --save-interval 2 --hidden-size 256 --ffn-hidden-size 512")
    (said,) = lines(run.out, "a checkpoint in run takes ")
    assert run.out.index(said) < run.out.index("saved run/iter_0000002") and "GB are free there" in said
    size = sum(path.stat().st_size for path in (tmp_path / "run" / "iter_0000002").glob("*.safetensors"))
    assert float(said.split("takes ")[1].split()[0]) == pytest.approx(size / 1e9, rel=0.1)


def test_a_strategy_of_sharding_without_anything_to_shard_is_told(tmp_path: Path) -> None:
    config = Config(parallel=ParallelConfig(data_parallel_sharding_strategy="optim"))
    note = "note: --data-parallel-sharding-strategy optim has no effect with one data-parallel process"
    assert notes_on_effects(config, Layout())[0].startswith(note)
    assert notes_on_effects(config, Layout(dp_shard=2)) == notes_on_effects(config, Layout(cp=2)) == []
    for more in ("", " --dry-run"):
        assert note in run_here(tmp_path, "--data-parallel-sharding-strategy optim" + more).out


def test_settings_that_loading_leaves_nothing_to_do_are_refused(tmp_path: Path) -> None:
    run = run_here(tmp_path, "--save run --load auto --no-exit-on-missing-checkpoint")
    assert run.code == 2 and "--no-exit-on-missing-checkpoint has no effect with --load auto" in run.errors[0]
    write_model(tmp_path / "llama", layers=1)
    base = "--mock-data --seq-length 16 --train-iters 1 --load llama"
    run = run_here(tmp_path, "--init-method-std 0.3", base=base)
    assert run.code == 2 and "--init-method-std 0.3 has no effect with --load llama" in run.errors[0]


def test_a_dry_run_has_one_meaning_for_each_flop_and_says_what_its_step_leaves_out(tmp_path: Path) -> None:
    plain = run_here(tmp_path, "--dry-run")
    assert len(lines(plain.out, "TFLOP")) == 2
    assert "# model FLOPs (for MFU, without recompute): " in plain.out
    assert "# work of it, with recompute and without skipping masked attention: " in plain.out
    assert "is left out of it" not in plain.out and "are left out of it" not in plain.out
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    more = "--no-mock-data --data-path texts.jsonl --reset-attention-mask --window-size 4 --dry-run"
    left = run_here(tmp_path, more)
    assert "# documents are left out of it: " in left.out and "# the window is left out of it: " in left.out, left.err


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_dry_run_says_whether_chunks_are_in_its_attention(cp: int, backend: str) -> None:
    """Those of whole sequences are in the mask of math; a cut's are counted, which needs numbers."""
    flags = "--mock-data --vocab-size 60 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    flags += f"--train-iters 1 --attention-chunk-size 4 --attention-backend {backend} --context-parallel-size {cp}"
    told = describe(read_settings(flags.split(), PRESETS, cp), cp)
    left_out = "# the chunks are left out of it: its attention is over all tokens before" in told
    assert left_out == (cp > 1 or backend == "auto") and "that was run on tensors without data" in told


def test_a_phase_ends_also_with_an_error() -> None:
    meter = Meter({})
    with pytest.raises(ValueError), meter.phase("forward"):
        raise ValueError
    assert meter._phase is None
