"""``make parity``: run the cases of the matrix and write what was measured to docs/parity.md."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.parity import cases, context_cases, pipeline_cases
from tests.parity.cases import Case
from tests.parity.lab import Lab
from tests.parity.result import TOLERANCE, Result, compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
INTRODUCTION = f"""# Parallelism never changes the math: measured

Every way to spread a run over processes gives the result of one process. The tables show how closely, case by case. The
page is written by `make parity`.

- A *problem* is a model, its data and its optimizer. A *layout* says how it is split over processes (CPU, gloo).
- Every layout trains ten steps (five in a pipeline; `make test` two) of SGD with weight decay. It is compared with one
  process that runs the same problem without accumulation, recompute or compilation. Initial weights must be
  bit-identical.
- One process is compared with plain torch in float64 (`tests/parity/reference.py`: whole tensors, autograd, full
  logits).
- `make test` runs about half of these cases, `make test-slow` the others.

Errors are the worst over steps and tensors:

- loss and gradient norm: |x - y| / |y|
- gradients (all, of the first and the last step): |x - y| / |y| in the L2 norm per tensor
- weights: the same, relative to how far training moved them

Bounds:

- fp32: {TOLERANCE:g}. A difference of eps times the norm of the tensor's layer counts as {TOLERANCE:g}: GPT-2's key
  bias has a gradient of exactly zero in theory, so relative to itself its rounding is never small.
- bf16: twice the distance between bf16 and fp32 of the same problem on one process, which the first rows of that table
  show. For the loss, one number in which roundings may cancel, it is twice the largest of those distances.

Names of cases:

| part | |
|---|---|
| `pp` | pipeline ranks and their schedule |
| `tp`, `sp` | tensor parallel ranks; with sequence parallelism |
| `shard`, `rep` | the two degrees of hybrid FSDP |
| `acc` | accumulation |
| `cp` | processes that share a sequence, and the exchange |
| the rest | style, variant, head |
| `vocabNbyM` | vocabulary of N; its rows are padded to a multiple of M per rank |
| `kvNofM` | N key/value heads of M heads |
| `2x3x15` | micro-batches x samples x tokens |
| `unequal` | ranks and micro-batches have different numbers of valid tokens, also none |
| `clip` | every step clips |
| `chunks` | bytes of one chunk of logits |
"""
FUZZ = "<!-- written by make fuzz-parity -->"
"""From here on the page is that of ``tests.parity.fuzz``."""
HEAD = "| case | loss | gradient | norm | weight |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Section:
    """A table of the page: each case is compared with another one, or with plain torch in float64 (None)."""

    title: str
    text: str
    rows: list[tuple[Case, Case | None]]


def sections() -> list[Section]:
    """What the page lists, in its order."""
    pairwise, bf16, compiled = cases.pairwise_cases(), cases.bf16_cases(), cases.compiled_cases()
    pipelines = [*pipeline_cases.pipeline_cases(), *pipeline_cases.special_cases()]
    rounded = [case for case in [*bf16, *pipeline_cases.bf16_cases(), *compiled] if case.spread.bf16]
    problems = dict.fromkeys(case.one_rank_fp32 for case in [*pairwise, *compiled])
    return [
        Section(
            "Layouts against one process, fp32",
            f"The first {len(pairwise)} cases contain every pair of values of every two factors; the others compile.",
            [(case, case.one_rank) for case in [*pairwise, *compiled] if not case.spread.bf16],
        ),
        Section(
            "Pipelines against one process, fp32",
            "Every schedule with every other way to split, and every pair of values of every two factors; then few "
            "micro-batches,\nplacements by hand and compilation. `make test-slow` runs the product. A pipeline alone "
            "equals accumulation on\none process to the last bit (asserted; not listed).",
            [(case, case.one_rank) for case in pipelines],
        ),
        Section(
            "Context parallelism against one process, fp32",
            "Each exchange, each kind of split and each kind of attention; `make test-slow` runs every pair of values\n"
            "of every two factors, bf16 and compilation.",
            [(case, case.one_rank) for case in context_cases.fast_cases()],
        ),
        Section("One process against plain torch in float64", "", [(case, None) for case in problems]),
        Section(
            "bf16: one process against fp32, then layouts against one process in bf16",
            "",
            list(
                dict.fromkeys([*((c.one_rank, c.one_rank_fp32) for c in rounded), *((c, c.one_rank) for c in rounded)])
            ),
        ),
    ]


def main() -> None:
    chosen = sections()
    needed = [
        case for section in chosen for case, other in section.rows for case in (case, other or case.one_rank_fp32)
    ]
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(needed, Path(folder))
        parts = [INTRODUCTION, measured(), *(_text(section, lab) for section in chosen)]
    fuzz = PAGE.read_text(encoding="utf-8").partition(FUZZ)
    PAGE.write_text("\n".join([*parts, "".join(fuzz[1:])]), encoding="utf-8")
    print(f"wrote {PAGE}")


def measured() -> str:
    """When, of what and with what."""
    git = ["git", "-C", str(PAGE.parent)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no", ":/smp"], text=True)
    where = f"commit {commit}{' with changes' if changed else ''}"
    return f"Measured {datetime.now(UTC):%Y-%m-%d}, {where}, torch {torch.__version__}.\n"


def _text(section: Section, lab: Lab) -> str:
    rows = [(case, compare(lab.result(case), _expected(lab, case, other))) for case, other in section.rows]
    lines = [f"| {case} | {e.loss:.1e} | {e.gradient:.1e} | {e.norm:.1e} | {e.weight:.1e} |\n" for case, e in rows]
    return f"## {section.title}\n\n" + (f"{section.text}\n\n" if section.text else "") + HEAD + "".join(lines)


def _expected(lab: Lab, case: Case, other: Case | None) -> Result:
    return lab.reference(case) if other is None else lab.result(other)


if __name__ == "__main__":
    main()
