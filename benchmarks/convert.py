"""Converting a checkpoint of a 7B model's shape: time beside ``cp`` of the same files, and peak memory.

The checkpoint is made on the spot (Llama 2 7B, bf16, random bytes, 13.5 GB; fewer layers where the disk is short, which
is said). Every entry is a whole command, from the start of Python to the last fsync, with the source dropped from the
page cache before it; ``cp`` ends with an fsync of what it wrote as well. Entries take turns.

    python benchmarks/convert.py --layers 32 --rounds 1 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from smp.checkpoint.folders.local import LocalFolder, sync_to_disk
from smp.checkpoint.format.tensor_bytes import lay_out, raw_bytes
from smp.checkpoint.format.tensor_file import write_file
from smp.convert.huggingface.config import resolved, to_hf
from smp.convert.huggingface.more_families import FAMILIES
from smp.convert.huggingface.store import INDEX
from smp.convert.layout import by_external_name, links
from smp.models.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
COPIES = 3
"""Space on the disk: the source, what a conversion made of it, and what the next one makes of that."""


@dataclass
class Entry:
    """One line of the table."""

    name: str
    seconds: list[float] = field(default_factory=list)
    peak: int = 0


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a Hugging Face folder of Llama 2 7B with so many layers."""
    config = resolved(**{**PRESETS["llama2-7b"], "num_layers": layers})
    found = by_external_name(links(FAMILIES["llama"].table, config))
    return {name: parts[0].external_shape for name, parts in found.items()}


def size_of(layers: int) -> int:
    """Bytes of the checkpoint."""
    return sum(2 * torch.Size(shape).numel() for shape in shapes(layers).values())


def layers_that_fit(folder: Path, wanted: int, copies: int = COPIES) -> int:
    """As many layers as there is room for on the disk; 0: none."""
    free = shutil.disk_usage(folder).free
    return next((n for n in range(wanted, 0, -1) if (copies + 0.3) * size_of(n) <= 0.9 * free), 0)


def make_checkpoint(folder: Path, layers: int, limit: int = 5 * 10**9) -> int:
    """Write the checkpoint, in files of 5 GB as transformers does; bytes of its largest tensor."""
    folder.mkdir()
    tensors = {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in shapes(layers).items()}
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (300 << 20,), dtype=torch.uint8, generator=generator)
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > limit:
            files.append({})
        files[-1][name] = tensor
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for number, (name, held) in enumerate(zip(names, files, strict=True)):
        layout = lay_out(held, {"format": "pt"})
        start = [(7919 * (number * 1000 + i)) % (30 << 20) for i in range(len(layout.slots))]
        data = ((s.key, raw_bytes(noise[a : a + s.size])) for s, a in zip(layout.slots, start, strict=True))
        write_file(LocalFolder(folder), name, layout, data)
    where = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size_of(layers)}, "weight_map": where}))
    config = to_hf(resolved(**{**PRESETS["llama2-7b"], "num_layers": layers}), "bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    return max(tensor.nbytes for tensor in tensors.values())


def forget(folder: Path) -> None:
    """Everything to disk, and a folder's files out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run(command: list[str]) -> tuple[float, int]:
    """Seconds of a command, and its peak resident memory in bytes."""
    started = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def copy(source: Path, target: Path) -> tuple[float, int]:
    """``cp`` of a folder, to the disk."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.rglob("*"):
        sync_to_disk(path)
    return time.perf_counter() - started, 0


def convert(source: Path, target: Path, kind: str, *flags: str) -> tuple[float, int]:
    """The command of the tools."""
    command = [sys.executable, str(ROOT / "tools/convert_checkpoint.py"), "--load", str(source), "--save", str(target)]
    return run([*command, "--to", kind, *flags])


def measure(root: Path, rounds: int) -> list[Entry]:
    """All entries, in turns."""
    hf, smp = root / "hf", root / "smp"
    entries = [
        Entry(name) for name in ("cp of the Hugging Face folder", "hf -> smp", "cp of our checkpoint", "smp -> hf")
    ]
    entries.append(Entry("hf -> megatron"))
    for _ in range(rounds):
        for entry, source, target, kind in zip(
            entries,
            (hf, hf, smp, smp, hf),
            ("copy", "smp", "copy", "back", "megatron"),
            ("", "smp", "", "hf", "megatron"),
            strict=True,
        ):
            shutil.rmtree(root / target, ignore_errors=True)
            forget(source)
            seconds, peak = convert(source, root / target, kind) if kind else copy(source, root / target)
            entry.seconds.append(seconds)
            entry.peak = max(entry.peak, peak)
            print(f"{entry.name}: {seconds:.1f} s, {peak / 1e6:.0f} MB", file=sys.stderr, flush=True)
            if target not in ("smp",):
                shutil.rmtree(root / target)
        shutil.rmtree(smp)
    return entries


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        layers = layers_that_fit(root, args.layers)
        if layers == 0:
            sys.exit(f"{root}: no room for a checkpoint and its copies")
        largest, total = make_checkpoint(root / "hf", layers), size_of(layers)
        entries = measure(root, args.rounds)
    print(f"Llama 2 7B's shape with {layers} of 32 layers, bf16: {total / 1e9:.2f} GB, medians of {args.rounds} rounds")
    print(f"{'':32s}{'s':>8s}{'GB/s':>8s}{'of cp':>8s}{'peak MB':>10s}")
    copied = {"hf": statistics.median(entries[0].seconds), "smp": statistics.median(entries[2].seconds)}
    for entry in entries:
        seconds = statistics.median(entry.seconds)
        share, peak = "", ""
        if entry.peak:
            share, peak = f"{copied[entry.name.split(' ')[0]] / seconds:.2f}", f"{entry.peak / 1e6:.0f}"
        print(f"{entry.name:32s}{seconds:8.1f}{total / 1e9 / seconds:8.2f}{share:>8s}{peak:>10s}")
    bound = 2 * largest + 10**9
    print(f"bound of the memory: 2 x the largest tensor ({largest / 1e6:.0f} MB) + 1 GB = {bound / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
