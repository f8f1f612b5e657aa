"""Losses of real runs with ``--kernels torch`` and with ``--kernels triton`` in Triton's interpreter, and how often
each operator of ours ran, as JSON.

    python -m tests.kernels.interpreted_runs FOLDER FLAGS [FLAGS ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.training.flag_runs import run_here

_compile = torch.compile
FEW_TOKENS = "--seq-length 8 --micro-batch-size 1 --global-batch-size 1"  # a program takes a millisecond or two


def _compile_eagerly(function: Any, **options: Any) -> Any:
    """Graphs are captured; turning them into machine code is torch's affair, and slow."""
    return _compile(function, backend="aot_eager", **options)


def main(folder: str, cases: list[str]) -> None:
    torch.compile = _compile_eagerly  # type: ignore[assignment]
    out = []
    for i, flags in enumerate(cases):
        runs = {}
        for kernels in ("torch", "triton"):
            given = f"{FEW_TOKENS} {flags} --kernels {kernels}"
            run = run_here(Path(folder) / f"{i}-{kernels}", given, count_ops="--compile" not in flags)
            assert run.code == 0, run.err
            names = "cross_entropy, norm, rope" if "--no-swiglu" in flags else "cross_entropy, norm, swiglu, rope"
            names += ", router, permute, grouped_gemm" * ("--num-experts" in flags)
            assert f"kernels: {kernels} for {names} (" in run.out + run.err, run.out + run.err
            operators = {name: n for name, n in run.ops.items() if name.startswith("smp::")}
            runs[kernels] = {"losses": run.losses, "operators": operators}
        out.append(runs)
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
