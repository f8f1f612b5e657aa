"""The recorder of the parity matrix sees ranks that call a communicator in different orders."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.parity.communication import Log, Recorder, check_order


def talk(rank: int, ranks: int, swapped: str) -> Log:
    """Two collectives and two messages; rank 1 swaps one of the two. Gloo does not mind: the bytes are as many."""
    shapes = [(2, 3), (3, 2)]
    with Recorder() as recorder:
        for shape in shapes[:: -1 if rank and swapped == "collectives" else 1]:
            dist.all_reduce(torch.ones(shape))
        for shape in shapes[:: -1 if rank and swapped == "messages" else 1]:
            message = torch.ones(shape)
            (dist.recv if rank else dist.send)(message, 1 - rank)
    return recorder.log


def test_ranks_that_agree() -> None:
    logs = run_distributed(talk, 2, "nothing")
    check_order(logs)
    assert {key[1]: len(calls) for key, calls in logs[0].items()} == {(0, 1): 4}


@pytest.mark.parametrize(("swapped", "call"), [("collectives", 0), ("messages", 2)])
def test_a_swap_on_one_rank_is_seen(swapped: str, call: int) -> None:
    logs = run_distributed(talk, 2, swapped)
    with pytest.raises(AssertionError, match=rf"call {call} of \(0, 1\): rank 0 has .*\(2, 3\).* 1 has .*\(3, 2\)"):
        check_order(logs)


def test_a_call_that_one_rank_leaves_out_is_seen() -> None:
    with pytest.raises(AssertionError, match="call 1 of .* rank 3 has None"):
        check_order([{}, {("g", (1, 3)): ["a", "b"]}, {}, {("g", (1, 3)): ["a"]}])
