"""Add adapters into the weights of their model, as a folder that needs nothing else.

    python tools/merge_lora.py --load HF_FOLDER --adapter runs/adapter --save merged
    python tools/merge_lora.py --load checkpoints --adapter checkpoints_lora --save merged --to smp

--load is a Hugging Face folder or checkpoints of ours, --adapter a folder in peft's format or checkpoints of a LoRA
run. What is written is a Hugging Face folder with tokenizer and chat template, or a checkpoint of ours. Tensors are
read, merged and written one after the other, so memory does not grow with the model. W + scale x B A is computed in
fp32 and kept in W's dtype.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from smp.checkpoint import CheckpointError, find, read_manifest
from smp.checkpoint.local import open_folder
from smp.convert.adapters import Adapter, MergedWeights, family_for, is_adapter_folder, read_adapters
from smp.convert.convert import write
from smp.convert.hf import HFTarget, open_hf
from smp.convert.hf_config import is_hf_folder, read_hf_config
from smp.convert.smp_format import SmpTarget, SmpWeights, carried
from smp.convert.weights import Weights
from smp.training.adapter_files import read_saved_adapters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_model(load: Path) -> tuple[Weights, Path | None]:
    """(weights, the folder that holds config.json and tokenizer, if there is one)."""
    if is_hf_folder(load):
        return open_hf(load), load
    folder = find(load)
    return SmpWeights(folder), carried(folder)


def open_adapters(path: Path, model: Weights, reference: Path | None) -> Mapping[str, Adapter]:
    """By the name of our layer, from peft's format or a checkpoint of a LoRA run."""
    if is_adapter_folder(path):
        content = read_hf_config(reference) if reference is not None and is_hf_folder(reference) else None
        return read_adapters(path, model.config, family_for(model.config, content))[0]
    folder = open_folder(find(path))
    return read_saved_adapters(folder, read_manifest(folder))


def merge(args: argparse.Namespace) -> list[str]:
    """Do it; returns what the user should hear.

    Raises:
        ValueError: something cannot be read or written; one line.
    """
    model, found = open_model(args.load)
    with model:
        reference = args.reference or found
        merged = MergedWeights(model, open_adapters(args.adapter, model, found))
        dtype = None if args.dtype is None else DTYPES[args.dtype]
        target = (HFTarget if args.to == "hf" else SmpTarget)(merged, dtype, reference)
        options = {"to": args.to, "dtype": args.dtype}
        write(merged, target, args.save, options=options, workers=args.workers)
        return [*merged.notes, f"wrote {args.save}"]


def main(argv: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, type=Path, help="the model: a Hugging Face folder or our checkpoints")
    parser.add_argument("--adapter", required=True, type=Path, help="folder in peft's format, or checkpoints of LoRA")
    parser.add_argument("--save", required=True, type=Path, help="folder to write, which must not exist")
    parser.add_argument("--to", choices=("hf", "smp"), default="hf", help="what to write (default: hf)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    parser.add_argument("--reference", type=Path, help="folder with config.json and tokenizer to take along")
    parser.add_argument("--workers", type=int, default=2, help="files written at the same time (default: 2)")
    try:
        print("\n".join(merge(parser.parse_args(argv))))
    except (ValueError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
