"""The whole way in minutes, on a CPU or on GPUs: corpus, tokenizer, training on two processes, loss curve, sample.

    python tools/demo.py
    python tools/demo.py --folder /tmp/demo --train-iters 20
    python tools/demo.py --finetune
    python tools/demo.py --experts
    python tools/demo.py --rl --seed 1

With --finetune the trained model (which is trained first if there is none) learns to write docstrings: LoRA on
functions of the standard library, the adapters merged, and both models side by side.

With --experts a small dense model and a mixture of experts in which a token uses as many parameters of MLPs train on
the same batches, and a picture shows both losses and how evenly the experts are loaded.

With --rl a tiny model that sorts six digits now and then learns by rewards alone to do it nearly always (GRPO): texts
that it wrote before and after, and a picture of the rewards.

Every command is printed before it runs, so each can be repeated alone. Flags that this tool does not know go to
pretrain_gpt.py, or to finetune.py. What an earlier demo left in --folder is replaced.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from math import log
from pathlib import Path

from smp.config.command_line.command import CommandParser, run_tool

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "class Parser:\n    def __init__(self"
HEADS = ('def remove_file(path, missing_ok=False):\n    """', 'def is_valid(self, name):\n    """')
"""Heads of functions that want a docstring."""
EXPERTS = shlex.split(
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-router-topk-scaling-factor 2 "
    "--moe-aux-loss-coeff 0.001"
)
"""Two of 128 are as wide as the recipe's MLP of 256, and with weights that sum to 2 they give as much at first."""
LINE = "{:28}{:8.3f} nats per token{:8.3f} bits per byte"


def layout(gpus: int) -> tuple[int, list[str]]:
    """Processes to start, and how pretrain_gpt.py uses them. One GPU takes one process: NCCL wants a GPU for each."""
    processes = min(2, gpus) or 2
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel"] if processes == 2 else []
    return processes, flags + (["--bf16"] if gpus else [])


class Runner:
    """Runs commands from the root of the repository.

    Args:
        processes: how many the training gets; they share the cores.
    """

    def __init__(self, processes: int) -> None:
        threads = max(1, (os.cpu_count() or 1) // processes)
        path = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )  # runs without an installation
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}

    def python(self, *words: object) -> str:
        """Print a command, run it, show its output and return it.

        Raises:
            SystemExit: the command failed; its message is on the screen already.
        """
        command = [_relative(sys.executable), *map(str, words)]
        print(f"\n$ {shlex.join(command)}", flush=True)
        output = []
        with subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    output.append(line)
            except KeyboardInterrupt:  # the command was told too, and may have something to save
                print(*process.stdout, sep="", end="", flush=True)
                raise SystemExit(130) from None
        if process.returncode:
            raise SystemExit(process.returncode)
        return "".join(output)


def _relative(path: str | Path) -> str:
    """Shorter where it lies in the repository: the commands are there to be read."""
    path = Path(os.path.abspath(path))  # not resolved: an environment's python is a link
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def prepare(folder: Path, python: Callable[..., str]) -> None:
    """Corpus, tokenizer and tokens; what was there is replaced."""
    corpus, tokenizer, data = folder / "corpus.jsonl", folder / "tokenizer.model", folder / "corpus_text_document"
    for old in (corpus, tokenizer, Path(f"{data}.bin"), Path(f"{data}.idx")):
        (ROOT / old).unlink(missing_ok=True)
    python("tools/demo_corpus.py", "--output", corpus)
    python(
        "tools/train_tokenizer.py", "--input", corpus, "--model-prefix", tokenizer.with_suffix(""), "--vocab-size", 4096
    )
    python(
        *("tools/preprocess_data.py", "--input", corpus, "--output-prefix", folder / "corpus"),
        *("--tokenizer-model", tokenizer, "--append-eod"),
    )


PICTURE = "loss.png"
"""Made when the demo's model is trained to its end."""


def run(folder: Path, processes: int, flags: Sequence[str]) -> None:
    """All steps, then the summary."""
    tokenizer, data = folder / "tokenizer.model", folder / "corpus_text_document"
    checkpoints, logs, picture = folder / "checkpoints", folder / "logs", folder / PICTURE
    for old in (checkpoints, logs):
        shutil.rmtree(ROOT / old, ignore_errors=True)
    (ROOT / picture).unlink(missing_ok=True)
    python = Runner(processes).python
    with_tokenizer = ("--tokenizer-model", tokenizer)
    prepare(folder, python)
    python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes),
        *(
            "pretrain_gpt.py",
            "--config",
            "recipes_collection/recipes/laptop/quickstart.yaml",
            "--data-path",
            data,
            *with_tokenizer,
        ),
        *("--save", checkpoints, "--log-dir", logs, *flags),
    )
    bigram = python("tools/bigram_baseline.py", "--data-path", data, *with_tokenizer)
    nats, bytes_per_token = bigram_figures(bigram)
    python(
        *("tools/plot_loss.py", "--metrics", logs / "metrics.jsonl", "--output", picture),
        *("--baseline", nats, "--baseline-label", "bigram"),
    )
    python("tools/generate.py", "--load", checkpoints, *with_tokenizer, "--prompt", PROMPT)
    print("\n" + summary(last_validation_loss(ROOT / logs / "metrics.jsonl"), nats, bytes_per_token))
    print(f"loss curve: {picture}")


def bigram_figures(output: str) -> tuple[float, float]:
    """Nats per token of the bigram model and bytes per token, from what bigram_baseline.py prints."""
    match = re.search(r"bigram: ([\d.]+) nats per token .* at ([\d.]+) bytes per token", output)
    assert match is not None, output
    return float(match[1]), float(match[2])


def last_validation_loss(metrics: Path) -> float:
    """Validation loss of the last evaluation, in nats per token."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return float([record["validation loss"] for record in records if "validation loss" in record][-1])


def summary(model: float, bigram: float, bytes_per_token: float) -> str:
    """Both models on the validation split, per token and per byte of text."""
    lines = [
        LINE.format(name, nats, nats / log(2) / bytes_per_token)
        for name, nats in (("validation loss", model), ("bigram model (Kneser-Ney)", bigram))
    ]
    verdict = "learned from context: below" if model < bigram else "has not learned from context yet: not below"
    return "\n".join([*lines, f"the model {verdict} what the last token alone can tell"])


def finetune(folder: Path, processes: int, flags: Sequence[str]) -> None:
    """Adapters on the demo's model, and what it writes before and after."""
    base, pairs, tuned, merged = (folder / name for name in ("checkpoints", "pairs.jsonl", "lora", "merged"))
    logs, with_tokenizer = folder / "logs_lora", ("--tokenizer-model", folder / "tokenizer.model")
    for old in (tuned, merged, logs):
        shutil.rmtree(ROOT / old, ignore_errors=True)
    (ROOT / pairs).unlink(missing_ok=True)
    python = Runner(processes).python
    python("tools/demo_corpus.py", "--output", pairs, "--pairs")
    data = ("--load", base, *with_tokenizer, "--data-path", pairs)
    python("finetune.py", *data, "--preview", 2)
    python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes),
        *(
            "finetune.py",
            "--config",
            "recipes_collection/recipes/laptop/finetune_demo.yaml",
            *data,
            "--save",
            tuned,
            "--log-dir",
            logs,
            *flags,
        ),
    )
    python("tools/merge_lora.py", "--load", base, "--adapter", tuned / "adapter", "--save", merged, "--to", "smp")
    written = {}
    for model, head in ((model, head) for model in (base, merged) for head in HEADS):
        options = ("--max-new-tokens", 40, "--temperature", 0)
        written[model, head] = python("tools/generate.py", "--load", model, *with_tokenizer, "--prompt", head, *options)
    before, after = validation_losses(ROOT / logs / "metrics.jsonl")
    for head in HEADS:
        print("\n" + side_by_side(written[base, head], written[merged, head]))
    print(f"\nvalidation loss, nats per token of docstrings: {before:.3f} before, {after:.3f} after")


def compare_experts(folder: Path, processes: int, flags: Sequence[str]) -> None:
    """A dense model and one with experts, whose picture it is."""
    tokenizer, data, picture = folder / "tokenizer.model", folder / "corpus_text_document", folder / "experts.png"
    python, metrics = Runner(processes).python, {}
    if not (ROOT / f"{data}.idx").is_file():
        prepare(folder, python)
    for name, more in (("dense", []), ("experts", [*EXPERTS, "--expert-model-parallel-size", processes])):
        logs = folder / f"logs_{name}"
        shutil.rmtree(ROOT / logs, ignore_errors=True)
        python(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes),
            *("pretrain_gpt.py", "--config", "recipes_collection/recipes/laptop/experts_demo.yaml"),
            *("--data-path", data, "--tokenizer-model", tokenizer, "--log-dir", logs, *more, *flags),
        )
        metrics[name] = logs / "metrics.jsonl"
    dense, experts = (last_validation_loss(ROOT / path) for path in metrics.values())
    python(
        *("tools/plot_loss.py", "--metrics", metrics["experts"], "--output", picture),
        *("--baseline", dense, "--baseline-label", "dense model's last validation"),
    )
    print(f"\nvalidation loss, nats per token: {dense:.3f} dense, {experts:.3f} with experts")
    print(f"losses and loads: {picture}")


def _seed(flags: Sequence[str]) -> Sequence[str]:
    """--seed, which is both trainings'."""
    return [word for pair in pairwise(flags) if pair[0] == "--seed" for word in pair]


def learn_by_rewards(folder: Path, processes: int, flags: Sequence[str]) -> None:
    """A first training that is too short, and then rewards."""
    base, tuned, logs, picture = (folder / name for name in ("sorting_base", "sorting", "logs_sorting", "rewards.png"))
    for old in (base, tuned, logs):
        shutil.rmtree(ROOT / old, ignore_errors=True)
    data, python = folder / "sorting_data", Runner(processes).python
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    python("examples/sort_digits.py", "--output", data)
    python(
        *(*torchrun, "pretrain_gpt.py", "--config", "recipes_collection/recipes/laptop/rl_demo_base.yaml"),
        *("--data-path", data / "texts.jsonl", "--tokenizer-model", data / "tokenizer.json"),
        *("--save", base, "--log-dir", folder / "logs_sorting_base", *_seed(flags)),
    )
    python(
        *(*torchrun, "finetune.py", "--config", "recipes_collection/recipes/laptop/rl_demo.yaml"),
        *("--load", base, "--tokenizer-model", data, "--data-path", data / "prompts.jsonl"),
        *("--reward-funcs", "examples/sort_digits.py:in_order", "--save", tuned, "--log-dir", logs, *flags),
    )
    python("tools/plot_loss.py", "--metrics", logs / "metrics.jsonl", "--output", picture)
    rows = [json.loads(line) for line in (ROOT / logs / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = {
        name: "\n".join(f"{row['prompt']}{row['completion']:16} reward {row['reward']:.2f}" for row in of)
        for name, of in (("before", rows[:9]), ("after", rows[-9:]))
    }
    print("\n" + side_by_side(shown["before"], shown["after"]))
    records = [json.loads(line) for line in (ROOT / logs / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [record["validation reward"] for record in records if "validation reward" in record]
    print(f"\nmean reward of validation prompts: {rewards[0]:.3f} before, {rewards[-1]:.3f} after; rewards: {picture}")


def validation_losses(metrics: Path) -> tuple[float, float]:
    """Validation losses of the first and the last evaluation, in nats per token."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [record["validation loss"] for record in records if "validation loss" in record]
    return losses[0], losses[-1]


def side_by_side(left: str, right: str, width: int = 58) -> str:
    """Two texts in columns."""
    columns = []
    for title, text in (("before", left), ("after", right)):
        lines = [title, "-" * width, *text.rstrip().expandtabs().splitlines()]
        columns.append([line[i : i + width] for line in lines for i in range(0, max(len(line), 1), width)])
    return "\n".join(f"{a:{width}} | {b}".rstrip() for a, b in zip_longest(*columns, fillvalue=""))


def work(argv: Sequence[str] | None) -> None:
    """Read the command line, and run the commands."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--folder", default=ROOT / "demo", type=Path, help="where everything goes (default: demo)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--finetune", action="store_true", help="fine-tune the demo's model")
    kind.add_argument("--experts", action="store_true", help="compare a dense model with a mixture of experts")
    kind.add_argument("--rl", action="store_true", help="learn to sort digits by rewards")
    args, extra = parser.parse_known_args(argv)
    import torch  # after --help

    processes, flags = layout(torch.cuda.device_count())
    folder = Path(_relative(args.folder))
    if args.experts:  # without tensor parallelism: experts are split over the processes
        compare_experts(folder, processes, [*(flag for flag in flags if flag == "--bf16"), *extra])
        return
    if args.rl:
        learn_by_rewards(folder, processes, [*(flag for flag in flags if flag == "--bf16"), *extra])
        return
    if not args.finetune:
        run(folder, processes, [*flags, *extra])
        return
    if not (ROOT / folder / PICTURE).is_file():
        print("the demo's model is trained first: there is none, or its training was interrupted", flush=True)
        run(folder, processes, flags)
    finetune(folder, processes, [*flags, *extra])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: work(argv))


if __name__ == "__main__":
    sys.exit(main())
