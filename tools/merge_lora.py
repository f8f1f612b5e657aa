"""Add adapters into the weights of their model, as a folder that needs nothing else.

    python tools/merge_lora.py --load HF_FOLDER --adapter runs/chat/adapter --save merged
    python tools/merge_lora.py --load checkpoints --adapter runs/chat --save merged --to smp

--load is a model in any format that tools/convert_checkpoint.py reads, --adapter a folder in peft's format or the
checkpoints of a LoRA run. A Hugging Face folder is written with the tokenizer and chat template of that run, or of the
model. Tensors are read, merged and written one after the other, so memory does not grow with the model. W + scale x B A
is computed in fp32 and rounded once, to --dtype or to W's. The same command goes on after an interrupt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from smp.checkpoint import find, read_manifest
from smp.checkpoint.local import open_folder
from smp.config import ConfigError
from smp.config.command import CommandParser, run_tool
from smp.convert.adapters import Adapter, MergedWeights, family_for, is_adapter_folder
from smp.convert.convert import ERRORS, write
from smp.convert.formats import FORMATS, Opened, make_target, open_checkpoint
from smp.convert.hf_config import is_hf_folder, read_hf_config
from smp.convert.peft_read import read_adapters
from smp.training.adapter_files import companions_of, read_saved_adapters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_adapters(path: Path, model: Opened) -> Mapping[str, Adapter]:
    """By the name of the layer, from peft's format or a checkpoint of a LoRA run."""
    config, reference = model.weights.config, model.reference
    if is_adapter_folder(path):
        content = read_hf_config(reference) if reference is not None and is_hf_folder(reference) else None
        return read_adapters(path, config, family_for(config, content))[0]
    folder = open_folder(find(path))
    return read_saved_adapters(folder, read_manifest(folder))


def merge(args: argparse.Namespace) -> None:
    """Do it, with a progress bar where somebody can see it.

    Raises:
        CheckpointError, ConfigError: something cannot be read or written; one line.
    """
    if args.workers < 1:
        raise ConfigError(f"--workers {args.workers} must be above 0")
    if not args.adapter.is_dir():
        raise ConfigError(
            f"--adapter {args.adapter}: there is no such folder. A run writes the folder adapter when it ends; until "
            "then give the one of its checkpoints"
        )
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
    out.add_argument("--load", required=True, type=Path, help="the model; of a run its newest checkpoint")
    out.add_argument("--adapter", required=True, type=Path, help="folder in peft's format, or checkpoints of LoRA")
    out.add_argument("--save", required=True, type=Path, help="folder to write; must not exist")
    out.add_argument("--to", choices=FORMATS, default="hf", help="format of --save")
    out.add_argument("--dtype", choices=DTYPES, help="convert all weights to this (default: as they are)")
    out.add_argument("--reference", type=Path, help="Hugging Face folder that tokenizer and config.json come from")
    out.add_argument("--workers", type=int, default=2, help="files read and written at once")
    return out


def main(argv: list[str]) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command`."""
    return run_tool(lambda: merge(parser().parse_args(argv)), "the same command goes on from here", told=ERRORS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
