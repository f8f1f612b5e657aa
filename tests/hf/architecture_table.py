"""Measure causal language models of transformers, by default all, in all layouts with ten steps of training, and write
docs/transform-models.md, from the root of the repository. Types and layouts that are not named keep what the page says.

OMP_NUM_THREADS=1 python -m tests.hf.architecture_table [--layouts "TP 2,SP"] [TYPE ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tests.distributed import run_distributed
from tests.hf.architectures import architectures
from tests.hf.matrix import LAYOUTS, NOT_RUN, measure
from tests.hf.weights_matrix import COLUMNS, measure_weights

PAGE = Path("docs/transform-models.md")
HEAD = """# Causal language models of transformers under `smp.transform`

Written by `python -m tests.hf.architecture_table`. transformers 5.23; each type as a tiny
random model in fp32 (gemma4 in fp64, because rounding moves its fp32 gradients by 1e-5), in four processes,
transformed, compared with itself in one process.

*cut* is the share of the parameters of which each of two ranks has a half (the small ones of these tiny models, norms
and routers, are a larger share of them than of real ones). *load*: `smp.load_weights` fills a model on the meta device
from the folder that transformers writes, bit for bit at TP 2, and `save_pretrained` writes the same folder again.
*delayed init*: the numbers that `DelayedParamIniter` draws have the distributions of `from_config` (Kolmogorov-Smirnov
over 6 to 60 seeds, every kind of parameter). A cell stands until its type is measured again; marks say what was other
then.

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
| `3e-07*` | at TP 2 and SP: in two processes, with two steps of training |
| `equal‡` | *load* measured in one process; *delayed init* with six seeds, too few to see decays of four heads |
| empty | not measured since layers that no plan names are cut |

"""
_SHORT = {"has no tensor-parallel plan": "no plan", "has no experts": "no experts", "compared are": "not listed"}
ALL = (*COLUMNS, *LAYOUTS)
_BEGIN, _WHY = "| type | " + " | ".join(ALL) + " |", "| type | column | why |"


def cell(value: Any) -> str:
    """Of one column."""
    if isinstance(value, dict):
        return f"{max(value.values()):.0e}"
    if value == "equal" or value.endswith("%"):
        return value
    if value.startswith(NOT_RUN):
        return "not run"
    return next((short for said, short in _SHORT.items() if said in value), "refused")


def lines_of(kind: str, found: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The cells of a type, and the reasons that the cells do not say, by column."""
    cells = {column: cell(value) for column, value in found.items()}
    unsaid = {column for column in cells if cells[column] in ("refused", "not run")}
    return cells, {column: found[column].replace("|", "/") for column in unsaid}


def rows_in(page: str) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """The cells and reasons of a page by type and column."""
    table, _, why = page.partition("## Why not")
    rows, reasons = {}, {}
    header: list[str] = []
    for cells in _tables(table):
        header = cells if cells[0] == "type" else header
        if header and len(cells) == len(header) and cells[0] not in ("type", "---"):
            rows[cells[0]] = dict(zip(header[1:], cells[1:], strict=True))
    for cells in _tables(why):
        if len(cells) == 3 and cells[0] not in ("type", "---"):
            reasons.setdefault(cells[0], {}).update(dict.fromkeys(cells[1].split(", "), cells[2]))
    return rows, reasons


def _tables(text: str) -> list[list[str]]:
    # The last cells of a line may be empty.
    lines = (line.removeprefix("| ").removesuffix(" |") for line in text.splitlines() if line.startswith("| "))
    return [line.split(" | ") for line in lines]


def write(found: dict[str, dict[str, Any]]) -> None:
    """Put what was found by type and column into the page."""
    rows, reasons = rows_in(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else ({}, {})
    for kind, columns in found.items():
        for value in columns.values():
            assert not isinstance(value, dict) or max(value.values()) <= 1e-5, (kind, columns)
        cells, why = lines_of(kind, columns)
        rows[kind] = rows.get(kind, {}) | cells
        reasons[kind] = {c: text for c, text in reasons.get(kind, {}).items() if c not in columns} | why
    save(rows, reasons)


def save(rows: dict[str, dict[str, str]], reasons: dict[str, dict[str, str]]) -> None:
    """Write the page."""
    lines = [f"| {kind} | " + " | ".join(rows[kind].get(column, "") for column in ALL) + " |" for kind in sorted(rows)]
    table = [_BEGIN, "|---|" + "---:|" * len(ALL), *lines]
    why = [_WHY, "|---|---|---|", *(line for kind in sorted(rows) for line in _why(kind, reasons.get(kind, {})))]
    left = sorted(architectures().keys() - rows.keys())
    rest = ["", "Not in the table: " + " ".join(left) + "."] if left else []
    page = [*table, *rest, "", "## Why not", "", *why, ""]
    PAGE.write_text(HEAD + "\n".join(page), encoding="utf-8")


def _why(kind: str, reasons: dict[str, str]) -> list[str]:
    columns: dict[str, list[str]] = {}
    for column in ALL:
        if column in reasons:
            columns.setdefault(reasons[column], []).append(column)
    return [f"| {kind} | {', '.join(where)} | {why} |" for why, where in columns.items()]


def worst_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``measure`` found of one type, the largest error of any rank."""
    worst: dict[str, Any] = {}
    for layout, first in ranks[0].items():
        values = [rank[layout] for rank in ranks]
        errors = isinstance(first, dict)
        worst[layout] = {what: max(value[what] for value in values) for what in first} if errors else first
    return worst


def main(kinds: list[str], layouts: list[str], weights: bool) -> None:
    """Eight types at a time, and one by one where one of them fails: what was measured stays.

    Raises:
        RuntimeError: with the types that fail.
    """
    failed: dict[str, str] = {}
    for first in range(0, len(kinds), 8):
        some = kinds[first : first + 8]
        try:
            write(_found(some, layouts, weights))
        except (AssertionError, RuntimeError):
            for kind in some:
                try:
                    write(_found([kind], layouts, weights))
                except (AssertionError, RuntimeError) as error:
                    failed[kind] = next((x for x in str(error).splitlines() if "Error" in x), str(error)[-200:])
                    print("failed:", kind, failed[kind], flush=True)
    if failed:
        raise RuntimeError(f"{len(failed)} types fail: {failed}")


def _found(kinds: list[str], layouts: list[str], weights: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    if layouts:
        ranks = run_distributed(measure, 4, kinds, layouts, 10, timeout=3600.0)
        found = {kind: worst_of([rank[kind] for rank in ranks]) for kind in kinds}
    if weights:
        for kind, columns in run_distributed(measure_weights, 2, kinds, timeout=3600.0)[0].items():
            found[kind] |= columns
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="of the processes; none: ''")
    parser.add_argument("--no-weights", action="store_true", help="without the columns " + ", ".join(COLUMNS))
    given = parser.parse_args()
    chosen = [layout for layout in given.layouts.split(",") if layout]
    main(given.types or sorted(architectures()), chosen, not given.no_weights)
