"""Measure causal language models of transformers, by default all, in all layouts with ten steps of training, and write
docs/transform-models.md, from the root of the repository. Types that are not named keep their rows.

OMP_NUM_THREADS=1 python -m tests.hf.architecture_table [TYPE ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.distributed import run_distributed
from tests.hf.architectures import architectures
from tests.hf.matrix import LAYOUTS, NOT_RUN, measure

PAGE = Path("docs/transform-models.md")
HEAD = """# Causal language models of transformers under `smp.transform`

Written by `python -m tests.hf.architecture_table`; nothing is edited by hand. transformers 5.23; each type as a tiny
random model in fp32 (gemma4_unified_text in fp64, because its own fp32
gradients are 1.2e-5 from those), in four processes, transformed, beside itself in one process.

A number is the largest relative error. At TP 2 (x shard 2) and TP 4: of logits (padding on the left and on the right,
`position_ids`, `inputs_embeds`, no labels), the loss, all gradients of two micro-batches, generated tokens (0 differ),
losses and weights of ten steps of training with clipping. At TP 1 (x shard 4), SP (sequence parallelism, TP 2), CP
(TP 2 x CP 2) and EP (TP 2 x EP 2): of the loss and all gradients. FSDP2 (`fully_shard`) is around the model everywhere.

gemma4_text, gemma4_unified and gemma4_unified_text have no row: the tiny ones amplify rounding. In one process, without
smp, noise of 1e-7 of each weight changes their gradients by 1e-5 to 2e-5 and their weights after ten steps by 5e-2 to
1e-1: as large as the differences at TP 2.

| | |
|---|---|
| `no plan` | neither transformers nor smp has rows for the class: `transform(rows=)` takes the caller's |
| `no experts` | nothing that expert parallelism could cut |
| `not listed` | context parallelism takes the families that it was compared for |
| `refused` | by the line below the table |

"""
_SHORT = {"has no tensor-parallel plan": "no plan", "has no experts": "no experts", "compared are": "not listed"}
_BEGIN, _WHY = "| type | " + " | ".join(LAYOUTS) + " |", "| type | layout | why |"


def cell(value: Any) -> str:
    """Of one layout."""
    if isinstance(value, dict):
        return f"{max(value.values()):.0e}"
    if value.startswith(NOT_RUN):
        return "not run"
    return next((short for said, short in _SHORT.items() if said in value), "refused")


def lines_of(kind: str, layouts: dict[str, Any]) -> tuple[str, list[str]]:
    """The row of a type, and one for each reason that the row does not say."""
    row = f"| {kind} | " + " | ".join(cell(layouts[layout]) for layout in LAYOUTS) + " |"
    reasons: dict[str, list[str]] = {}
    for layout, value in layouts.items():
        if cell(value) in ("refused", "not run"):
            reasons.setdefault(value.replace("|", "/"), []).append(layout)
    return row, [f"| {kind} | {', '.join(where)} | {why} |" for why, where in reasons.items()]


def rows_in(page: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The rows and reasons of a page by type."""
    table, _, why = page.partition(_WHY)
    rows = {line.split(" | ")[0][2:]: line for line in table.partition(_BEGIN)[2].splitlines() if line.startswith("| ")}
    reasons: dict[str, list[str]] = {}
    for line in why.splitlines():
        if line.startswith("| "):
            reasons.setdefault(line.split(" | ")[0][2:], []).append(line)
    return rows, reasons


def write(found: dict[str, dict[str, Any]]) -> None:
    """Put what was found by type into the page."""
    rows, reasons = rows_in(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else ({}, {})
    for kind, layouts in found.items():
        for value in layouts.values():
            assert not isinstance(value, dict) or max(value.values()) <= 1e-5, (kind, layouts)
        rows[kind], reasons[kind] = lines_of(kind, layouts)
    table = [_BEGIN, "|---|" + "---:|" * len(LAYOUTS), *(rows[kind] for kind in sorted(rows))]
    why = [_WHY, "|---|---|---|", *(line for kind in sorted(rows) for line in reasons.get(kind, []))]
    left = sorted(architectures().keys() - rows.keys())
    rest = ["", "Not in the table: " + " ".join(left) + "."] if left else []
    page = [*table, *rest, "", "## Why not", "", *why, ""]
    PAGE.write_text(HEAD + "\n".join(page), encoding="utf-8")


def worst_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``measure`` found of one type, the largest error of any rank."""
    worst: dict[str, Any] = {}
    for layout, first in ranks[0].items():
        values = [rank[layout] for rank in ranks]
        errors = isinstance(first, dict)
        worst[layout] = {what: max(value[what] for value in values) for what in first} if errors else first
    return worst


def main(kinds: list[str]) -> None:
    """Eight types at a time: what was measured stays when a later one fails."""
    for first in range(0, len(kinds), 8):
        some = kinds[first : first + 8]
        ranks = run_distributed(measure, 4, some, list(LAYOUTS), 10, timeout=3600.0)
        write({kind: worst_of([rank[kind] for rank in ranks]) for kind in some})


if __name__ == "__main__":
    main(sys.argv[1:] or sorted(architectures()))
