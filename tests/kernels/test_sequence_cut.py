"""Cuts of sequences over ranks: equal shares of tokens and work, whatever the documents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.config import ConfigError
from smp.kernels.sequence_cut import SequenceCut, _deal, cut_sequences


def ids_of(*lengths: int) -> torch.Tensor:
    """(1, sum of lengths)."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def check(cut: SequenceCut, batch: int, length: int, cp: int) -> None:
    """Every token is on one rank, equally many on each, and all indices say the same."""
    assert (cut.batch, cut.length, cut.local_length) == (batch, length, length // cp)
    held = torch.stack([cut.index(rank) for rank in range(cp)])
    assert held.shape == (cp, batch, length // cp)
    assert (held.diff(dim=-1) > 0).all()
    assert torch.equal(held.movedim(0, 1).flatten(1).sort().values, torch.arange(length).expand(batch, length))
    tokens = torch.arange(batch * length).view(batch, length)
    sent = torch.cat([tokens.gather(1, cut.index(rank)).flatten() for rank in range(cp)])
    assert torch.equal(cut.gathered_order(cp), sent)


def test_a_sequence_is_cut_in_zig_zag() -> None:
    cut = cut_sequences(2, 12, 3)
    check(cut, 2, 12, 3)
    assert cut.ranks.tolist() == [[0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0]] * 2
    assert str(cut) == "6 chunks of 2 tokens, a first and a last one on each rank"
    assert cut_sequences(1, 7, 1).ranks.tolist() == [[0] * 7]


def test_each_document_is_cut_by_itself() -> None:
    ranks = _deal([18, 22, 3, 5], 2, 0).tolist()
    assert ranks[:18] == [0] * 5 + [1] * 5 + [1] * 4 + [0] * 4
    assert ranks[18:40] == [0] * 6 + [1] * 6 + [1] * 5 + [0] * 5
    assert ranks[40:43] == [0, 1, 0]  # what does not divide
    assert ranks[43:] == [0, 1, 1, 1, 0]  # the second rank had more room
    cut = cut_sequences(1, 40, 2, ids_of(36, 4))
    check(cut, 1, 40, 2)
    assert str(cut).startswith("each document in 4 pieces, a first and a last one on each rank, those below")


def test_documents_that_share_the_work_stay_whole() -> None:
    cut = cut_sequences(1, 16, 4, ids_of(4, 4, 4, 4))
    assert cut.ranks.tolist() == [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4]
    long_and_short = cut_sequences(1, 64, 4, ids_of(48, 4, 4, 4, 4))
    check(long_and_short, 1, 64, 4)
    assert len(long_and_short.ranks[0, :48].unique()) == 4  # alone on a rank, it would be most of the work
    assert all(len(row.unique()) == 1 for row in long_and_short.ranks[0, 48:].split(4))


def test_neighbouring_ranks_as_one_hold_the_coarser_cut() -> None:
    cut = cut_sequences(1, 48, 4)
    assert torch.equal(cut.merged(2).ranks, cut_sequences(1, 48, 2).ranks)
    assert cut.merged(4).ranks.unique().tolist() == [0]
    second = [cut.index(2), cut.index(3)]
    place = cut.gathered_order(2, part=1)
    assert torch.equal(cut.merged(2).index(1)[0][place], torch.cat(second, 1)[0])


@pytest.mark.parametrize(
    ("length", "cp", "documents", "message"),
    [
        (30, 4, False, "--seq-length 30 cannot be cut into 2 x 4 chunks for --context-parallel-size 4; the next length "
                       "that can is 32"),
        (30, 4, True, "--seq-length 30 cannot be cut into 4 equal parts for --context-parallel-size 4; the next length "
                      "that can is 32"),
    ],
)  # fmt: skip
def test_a_length_that_does_not_divide_names_the_next(length: int, cp: int, documents: bool, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        cut_sequences(1, length, cp, ids_of(length) if documents else None)
    assert str(raised.value) == message


def test_document_ids_of_another_shape_or_place_are_refused() -> None:
    with pytest.raises(ValueError, match=r"document ids \(1, 4\) on cpu for sequences \(2, 4\)"):
        cut_sequences(2, 4, 2, ids_of(4))
    with pytest.raises(ValueError, match="on meta"):
        cut_sequences(1, 4, 2, ids_of(4).to("meta"))


def test_work_is_what_is_seen() -> None:
    cut = cut_sequences(1, 8, 2, ids_of(5, 3))
    seen = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3])
    for window, most in ((None, 9), (2, 2), (1, 1)):
        want = [int(seen.clamp(max=most)[cut.ranks[0] == rank].sum()) for rank in range(2)]
        assert cut.work(window).tolist() == want
    again = cut_sequences(1, 6, 2, torch.tensor([[1, 2, 1, 2, 1, 1]]))  # documents that come back
    assert again.document_positions().tolist() == [[0, 0, 1, 1, 2, 3]]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_any_documents_are_shared_equally(data: st.DataObject, cp: int, batch: int, times: int) -> None:
    length = cp * times
    ids = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    documents = torch.tensor([data.draw(ids) for _ in range(batch)])
    check(cut_sequences(batch, length, cp, documents), batch, length, cp)


def test_causal_work_is_balanced_within_one_percent() -> None:
    for cp in (2, 3, 4, 8):
        work = cut_sequences(1, 240 * cp, cp).work().double()
        assert work.max() <= 1.01 * work.mean()


def packings(count: int, length: int) -> list[torch.Tensor]:
    """Lognormal lengths of many means, as those of chats, web pages and books are, cut where the sequence ends."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        mean = 2 ** (4 + i % 8)
        sizes = (mean * torch.randn(length, generator=generator).exp()).long().clamp(min=1)
        ends = sizes.cumsum(0).clamp(max=length).unique()
        found.append(torch.bucketize(torch.arange(length), ends, right=True)[None])
    return found


def test_work_of_a_thousand_packings_is_balanced_within_ten_percent() -> None:
    length, worst = 4096, 0.0
    for i, ids in enumerate(packings(1000, length)):
        work = cut_sequences(1, length, (2, 4, 8)[i % 3], ids).work().double()
        worst = max(worst, float(work.max() / work.mean()))
    assert worst <= 1.1
