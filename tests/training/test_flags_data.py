"""Every setting of the data: what the model is fed, seen at its first operation."""

from __future__ import annotations

import base64
import json
import keyword
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from smp.data.indexed_dataset import IndexedDatasetWriter
from smp.data.mock_dataset import MockDataset
from tests.training.flag_runs import Run, Runs, Watched, proves, run_here
from tools.train_tokenizer import train

DOCUMENTS, LONG = 10, 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten documents of 40 tokens; document d holds only the token d."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for d in range(DOCUMENTS):
            writer.add_document([d] * LONG)
    return f"--no-mock-data --data-path {prefix} "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model of 400 token ids."""
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    text = Path(__file__).read_text() + "".join(f"x{i} = {word!r}  # {i}\n" for i, word in enumerate(keyword.kwlist))
    path.write_bytes(train([text], 400, "bpe", 0))
    return path


def ids(run: Run) -> set[int]:
    return {token for batch in run.tokens for token in batch.flatten().tolist()}


def first_batch(run: Run) -> list[list[int]]:
    return torch.cat(run.tokens[:2]).tolist()


@proves("mock_data")
def test_mock_data_are_numbered_samples_of_the_seed(runs: Runs) -> None:
    expected = [MockDataset(97, 17, seed=1234).sample(i).input_ids.tolist() for i in range(4)]
    assert first_batch(runs()) == expected
    without = runs.fresh("--no-mock-data")
    assert without.code == 2 and "--data-path or --mock-data" in without.errors[0] and not without.files


@proves("data_path")
def test_a_corpus_is_read(runs: Runs, corpus: str) -> None:
    """Only tokens of the documents come, in runs of one document, and what is learned is another loss."""
    run = runs(corpus + "--split 1,0,0")
    assert ids(run) <= set(range(DOCUMENTS))
    assert all(len(set(row)) <= 2 for row in first_batch(run))
    assert run.losses != runs().losses


def test_an_evaluation_of_more_samples_than_there_are_is_said(runs: Runs, corpora: Path) -> None:
    flags = f"--no-mock-data --train-data-path {corpora}/low --valid-data-path {corpora}/high --eval-interval 3 "
    low, high = (f"{corpora}/{name} has 23 and is read 1.04 times" for name in ("low", "high"))
    enough, more = (runs(flags + f"--test-data-path {corpora}/low --eval-iters {n}").out for n in (5, 6))
    assert "is read" not in enough
    assert f"note: validation reads --eval-iters 6 x 4 samples: {high}" in more
    assert f"note: test reads --eval-iters 6 x 4 samples: {low}" in more


def sizes(run: Watched) -> tuple[range, range, int | None]:
    train, valid = (blend.sources[0].data for blend in (run.batches.dataset, run.datasets.valid))  # type: ignore[union-attr]
    return train.document_range, valid.document_range, train.samples_per_epoch  # type: ignore[union-attr]


@proves("split")
def test_the_split_decides_which_documents_are_trained_on(runs: Runs, corpus: str) -> None:
    half = runs.fresh(corpus + "--split 5,4,1 --train-iters 6", probe=sizes)
    assert half.probed == (range(0, 5), range(5, 9), (5 * LONG - 1) // 17)
    assert ids(half) == set(range(5))
    most = runs.fresh(corpus + "--split 9,1,0 --train-iters 6", probe=sizes)
    assert most.probed == (range(0, 9), range(9, 10), (9 * LONG - 1) // 17)
    assert ids(most) == set(range(9))


def test_a_validation_part_too_small_for_a_sample_is_refused(runs: Runs, corpus: str) -> None:
    run = runs.fresh(corpus + "--split 9,1,0 --eval-interval 1 --seq-length 60")
    assert run.code == 2 and len(run.errors) == 1 and "--eval-interval" in run.errors[0] and not run.files


@proves("tokenizer_model")
def test_the_tokenizer_sets_the_vocabulary(runs: Runs, tokenizer: Path) -> None:
    run = runs(f"--tokenizer-model {tokenizer} --vocab-size none --make-vocab-size-divisible-by 1")
    assert run.shapes["embedding.weight"] == run.shapes["head.weight"] == (400, 32)
    assert max(ids(run)) > 97
    larger = runs(f"--tokenizer-model {tokenizer} --vocab-size 420 --make-vocab-size-divisible-by 1")
    assert larger.shapes["embedding.weight"] == (420, 32)


@proves("seq_length")
def test_the_sequence_length(runs: Runs) -> None:
    short = runs("--seq-length 9")
    assert {tuple(t.shape) for t in short.tokens} == {(2, 9)}
    assert {tuple(t.shape) for t in runs().tokens} == {(2, 17)}
    assert short.records("tokens/s")[0] * short.records("seconds per iteration")[0] == pytest.approx(4 * 9)


@proves("micro_batch_size")
def test_the_micro_batch_changes_how_not_what(runs: Runs) -> None:
    """The same samples in more and smaller pieces, and the same losses and norms up to rounding."""
    base, single, whole = runs(), runs("--micro-batch-size 1"), runs("--micro-batch-size 4")
    for run, micro in ((base, 2), (single, 1), (whole, 4)):
        assert {tuple(t.shape) for t in run.tokens} == {(micro, 17)} and len(run.tokens) == 3 * 4 // micro
        assert torch.equal(torch.cat(run.tokens), torch.cat(base.tokens))
        assert run.losses == pytest.approx(base.losses, rel=1e-5)
        assert run.records("grad norm") == pytest.approx(base.records("grad norm"), rel=1e-4)


@proves("global_batch_size")
def test_the_global_batch_is_what_a_step_consumes(runs: Runs) -> None:
    run = runs("--global-batch-size 8")
    assert run.records("consumed samples") == [8, 16, 24] and len(run.tokens) == 3 * 4
    assert runs().records("consumed samples") == [4, 8, 12]
    assert torch.equal(torch.cat(run.tokens[:6]), torch.cat(runs().tokens))  # the same samples in the same order
    assert "global batch size:     8 |" in runs("--global-batch-size 8 --log-format megatron").out


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets low (tokens 0 to 9) and high (tokens 50 to 59), and blend.txt."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, first in (("low", 0), ("high", 50)):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for d in range(DOCUMENTS):
                writer.add_document([first + d] * LONG)
    (folder / "blend.txt").write_text(f"0.25 {folder}/low\n0.75 {folder}/high\n")
    return folder


def of_high(run: Run) -> list[bool]:
    """For each sample whether it comes from the data set high."""
    return [row[0] >= 50 for row in torch.cat(run.tokens).tolist()]


def test_a_blend_is_exact(runs: Runs, corpora: Path) -> None:
    run = runs(f"--no-mock-data --data-path 0.25 {corpora}/low 0.75 {corpora}/high --split 1,0,0 --train-iters 6")
    assert sum(of_high(run)) == 18
    for n in range(25):
        assert abs(sum(of_high(run)[:n]) - 0.75 * n) < 1
    by_size = runs(f"--no-mock-data --data-path {corpora}/low {corpora}/high --split 1,0,0 --train-iters 6")
    assert sum(of_high(by_size)) == 12


@proves("data_args_path")
def test_the_words_of_data_path_in_a_file(runs: Runs, corpora: Path) -> None:
    words = runs(f"--no-mock-data --data-path 0.25 {corpora}/low 0.75 {corpora}/high --split 1,0,0 --train-iters 6")
    file = runs(f"--no-mock-data --data-args-path {corpora}/blend.txt --split 1,0,0 --train-iters 6")
    assert torch.equal(torch.cat(words.tokens), torch.cat(file.tokens))


@proves("train_data_path", "valid_data_path", "test_data_path")
def test_separate_files_for_training_validation_and_test(runs: Runs, corpora: Path, corpus: str) -> None:
    flags = f"--no-mock-data --train-data-path {corpora}/low --valid-data-path {corpora}/high --eval-interval 3"
    run = runs(flags + f" --test-data-path {corpora}/low --eval-iters 2")
    assert not any(of_high(run)) and run.eval_passes == 8  # validation and test, two batches of two micro-batches each
    assert len(run.records("validation loss")) == len(run.records("test loss")) == 1
    assert run.records("validation loss") != run.records("test loss")
    assert "test loss at iteration 3" in run.out
    without = runs.fresh(f"--no-mock-data --train-data-path {corpora}/low --eval-interval 3")
    assert without.code == 2 and "--eval-interval and --valid-data-path go together" in without.errors[0]


@proves("data_cache_path")
def test_where_the_index_is_kept(runs: Runs, corpora: Path) -> None:
    run = runs(f"--no-mock-data --data-path {corpora}/low --split 1,0,0 --data-cache-path index")
    kept = {name for name in run.files if name.startswith("index/") and "lock" not in name}
    assert len(kept) == 1 and any("contents-" in name for name in kept)  # the order of so few documents is no file
    assert torch.equal(
        torch.cat(run.tokens),
        torch.cat(runs(f"--no-mock-data --data-path {corpora}/low --split 1,0,0").tokens),
    )


@proves("tiktoken_pattern")
def test_text_with_a_tiktoken_file(runs: Runs, tmp_path: Path) -> None:
    """A .jsonl file trains straight away; the pattern decides how it is cut into tokens."""
    merges = [bytes([b]) for b in range(256)] + [b"ab", b"12", b"34", b"1234"]
    file = tmp_path / "merges.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(m) + b" %d\n" % i for i, m in enumerate(merges)))
    (tmp_path / "corpus.jsonl").write_text('{"text": "ab 1234 ab"}\n' * 40)
    flags = f"--no-mock-data --data-path {tmp_path}/corpus.jsonl --tokenizer-model {file} --vocab-size none "
    gpt2 = runs.fresh(flags + "--tiktoken-pattern gpt2 --split 1,0,0")
    assert gpt2.code == 0 and gpt2.shapes["head.weight"][0] == 384  # 261 ids, padded
    assert {259, 260} < ids(gpt2)  # the number is one token; 260 ends a document
    cl100k = runs.fresh(flags + "--tiktoken-pattern cl100k --split 1,0,0")
    assert cl100k.code == 0 and 259 not in ids(cl100k) and 261 in ids(cl100k)  # three digits at most
    missing = runs.fresh(flags)
    assert missing.code == 2 and "needs --tiktoken-pattern" in missing.errors[0]


@proves("packing")
def test_best_fit_packing_cuts_no_document(runs: Runs, corpora: Path) -> None:
    flags = f"--no-mock-data --data-path {corpora}/low --split 1,0,0 --seq-length 80 --train-iters 5"
    rows = torch.cat(runs(flags + " --packing best-fit").tokens).tolist()
    assert all(row[0] == row[38] != row[39] == row[77] and row[78:] == [0, 0] for row in rows)  # two of 39 steps each
    stream = torch.cat(runs(flags).tokens).tolist()
    assert all(row[0] == row[39] != row[40] == row[79] for row in stream)  # whole documents only by chance
    packed = runs(flags + " --packing best-fit")
    assert packed.losses != runs(flags).losses
    seconds = packed.records("seconds per iteration")[0]
    assert packed.records("tokens/s")[0] * seconds == pytest.approx(4 * 78)  # two places of each sequence are padding


@proves("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
def test_documents_in_a_sequence(runs: Runs, corpora: Path) -> None:
    flags = f"--no-mock-data --data-path {corpora}/low --split 1,0,0 --seq-length 60 --position-embedding-type "
    learned = flags + "learned_absolute "
    seen = [runs(learned + extra).losses[0] for extra in ("", "--reset-attention-mask", "--reset-position-ids")]
    assert len(set(seen)) == 3
    whole, ends = runs(learned), runs(learned + "--eod-mask-loss")
    assert torch.equal(torch.cat(whole.tokens), torch.cat(ends.tokens)) and whole.losses != ends.losses
    refused = runs.fresh(flags + "rope --packing best-fit --eod-mask-loss")
    assert refused.code == 2 and "--eod-mask-loss" in refused.errors[0]
    refused = runs.fresh("--reset-attention-mask")
    assert refused.code == 2 and "--mock-data has no documents: leave out --reset-attention-mask" in refused.errors[0]


@proves("num_workers")
def test_reading_threads_change_nothing_else(runs: Runs) -> None:
    def readers(run: Watched) -> tuple[int, int]:
        pool = run.batches._reader
        return 0 if pool is None else pool._max_workers, len(run.batches._pending)

    found = {n: runs.fresh(f"--num-workers {n}", probe=readers) for n in (0, 1, 4)}
    assert {n: run.probed for n, run in found.items()} == {0: (0, 0), 1: (1, 2), 4: (4, 4)}  # with steps read ahead
    for run in found.values():
        assert torch.equal(torch.cat(run.tokens), torch.cat(runs().tokens)) and run.losses == runs().losses


@proves("rampup_batch_size")
def test_the_batch_grows(runs: Runs) -> None:
    """From 2 by 2 to 6 over 8 samples: 2 2 4 6 6 ..., and the same samples in the same order."""
    flags = "--global-batch-size 6 --rampup-batch-size 2 2 8 "
    run = runs(flags + "--train-iters 5")
    assert run.records("consumed samples") == [2, 4, 8, 14, 20]
    assert run.records("global batch size") == [2, 2, 4, 6, 6]
    assert torch.equal(torch.cat(run.tokens), torch.cat(runs("--global-batch-size 4 --train-iters 5").tokens))
    assert runs(flags + "--train-iters none --train-samples 15").records("consumed samples") == [2, 4, 8, 14, 20]
    for bad, message in (("2 3 8", "do not lead from 2"), ("2 2", "three numbers")):
        refused = runs.fresh(f"--global-batch-size 6 --rampup-batch-size {bad}")
        assert refused.code == 2 and message in refused.errors[0], refused.errors


def test_a_ramp_goes_on_after_a_resume(runs: Runs) -> None:
    flags = "--global-batch-size 6 --rampup-batch-size 2 2 8 --save ckpt --load auto "
    whole = runs("--global-batch-size 6 --rampup-batch-size 2 2 8 --train-iters 5")
    first = runs.fresh(flags + "--train-iters 5 --exit-interval 3")
    second = run_here(first.folder, flags + "--train-iters 5")
    assert first.losses[:3] + second.losses[3:] == whole.losses and second.records("consumed samples")[-1] == 20


STEPS = "--global-batch-size none --step-batch-size-schedule 0:2 68:6 238:4 "  # 17 tokens in a sample: from 4 and 14 on


@proves("step_batch_size_schedule")
def test_the_batch_follows_a_schedule_of_tokens(runs: Runs) -> None:
    """2 2 6 6 4 4: the same samples in the same order, also with the number of samples as the length of the run."""
    run = runs(STEPS + "--train-iters 6")
    assert run.records("global batch size") == [2, 2, 6, 6, 4, 4]
    assert "global batch size: 2 from sample 0 on, 6 from sample 4 on, 4 from sample 14 on" in run.out
    assert torch.equal(torch.cat(run.tokens), torch.cat(runs("--train-iters 6").tokens))
    assert runs(STEPS + "--train-iters none --train-samples 21").records("consumed samples")[-1] == 24
    dry = runs.fresh(STEPS + "--dry-run")
    assert "# global batch size: 2 from sample 0 on" in dry.out and "# tokens per step: 102" in dry.out
    ramp = runs("--global-batch-size 6 --rampup-batch-size 2 2 8 --train-iters 5")
    assert runs("--global-batch-size 6 --step-batch-size-schedule 0:2,68:4,136:6 --train-iters 5").losses == ramp.losses


def test_a_schedule_goes_on_after_a_resume_bit_for_bit(runs: Runs) -> None:
    flags = STEPS + "--lr-warmup-samples 3 --lr-decay-samples 30 --train-iters 6 "
    whole = runs(flags)
    first = runs.fresh(flags + "--save ckpt --load auto --exit-interval 3")
    second = run_here(first.folder, flags + "--save ckpt --load auto")
    assert first.losses[:3] + second.losses[3:] == whole.losses and second.rates == whole.rates
    assert all(torch.equal(second.final[name], whole.final[name]) for name in whole.final)


def test_a_step_of_any_size_is_filled_up(runs: Runs) -> None:
    """Micro-batches of 4 rows, steps of 2, 6 and 5 samples: rows without a sample count nothing."""
    flags = "--global-batch-size none --step-batch-size-schedule 0:2,68:6,136:5 --eval-interval 2 --eval-iters 1 "
    whole = runs(flags + "--micro-batch-size 1 --train-iters 4")
    filled = runs.fresh(flags + "--micro-batch-size 4 --train-iters 4")
    assert filled.records("global batch size") == whole.records("global batch size") == [2, 2, 6, 5]
    assert filled.records("consumed samples") == [2, 4, 10, 15]
    assert filled.losses == pytest.approx(whole.losses, rel=1e-6)
    assert filled.records("validation loss") == pytest.approx(whole.records("validation loss"), rel=1e-6)
    assert "uneven shares: 2 samples on 1 data-parallel processes in micro-batches of 4 fill 2 of 4 rows" in filled.out
    assert "uneven" not in whole.out


def test_a_blend_changed_on_resume_repeats_nothing(runs: Runs, corpora: Path) -> None:
    common = "--no-mock-data --split 1,0,0 --save ckpt --load auto --data-path "
    first = runs.fresh(common + f"{corpora}/low --train-iters 3")
    second = run_here(first.folder, common + f"0.5 {corpora}/low 0.5 {corpora}/high --train-iters 6")
    assert "note: the blend changes at sample 12; what was read before continues after its last sample" in second.out
    assert f"note: {corpora}/high was not read before" in second.out
    rows = torch.cat(first.tokens + second.tokens).tolist()
    assert len(rows) == 24 and sum(row[0] >= 50 for row in rows) == 6
    alone = runs(f"--no-mock-data --data-path {corpora}/low --split 1,0,0 --train-iters 6")
    low = [row for row in rows if row[0] < 50]
    assert low == torch.cat(alone.tokens).tolist()[:18]


@pytest.mark.parametrize("cut", ["low.bin", "low.idx", "config.json"])
def test_damage_that_keeps_a_run_from_starting_is_no_mistake_of_its_command(
    runs: Runs, corpora: Path, tmp_path: Path, cut: str
) -> None:
    """Found with the settings, or when the data are opened."""
    data, model = tmp_path / "data", tmp_path / "model"
    for folder in (data, model):
        folder.mkdir()
    for name in ("low.bin", "low.idx"):
        shutil.copy(corpora / name, data / name)
    (model / "config.json").write_text('{"model_type": "llama"')
    if cut != "config.json":
        os.truncate(data / cut, (data / cut).stat().st_size - 8)
    start = f" --load {model} --finetune" if cut == "config.json" else ""
    run = runs.fresh(f"--no-mock-data --data-path {data}/low --status-file why.json{start}")
    assert run.code == 1 and len(run.errors) == 1 and cut in run.errors[0], run.err
    status = json.loads((run.folder / "why.json").read_text())
    assert status == {"status": "failed", "reason": run.errors[0].removeprefix("error: "), "iteration": 0}


def test_a_token_outside_of_the_vocabulary_is_found_before_training(runs: Runs, corpora: Path) -> None:
    run = runs.fresh(f"--no-mock-data --data-path {corpora}/high --vocab-size 58")
    assert run.code == 2 and not run.files
    assert "high.bin: token id 58 in document 8 at offset 0, the vocabulary has 58" in run.errors[0]
