"""The table of docs/any-model.md: tiny models of many types through ``finetune.py`` beside a plain loop of
transformers.

    python -m tests.training.any_model_table

Five steps of plain SGD in fp32. A number is the largest relative error of losses, gradient norms and final weights.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.distributed import run_distributed
from tests.training.any_model_lab import LR, largest_error, plain_loop, tune_types, write_type
from tests.training.tuning_lab import together

TYPES = (
    *("nemotron_h", "falcon_h1", "bamba", "mamba2", "jamba", "granitemoehybrid", "lfm2", "lfm2_moe"),
    *("qwen3_next", "olmo_hybrid", "minimax", "recurrent_gemma", "helium", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("ernie4_5_moe", "ernie4_5", "qwen3_moe", "gpt_oss", "dots1", "flex_olmo", "phimoe", "minimax_m2"),
    *("exaone4", "seed_oss", "nemotron", "stablelm", "apertus", "arcee", "persimmon", "gpt_neo"),
    *("gemma2", "gemma3_text", "cohere2", "smollm3", "olmoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe"),
    *("vaultgemma", "bitnet", "diffllama", "doge", "afmoe", "solar_open", "opt", "bloom"),
)
"""``model_type`` of transformers: hybrids with Mamba and Mamba-2, convolutions and gated delta nets; latent attention;
experts; dense ones. Some are families of this project, too, and run by transformers here."""
COLUMNS = {
    "one process": (1, "--packing off"),
    "packed": (1, "--packing best-fit"),
    "2 shards": (2, "--packing off"),
    "TP 2": (2, "--packing off --tensor-model-parallel-size 2"),
}
LORA = {"one": (1, ""), "LoRA, TP 2": (2, "--tensor-model-parallel-size 2")}
STEPS = f"--train-iters 5 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd"
PAGE = Path(__file__).parents[2] / "docs/any-model.md"
BEGIN = "<!-- table: written by python -m tests.training.any_model_table -->"
END = "<!-- end of table -->"
CHUNK = 8
WORDS = {
    "carries over": "refused: recurrent",
    "by itself": "refused: own masks",
    "no positions": "refused: no positions",
    "without positions": "refused: no positions",
    "this buffer again": "refused: own buffers",
    "meta device and other": "refused: not built on the meta device",
}
"""What the table says of a reason that has these words."""


def measure(kinds: Sequence[str], root: Path) -> dict[str, dict[str, float | str]]:
    """Cells of each type by column: a number, or why there is none."""
    folders, rows = {}, {kind: dict[str, float | str]() for kind in kinds}
    for kind in kinds:
        try:
            folders[kind] = write_type(root / kind, kind)
        except Exception as error:
            rows[kind] = dict.fromkeys([*COLUMNS, "LoRA, TP 2"], f"not built: {type(error).__name__}")
    runs = _run(folders)
    for kind, folder in folders.items():
        for column in COLUMNS:
            rows[kind][column] = _error(runs, folder, kind, column)
        one, cut = runs[kind, "one"], runs[kind, "LoRA, TP 2"]
        reason = one.get("refused") or cut.get("refused")
        rows[kind]["LoRA, TP 2"] = reason or max(largest_error(cut, one).values())
    return rows


def _run(folders: dict[str, Path]) -> dict[tuple[str, str], dict[str, Any]]:
    out = {}
    for world in (1, 2):
        of = {name: words for name, (size, words) in COLUMNS.items() if size == world}
        of |= {n: f"--packing off --lora-rank 4 {words}" for n, (size, words) in LORA.items() if size == world}
        cases = [(kind, column) for kind in folders for column in of]
        common = f"{STEPS} --weight-decay 0 --model-implementation transformers"
        flags = [
            f"--load {folders[k]} --data-path {folders[k]}/sft.jsonl --log-dir {folders[k]}/logs {common} {of[column]}"
            for k, column in cases
        ]
        ranks = run_distributed(tune_types, world, flags, timeout=1200)
        for i, case in enumerate(cases):
            every = [rank[i] for rank in ranks]
            out[case] = every[0] if "refused" in every[0] else together(every)
    return out


def _error(runs: Any, folder: Path, kind: str, column: str) -> float | str:
    result = runs[kind, column]
    if "refused" in result:
        return str(result["refused"])
    alone = runs[kind, "packed" if column == "packed" else "one process"]
    return max(largest_error(result, plain_loop(folder, alone["batches"])).values())


def chunks(kinds: Sequence[str]) -> Iterator[Sequence[str]]:
    """A start of processes for some types each."""
    for first in range(0, len(kinds), CHUNK):
        yield kinds[first : first + CHUNK]


def shown(cell: float | str) -> str:
    """A number, or a few words for the reason that a run has said."""
    if isinstance(cell, float):
        return f"{cell:.0e}"
    for part, word in WORDS.items():
        if part in cell:
            return word
    return "refused: " + " ".join(cell.replace("|", "/").split())[:110]


def table(rows: dict[str, dict[str, float | str]]) -> str:
    """In Markdown."""
    columns = [*COLUMNS, "LoRA, TP 2"]
    head = ["| `model_type` | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    return "\n".join(
        head + [f"| {k} | " + " | ".join(shown(row[c]) for c in columns) + " |" for k, row in rows.items()]
    )


def write(rows: dict[str, dict[str, float | str]]) -> None:
    """Into the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    found: dict[str, dict[str, float | str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for some in chunks(sys.argv[1:] or TYPES):
            found |= measure(some, Path(scratch))
            write(found)
