"""Evaluate a model: how well it predicts text, or the tasks of EleutherAI's lm-evaluation-harness.

    python tools/evaluate.py --load runs/pretrain --tokenizer-model tokenizer.model --data-path held-out.jsonl
    python tools/evaluate.py --load Llama-3.2-1B --adapter runs/chat/adapter --data-path book.txt --stride 512
    python tools/evaluate.py --load Llama-3.2-1B --tasks hellaswag arc_easy --num-fewshot 5 --output results.json

--load is a model in any format that tools/convert_checkpoint.py reads. Each document is scored alone, in windows of
--seq-length tokens that move by --stride. Its first token is predicted from what the tokenizer puts in front of a text;
if that is nothing, from the begin-of-text token, or else from the end-of-text token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, refuse_existing, run_tool
from smp.config.command_line.hub import model_path, tokenizer_path
from smp.convert.huggingface.folder import end_ids
from smp.data.files.remote import RemoteFile
from smp.data.files.text_files import expand_paths, read_texts
from smp.training.texts.evaluation import Perplexity, TextScorer, harness_model
from smp.training.texts.text_model import DTYPES, alone, folder_tokenizer, load_model, open_model

OF_TASKS = ("num_fewshot", "include_path", "apply_chat_template", "limit")


def build_parser() -> CommandParser:
    """All flags."""
    out = CommandParser(description=__doc__)
    out.add_argument("--load", required=True, type=model_path, help="the model's folder, or hub:NAME")
    out.add_argument("--adapter", type=Path, help="folder in peft's format, or checkpoints of a LoRA run")
    out.add_argument(
        "--reference", type=Path, help="Hugging Face folder for what --load lacks (tokenizer, config.json)"
    )
    out.add_argument(
        "--tokenizer-model",
        type=tokenizer_path,
        help="tokenizer file, or folder with tokenizer.json (default: the one in --load)",
    )
    out.add_argument("--dtype", choices=DTYPES, default="fp32", help="precision of weights and arithmetic")
    out.add_argument("--data-path", nargs="+", help="text: files, folders or glob patterns")
    out.add_argument("--json-key", default="text", help="key or column of the text")
    out.add_argument("--seq-length", type=int, help="tokens per window (default: the model's longest sequence)")
    out.add_argument(
        "--stride", type=int, help="tokens by which the window moves (default: half a window; with --tasks a whole one)"
    )
    out.add_argument("--tasks", nargs="+", help="names of lm-evaluation-harness's tasks")
    out.add_argument("--num-fewshot", type=int, help="solved examples before each question of a task")
    out.add_argument("--include-path", type=Path, help="folder with more tasks, as YAML files")
    out.add_argument("--apply-chat-template", action="store_true", help="ask each question as a chat message")
    out.add_argument("--limit", type=int, help="number of questions per task (default: all)")
    out.add_argument("--batch-size", type=int, default=32, help="texts that tasks let the model write at once")
    out.add_argument("--output", type=Path, help="JSON file for the results")
    return out


def check(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together.

    Raises:
        ConfigError: there are such.
        FileExistsError: --output is there.
    """
    if bool(args.data_path) == bool(args.tasks):
        raise ConfigError("give --data-path, whose text is scored, or --tasks of lm-evaluation-harness")
    given = [name for name in OF_TASKS if (value := getattr(args, name)) is not None and value is not False]
    if args.data_path and given:
        raise ConfigError(f"--{given[0].replace('_', '-')} has no effect without --tasks; leave it out")
    if args.data_path and args.batch_size != 32:
        raise ConfigError("--batch-size has no effect without --tasks; leave it out")
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size} cannot be: give 1 or more")
    if args.tasks and args.json_key != "text":
        raise ConfigError("--json-key has no effect with --tasks; leave it out")
    if args.output:
        refuse_existing(args.output)


def window(args: argparse.Namespace, longest: int) -> tuple[int, int]:
    """Length and stride.

    Raises:
        ConfigError: they cannot be.
    """
    length = longest if args.seq_length is None else args.seq_length
    if not 1 < length <= longest:
        raise ConfigError(f"--seq-length {length} is not between 2 and the model's longest sequence, {longest}")
    default = length if args.tasks else length // 2  # the library's windows do not overlap
    stride = default if args.stride is None else args.stride
    if not 0 < stride <= length:
        raise ConfigError(f"--stride {stride} is not between 1 and --seq-length {length}")
    return length, stride


def perplexity(args: argparse.Namespace, scorer: TextScorer, paths: Sequence[Path | RemoteFile]) -> dict[str, Any]:
    """Perplexity of the documents in --data-path."""
    found = Perplexity()
    for text in tqdm(
        read_texts(paths, args.json_key), unit=" documents", disable=sys.stderr is None or not sys.stderr.isatty()
    ):
        found.add(scorer, text)
    return found.results()


def run_tasks(args: argparse.Namespace, scorer: TextScorer) -> dict[str, Any]:
    """What lm-evaluation-harness says of --tasks."""
    model = harness_model(scorer, str(args.load))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if args.include_path is None else str(args.include_path))
    found = simple_evaluate(
        model=model,
        tasks=args.tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None, "only other ranks than the first get none"
    return {task: dict(values) for task, values in found["results"].items()}


def work(args: argparse.Namespace) -> None:
    """Load, evaluate, print."""
    check(args)
    paths = expand_paths(args.data_path or [])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = open_model(args.load, args.adapter, args.reference)
    tokenizer = folder_tokenizer(opened, args.tokenizer_model)
    length, stride = window(args, opened.weights.config.max_position_embeddings)
    with alone(device):
        model = load_model(opened, device, DTYPES[args.dtype])
        ends = (*end_ids(opened.reference), tokenizer.eos)
        scorer = TextScorer(model, tokenizer, ends, length, stride, args.batch_size)
        results = perplexity(args, scorer, paths) if paths else run_tasks(args, scorer)
    for name, value in results.items():
        shown = value if isinstance(value, dict) else {name: value}
        for key, number in shown.items():
            text = f"{number:.6g}" if isinstance(number, float) else str(number)
            print(f"{name}: {key}: {text}" if isinstance(value, dict) else f"{key}: {text}")
    if args.output:
        settings = {"seq_length": length, "stride": stride, "dtype": args.dtype, "load": str(args.load)}
        text = json.dumps({"settings": settings, "results": results}, indent=2, default=str)
        args.output.write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: work(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
