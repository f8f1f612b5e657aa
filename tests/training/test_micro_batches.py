"""The cut of micro-batches: all ranks together have every token once, with what belongs to it."""

from __future__ import annotations

import pytest
import torch

from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.batches import PairBatch
from smp.layers.heads.answers import AnswerLoss
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group
from smp.training.micro_batches import token_micro_batch
from smp.training.objectives.contract import answer_micro_batches

CPU = torch.device("cpu")
ROWS, LENGTH = 3, 24


def batch(*, packed: bool = False, lengths: tuple[int, ...] | None = None) -> RankBatch:
    """Two micro-batches in which every token is another one; a part of the labels is left out."""
    ids = torch.arange(2 * ROWS * LENGTH).view(2, ROWS, LENGTH)
    labels = torch.where(ids % 5 == 0, IGNORE_INDEX, ids + 1)
    documents = torch.tensor([0] * 7 + [1] * 12 + [2] * 5).expand_as(ids)
    places = torch.cat([torch.arange(n) for n in (7, 12, 5)]).expand_as(ids)
    return RankBatch(
        ids,
        labels,
        torch.arange(100, 100 + 2 * ROWS).view(2, ROWS),
        document_ids=documents if packed else None,
        position_ids=places if packed else None,
        lengths=lengths,
        sequence_lengths=torch.tensor([7] * 7 + [12] * 12 + [5] * 5).expand_as(ids) if packed else None,
    )


def parts(whole: RankBatch, cp: int) -> list[MicroBatch]:
    return [token_micro_batch(whole, 1, 10, CPU, Group("", cp, rank)) for rank in range(cp)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_token_is_on_one_rank_with_what_belongs_to_it(cp: int, packed: bool) -> None:
    uncut, cut = token_micro_batch(batch(packed=packed), 1, 10, CPU), parts(batch(packed=packed), cp)
    assert uncut.labels is not None and uncut.loss_weights is not None and uncut.token_index is not None
    order = torch.cat([part.input_ids for part in cut], dim=1).argsort(dim=1)
    places = torch.arange(LENGTH).expand(ROWS, LENGTH) if uncut.position_ids is None else uncut.position_ids
    wanted = (uncut.input_ids, uncut.labels, uncut.loss_weights, uncut.token_index, places)
    for name, want in zip(("input_ids", "labels", "loss_weights", "token_index", "position_ids"), wanted, strict=True):
        assert torch.equal(torch.cat([getattr(part, name) for part in cut], dim=1).gather(1, order), want), name
    whole = torch.cat([part.whole_lengths() for part in cut], dim=1).gather(1, order)
    assert torch.equal(whole, uncut.whole_lengths())
    for part in cut:
        assert part.input_ids.shape == (ROWS, LENGTH // cp)
        assert part.document_ids is None and part.cut is not None
        assert (part.cut.document_ids is None) is not packed


def test_padding_that_is_left_out_leaves_a_length_that_can_be_cut() -> None:
    for real, length in ((1, 8), (8, 8), (9, 16), (17, 24), (24, 24)):
        cut = parts(batch(packed=True, lengths=(24, real)), 4)
        assert {part.input_ids.shape for part in cut} == {(ROWS, length // 4)}
        assert set(torch.cat([part.input_ids for part in cut], dim=1)[0].tolist()) == set(range(72, 72 + length))
        assert cut[0].token_index is not None
        assert set((cut[0].token_index[0] // LENGTH).tolist()) == {103}, "numbers are those of whole rows"


def test_answers_of_a_pair_are_cut_alike_and_keep_their_order() -> None:
    whole = batch()
    pairs = PairBatch(
        whole.input_ids[:, :2],
        whole.labels[:, :2],
        whole.sample_index[:, :2],
        texts=torch.zeros(2, 2, dtype=torch.int64),
    )
    for rank in range(2):
        wanted = AnswerLoss()
        made = answer_micro_batches(pairs, lambda _, wanted=wanted: wanted, CPU, Group("", 2, rank))[0]
        assert made.answers is wanted and made.input_ids.shape == (2, LENGTH // 2)
        assert torch.equal(made.input_ids[1], made.input_ids[0] + LENGTH)


@pytest.mark.parametrize("packed", [False, True])
def test_further_layers_read_and_predict_what_lies_behind_each_token_wherever_it_is(packed: bool) -> None:
    """Tokens count up in ``batch``, so what lies behind one is known."""
    ends = {6, 18, 23} if packed else {23}  # columns where documents, or the sequence, end
    counted = 0
    for rank in range(2):
        part = token_micro_batch(batch(packed=packed), 1, 10, CPU, Group("", 2, rank), mtp=2)
        for k, further in enumerate(part.mtp, start=1):
            flat = (part.input_ids, further.input_ids, further.labels, further.loss_weights)
            for token, read, label, weight in zip(*(x.flatten().tolist() for x in flat), strict=True):
                column = token % LENGTH
                left = min(end for end in ends if end >= column) - column  # tokens behind it in its document
                valid = k <= left and (token + k) % 5 != 0
                assert label == (token + k + 1 if valid else IGNORE_INDEX)
                assert weight == pytest.approx(0.1 if valid else 0.0)
                assert column + k >= LENGTH or read == token + k
                counted += valid
    assert counted > ROWS * LENGTH
