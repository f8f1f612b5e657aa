"""What FP8 does to a loss: the demo's corpus, the same run in bf16 and with each recipe, emulated, for several seeds.

Compared are means over windows of 50 steps, relative to bf16 with the same seed, so with the same data and the same
initial weights. The spread between seeds of the bf16 runs stands beside them: data order and initial weights differ.

    python benchmarks/fp8_loss.py --folder fp8_loss
    python benchmarks/fp8_loss.py --folder fp8_loss --recipes tensorwise,rowwise --seeds 1 -- --num-layers 2

Flags behind -- go to pretrain_gpt.py. Runs that are in the folder already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 50
_NVFP4 = ["--fp8-format", "e2m1", "--fp8-recipe", "nvfp4", "--fp8-emulate"]
_ENDS = [*_NVFP4, "--first-last-layers-bf16"]
PRECISIONS = {
    "bf16": [],
    "delayed": ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-emulate"],
    "tensorwise": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-emulate"],
    "rowwise": ["--fp8-format", "hybrid", "--fp8-recipe", "rowwise", "--fp8-emulate"],
    "blockwise": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-emulate"],
    "mxfp8": ["--fp8-format", "hybrid", "--fp8-recipe", "mxfp8", "--fp8-emulate"],
    "nvfp4": _NVFP4,
    "nvfp4-first": [*_ENDS, "--num-layers-at-end-in-bf16", "0"],
    "nvfp4-last": [*_ENDS, "--num-layers-at-start-in-bf16", "0"],
    "nvfp4-ends": _ENDS,
    "delayed, e4m3": ["--fp8-format", "e4m3", "--fp8-recipe", "delayed", "--fp8-emulate"],
}
"""``nvfp4-first``, ``-last`` and ``-ends`` keep the first, the last, or both layers in bf16 (both of more than two)."""
MODEL = shlex.split(
    "--bf16 --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--micro-batch-size 8 --global-batch-size 8 --train-iters 300 --lr 5e-4 --lr-warmup-iters 20 --log-interval 1 "
    "--no-tensorboard --no-progress-bar"
)
"""Widths that are multiples of 128, which blockwise scaling asks for."""


def python(*words: object) -> None:
    """Run a command from the repository's root."""
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def prepare(folder: Path) -> list[str]:
    """The demo's corpus with a small vocabulary; returns flags that train on it."""
    corpus, tokenizer, data = folder / "corpus.jsonl", folder / "tokenizer.model", folder / "corpus_text_document"
    if not Path(f"{data}.idx").exists():
        python("tools/demo_corpus.py", "--output", corpus)
        words = ("--input", corpus, "--model-prefix", tokenizer.with_suffix(""), "--vocab-size", 1024)
        python("tools/train_tokenizer.py", *words)
        words = ("--input", corpus, "--output-prefix", folder / "corpus", "--tokenizer-model", tokenizer)
        python("tools/preprocess_data.py", *words, "--append-eod")
    return ["--data-path", str(data), "--tokenizer-model", str(tokenizer)]


def losses(folder: Path, flags: list[str], precision: str, seed: int) -> list[float]:
    """Of each step of a run."""
    logs = folder / f"{precision.replace(', ', '_')}_{seed}"
    metrics = logs / "metrics.jsonl"
    if not (metrics.exists() and len(metrics.read_text().splitlines()) > WINDOW):
        python("pretrain_gpt.py", *MODEL, *flags, *PRECISIONS[precision], "--seed", seed, "--log-dir", logs)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["lm loss"] for row in rows if "lm loss" in row]


def windows(values: list[float]) -> list[float]:
    """Means of 50 steps."""
    return [fmean(values[i : i + WINDOW]) for i in range(0, len(values) - WINDOW + 1, WINDOW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--recipes", default=",".join(name for name in PRECISIONS if name.isalnum()))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*prepare(folder), *given.flags]
    names = [name for name in given.recipes.split(",") if name != "bf16"]
    seeds = range(given.seeds)
    base = {seed: windows(losses(folder, flags, "bf16", seed)) for seed in seeds}
    last = [values[-1] for values in base.values()]
    spread = (max(last) - min(last)) / fmean(last)
    print(f"bf16, last window: {', '.join(f'{x:.4f}' for x in last)}; spread over seeds {100 * spread:.2f} %")
    print(f"{'recipe':12}{'seed':>5}{'last window':>14}{'worst window':>14}   relative to bf16, %")
    for name, seed in product(names, seeds):
        found = windows(losses(folder, flags, name, seed))
        off = [100 * (x / y - 1) for x, y in zip(found, base[seed], strict=True)]
        print(f"{name:12}{seed:>5}{off[-1]:>+14.3f}{max(off, key=abs):>+14.3f}", flush=True)


if __name__ == "__main__":
    main()
