"""Batched generation of a small Llama beside ``transformers.generate`` with the same weights, in turns.

    python benchmarks/generation.py                  # one thread, fp32 and bf16
    python benchmarks/generation.py --threads 2

Tokens per second of wall time (medians over rounds) and of processor time (fastest round: waiting for a busy machine
does not count). Both sample with temperature 1 from all tokens. The limit is that of the matrix products alone: all
weights that a token is multiplied with, measured by themselves at the batch size. A training step of the same model
(forward and backward) says what rate of arithmetic the processor reaches where it does not wait for memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from benchmarks.timing import Report
from smp.convert.formats import open_checkpoint
from smp.generation import Generator, Request, Sampling
from smp.models.micro_batch import MicroBatch
from smp.models.protocol import Model
from smp.training.texts.text_model import alone, load_model

CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
PROMPT = 16


def seconds(run: Callable[[], int], expected: int) -> tuple[float, float]:
    """(wall time, processor time) of a call, which says how many tokens it wrote."""
    gc.collect()
    start = time.perf_counter(), time.process_time()
    count = run()
    assert count == expected, (count, expected)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def products(dtype: torch.dtype, batch: int) -> Callable[[], int]:
    """Every matrix product of one token for each text of a batch, without anything in between."""
    hidden, width, layers = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_hidden_layers
    shapes = [(hidden, hidden)] * 4 + [(width, hidden)] * 2 + [(hidden, width)]
    weights = [torch.randn(shape).to(dtype) for _ in range(layers) for shape in shapes]
    weights.append(torch.randn(CONFIG.vocab_size, hidden).to(dtype))
    inputs = {n: torch.randn(batch, n).to(dtype) for n in (hidden, width)}

    def run() -> int:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        return batch

    return run


MATRICES = CONFIG.num_hidden_layers * (
    4 * CONFIG.hidden_size**2 + 3 * CONFIG.hidden_size * CONFIG.intermediate_size
) + (CONFIG.hidden_size * CONFIG.vocab_size)
"""Weights that a token is multiplied with."""
STEP = (4, 256)
"""Sequences and tokens of a training step."""


def training_step(model: Model) -> int:
    """Forward and backward; how many tokens."""
    ids = torch.randint(3, CONFIG.vocab_size, STEP)
    weights = torch.full(STEP, 1.0 / ids.numel())
    loss = model(MicroBatch(ids, labels=ids.roll(-1, 1), loss_weights=weights)).loss
    assert loss is not None
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return ids.numel()


def measure(report: Report, dtype: torch.dtype, args: argparse.Namespace) -> None:
    """The table of one dtype."""
    prompts = torch.randint(3, CONFIG.vocab_size, (args.batch, PROMPT), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        model = load_model(open_checkpoint(Path(folder)), torch.device("cpu"), dtype)
    theirs.generation_config.eos_token_id = None
    requests = [Request(prompt, args.new, index) for index, prompt in enumerate(prompts.tolist())]
    options = {"max_new_tokens": args.new, "do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}

    def ours() -> int:
        found = Generator(model, batch_size=args.batch).write(requests, Sampling(1.0, 0))
        return sum(len(text.ids) for text in found)

    def others() -> int:
        written: torch.Tensor = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        return int(written[:, PROMPT:].numel())

    steps, total = products(dtype, args.batch), args.batch * args.new

    def limit() -> int:
        return sum(steps() for _ in range(args.new))

    step = STEP[0] * STEP[1]
    runs = {"transformers.generate": (others, total), "smp": (ours, total), "matrix products alone": (limit, total)}
    runs |= {"training step": (lambda: training_step(model), step)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(args.rounds + 1):
        for name, (run, count) in runs.items():
            found = seconds(run, count)
            if turn:  # the first is a warm-up
                times[name].append(found)
    report.say(f"\n{args.batch} texts x {args.new} new tokens behind {PROMPT}, {str(dtype).removeprefix('torch.')}")
    report.say(f"  {'':24} {'tokens/s, wall time':>20} {'tokens/s, processor time':>26} {'matrices':>13}")
    first = [statistics.median(w for w, _ in times["transformers.generate"])]
    first.append(min(p for _, p in times["transformers.generate"]))
    for name, found in times.items():
        wall, busy = statistics.median(w for w, _ in found), min(p for _, p in found)
        trains = name == "training step"
        count, work = (step, 6) if trains else (total, 2)
        rates = f"{count / wall:12.0f} {'' if trains else f'{first[0] / wall:6.2f} x':8}"
        ours_of = "" if trains else f"{first[1] / busy:6.2f} x"
        # Of one thread, attention not counted: the same for all rows.
        arithmetic = work * MATRICES * count / busy / 1e9
        report.say(f"  {name:24} {rates} {args.threads * count / busy:16.0f} {ours_of:8} {arithmetic:6.0f} GFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    report = Report("generation" if args.threads == 1 else f"generation_{args.threads}_threads", "cpu")
    with alone(torch.device("cpu")):
        for dtype in args.dtypes:
            measure(report, getattr(torch, dtype), args)


if __name__ == "__main__":
    main()
