"""Every setting of the data: what the model is fed, seen at its first operation."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from smp.data.indexed_dataset import IndexedDatasetWriter
from smp.data.mock_dataset import MockDataset
from tests.training.flag_runs import Run, Runs, Watched, proves
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
    expected = [MockDataset(97, 17, seed=1234)[i][:-1].tolist() for i in range(4)]
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


def sizes(run: Watched) -> tuple[range, range, int | None]:
    train, valid = (blend.sources[0].data for blend in (run.batches.dataset, run.valid))  # type: ignore[union-attr]
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
    assert "global batch size:     8 |" in run.out
