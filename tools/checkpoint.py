"""Look at checkpoints, check, compare, thin out and rewrite them. Needs no GPU, no model and no process group.

    python tools/checkpoint.py ls RUN                      # checkpoints of a run; of one checkpoint its tensors
    python tools/checkpoint.py verify RUN --all            # every checksum of every checkpoint
    python tools/checkpoint.py diff RUN_A RUN_B            # tensors and settings; the layouts may differ
    python tools/checkpoint.py cat RUN "model.layers.0.mlp.up.weight[0:2,:4]"
    python tools/checkpoint.py prune RUN --keep-last-k 3 --dry-run
    python tools/checkpoint.py reshard RUN s3://bucket/copy --files 8

A path is a run's folder, which stands for its newest complete checkpoint, or one checkpoint's own folder; both may be
URLs such as s3://bucket/run. Exit code 0 means all is well; 1 damage, a difference, or work that failed on the way; 2 a
mistake in the command.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from tqdm import tqdm

from smp.checkpoint import CheckpointError, DamagedError, Manifest, find, read_manifest, verify
from smp.checkpoint.commit import OUR_FILES
from smp.checkpoint.diff import CACHED, diff_tensor
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.latest import ITERATION, LATEST, complete, misnamed, other_iteration
from smp.checkpoint.folders.lock import RunLock
from smp.checkpoint.folders.retention import VALIDATION_LOSS, Retention, doomed, prune
from smp.checkpoint.format.entries import ELEMENT_SIZES, TensorEntry
from smp.checkpoint.format.manifest import MANIFEST
from smp.checkpoint.rewrite import rewrite
from smp.checkpoint.tensor_slices import read_blocks, read_region
from smp.config.command_line.command import CommandParser, run_tool

_SHOWN_WHOLE = 1000  # elements: of more, torch prints only the first and last ones in each dimension
_EDGE = 3  # torch's: so many of them
_NUMBER = r" *(?:-?\d+)? *"
_SLICE = rf"(?: *-?\d+ *|{_NUMBER}(?::{_NUMBER})+)"
_SELECTION = re.compile(rf"(?P<name>.+?)\[(?P<slices>{_SLICE}(?:,{_SLICE})*)\]")


def opened(path: str) -> tuple[Folder, Manifest]:
    """The checkpoint that a path means. Raises CheckpointError when there is none."""
    folder = find(path)
    return folder, read_manifest(folder)


def size_of(entry: TensorEntry) -> int:
    """Bytes of a tensor."""
    return math.prod(entry.shape) * ELEMENT_SIZES[entry.dtype]


def total_size(manifest: Manifest) -> int:
    """Bytes of all tensors."""
    return sum(map(size_of, manifest.tensors.values()))


@contextmanager
def bar(size: int, what: str) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes, where somebody can see it; yields what to tell of bytes that are done.

    At the end a line tells their number and the speed, on the error output as the bar.
    """
    started, done = time.perf_counter(), 0
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, unit_divisor=1000, disable=None) as shown:

        def tell(count: int) -> None:
            nonlocal done
            done += count
            shown.update(count)

        yield tell
    seconds = time.perf_counter() - started
    print(f"{what}: {done / 1e9:.3f} GB in {seconds:.2f} s, {done / 1e9 / seconds:.2f} GB/s", file=sys.stderr)


def ls(args: argparse.Namespace) -> int:
    """A run's checkpoints, or a checkpoint's tensors. One that is damaged so that it cannot be listed is damage."""
    folder = open_folder(args.path)
    rows = _tensors(read_manifest(folder)) if folder.size(MANIFEST) is not None else _checkpoints(folder)
    if not rows:
        raise CheckpointError(f"{folder} holds no checkpoint")
    damaged = int(any(str(row.get("state")).startswith("damaged") for row in rows))
    if args.json:
        print(json.dumps(rows, indent=1))
        return damaged
    table = [{key: key for key in rows[0]}, *({key: _cell(value) for key, value in row.items()} for row in rows)]
    widths = {key: max(len(row[key]) for row in table) for key in rows[0]}
    for row in table:
        print("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip())
    return damaged


def _cell(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _checkpoints(root: Folder) -> list[dict[str, object]]:
    newest = root.read(LATEST).decode().strip() if root.size(LATEST) is not None else ""
    whole, rows = set(complete(root)), []
    for name in (name for name in root.names() if name.removeprefix("damaged_").startswith("iter_")):
        row: dict[str, object] = {"checkpoint": name, "state": "incomplete", "bytes": "", "tensors": "", "files": ""}
        row |= {"processes": "", "validation loss": ""}
        if name in whole:
            try:
                manifest = read_manifest(root.child(name))
                loss = manifest.extra.get(VALIDATION_LOSS)
                row |= {"state": "latest" if name == newest else "complete", "bytes": total_size(manifest)}
                row |= {"tensors": len(manifest.tensors), "files": len(manifest.files)}
                row |= {"processes": manifest.extra.get("world_size", ""), "validation loss": loss or ""}
            except DamagedError as error:
                row["state"] = f"damaged: {error}"
            except CheckpointError as error:
                row["state"] = f"not readable: {error}"
        elif not ITERATION.fullmatch(name):
            row["state"] = "set aside"
        rows.append(row)
    return rows


def _tensors(manifest: Manifest) -> list[dict[str, object]]:
    return [
        {"tensor": name, "dtype": e.dtype, "shape": e.shape, "shards": len(e.shards), "bytes": size_of(e)}
        for name, e in manifest.tensors.items()
    ]


def check(args: argparse.Namespace) -> int:
    """Every checksum of one checkpoint, or with --all of every complete one of a run."""
    root = open_folder(args.path)
    if args.all and root.size(MANIFEST) is not None:
        raise CheckpointError(f"{root} is one checkpoint: --all is for the folder of a run")
    folders = [root.child(name) for name in complete(root)] if args.all else [find(root)]
    if not folders:
        raise CheckpointError(f"{root} holds no complete checkpoint")
    damaged = False
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            with bar(total_size(manifest), folder.name) as shown:
                wrong = verify(folder, manifest, shown, args.workers)
            wrong += [line for line in [misnamed(folder, manifest.extra)] if line is not None]
        except DamagedError as error:
            wrong = [str(error)]
        for line in wrong or [f"{folder}: whole"]:
            print(line)
        damaged |= bool(wrong)
    return int(damaged)


def diff(args: argparse.Namespace) -> int:
    """Tensors and settings of two checkpoints."""
    a, b = opened(args.a), opened(args.b)
    lines = [f"only in {a[0]}: {name}" for name in a[1].tensors if name not in b[1].tensors]
    lines += [f"only in {b[0]}: {name}" for name in b[1].tensors if name not in a[1].tensors]
    common = [name for name in a[1].tensors if name in b[1].tensors]
    with bar(sum(size_of(a[1].tensors[name]) for name in common), "comparing") as shown:
        for name in common:
            left, right = a[1].tensors[name], b[1].tensors[name]
            if (left.shape, left.dtype) != (right.shape, right.dtype):
                lines.append(f"{name}: {left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}")
            elif not (found := diff_tensor(a, b, name, shown)).within(args.atol, args.rtol):
                lines.append(f"{name}: largest difference {found.largest:.3g}, relative {found.relative:.3g}")
    told = [*lines, *_changed(a[1].extra, b[1].extra)]  # which is no reason to call two checkpoints different
    if not lines:
        told.append(f"{'within tolerance' if args.atol or args.rtol else 'equal'}: {len(common)} tensors")
    print("\n".join(told))
    return int(bool(lines))


def _changed(a: object, b: object, path: str = "extra") -> list[str]:
    """What differs in the free part of the manifests."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        return [line for key in keys for line in _changed(a.get(key), b.get(key), f"{path} {key}")]
    return [] if a == b else [f"{path}: {a} and {b}"]


def cat(args: argparse.Namespace) -> int:
    """A tensor, or the free part of the manifest."""
    folder, manifest = opened(args.path)
    if args.tensor is None:
        print(json.dumps(manifest.extra, indent=1))
        return 0
    name, slices = args.tensor, None
    if name not in manifest.tensors and (match := _SELECTION.fullmatch(name)) is not None:
        name, slices = match["name"], match["slices"]
    if name not in manifest.tensors:
        raise CheckpointError(f"{folder} has no tensor {name!r}; ls shows their names, w[0:4,:8,3] selects of one")
    entry = manifest.tensors[name]
    offsets, sizes = _region(slices, entry.shape)
    blocks = read_blocks(folder, manifest, name, offsets, sizes)
    told = _statistics(block for _, block in blocks) if 0 not in sizes else []
    print(f"{name}: {entry.dtype} {list(entry.shape)}" + (f", shown {list(sizes)}" if slices else ""), *told, sep="\n")
    cut = math.prod(sizes) > _SHOWN_WHOLE
    torch.set_printoptions(precision=6, linewidth=120, threshold=0 if cut else _SHOWN_WHOLE)
    read = partial(read_region, folder, manifest, name)
    print(_corners(read, offsets, sizes) if cut else read(offsets, sizes))
    return 0


def _statistics(blocks: Iterable[torch.Tensor]) -> list[str]:
    """Lines about the elements of a tensor, which comes in blocks, in double precision."""
    count = nan = infinite = 0
    low, high = torch.tensor(math.inf).double(), torch.tensor(-math.inf).double()
    total = squares = 0.0
    for part in (part for block in blocks for part in block.reshape(-1).split(CACHED)):
        numbers = part.double()
        count += len(numbers)
        nan += int(numbers.isnan().sum())
        infinite += int(numbers.isinf().sum())
        low = torch.minimum(low, numbers.min())  # NaN, when an element is
        high = torch.maximum(high, numbers.max())
        total += numbers.sum().item()
        squares += numbers.square().sum().item()
    line = f"min {low:.6g}  max {high:.6g}  mean {total / count:.6g}  norm {math.sqrt(squares):.6g}"
    return [line, f"NaN {nan}  infinite {infinite}"]


def _corners(
    read: Callable[[list[int], list[int]], torch.Tensor], offsets: list[int], sizes: list[int], dim: int = 0
) -> torch.Tensor:
    """A small tensor that torch prints like the large one: the first and last elements of every dimension, and between
    them something that is not printed."""
    if dim == len(sizes):
        return read(offsets, sizes)
    if sizes[dim] <= 2 * _EDGE + 1:
        return _corners(read, offsets, sizes, dim + 1)
    ends = []
    for at in (offsets[dim], offsets[dim] + sizes[dim] - _EDGE):
        edge = [*offsets[:dim], at, *offsets[dim + 1 :]], [*sizes[:dim], _EDGE, *sizes[dim + 1 :]]
        ends.append(_corners(read, *edge, dim + 1))
    return torch.cat([ends[0], ends[0].narrow(dim, 0, 1), ends[1]], dim)


def _region(text: str | None, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Offsets and sizes of a selection such as ``0:4,:8,3``; a single number keeps its dimension, with size 1.

    Raises:
        CheckpointError: more slices than dimensions, steps, or a single number that is not in its dimension.
    """
    words = [] if text is None else text.split(",")
    if len(words) > len(shape) or any(word.count(":") > 1 for word in words):
        raise CheckpointError(f"[{text}] does not select from a tensor of shape {list(shape)}")
    ranges = []
    for word, size in zip([*words, *[":"] * (len(shape) - len(words))], shape, strict=True):
        first, colon, last = word.strip().partition(":")
        if not colon and not -size <= int(first) < size:
            raise CheckpointError(f"[{text}]: there is no {first} in a dimension of size {size}")
        if not colon:
            last = str(int(first) + 1) if first != "-1" else ""
        ranges.append(range(size)[slice(int(first) if first else None, int(last) if last else None)])
    return [r.start for r in ranges], [len(r) for r in ranges]


def thin_out(args: argparse.Namespace) -> int:
    """Delete checkpoints that no rule keeps."""
    root = open_folder(args.path)
    if not root.exists() or root.size(MANIFEST) is not None:
        raise CheckpointError(f"{root} is not the folder of a run, which holds checkpoints")
    keep = Retention(args.keep_last_k, args.save_retain_interval, args.keep_best_k)
    lock = None if args.dry_run else RunLock(root, print)
    try:
        names = doomed(root, keep, print)
        freed = sum(_held(root.child(name)) for name in names)
        if lock is not None:
            names = prune(root, keep)
    finally:
        if lock is not None:
            lock.release()
    for name in names:
        print(f"{'would remove' if args.dry_run else 'removed'} {root.child(name)}")
    left = [name for name in complete(root) if name not in names]
    print(f"{len(names)} checkpoints, {freed / 1e9:.3f} GB; {', '.join(left) or 'none'} left")
    return 0


def _held(folder: Folder) -> int:
    """Bytes of the files in a folder, whatever they are."""
    return sum(folder.size(name) or 0 for name in folder.names())


def reshard(args: argparse.Namespace) -> int:
    """The same checkpoint in another number of files, or in other storage."""
    folder, manifest = opened(args.path)
    target = open_folder(args.target)
    if (held := other_iteration(target, manifest.extra)) is not None:
        raise CheckpointError(
            f"{target} would hold iteration {held}: give the copy that one's name, or none of an iteration"
        )
    with bar(total_size(manifest), "rewriting") as shown:
        written = rewrite(folder, target, args.files, shown)
    print(f"{len(written.files)} files with {total_size(written) / 1e9:.3f} GB in {target}")
    if others := [n for n in folder.names() if n not in manifest.files and not OUR_FILES.fullmatch(n)]:
        print(f"not copied, because it is no part of the checkpoint: {', '.join(others)}")
    return 0


def parser() -> CommandParser:
    """The command line."""
    top = CommandParser(description=__doc__)
    commands = top.add_subparsers(required=True, metavar="ls | verify | diff | cat | prune | reshard")

    def command(name: str, run: object, *paths: str) -> CommandParser:
        made = commands.add_parser(name, help=str(run.__doc__))
        for path in paths:
            made.add_argument(path)
        made.set_defaults(run=run)
        return made

    command("ls", ls, "path").add_argument("--json", action="store_true", help="print JSON")
    made = command("verify", check, "path")
    made.add_argument("--all", action="store_true", help="every complete checkpoint of a run")
    made.add_argument("--workers", type=_positive, default=1, help="files read at the same time")
    made = command("diff", diff, "a", "b")
    made.add_argument("--atol", type=_tolerance, default=0.0, help="largest difference of an element that may pass")
    made.add_argument("--rtol", type=_tolerance, default=0.0, help="largest relative difference of a tensor that may")
    command("cat", cat, "path").add_argument("tensor", nargs="?", help="name, with a selection such as [0:4,:8]")
    made = command("prune", thin_out, "path")
    made.add_argument("--keep-last-k", type=int, required=True, help="newest checkpoints that stay, at least 2")
    made.add_argument("--save-retain-interval", type=_positive, help="keep iterations that are a multiple")
    made.add_argument("--keep-best-k", type=_positive, help="keep so many with the lowest validation loss")
    made.add_argument("--dry-run", action="store_true", help="only say what would go")
    command("reshard", reshard, "path", "target").add_argument("--files", type=_positive, default=1, help="data files")
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not value >= 0:  # NaN is not either
        raise argparse.ArgumentTypeError(f"{text} is not 0 or above")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code, see :mod:`smp.config.command_line.command`."""

    def work() -> int:
        args = parser().parse_args(argv)
        torch.set_printoptions(precision=6, linewidth=120)
        return int(args.run(args))

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
