"""Errors of all Triton kernels in Triton's interpreter, as JSON: ``python -m tests.kernels.interpreted``."""

from __future__ import annotations

import json

import torch

from tests.kernels.cases import OPERATIONS, error


def main() -> None:
    errors = {
        f"{operation}, {str(dtype).removeprefix('torch.')}, {case}: {name}": error(got, want)
        for operation, cases in OPERATIONS.items()
        for dtype in (torch.float32, torch.bfloat16)
        for case, both in cases(dtype, "triton")
        for name, (got, want) in both.items()
    }
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
