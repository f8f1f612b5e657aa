"""Sinkhorn's balance: in training experts are chosen by scores of which, over a sequence, each gets the same (Clark et
al. 2022, arXiv 2202.01169; Megatron's ``sinkhorn``).

Of a sequence of S tokens with logits z, and E experts, factors of rows and columns are made in turns,

    d0_t = 1 / (S sum_e exp(z_te) d1_e)      d1_e = 1 / (E sum_t d0_t exp(z_te))

from d1 = 1 on, so that each token has the sum 1 / S and each expert nearly 1 / E of d0_t exp(z_te) d1_e. A token's
experts are those of which this is largest: the largest of z_te + log d1_e, so the sequence has a bias for each expert.
Weights are those of the router, of the logits as they are. Nothing is minimised.

The number of rounds is fixed; Megatron iterates until the change is below 1e-4, for which the host has to wait.
Megatron balances the tokens that a rank computes at a time; here each sequence is balanced by itself, so the choice
does not depend on micro-batches and layouts. Where sequences are cut, ranks exchange their logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp.kernels.token_layout import TokenLayout
from smp.kernels.transfer import to_device
from smp.parallel.collectives import Group, start_all_gather, wait

ROUNDS = 10


@dataclass(frozen=True)
class Sinkhorn:
    """Computes the term that is added to logits when experts are chosen.

    Attributes:
        shared_by: the tensor-parallel ranks that hold slices of the same tokens; None: tokens are whole.
        group: the context-parallel ranks that hold parts of the same sequences; None: sequences are whole.
    """

    shared_by: Group | None = None
    group: Group | None = None

    @torch.no_grad()
    def bias(self, logits: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """log d1 of each token's sequence, (tokens [/p], experts), of logits of the same shape. All ranks of the groups
        call it. Rows that only pad get that of some sequence."""
        own, experts = logits.shape
        whole = logits if self.shared_by is None else wait(start_all_gather(logits, self.shared_by), self.shared_by)
        rows, sequences = len(whole), whole[: layout.num_queries]
        if self.group is not None and layout.cut is not None:
            # Rank by rank -> in the order of the sequences.
            order = to_device(layout.cut.gathered_order(self.group.size), logits.device).argsort()
            sequences = wait(start_all_gather(sequences, self.group), self.group)[order]
        found = expert_factors(sequences.reshape(layout.batch, -1, experts)).log()  # (batch, experts)
        numbers = torch.arange(rows, device=logits.device) // layout.length
        found = found.index_select(0, numbers.clamp(max=layout.batch - 1))
        return found if self.shared_by is None else found.narrow(0, self.shared_by.rank * own, own)


def expert_factors(logits: torch.Tensor) -> torch.Tensor:
    """d1 (batch, experts) of logits (batch, tokens, experts)."""
    _, tokens, experts = logits.shape
    scores = (logits - logits.amax(-1, keepdim=True)).exp()  # a factor of a row, which d0 takes up
    d1 = scores.new_ones(len(scores), 1, experts)
    for _ in range(ROUNDS):
        # (batch, tokens, 1) and (batch, 1, experts)
        d0 = 1 / (tokens * (scores * d1).sum(-1, keepdim=True))
        # An expert that no token scores would divide by 0.
        d1 = 1 / (experts * (scores * d0).sum(1, keepdim=True) + 1e-20)
    return d1.squeeze(1)
