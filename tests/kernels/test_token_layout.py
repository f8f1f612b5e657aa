"""Layouts of tokens: masks that layers share, and where documents begin."""

from __future__ import annotations

import pytest
import torch

from smp.kernels.token_layout import TokenLayout

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])


def test_where_documents_begin() -> None:
    found = TokenLayout(2, 10, document_ids=DOCUMENTS).with_documents_found(CPU)
    assert found.cu_seqlens_q is not None and found.cu_seqlens_k is not None
    assert found.cu_seqlens_q.tolist() == found.cu_seqlens_k.tolist() == [0, 3, 5, 6, 8, 10, 20, 20, 20]
    assert found.cu_seqlens_q.dtype == torch.int32
    assert found.max_seqlen_q == found.max_seqlen_k == 10  # the next power of two is more than a sequence has
    short = TokenLayout(1, 10, document_ids=DOCUMENTS[:1]).with_documents_found(CPU)
    assert short.cu_seqlens_k is not None and len(short.cu_seqlens_k) == 8 + 1 and short.max_seqlen_k == 4
    with pytest.raises(ValueError, match="not next to each other"):
        TokenLayout(1, 3, document_ids=torch.tensor([[0, 1, 0]])).with_documents_found(CPU)
    with pytest.raises(ValueError, match="document ids are on meta"):
        TokenLayout(2, 10, document_ids=DOCUMENTS.to("meta")).with_documents_found(CPU)


def test_fewer_queries_than_keys() -> None:
    """The last queries of a sequence: documents that ended before them have keys, and no queries."""
    ids = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]])
    layout = TokenLayout(2, 2, document_ids=ids[:, 3:], query_start=3, key_length=5, key_document_ids=ids)
    found = layout.with_documents_found(CPU)
    assert found.cu_seqlens_q is not None and found.cu_seqlens_k is not None
    assert found.cu_seqlens_q.tolist() == [0, 0, 2, 3, 4] and found.cu_seqlens_k.tolist() == [0, 2, 5, 9, 10]
    assert (found.max_seqlen_q, found.max_seqlen_k) == (2, 4)
    with pytest.raises(ValueError, match="do not end together"):
        TokenLayout(2, 2, key_length=5).with_documents_found(CPU)
    with pytest.raises(ValueError, match="give key_document_ids"):
        TokenLayout(2, 2, document_ids=ids[:, 3:], query_start=3, key_length=5).with_documents_found(CPU)
    with pytest.raises(ValueError, match="2 document ids for 5 keys: give key_document_ids"):
        TokenLayout(2, 2, document_ids=ids[:, 3:], query_start=3, key_length=5).make_mask((True, None), torch.bool, CPU)


def test_layers_with_the_same_pattern_share_a_mask() -> None:
    layout = TokenLayout(3, 5)
    patterns = [layout.pattern(True, window) for window in (None, 2, 5, 2, 9)]
    assert patterns == [(True, None), (True, 2), (True, None), (True, 2), (True, None)]  # 5 hides nothing
    found = layout.with_masks(patterns, torch.bfloat16, CPU)
    assert list(found.masks) == [(True, 2)] and found.masks[True, 2].shape == (1, 1, 5, 5)  # of all samples
    assert found.mask((True, 2), torch.bfloat16, CPU) is found.masks[True, 2]
    assert found.mask((True, None), torch.bfloat16, CPU) is None
    assert (found.masks[True, 2] == 0).sum(-1).tolist() == [[[1, 2, 2, 2, 2]]]
    documents = TokenLayout(2, 10, document_ids=DOCUMENTS).with_masks([(True, None)], torch.float32, CPU)
    assert documents.masks[True, None].shape == (2, 1, 10, 10)


def test_chunks_are_documents() -> None:
    places = torch.cat([torch.arange(n) for n in (3, 2, 1, 2, 2, 10)]).view(2, 10)
    chunks = TokenLayout(2, 10, document_ids=DOCUMENTS).in_chunks(2)
    causal = torch.ones(10, 10).tril().bool()
    same = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]) & (places[:, :, None] // 2 == places[:, None, :] // 2)
    assert torch.equal(chunks.make_mask((True, None), torch.float32, CPU)[:, 0] == 0, same & causal)
    plain = TokenLayout(2, 10)
    assert plain.in_chunks(10) is plain
    assert TokenLayout(1, 5).in_chunks(2).with_documents_found(CPU).cu_seqlens_q.tolist() == [0, 2, 4, 5, 5]  # type: ignore[union-attr]
    late = TokenLayout(1, 2, query_start=5, key_length=7).in_chunks(3)  # with a cache: tokens 5 and 6
    assert (late.make_mask((True, None), torch.float32, CPU) == 0).int().tolist() == [
        [[[0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]]
    ]
    with pytest.raises(ValueError, match="first tokens are missing"):
        TokenLayout(1, 2, query_start=5, key_length=7, document_ids=DOCUMENTS[:1, :2]).in_chunks(3)


def test_this_ranks_token_index_is_all_of_it_by_default() -> None:
    index = torch.arange(6)
    assert TokenLayout(2, 3, token_index=index).local_token_index is index
    assert TokenLayout(2, 3, token_index=index, local_token_index=index[:3]).local_token_index is not index
    layout = TokenLayout(2, 3, padding=2)
    assert (layout.num_queries, layout.num_tokens, layout.keys, layout.sees_itself) == (6, 8, 3, True)
