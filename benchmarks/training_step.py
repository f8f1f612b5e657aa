"""Tokens per second of one training step on a CPU: smp beside transformers, and two-way tensor parallelism beside none.

Every entry trains the same model (same sizes, batch, fp32 master weights and fused AdamW). Entries take turns, one step
each, so that whatever else the machine does hits all of them. Reported are medians.

Beside transformers each program has a process of its own: a run of smp asks the C library to keep freed memory
(``smp/training/host_memory.py``), a script with transformers does not. ``--same-memory`` asks it for both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from smp.config import Config, Layout, ModelConfig, ParallelConfig
from smp.kernels.copier import copier_of
from smp.layers import Normal
from smp.layers.fp8.apply import fp8_history
from smp.models.arithmetic import training_flops_per_token
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.optim.optimizer import build_optimizer, clip_gradients
from smp.parallel.context import ParallelContext, build_context
from smp.parallel.node_group import NAME
from smp.sharding.offload import offload_of
from smp.sharding.parallelize import parallelize
from smp.training.build import RunSetup, assemble, choose_backends
from smp.training.host_memory import keep_freed_memory

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=64,
    vocab_size=32_000,
    max_position_embeddings=512,
)
Step = Callable[[], torch.Tensor]
"""One training step; the loss, which may still be on its way."""


@dataclass(frozen=True)
class Work:
    """What every entry of a table trains."""

    model: ModelConfig
    batch: int
    length: int
    device: str

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.length

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random tokens and labels, (batch, length) each."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.length + 1)
        tokens = torch.randint(0, self.model.vocab_size or 0, shape, generator=generator).to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def micro_batch(self) -> MicroBatch:
        """The same, with the weights of a mean loss."""
        tokens, labels = self.data()
        return MicroBatch(tokens, labels, torch.full(labels.shape, 1.0 / labels.numel(), device=self.device))


ON_CPU = Work(MODEL, batch=4, length=512, device="cpu")


@dataclass
class Entry:
    """One row of the table: a step function and the seconds it took."""

    name: str
    step: Step
    threads: int
    seconds: list[float]


def smp_model(
    work: Work, context: ParallelContext, backends: dict[str, Any] | None = None, **parallel: Any
) -> tuple[GPT, RunSetup, Config]:
    """Our model as a run builds it, with settings ``parallel``, but for the numbers of its weights; ``backends`` are of
    operations that get another one than --kernels gives them."""
    config = Config(model=work.model, parallel=ParallelConfig(**parallel))
    config.data.seq_length, device = work.length, torch.device(work.device)
    context = replace(context, sequence_parallel=config.parallel.sequence_parallel)
    kernels, _ = choose_backends(config, context, device, documents=False)
    kernels = replace(kernels, **(backends or {}))
    setup = RunSetup(context, device, kernels, offload=offload_of(config.parallel, copier_of(device)))
    model = assemble(config, setup)
    parallelize(model, context, config.parallel, setup.offload)
    model.to_empty(device=work.device)
    draw_weights(model)
    return model, setup, config


def smp_step(work: Work, context: ParallelContext, **parallel: Any) -> Step:
    """A training step of our model without data parallelism: loss, backward, clip, AdamW."""
    model, setup, config = smp_model(work, context, **parallel)
    optimizer = build_optimizer(model, config.optim, setup.context.fsdp)
    history, micro_batch = fp8_history(model), work.micro_batch()

    def step() -> torch.Tensor:
        loss = model(micro_batch).loss
        loss.backward()
        norm = clip_gradients(model.parameters(), 1.0, context.tp.get_group())
        if history is not None:
            norm = history.checked(norm)
        optimizer.step()
        optimizer.zero_grad()
        if history is not None:
            history.advance(norm.isfinite())
        return loss.detach()

    return step


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """First values of the right size, drawn where the weights are. (``init_weights`` draws the same bits for every
    layout, on one core of the host: minutes for billions.)"""
    for module in model.modules():
        for name, initializer in getattr(module, "initializers", {}).items():
            if (parameter := getattr(module, name, None)) is None:
                continue
            data = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if isinstance(initializer, Normal):
                data.normal_(std=initializer.std)
            else:
                data.fill_(initializer.value)


def transformers_step(
    work: Work, bf16: bool, *, compiled: bool = False, change: Callable[[torch.nn.Module], object] = lambda model: None
) -> Step:
    """The same step by transformers' Llama, SDPA attention, autocast for bf16; ``change`` is done to the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = work.model
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_query_groups,
        max_position_embeddings=sizes.max_position_embeddings,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float().to(work.device).train()
    change(model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    tokens, labels = work.data()
    run = torch.compile(model) if compiled else model

    def step() -> torch.Tensor:
        with torch.autocast(work.device, torch.bfloat16, enabled=bf16):
            loss = run(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def interleave(entries: list[Entry], rounds: int) -> None:
    """Let the entries take turns: a warm-up step each, then ``rounds`` timed ones."""
    for turn in range(rounds + 1):
        for entry in entries:
            torch.set_num_threads(entry.threads)
            if dist.get_world_size() > 1:
                dist.barrier()
            started = time.perf_counter()
            entry.step().item()
            if turn:
                entry.seconds.append(time.perf_counter() - started)


def show(title: str, work: Work, entries: list[Entry]) -> None:
    """Print tokens per second, model FLOP/s and the ratio to the first entry, from the medians."""
    print(title)
    first = statistics.median(entries[0].seconds)
    flops = training_flops_per_token(work.model, work.length, work.model.vocab_size or 0)
    for entry in entries:
        median = statistics.median(entry.seconds)
        spread = f"{min(entry.seconds):.3f}-{max(entry.seconds):.3f} s"
        rate = f"{work.tokens / median:9.0f} tokens/s {work.tokens * flops / median / 1e12:8.3f} TFLOP/s"
        print(f"  {entry.name:32s} {rate}  {first / median:.3f} x   ({spread})", flush=True)


def product_limit(rows: int, inner: int, columns: int, dtype: torch.dtype, rounds: int = 7) -> float:
    """FLOP/s of one matrix product into memory that is there: what no training step can exceed."""
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / statistics.median(seconds)


def theirs(bf16: bool) -> dict[str, Step]:
    """Transformers' rows."""
    return {
        "transformers": transformers_step(ON_CPU, bf16),
        "transformers, compiled": transformers_step(ON_CPU, bf16, compiled=True),
    }


def ours(bf16: bool) -> dict[str, Step]:
    """Rows of smp."""
    context = build_context(Layout(), "cpu")
    return {
        "smp": smp_step(ON_CPU, context, bf16=bf16),
        "smp --compile": smp_step(ON_CPU, context, bf16=bf16, compile=True),
    }


def work_for(turns: Connection, build: Callable[[bool], dict[str, Step]], keeps: bool, bf16: bool) -> None:
    """A process's part: a step of the row that ``turns`` names, until it names none."""
    if keeps:
        keep_freed_memory()
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = build(bf16)
    turns.send(list(rows))
    while name := turns.recv():
        turns.send(rows[name]().item())
    dist.destroy_process_group()


@contextmanager
def in_a_process(build: Callable[[bool], dict[str, Step]], keeps: bool, bf16: bool) -> Iterator[list[Entry]]:
    """The rows of another process as entries here."""
    here, there = Pipe()
    process = get_context("spawn").Process(target=work_for, args=(there, build, keeps, bf16))
    process.start()

    def turn(name: str) -> torch.Tensor:
        here.send(name)
        return torch.tensor(here.recv())

    try:
        yield [Entry(name, partial(turn, name), 2, []) for name in here.recv()]
    finally:
        here.send(None)
        process.join()


def beside_transformers(rounds: int, dtypes: Sequence[str], same_memory: bool) -> None:
    """Two threads: transformers, and ours; each compiled and not."""
    for name in dtypes:
        bf16 = name == "bf16"
        with in_a_process(theirs, same_memory, bf16) as others, in_a_process(ours, True, bf16) as own:
            entries = [*others, *own]
            interleave(entries, rounds)
            show(f"one step, {name}{', freed memory kept by both' * same_memory}", ON_CPU, entries)
        torch.set_num_threads(2)
        limit = product_limit(2048, 512, 1536, torch.bfloat16 if bf16 else torch.float32)
        print(f"  limit: {limit / 1e12:.3f} TFLOP/s, the product 2048 x 512 x 1536 alone")


def beside_one_process(rounds: int) -> None:
    """Two processes with a thread each, through memory and over gloo, beside rank 0 alone with two threads: tensor and
    sequence parallelism, and FSDP of half of the batch each."""
    context = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("copy", "dp_shard", "tp"))
    alone = ParallelContext(tp=context["tp"], fsdp=context["dp_shard"])
    single = smp_step(ON_CPU, alone) if dist.get_rank() == 0 else _nothing
    entries = [Entry("smp TP=1", single, 2, [])]
    half = replace(ON_CPU, batch=ON_CPU.batch // 2)
    for backend in (NAME, "gloo"):
        tp, fsdp = (
            build_context(layout, "cpu", backend=_always(backend)) for layout in (Layout(tp=2), Layout(dp_shard=2))
        )
        entries += [
            Entry(f"TP=2 --sequence-parallel, {backend}", smp_step(ON_CPU, tp, sequence_parallel=True), 1, []),
            Entry(f"FSDP over 2, {backend}", smp_step(half, fsdp), 1, []),
        ]
    interleave(entries, rounds)
    if dist.get_rank() == 0:
        show("one step, fp32, two cores", ON_CPU, entries)


def _always(backend: str) -> Callable[[Sequence[int]], str]:
    """The same backend for every group."""
    return lambda ranks: backend


def _nothing() -> torch.Tensor:
    """The other rank waits at the next barrier while rank 0 works alone."""
    return torch.zeros(())


def main() -> None:
    """Under plain python the comparison with transformers, under torchrun with 2 processes that with TP."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each entry")
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--same-memory", action="store_true", help="transformers' process keeps freed memory, too")
    args = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    dist.init_process_group("gloo", store=None if world > 1 else dist.HashStore(), rank=rank, world_size=world)
    if world == 1:
        beside_transformers(args.rounds, args.dtypes, args.same_memory)
    else:
        keep_freed_memory()
        beside_one_process(args.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
