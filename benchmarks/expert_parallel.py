"""Experts spread over nodes (EP) beside experts that FSDP shards over the same processes, over a shaped network.

Steps of a small model with experts, forward and backward, by both ways in turns: seconds of the slowest process, bytes
of a node's uplink (counted by its interface), and the bytes that the formulas of docs/moe.md say, of rows that cross
and of weights and gradients. Collectives of FSDP are hierarchical, or gloo's with --flat. Which way wins depends on the
tokens of a micro-batch and the width of experts; the cases are on both sides.

    netlab run --nodes 2 --procs 2 --rate 100mbit --launcher env -- benchmarks/expert_parallel.py --rate 100
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import statistics
from typing import Any

import torch
import torch.distributed as dist
from collectives import MIB, measured

from smp.config import Layout, ModelConfig, ParallelConfig
from smp.config.resolve import resolve_model
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel import collectives
from smp.parallel.agree import gather
from smp.parallel.context import build_context
from smp.parallel.network.select_collectives import choose_collectives
from smp.sharding.parallelize import parallelize

LAYERS, HIDDEN, EXPERTS, K, VOCABULARY = 2, 256, 8, 2, 256
CASES = ((128, 768), (512, 512), (1024, 256), (2048, 64))
"""Tokens of a process, and width of an expert."""
BF16, FP32 = 2, 4


class CountedRows:
    """In place of torch's collectives: adds up the bytes that all-to-alls send to processes of other nodes."""

    def __init__(self, beyond: list[int]) -> None:
        self.ops, self.beyond, self.sent = collectives._ops, beyond, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def all_to_all_single(self, x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
        self.sent += sum(sent[rank] for rank in self.beyond) * x[:1].nbytes if len(x) else 0
        return self.ops.all_to_all_single(x, received, sent, group)


class Step:
    """A forward and a backward pass in bf16 with fp32 sums of gradients; weights sharded over all processes."""

    def __init__(self, tokens: int, width: int, ep: int, flat: bool) -> None:
        config = resolve_model(
            ModelConfig(
                num_layers=LAYERS,
                hidden_size=HIDDEN,
                num_attention_heads=4,
                vocab_size=VOCABULARY,
                num_experts=EXPERTS,
                moe_router_topk=K,
                moe_ffn_hidden_size=width,
                max_position_embeddings=tokens,
            )
        )
        world = dist.get_world_size()
        context = build_context(Layout(dp_shard=world, ep=ep), "cpu")
        if not flat:
            meshes = {"parameters": context.fsdp}
            meshes |= {"experts": context.expert_fsdp} if context.expert_fsdp is not None and ep < world else {}
            context = dataclasses.replace(context, collectives=choose_collectives(meshes, "hierarchical"))
        with torch.device("meta"):
            self.model = GPT(config, context, compute_dtype=torch.bfloat16)
        self.weights = {False: 0, True: 0}  # of experts?
        self.root = 0
        for name, parameter in self.model.named_parameters():
            self.weights[".experts." in name] += parameter.numel()
            self.root += 0 if ".layers." in f".{name}" else parameter.numel()
        parallelize(self.model, context, ParallelConfig(bf16=True))
        self.model.to_empty(device="cpu")
        init_weights(self.model, 0)
        draw = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, VOCABULARY, (1, tokens), generator=draw)
        self.batch = MicroBatch(ids, ids, loss_weights=torch.full((1, tokens), 1 / tokens / world))

    def __call__(self) -> None:
        loss = self.model(self.batch).loss
        assert loss is not None
        loss.backward()
        self.model.zero_grad()


def predicted_mib(step: Step, tokens: int, ep: int, flat: bool, nodes: int) -> tuple[float, float]:
    """What an uplink sends: rows of tokens at even loads, and weights with their gradients."""
    world = dist.get_world_size()
    here = world // nodes
    crossing = (world - here) / world if ep == world else 0.0
    rows = here * 4 * tokens * K * HIDDEN * BF16 * LAYERS * crossing
    share = (world - 1) / world if flat else (nodes - 1) / nodes
    # gloo's reduce-scatter is an all-reduce; what is in no layer is gathered once
    of_layers = 2 * BF16 + FP32 * (2 if flat else 1)
    sharded = step.weights[False] + (step.weights[True] if ep == 1 else 0)
    return rows / MIB, share * (of_layers * sharded - BF16 * step.root) / MIB


def compare(options: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    places = gather(socket.gethostname())
    nodes, world = len(set(places)), dist.get_world_size()
    beyond = [rank for rank, place in enumerate(places) if place != places[dist.get_rank()]]
    lines = [
        f"{world} processes on {nodes} nodes, uplinks of {options.rate:g} Mbit/s, {LAYERS} layers of {HIDDEN} with "
        f"{EXPERTS} experts, {K} of a token, bf16, FSDP by {'flat' if options.flat else 'hierarchical'} collectives, "
        f"median of {options.rounds} (least)",
        "",
        f"{'tokens':>6} {'width':>6} {'':<5} {'s':>6} {'':>8} {'MiB of uplink':>14} {'formula':>8} "
        f"{'rows that cross, MiB':>21} {'formula':>8}",
    ]
    for tokens, width in CASES:
        steps = {ep: Step(tokens, width, ep, options.flat) for ep in (world, 1)}
        found: dict[int, list[tuple[float, int]]] = {ep: [] for ep in steps}
        sent = dict.fromkeys(steps, 0)
        for turn in range(options.rounds + 1):
            for ep, step in steps.items():
                counted = collectives._ops = CountedRows(beyond)  # type: ignore[assignment]
                taken = measured(step)
                collectives._ops = counted.ops
                found[ep] += [taken] if turn else []
                sent[ep] = counted.sent
        for ep, values in found.items():
            crossed = sum(count for count, place in zip(gather(sent[ep]), places, strict=True) if place == places[0])
            rows, weights = predicted_mib(steps[ep], tokens, ep, options.flat, nodes)
            times = sorted(seconds for seconds, _ in values)
            uplink = statistics.median(count for _, count in values) / MIB
            lines.append(
                f"{tokens:>6} {width:>6} {f'EP {ep}' if ep > 1 else 'FSDP':<5} {statistics.median(times):>6.2f} "
                f"({times[0]:>5.2f}) {uplink:>14.2f} {rows + weights:>8.2f} {crossed / MIB:>21.2f} {rows:>8.2f}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, required=True, help="Mbit/s of an uplink, for the title")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flat", action="store_true", help="FSDP by gloo's own collectives")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = compare(options)
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
