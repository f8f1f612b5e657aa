"""``make parity``: run the cases of the matrix and write what was measured to docs/parity.md."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.parity import cases, pipeline_cases
from tests.parity.cases import Case
from tests.parity.lab import Lab
from tests.parity.result import TOLERANCE, Errors, compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"
INTRODUCTION = f"""# Parallelism never changes the math: measured

Written by `make parity`; `make test` asserts the same cases. A *problem* is a model, its data and its optimizer; a
*layout* says how it is spread over processes (CPU, gloo). Every layout trains ten steps (five in a pipeline) of SGD
with weight decay and is compared with one process that runs the same problem without accumulation, recompute or
compilation; initial weights must be bit-identical. One process is compared with plain torch in float64
(`tests/parity/reference.py`: whole tensors, autograd, full logits).

Errors are the worst over steps and tensors. Loss and gradient norm: |x - y| / |y|. Gradients (every full one, of the
first and the last step) and weights: |x - y| / |y| in the L2 norm per tensor, for weights relative to how far
training moved them. A difference of eps times the norm of the tensor's layer counts as {TOLERANCE:g}: GPT-2's key
bias has a gradient of exactly zero in theory, so relative to itself its rounding is never small. In fp32 the bound is
{TOLERANCE:g}. In bf16 it is twice the largest distance between bf16 and fp32 on one process, in the first rows of
that table.

Names: pp = pipeline ranks and their schedule, tp = tensor parallel (sp: with sequence parallelism), shard and rep =
hybrid FSDP's two degrees, acc = accumulation, then the problem: style, variant, head, vocabulary and what its rows are
padded to per rank, key/value heads of heads, micro-batches x samples x tokens. `unequal` has ranks and micro-batches
with different numbers of valid tokens, also none; `clip` clips at every step.
"""
PIPELINES = """## Pipelines against one process, fp32

Every schedule on 2 and 4 ranks beside every other way to split, then few micro-batches, placements by hand and
compilation. A pipeline alone equals accumulation on one process to the last bit (asserted, not listed).
"""
HEAD = "| case | loss | gradient | norm | weight |\n|---|---|---|---|---|\n"


def main() -> None:
    pairwise, bf16, compiled = cases.pairwise_cases(), cases.bf16_cases(), cases.compiled_cases()
    pipelines = [*pipeline_cases.pipeline_cases(), *pipeline_cases.special_cases()]
    bf16 += pipeline_cases.bf16_cases()
    layouts = [*pairwise, *bf16, *compiled, *pipelines]
    rounded = [case for case in [*bf16, *compiled] if case.spread.bf16]
    problems = list(dict.fromkeys(case.one_rank_fp32 for case in [*pairwise, *compiled]))
    singles = [single for case in layouts for single in (case.one_rank, case.one_rank_fp32)]
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab([*layouts, *singles], Path(folder))
        fp32 = [case for case in [*pairwise, *compiled] if not case.spread.bf16]
        parts = [
            INTRODUCTION,
            "## Layouts against one process, fp32\n\n"
            f"The first {len(pairwise)} cases contain every pair of values of every two factors; the others compile.\n",
            _table((case, compare(lab.result(case), lab.result(case.one_rank))) for case in fp32),
            PIPELINES,
            _table((case, compare(lab.result(case), lab.result(case.one_rank))) for case in pipelines),
            "## One process against plain torch in float64\n",
            _table((case, compare(lab.result(case), lab.reference(case))) for case in problems),
            "## bf16: one process against fp32, then layouts against one process in bf16\n",
            _table(
                [
                    *((c.one_rank, compare(lab.result(c.one_rank), lab.result(c.one_rank_fp32))) for c in rounded),
                    *((c, compare(lab.result(c), lab.result(c.one_rank))) for c in rounded),
                ]
            ),
        ]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote {PAGE}")


def _table(rows: Iterable[tuple[Case, Errors]]) -> str:
    lines = [f"| {case} | {e.loss:.1e} | {e.gradient:.1e} | {e.norm:.1e} | {e.weight:.1e} |\n" for case, e in rows]
    return HEAD + "".join(lines)


if __name__ == "__main__":
    main()
