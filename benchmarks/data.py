"""The data path: preprocessing, index and next batch, with megatron-core beside where it does the same.

Preprocessing is compared with a bare loop over the tokenizer's own batch call on the same texts, already in memory, and
with megatron-core's way: a call of the tokenizer for each text, and its builder. Rounds of all entries take turns; the
table has medians of one process on one core. The limit of each figure stands beside it.

    python benchmarks/data.py           # about five minutes; --only preprocessing or --only index: less
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smp.config.schema import DataConfig
from smp.data.preprocess import Encoder, preprocess
from smp.data.tokenizers.files import HuggingFaceTokenizer, TiktokenTokenizer, load_tokenizer
from smp.data.tokenizers.tokenizer import SentencePieceTokenizer
from tools.train_tokenizer import train

ROUNDS = 5
CORPUS_BYTES = 20_000_000
DOCUMENTS, TOKENS = 1_000_000, 1_000_000_000


def corpus(folder: Path) -> tuple[Path, list[str]]:
    """The standard library's sources as .jsonl, and their texts."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(path.read_text(encoding="utf-8"))
            size += len(texts[-1])
        if size > CORPUS_BYTES:
            break
    with (folder / "corpus.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return folder / "corpus.jsonl", texts


def tokenizers_of(folder: Path, texts: list[str]) -> dict[str, tuple[Path, str | None]]:
    """One of each kind, with its pattern."""
    import base64

    import tokenizers

    sample = texts[::7]
    (folder / "sp.model").write_bytes(train(sample, 4096, "bpe", 0))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(sample, trainer)
    made.save(str(folder / "tokenizer.json"))
    characters = {c: b for b, c in bytes_to_unicode().items()}
    merged = [t for t, _ in sorted(made.get_vocab().items(), key=lambda item: item[1]) if t != "<|endoftext|>"]
    lines = [base64.b64encode(bytes(characters[c] for c in token)) + b" %d\n" % i for i, token in enumerate(merged)]
    (folder / "merges.tiktoken").write_bytes(b"".join(lines))
    return {
        "sentencepiece": (folder / "sp.model", None),
        "tokenizer.json": (folder / "tokenizer.json", None),
        "tiktoken": (folder / "merges.tiktoken", "gpt2"),
    }


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's visible character for each byte, as tokenizer.json spells them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def bare_call(path: Path, pattern: str | None) -> Callable[[list[str]], Any]:
    """The library's own call for a list of texts, on one core, its result left as it is."""
    tokenizer = load_tokenizer(path, pattern)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return lambda texts: tokenizer._processor.encode(texts, num_threads=1)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return lambda texts: tokenizer._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    assert isinstance(tokenizer, TiktokenTokenizer)
    return lambda texts: tokenizer._encoding.encode_ordinary_batch(texts, num_threads=1)


def chunks(texts: list[str]) -> Iterator[list[str]]:
    """About a megabyte at a time, as preprocessing takes them."""
    part: list[str] = []
    size = 0
    for text in texts:
        part.append(text)
        size += len(text)
        if size > 1 << 20:
            yield part
            part, size = [], 0
    if part:
        yield part


def quiet_preprocess(folder: Path, source: Path, path: Path, pattern: str | None, backend: str) -> None:
    shutil.rmtree(folder / "out.partial", ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()):
        preprocess(
            [source],
            str(folder / "out"),
            [str(folder / "out")],
            Encoder(str(path), ("text",), True, pattern, backend),
            1,
        )


def megatron_preprocess(folder: Path, source: Path, path: Path, pattern: str | None) -> None:
    """What megatron-core's tool does with a line: parse, one call of the tokenizer, a tensor, the builder."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = load_tokenizer(path, pattern)
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=np.uint16)
    with source.open() as lines:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"])
            ids.append(tokenizer.eod)
            builder.add_document(torch.IntTensor(ids), [len(ids)])
    builder.finalize(str(folder / "theirs.idx"))


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def preprocessing(folder: Path) -> None:
    source, texts = corpus(folder)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"Preprocessing {megabytes:.1f} MB of text, MB/s on one core (medians of {ROUNDS} interleaved rounds)\n")
    print(
        f"{'tokenizer':16}{'bare call':>10}{'smp':>8}{'smp / bare':>12}{'limit':>7}"
        f"{'megatron-core':>15}{'gigatoken':>11}"
    )
    for name, (path, pattern) in tokenizers_of(folder, texts).items():
        call = bare_call(path, pattern)
        entries: dict[str, Callable[[], Any]] = {
            "bare": lambda call=call: [call(part) for part in chunks(texts)],  # type: ignore[misc]
            "smp": lambda path=path, pattern=pattern: quiet_preprocess(folder, source, path, pattern, "reference"),  # type: ignore[misc]
            "megatron": lambda path=path, pattern=pattern: megatron_preprocess(folder, source, path, pattern),  # type: ignore[misc]
        }
        if name != "sentencepiece":
            entries["gigatoken"] = lambda path=path, pattern=pattern: quiet_preprocess(
                folder, source, path, pattern, "gigatoken"
            )  # type: ignore[misc]
        times: dict[str, list[float]] = {entry: [] for entry in entries}
        for entry in entries.values():
            entry()  # files, caches and imports
        for _ in range(ROUNDS):
            for entry, action in entries.items():
                times[entry].append(timed(action))
        rate = {entry: megabytes / statistics.median(values) for entry, values in times.items()}
        ratio = statistics.median([b / s for b, s in zip(times["bare"], times["smp"], strict=True)])
        fast = f"{rate['gigatoken']:11.1f}" if "gigatoken" in rate else f"{'-':>11}"
        print(f"{name:16}{rate['bare']:10.2f}{rate['smp']:8.2f}{ratio:12.3f}{'0.9':>7}{rate['megatron']:15.2f}{fast}")


def make_large(folder: Path) -> Path:
    """A million documents, a billion tokens."""
    from smp.data.indexed_dataset import publish, write_index

    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(1000) - 0.5, 1.0, DOCUMENTS).astype(np.int32), 1, None)
    lengths[0] += TOKENS - int(lengths.sum(dtype=np.int64)) if lengths.sum(dtype=np.int64) < TOKENS else 0
    block = draw.integers(0, 50_000, 1 << 22, dtype=np.uint16)
    total = int(lengths.sum(dtype=np.int64))
    with (folder / "large.bin.new").open("wb") as file:
        for start in range(0, total, len(block)):
            file.write(block[: min(len(block), total - start)].tobytes())
    write_index(folder / "large.idx.new", np.dtype("<u2"), lengths, np.arange(DOCUMENTS + 1))
    publish(folder / "large.bin.new", folder / "large.idx.new", folder / "large")
    return folder / "large"


def index(prefix: Path) -> None:
    print(f"\nIndex of {DOCUMENTS:,} documents and {TOKENS:,} tokens (uint16, sequences of 4096), a new process each\n")
    print(f"{'':42}{'seconds':>9}{'limit':>7}{'peak GB':>9}{'limit':>7}")
    entries = {
        "smp, all ids checked and contents hashed": (_smp_index, "stream"),
        "smp, best-fit packing, the same": (_smp_index, "best-fit"),
        "megatron-core GPTDataset, 1 epoch": (_megatron_index, ""),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in entries}
    for _ in range(3):
        for name, (action, how) in entries.items():
            found[name].append(in_process(action, str(prefix), how))
    for name, results in found.items():
        seconds, memory = (statistics.median(column) for column in zip(*results, strict=True))
        limits = ("5", "2") if name.startswith("smp") else ("", "")
        print(f"{name:42}{seconds:9.2f}{limits[0]:>7}{memory:9.2f}{limits[1]:>7}")
    print("peak GB: what building added to the private memory of the process (mapped files of the page cache left out)")


def in_process(action: Callable[..., Any], *arguments: str) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(action, arguments)


class Memory:
    """Largest private memory seen by a thread that looks every few milliseconds, in GB above the start."""

    def __enter__(self) -> Memory:
        import threading

        self.peak, self._first, self._done = 0.0, self._now(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    @staticmethod
    def _now() -> float:
        fields = Path("/proc/self/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize() / 1e9  # resident without shared

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, self._now() - self._first)

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def _smp_index(prefix: str, packing: str) -> tuple[float, float]:
    from smp.data.build import build_datasets

    with tempfile.TemporaryDirectory(dir=Path(prefix).parent) as cache:
        data = DataConfig(data_path=prefix, seq_length=4096, data_cache_path=cache, packing=packing, split="1,0,0")  # type: ignore[arg-type]
        with Memory() as memory:
            seconds = timed(lambda: build_datasets(data, 50_000, 1).train.sample(0))
    return seconds, memory.peak


def _megatron_index(prefix: str, how: str) -> tuple[float, float]:
    warnings.simplefilter("ignore")
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokens:
        """Enough of a tokenizer for the description of an index."""

        vocab_size, eod, pad, unique_identifiers = 50_000, 0, 0, {"class": "none"}

    with tempfile.TemporaryDirectory(dir=Path(prefix).parent) as cache, Memory() as memory:
        started = time.perf_counter()
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=4096,
            blend=([prefix], None),
            split="1,0,0",
            path_to_cache=cache,
            tokenizer=Tokens(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            mid_level_dataset_surplus=0.005,
        )
        low = IndexedDataset(prefix, mmap=True)
        dataset = GPTDataset(low, prefix, np.arange(DOCUMENTS, dtype=np.int32), TOKENS // 4096 - 1, Split.train, config)
        dataset[0]
        seconds = time.perf_counter() - started
    return seconds, memory.peak


def batches(prefix: Path) -> None:
    """What a step waits for when it asks for its batch, while it computes for 5 ms otherwise. In the third row another
    epoch begins in the middle."""
    from smp.data.build import build_datasets
    from smp.data.loader import BatchLoader

    data = DataConfig(
        data_path=str(prefix), seq_length=4096, data_cache_path=str(prefix.parent / "cache"), split="1,0,0"
    )
    train_data = build_datasets(data, 50_000, 1).train
    print("\nNext batch of 4 x 4096 tokens, milliseconds\n")
    print(f"{'':42}{'median':>9}{'99 %':>9}{'longest':>9}{'limit':>7}")
    end = train_data.samples_per_epoch
    assert end is not None
    rows = {
        "--num-workers 2": (2, 0),
        "--num-workers 0 (read when asked for)": (0, 0),
        "--num-workers 2, over the end of an epoch": (2, end - 200 * 4),
    }
    for name, (workers, start) in rows.items():
        loader = BatchLoader(
            train_data,
            micro_batch_size=4,
            batch_size=4,
            dp_rank=0,
            dp_size=1,
            num_workers=workers,
            start_sample=start,
        )
        times = []
        for _ in range(400):
            times.append(1e3 * timed(lambda loader=loader: next(loader)))  # type: ignore[misc]
            time.sleep(0.005)
        loader.close()
        limit = "1" if workers else ""
        columns = statistics.median(times), np.percentile(times, 99), max(times)
        print(f"{name:42}{columns[0]:9.3f}{columns[1]:9.3f}{columns[2]:9.3f}{limit:>7}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("preprocessing", "index"), help="one part (default: both)")
    only = parser.parse_args().only
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print("One core of the machine is used.\n")
    else:
        print("note: this system cannot hold the program to one core", file=sys.stderr)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        if only != "index":
            preprocessing(Path(name))
        if only != "preprocessing":
            prefix = make_large(Path(name))
            index(prefix)
            batches(prefix)


if __name__ == "__main__":
    main()
