"""The table of docs/any-model.md: tiny models of many types through ``finetune.py`` beside a plain loop of
transformers.

    python -m tests.training.any_model_table [TYPE ...]

Five steps of plain SGD in fp32. A number is the largest relative error of losses, gradient norms and final weights.
Types that are named are measured, and the rows of the others stay.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.distributed import run_distributed
from tests.training.any_model_lab import (
    LR,
    largest_error,
    logits_error,
    lora_loop,
    plain_loop,
    tune_types,
    write_type,
)
from tests.training.tuning_lab import together
from tools.convert_checkpoint import main as convert

TYPES = (
    *("nemotron_h", "falcon_h1", "bamba", "mamba2", "jamba", "granitemoehybrid", "lfm2", "lfm2_moe"),
    *("qwen3_next", "olmo_hybrid", "minimax", "recurrent_gemma", "helium", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("ernie4_5_moe", "ernie4_5", "qwen3_moe", "gpt_oss", "dots1", "flex_olmo", "phimoe", "minimax_m2"),
    *("exaone4", "seed_oss", "nemotron", "stablelm", "apertus", "arcee", "persimmon", "gpt_neo"),
    *("gemma2", "gemma3_text", "cohere2", "smollm3", "olmoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "jetmoe"),
    *("vaultgemma", "bitnet", "diffllama", "doge", "afmoe", "solar_open", "opt", "bloom"),
    *("t5", "mt5", "umt5", "longt5", "bart", "pegasus"),
)
"""``model_type`` of transformers: hybrids with Mamba and Mamba-2, convolutions and gated delta nets; latent attention;
experts; dense ones; encoders with a decoder. Some are families of this project, too, and run by transformers here."""
ALONE, PACKED, SHARDS, TP, BOTH = "one process", "packed", "2 shards", "TP 2", "TP 2 x 2 shards"
LORA_1, LORA_2 = "LoRA", "LoRA, TP 2"
BEGUN, RESUMED, EXPORTED, SHARE = "begun", "resumed", "export", "bytes of a rank"
_TP = "--packing off --tensor-model-parallel-size 2"
RUNS = {
    ALONE: (1, "--packing off --save {0}/export"),
    PACKED: (1, "--packing best-fit"),
    LORA_1: (1, "--packing off --lora-rank 4 --lora-alpha 8"),
    SHARDS: (2, "--packing off"),
    TP: (2, _TP),
    LORA_2: (2, f"{_TP} --lora-rank 4 --lora-alpha 8"),
    BEGUN: (2, f"{_TP} --save {{0}}/resumed --exit-interval 3"),
    RESUMED: (2, "--packing off --save {0}/resumed --resume"),
    BOTH: (4, _TP),
}
"""Of each type: how many processes, and the words. The one that is resumed has three of five steps at TP 2 and the rest
on two shards."""
COLUMNS = (ALONE, PACKED, SHARDS, TP, BOTH, LORA_1, LORA_2, RESUMED, EXPORTED, SHARE)
CUT = 0.55
"""Largest part of a model's bytes that a rank of two has where it says that it is cut."""
STEPS = f"--train-iters 5 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd"
PAGE = Path(__file__).parents[2] / "docs/any-model.md"
BEGIN = "<!-- table: written by python -m tests.training.any_model_table -->"
END = "<!-- end of table -->"
CHUNK = 8
UNKNOWN = "not measured"
WORDS = {
    "carries over": "refused: recurrent",
    "by itself": "refused: own masks",
    "no positions": "refused: no positions",
    "without positions": "refused: no positions",
    "this buffer again": "refused: own buffers",
    "read a prompt and its answer apart": "refused: prompt and answer apart",
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
            rows[kind] = dict.fromkeys(COLUMNS, f"not built: {type(error).__name__}")
    runs = _run(folders)
    for kind, folder in folders.items():
        rows[kind] = {column: _cell(runs, folder, kind, column) for column in COLUMNS}
    return rows


def _run(folders: dict[str, Path]) -> dict[tuple[str, str], dict[str, Any]]:
    out = {}
    for world in (1, 2, 4):
        of = {name: words for name, (size, words) in RUNS.items() if size == world}
        cases = [(kind, column) for kind in folders for column in of]
        common = f"{STEPS} --weight-decay 0 --model-implementation transformers"
        flags = [
            f"--load {folders[k]} --data-path {folders[k]}/sft.jsonl --log-dir {folders[k]}/logs {common} "
            f"{of[column].format(folders[k])}"
            for k, column in cases
        ]
        ranks = run_distributed(tune_types, world, flags, timeout=1200)
        for i, case in enumerate(cases):
            every = [rank[i] for rank in ranks]
            out[case] = every[0] if "refused" in every[0] else together(every)
    return out


def _cell(runs: Any, folder: Path, kind: str, column: str) -> float | str:
    if column == EXPORTED:
        alone = runs[kind, ALONE]
        return str(alone["refused"]) if "refused" in alone else _exported(folder, alone)
    if column == SHARE:
        return str(runs[kind, TP].get("refused") or part_of_a_rank(runs[kind, TP]["share"]))
    result = runs[kind, column]
    if "refused" in result:
        return str(result["refused"])
    if column in (LORA_1, LORA_2):
        alone = runs[kind, LORA_1]
        return str(alone["refused"]) if "refused" in alone else _largest(result, lora_loop(folder, alone, scale=2.0))
    want = plain_loop(folder, runs[kind, PACKED if column == PACKED else ALONE]["batches"])
    if column == RESUMED:
        if "refused" in runs[kind, BEGUN]:
            return str(runs[kind, BEGUN]["refused"])
        want = {**want, "losses": want["losses"][3:], "norms": want["norms"][3:]}
    return _largest(result, want)


def _exported(folder: Path, alone: dict[str, Any]) -> float:
    """Of the logits of the folder that a run's last checkpoint becomes."""
    assert convert(["--load", f"{folder}/export", "--save", f"{folder}/hf"]) == 0
    return logits_error(folder, folder / "hf", alone)


def _largest(got: dict[str, Any], want: dict[str, Any]) -> float:
    return max(largest_error(got, want).values())


def part_of_a_rank(share: float) -> str:
    """What the table says of the part of a model's bytes that one of two ranks has."""
    return f"cut: {share:.0%}" if share <= CUT else f"warned: {share:.0%}"


def chunks(kinds: Sequence[str]) -> Iterator[Sequence[str]]:
    """A start of processes for some types each."""
    for first in range(0, len(kinds), CHUNK):
        yield kinds[first : first + CHUNK]


def shown(cell: float | str) -> str:
    """A number, or a few words for the reason that a run has said."""
    if isinstance(cell, float):
        return f"{cell:.0e}"
    if cell.startswith(("cut:", "warned:", UNKNOWN)) or cell in WORDS.values() or cell[:1].isdigit():  # as in the page
        return cell
    for part, word in WORDS.items():
        if part in cell:
            return word
    return "refused: " + " ".join(cell.replace("|", "/").split())[:110]


def table(rows: dict[str, dict[str, float | str]]) -> str:
    """In Markdown."""
    head = ["| `model_type` | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    return "\n".join(
        head + [f"| {k} | " + " | ".join(shown(row.get(c, UNKNOWN)) for c in COLUMNS) + " |" for k, row in rows.items()]
    )


def written() -> dict[str, dict[str, str]]:
    """Cells of the table in the page, by type and column."""
    text = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    (_, *columns), *rows = (line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {kind: dict(zip(columns, cells, strict=True)) for kind, *cells in rows}


def write(rows: dict[str, dict[str, float | str]]) -> None:
    """Into the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    found: dict[str, dict[str, float | str]] = {kind: {**cells} for kind, cells in written().items()}
    with tempfile.TemporaryDirectory() as scratch:
        for some in chunks(sys.argv[1:] or TYPES):
            found |= measure(some, Path(scratch))
            write({kind: found[kind] for kind in TYPES if kind in found})
