"""The module in the README, as it is written there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests.distributed import run_distributed

README = Path(__file__).parents[2] / "README.md"


def tag(rank: int, world: int) -> dict[int, torch.Tensor]:
    """Outputs by TP size."""
    [code] = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    room: dict[str, Any] = {}
    exec(code, room)
    out = {}
    for tp in (1, world):
        tagger = room["build"](world, tp)
        with torch.no_grad():
            out[tp] = tagger(torch.tensor([3, 7, 49_999]))
    return out


def test_the_tagger_gives_the_same_on_one_rank_and_on_two() -> None:
    for out in run_distributed(tag, 2):
        assert out[1].shape == (3, 17) and out[1].std() > 0
        assert (out[2] - out[1]).norm() < 1e-6 * out[1].norm()
