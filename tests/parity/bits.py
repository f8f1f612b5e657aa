"""Losses, gradient norms and final weights of many layouts: recorded before a change, compared bit for bit after it.

    python -m tests.parity.bits record /tmp/bits             # in the tree before
    python -m tests.parity.bits compare /tmp/bits            # in the tree after; exit code 1 when a bit differs

Parity tests say that layouts agree within a tolerance; this says that a change of the code which should not change
numbers does not. Only command lines are run and only files are read, so nothing of it depends on the package's inside.

    OUT_DIR/inputs/       models, tokenizer, samples and texts that runs start from
    OUT_DIR/cases/NAME/   what a run left: metrics, and checkpoints of its second and last step
    OUT_DIR/record.json   of each case its metrics as hexadecimal floats, and hashes of tensors and counters

Cases that resume, convert or merge start from a recorded checkpoint, also in ``compare``: what was written before is
read after. On one tree ``record`` and then ``compare`` tell whether the machine repeats itself.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.checkpoint.plain_reader import read_checkpoint
from tests.parity.bits_cases import CASES, Case
from tests.programs import run_program
from tests.training.tiny_hf import WORDS, write_model, write_samples, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("seconds ", "TFLOP/s ", "tokens/s", "peak memory ", "MFU", "goodput")
"""How names in metrics.jsonl begin that are about time and memory."""
Tensors = dict[str, np.ndarray[Any, Any]]
Result = dict[str, Any]


def write_inputs(folder: Path) -> None:
    """What runs start from; the same whenever it is written, but only written once."""
    if folder.exists():
        return
    for kind in ("llama", "gpt2"):
        write_model(folder / kind, kind)
    write_tokenizer(folder / "llama")
    write_samples(folder)
    texts = [" ".join((WORDS * 4)[i % 3 :][: 1 + i * 5 % 7]) for i in range(300)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run_case(case: Case, out: Path, folder: Path) -> None:
    """Run a case in ``folder``.

    Raises:
        RuntimeError: its program failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if case.resumed is not None:
        checkpoint = out / "cases" / case.resumed / "ck" / "iter_0000002"
        shutil.copytree(checkpoint, folder / "ck" / checkpoint.name)
        (folder / "ck" / "latest").write_text(checkpoint.name + "\n")
    done = run_program(ROOT / case.program, case.flags(out), folder, case.processes, timeout=600)
    (folder / "out.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")


def read_result(folder: Path) -> Result:
    """What is compared of a finished run."""
    checkpoints = sorted((folder / "ck").glob("iter_*"))
    counters = read_checkpoint(checkpoints[-1])[1] if checkpoints else {}
    texts = {path.name: path.read_text() for path in sorted(folder.glob("hf/config.json"))}
    return {
        "metrics": read_metrics(folder / "logs" / "metrics.jsonl"),
        "tensors": {name: hash_of(tensor) for name, tensor in read_tensors(folder).items()},
        "counters": {name: counters[name] for name in ("progress", "optimizer_steps") if name in counters} | texts,
    }


def read_tensors(folder: Path) -> Tensors:
    """Of the last checkpoint, and of a folder in Hugging Face's or peft's format."""
    checkpoints = sorted((folder / "ck").glob("iter_*"))
    tensors = read_checkpoint(checkpoints[-1])[0] if checkpoints else {}
    for path in sorted([*folder.glob("hf/*.safetensors"), *folder.glob("ck/adapter/*.safetensors")]):
        tensors |= {f"{path.parent.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return tensors


def hash_of(tensor: np.ndarray[Any, Any]) -> str:
    """Of dtype, shape and bytes."""
    return hashlib.sha256(f"{tensor.dtype}{tensor.shape}".encode() + tensor.tobytes()).hexdigest()[:16]


def read_metrics(path: Path) -> dict[str, dict[str, str]]:
    """By name and iteration, exact; none of a case that trains nothing."""
    values: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        for name in record.keys() - {"iteration"}:
            if not name.startswith(MEASURED):
                values.setdefault(name, {})[str(record["iteration"])] = float(record[name]).hex()
    return values


def largest_difference(got: Result, want: Result, name: str) -> float:
    """Of a metric, relative; infinity when it is missing somewhere."""
    a, b = got["metrics"].get(name, {}), want["metrics"].get(name, {})
    if a.keys() != b.keys():
        return float("inf")
    pairs = [(float.fromhex(a[step]), float.fromhex(b[step])) for step in b]
    return max((abs(x - y) / max(abs(y), 1e-30) for x, y in pairs), default=0.0)


def largest_tensor_difference(got: Tensors, want: Tensors) -> tuple[float, str]:
    """In the norm of each tensor, and which one that is; infinity when one is missing or has another shape."""
    worst = 0.0, ""
    for name in sorted(got.keys() | want.keys()):
        a, b = got.get(name), want.get(name)
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            return float("inf"), name
        worst = max(worst, (norm_of(a.astype("f8") - b) / max(norm_of(b), 1e-30), name))
    return worst


def norm_of(tensor: np.ndarray[Any, Any]) -> float:
    """In fp64."""
    return float(np.linalg.norm(tensor.astype("f8").ravel()))


def record(cases: list[Case], out: Path) -> int:
    """Run all and keep everything; cases that were recorded before and are not among these stay."""
    write_inputs(out / "inputs")
    path = out / "record.json"
    results, failed = json.loads(path.read_text()) if path.exists() else {}, 0
    for number, case in enumerate(cases, 1):
        started, folder = time.monotonic(), out / "cases" / case.name
        try:
            run_case(case, out, folder)
            results[case.name], said = read_result(folder), "recorded"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            results.pop(case.name, None)
            failed, said = failed + 1, str(error)
        path.write_text(json.dumps(results, indent=1))
        print(f"{number}/{len(cases)} {case.name}: {said} in {time.monotonic() - started:.1f} s", flush=True)
    return int(failed > 0)


def compare(cases: list[Case], out: Path, work: Path) -> int:
    """Run all again and print a table. Returns 1 when something differs or fails."""
    results, differing = json.loads((out / "record.json").read_text()), 0
    print("case | equal bits | loss | grad norm | other metrics | tensors | seconds", flush=True)
    for case in cases:
        started = time.monotonic()
        try:
            run_case(case, out, work / case.name)
            row = compared(work / case.name, out / "cases" / case.name, results[case.name])
        except Exception as error:  # the other cases are worth knowing, too
            row = f"no: {type(error).__name__}: {error}"
        differing += row.startswith("no")
        print(f"{case.name} | {row} | {time.monotonic() - started:.1f}", flush=True)
    print(f"{len(cases) - differing} of {len(cases)} cases have equal bits")
    return int(differing > 0)


def compared(folder: Path, recorded: Path, want: Result) -> str:
    """The cells of a case: whether all is equal, and if not how far apart it is."""
    got = read_result(folder)
    new = got["metrics"].keys() - want["metrics"].keys()
    for name in new:  # what is measured in addition differs from nothing
        del got["metrics"][name]
    if got == want:
        return "yes | 0 | 0 | 0 | 0"
    others = sorted(want["metrics"].keys() - {"lm loss", "grad norm"})
    other = max(((largest_difference(got, want, name), name) for name in others), default=(0.0, ""))
    tensor = largest_tensor_difference(read_tensors(folder), read_tensors(recorded))
    loss, norm = (f"{largest_difference(got, want, name):.1e}" for name in ("lm loss", "grad norm"))
    cells = ["no", loss, norm, f"{other[0]:.1e} {other[1]}", f"{tensor[0]:.1e} {tensor[1]}"]
    changed = [name for name, value in want["counters"].items() if got["counters"].get(name) != value]
    return " | ".join(cells) + (f" | other {', '.join(changed)}" if changed else "")


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of cases, as shell patterns")
    parser.add_argument("--work", type=Path, help="compare: where runs leave their files. Default: nowhere")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, pattern) for pattern in args.only)]
    if not cases:
        parser.error(f"no case is named {' '.join(args.only)}")
    out = args.out.resolve()
    if args.what == "record":
        return record(cases, out)
    with tempfile.TemporaryDirectory() as folder:
        return compare(cases, out, (args.work or Path(folder)).resolve())


if __name__ == "__main__":
    sys.exit(main())
