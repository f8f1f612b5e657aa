"""Draw who holds and sends what, as text; ``tools/write_docs.py`` puts it into the documentation."""

from __future__ import annotations

import torch

from smp.kernels.sequence_cut import SequenceCut, cut_sequences

DOCUMENTS = (7, 2, 12, 3)


def pictures() -> str:
    """All pictures, as Markdown."""
    whole, packed = cut_sequences(1, 24, 3), _packed(3)
    parts = [
        ("Who holds which of 24 tokens, 3 processes (digits are processes):", held(whole)),
        (f"The same for packed documents of {', '.join(map(str, DOCUMENTS))} tokens:", held(packed)),
        (
            "p2p: the step of the ring in which a piece of queries meets a piece of keys (step 0: its own):",
            steps(whole),
        ),
        ("The same with a sliding window of 8 tokens, which leaves out what it hides:", steps(whole, 8)),
        ("a2a: 3 processes, 6 heads. Before the exchange, and after it (digits are processes):", heads(whole, 6)),
    ]
    return "\n\n".join(f"{title}\n\n```\n{picture}\n```" for title, picture in parts)


def held(cut: SequenceCut) -> str:
    """A line of the ranks of a sequence's tokens, with a bar between documents, and each rank's work."""
    ids = torch.zeros(cut.length) if cut.document_ids is None else cut.document_ids[0]
    words = []
    for column, rank in enumerate(cut.ranks[0].tolist()):
        border = column > 0 and bool(ids[column] != ids[column - 1])
        words.append(f"| {rank}" if border else str(rank))
    work = cut.work().tolist()
    each = ", ".join(f"{pairs}" for pairs in work)
    return f"{' '.join(words)}\npairs of a query and a key that it sees, by process: {each}"


def steps(cut: SequenceCut, window: int | None = None) -> str:
    """Queries downwards, keys to the right, in pieces; the step in which the queries' rank has the keys."""
    pieces = 2 * cut.cp
    size = cut.length // pieces
    owner = cut.ranks[0, ::size].tolist()
    lines = ["process of keys     " + " ".join(map(str, owner))]
    for query in range(pieces):
        row = []
        for key in range(pieces):
            nearest = max((query - key - 1) * size + 1, 0)  # of two tokens of these pieces
            seen = key <= query and (window is None or nearest < window)
            row.append(str((owner[query] - owner[key]) % cut.cp) if seen else ".")
        lines.append(f"queries of process {owner[query]} {' '.join(row)}")
    return "\n".join(lines)


def heads(cut: SequenceCut, count: int) -> str:
    """Tokens to the right, heads downwards; who has them."""
    size = cut.length // (2 * cut.cp)
    before = " ".join(map(str, cut.ranks[0, ::size].tolist()))
    lines = []
    for head in range(count):
        after = " ".join([str(head * cut.cp // count)] * 2 * cut.cp)
        lines.append(f"head {head}   {before}   ->   {after}")
    return "\n".join(lines)


def _packed(cp: int) -> SequenceCut:
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))[None]
    return cut_sequences(1, sum(DOCUMENTS), cp, ids)
