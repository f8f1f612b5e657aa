"""Convert checkpoints between Hugging Face, Megatron and smp, bit for bit, without building a model.

    python tools/convert_checkpoint.py --load Llama-3.2-1B --save checkpoint                 # Hugging Face to smp
    python tools/convert_checkpoint.py --load run --save exported --dtype bf16               # smp to Hugging Face
    python tools/convert_checkpoint.py --load run --to megatron --save megatron --megatron-tp 8
    python tools/convert_checkpoint.py --load megatron --to hf --save exported --reference Llama-3.2-1B
    python tools/convert_checkpoint.py --load Llama-3.2-1B --save experts --upcycle 8        # a mixture of 8 experts
    python tools/convert_checkpoint.py --load DeepSeek-V3 --save sparse --add-indexers 2048  # for sparse attention

Works on one tensor at a time, so memory does not grow with the model. The target gets its name when it is complete; the
same command continues an interrupted conversion. Exit code 0: done; 1: something is damaged or cannot be written;
2: a mistake in the command, or a model that it cannot convert.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from smp.checkpoint import CheckpointError
from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.hub import model_path
from smp.convert.convert import ERRORS, write
from smp.convert.formats import FORMATS, Format, Opened, detect, make_target, open_checkpoint
from smp.convert.huggingface.folder import TOKENIZERS, companions
from smp.convert.indexers import Indexed
from smp.convert.upcycle import Upcycled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parser() -> CommandParser:
    """All flags."""
    out = CommandParser(description=__doc__)
    out.add_argument("--from", dest="source", choices=FORMATS, help="format of --load (default: detected)")
    out.add_argument("--to", choices=FORMATS, help="format of --save (default: smp, or hf when --load is smp)")
    out.add_argument(
        "--load", required=True, type=model_path, help="folder to read; a run's folder stands for its newest checkpoint"
    )
    out.add_argument("--save", required=True, type=Path, help="folder to write; must not exist")
    out.add_argument(
        "--reference",
        type=Path,
        help="where tokenizer, chat template and configuration come from when --load lacks them: a Hugging Face "
        "folder, a folder with a tokenizer, or a checkpoint converted from Hugging Face",
    )
    out.add_argument("--dtype", choices=DTYPES, help="convert all weights to this (default: keep every bit)")
    out.add_argument("--vocab-size", type=int, help="vocabulary size of a Megatron checkpoint, without its padding")
    out.add_argument("--megatron-tp", type=int, help="TP size for which Megatron's vocabulary is padded (default: 1)")
    out.add_argument(
        "--upcycle", type=int, help="turn a dense model into a mixture of this many experts, copies of its MLP"
    )
    out.add_argument("--moe-router-topk", type=int, help="with --upcycle: experts per token (default: 2)")
    out.add_argument(
        "--add-indexers",
        type=int,
        help="give each layer of latent attention (DeepSeek-V3) an indexer with first weights, by which a token is to "
        "see this many keys: where the warm-up of DeepSeek's sparse attention begins",
    )
    out.add_argument("--max-shard-size", type=float, help="largest file in GB (default: hf 5, megatron 2, smp 1)")
    out.add_argument(
        "--workers", type=int, default=min(4, os.cpu_count() or 1), help="files to read and write in parallel"
    )
    out.add_argument(
        "--allow-pickle", action="store_true", help="read .bin files (tensors only, no code in them is run)"
    )
    return out


def check_values(args: argparse.Namespace) -> None:
    """Raise ConfigError for the value of a flag that cannot be."""
    for name in ("workers", "megatron_tp", "vocab_size", "upcycle", "moe_router_topk", "add_indexers"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be above 0")
    if args.moe_router_topk is not None and args.upcycle is None:
        raise ConfigError(f"--moe-router-topk {args.moe_router_topk} is for --upcycle; leave it out")
    size = args.max_shard_size
    if size is not None and not (math.isfinite(size) and size > 0):
        raise ConfigError(f"--max-shard-size {size} must be above 0")


def useless(args: argparse.Namespace, source: Format, kind: Format) -> str | None:
    """A flag that would do nothing between these formats."""
    if args.megatron_tp is not None and kind != "megatron":
        return f"--megatron-tp is for --to megatron, not {kind}"
    if args.vocab_size is not None and source != "megatron":
        return f"--vocab-size is for --from megatron, not {source}"
    if args.allow_pickle and source != "hf":
        return f"--allow-pickle is for --from hf, not {source}"
    return None


def convert(args: argparse.Namespace) -> None:
    """Do it, with a progress bar where somebody can see it.

    Raises:
        CheckpointError, ConfigError: one line that says why not.
    """
    check_values(args)
    source: Format = args.source or detect(args.load)
    kind: Format = args.to or ("hf" if source == "smp" else "smp")
    if problem := useless(args, source, kind):
        raise ConfigError(problem)
    opened = open_checkpoint(
        args.load, source, reference=args.reference, vocab_size=args.vocab_size, allow_pickle=args.allow_pickle
    )
    if args.upcycle is not None:
        opened = replace(opened, weights=Upcycled(opened.weights, args.upcycle, args.moe_router_topk or 2))
    if args.add_indexers is not None:
        opened = replace(opened, weights=Indexed(opened.weights, args.add_indexers))
    if opened.weights.config.is_foreign:
        return export(args, opened, kind)
    with opened.weights as weights:
        for note in weights.notes:
            print(f"note: {note}", file=sys.stderr)
        size = None if args.max_shard_size is None else int(args.max_shard_size * 1e9)
        dtype = None if args.dtype is None else DTYPES[args.dtype]
        target = make_target(kind, opened, dtype=dtype, shard_size=size, megatron_tp=args.megatron_tp or 1)
        if kind == "hf" and not set(TOKENIZERS) & set(companions(opened.reference)):
            print(
                f"note: there is no tokenizer in --load {args.load}, so {args.save} has none: --reference FOLDER takes "
                f"along that of a folder with {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}",
                file=sys.stderr,
            )
        total = sum(tensor.stored.nbytes for tensors in target.files.values() for tensor in tensors)
        options = [kind, args.dtype, args.max_shard_size, args.megatron_tp, str(opened.reference), args.upcycle]
        options.append(args.add_indexers)
        started = time.perf_counter()
        with tqdm(total=total, desc=f"{source} -> {kind}", unit="B", unit_scale=True, disable=None) as bar:
            kept = write(
                weights,
                target,
                args.save,
                options=options,
                workers=args.workers,
                progress=lambda n: bar.update(n) and None,
            )
        seconds = time.perf_counter() - started
    if kept:
        print(f"note: {kept} of {len(target.files)} files were there from an interrupted conversion", file=sys.stderr)
    print(
        f"{args.save}: {source} -> {kind}, {total / 1e9:.3f} GB in {seconds:.1f} s ({total / 1e9 / seconds:.2f} GB/s)"
    )


def export(args: argparse.Namespace, opened: Opened, kind: Format) -> None:
    """A checkpoint of a model that transformers computes, as the folder that transformers writes.

    Raises:
        ConfigError: another format is asked for, or a size of files.
    """
    if kind != "hf" or args.max_shard_size or args.upcycle or args.add_indexers:
        raise ConfigError("--load is of a model that transformers computes: it becomes a Hugging Face folder (--to hf)")
    if args.save.exists() and any(args.save.iterdir()):
        raise CheckpointError(f"{args.save} exists already: give a new name or remove it")
    from smp.hf.run.export import write_folder  # here, because other models need none of that room

    with opened.weights as weights:
        write_folder(weights, args.save, opened.reference, None if args.dtype is None else DTYPES[args.dtype])
    print(f"{args.save}: smp -> hf")


def main(argv: list[str]) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: convert(parser().parse_args(argv)), "the same command continues from here", expected=ERRORS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
