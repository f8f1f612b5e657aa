"""Numbers for docs/vision-language.md: tiny models of many types, beside a plain loop of transformers.

    python -m tests.training.vision_table [TYPE ...]

Five steps of plain SGD in fp32. A number is the largest relative error of losses, gradient norms and final weights.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smp.models.foreign import vision_part
from tests.distributed import run_distributed
from tests.training.any_model_lab import LR, largest_error, tune_types
from tests.training.any_model_table import shown
from tests.training.tiny_vision import MAKERS, write_vision_type
from tests.training.tuning_lab import together
from tests.training.vision_lab import load, vision_loop

COLUMNS = {
    "one process": (1, "--packing off"),
    "packed": (1, "--packing best-fit"),
    "2 shards": (2, "--packing off"),
    "TP 2": (2, "--packing off --tensor-model-parallel-size 2"),
    "TP 2, SP": (2, "--packing off --tensor-model-parallel-size 2 --sequence-parallel"),
    "frozen tower": (1, "--packing off --freeze-vision-model"),
    "LoRA, TP 2": (2, "--packing off --lora-rank 4 --tensor-model-parallel-size 2"),
}
STEPS = f"--train-iters 5 --seq-length 448 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd"
WORDS = {
    "between its layers": "refused: images between layers",
    "is a vision-language model": "refused",
    "kept whole": "refused",
    "of all tokens, with the residual stream": "refused: embeddings of all tokens in each layer",
    "and --reset-attention-mask": "refused",
}


def measure(kinds: Sequence[str], root: Path) -> dict[str, dict[str, float | str]]:
    """Cells of each type by column: a number, or why there is none."""
    folders, rows = {}, {kind: dict[str, float | str]() for kind in kinds}
    for kind in kinds:
        try:
            folders[kind] = write_vision_type(root / kind, kind)
        except ImportError as error:
            rows[kind] = dict.fromkeys(COLUMNS, f"not measured: {' '.join(str(error).split())[:60]}")
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for world in (1, 2):
        of = {column: words for column, (size, words) in COLUMNS.items() if size == world}
        of |= {"LoRA": "--packing off --lora-rank 4"} if world == 1 else {}
        cases = [(kind, column) for kind in folders for column in of]
        common = f"{STEPS} --weight-decay 0 --model-implementation transformers"
        flags = [
            f"--load {folders[k]} --data-path {folders[k]}/vl.jsonl --log-dir {folders[k]}/logs {common} {of[column]}"
            for k, column in cases
        ]
        ranks = run_distributed(tune_types, world, flags, timeout=1500)
        for i, case in enumerate(cases):
            every = [rank[i] for rank in ranks]
            runs[case] = every[0] if "refused" in every[0] else together(every)
    for kind, folder in folders.items():
        for column in COLUMNS:
            rows[kind][column] = _error(runs, folder, kind, column)
    return rows


def _error(runs: Any, folder: Path, kind: str, column: str) -> float | str:
    result, alone = runs[kind, column], runs[kind, "one process"]
    if "refused" in result or "refused" in alone:
        return str(result.get("refused") or alone["refused"])
    if "LoRA" in column:
        return max(largest_error(result, runs[kind, "LoRA"]).values())
    names = load(folder).state_dict()
    frozen = [name for name in names if vision_part(name) == "vision_model"] if column == "frozen tower" else []
    batches = result["batches"] if column in ("packed", "frozen tower") else alone["batches"]
    return max(largest_error(result, vision_loop(folder, batches, frozen)).values())


def noise(folder: Path, batches: Any = None) -> float:
    """The largest relative error of a plain loop whose first weights have noise of 1e-7 of each: what rounding alone
    does to a tiny model that amplifies it, as Gemma 4's does."""
    if batches is None:
        flags = f"--load {folder} --data-path {folder}/vl.jsonl --log-dir {folder}/logs {STEPS} --packing off"
        common = "--weight-decay 0 --model-implementation transformers"
        ((run,),) = run_distributed(tune_types, 1, [f"{flags} {common}"], timeout=1500)
        batches = run["batches"]
    model = load(folder).train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-7 * torch.randn_like(p))
    return max(largest_error(vision_loop(folder, batches, model=model), vision_loop(folder, batches)).values())


def cell(value: float | str) -> str:
    """A number, or a few words for the reason that a run has said."""
    words = next((word for part, word in WORDS.items() if isinstance(value, str) and part in value), None)
    return words or (value if isinstance(value, str) and value.startswith("not measured") else shown(value))


def table(rows: dict[str, dict[str, float | str]]) -> str:
    """In Markdown."""
    head = ["| `model_type` | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    return "\n".join(head + [f"| {k} | " + " | ".join(cell(row[c]) for c in COLUMNS) + " |" for k, row in rows.items()])


if __name__ == "__main__":
    found: dict[str, dict[str, float | str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for some in sys.argv[1:] or MAKERS:
            found |= measure([some], Path(scratch))
            print(table(found), flush=True)
            print(f"noise of 1e-7 in the first weights of {some}: {shown(noise(Path(scratch) / some))}", flush=True)
