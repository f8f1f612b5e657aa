"""Merge adapters into the weights of their model; writes a folder that needs nothing else.

    python tools/merge_lora.py --load HF_FOLDER --adapter runs/chat/adapter --save merged
    python tools/merge_lora.py --load checkpoints --adapter runs/chat --save merged --to smp

--load is a model in any format that tools/convert_checkpoint.py reads, --adapter a folder in peft's format or the
checkpoints of a LoRA run. A Hugging Face folder is written with the tokenizer and chat template of that run, or of the
model. Tensors are read, merged and written one after the other, so memory does not grow with the model. W + scale x B A
is computed in fp32 and rounded once, to --dtype or to W's. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.hub import model_path
from smp.convert.convert import ERRORS, write
from smp.convert.formats import FORMATS, make_target, open_checkpoint
from smp.convert.peft.adapters import MergedWeights
from smp.training.tuning.adapter_files import companions_of, open_adapters, require_adapter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def merge(args: argparse.Namespace) -> None:
    """Do it, with a progress bar where somebody can see it.

    Raises:
        CheckpointError, ConfigError: something cannot be read or written; one line.
    """
    if args.workers < 1:
        raise ConfigError(f"--workers {args.workers} must be above 0")
    require_adapter(args.adapter)
    model = open_checkpoint(args.load, reference=args.reference)
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    if args.reference is None:
        model = replace(model, reference=companions_of(args.adapter) or model.reference)
    with model.weights:
        merged = MergedWeights(model.weights, open_adapters(args.adapter, model), dtype)
        target = make_target(args.to, replace(model, weights=merged))
        total = sum(tensor.stored.nbytes for tensors in target.files.values() for tensor in tensors)
        options = ["merge", args.to, args.dtype, str(model.reference)]
        with tqdm(total=total, desc="merging", unit="B", unit_scale=True, disable=None) as bar:
            done = lambda count: bar.update(count) and None  # noqa: E731
            write(merged, target, args.save, options=options, workers=args.workers, progress=done)
    print("\n".join([*(f"note: {note}" for note in merged.notes), f"wrote {args.save}"]))


def parser() -> CommandParser:
    """All flags."""
    out = CommandParser(description=__doc__)
    out.add_argument(
        "--load", required=True, type=model_path, help="the model; a run's folder stands for its newest checkpoint"
    )
    out.add_argument(
        "--adapter", required=True, type=Path, help="folder in peft's format, or checkpoints of a LoRA run"
    )
    out.add_argument("--save", required=True, type=Path, help="folder to write; must not exist")
    out.add_argument("--to", choices=FORMATS, default="hf", help="format of --save")
    out.add_argument("--dtype", choices=DTYPES, help="convert all weights to this (default: as they are)")
    out.add_argument("--reference", type=Path, help="Hugging Face folder to take tokenizer and config.json from")
    out.add_argument("--workers", type=int, default=2, help="files to read and write in parallel")
    return out


def main(argv: list[str]) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: merge(parser().parse_args(argv)), "the same command continues from here", expected=ERRORS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
