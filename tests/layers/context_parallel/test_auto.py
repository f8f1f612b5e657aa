"""The model by which --cp-comm-type auto chooses, and bytes by formula beside bytes on the wire."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from smp.config import load_config, resolve
from smp.config.layers import layer_specs
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.dispatch import Kernels
from smp.kernels.sequence_cut import cut_sequences
from smp.kernels.token_layout import TokenLayout
from smp.layers import context_parallel_attention
from smp.layers.context_parallel.auto import CPU, H100, Seen, attention_flops, choose_comm_type
from smp.layers.context_parallel.cost import Exchanged, bytes_sent
from smp.layers.context_parallel.states import states_plan
from smp.parallel import collectives
from smp.training import build
from smp.training.exchange import exchange_of, recurrence_bytes, recurrence_exchange
from tests.distributed import run_distributed
from tests.layers.context_parallel.plain import Case
from tests.layers.context_parallel.test_methods import mesh_of, methods_of

ALL = Seen()
LLAMA = Exchanged(tokens=131072 // 8, heads=32, groups=8, head_dim=128, element=2, cp=8)


class Wire:
    """Stands for the collectives' operators and adds the bytes that leave this rank."""

    def __init__(self, operators: Any, rank: int) -> None:
        self.operators, self.rank, self.sent = operators, rank, 0
        self.shift = collectives._start_to_and_from

    def all_gather_into_tensor(self, x: torch.Tensor, size: int, name: str) -> torch.Tensor:
        self.sent += (size - 1) * x.numel() * x.element_size()
        return self.operators.all_gather_into_tensor(x, size, name)

    def reduce_scatter_tensor(self, x: torch.Tensor, op: str, size: int, name: str) -> torch.Tensor:
        self.sent += (size - 1) * x.numel() * x.element_size() // size
        return self.operators.reduce_scatter_tensor(x, op, size, name)

    def all_to_all_single(self, x: torch.Tensor, out: list[int], into: list[int], name: str) -> torch.Tensor:
        own = into[_rank_in(name, self.rank)]  # stays
        self.sent += (sum(into) - own) * x[0].numel() * x.element_size()
        return self.operators.all_to_all_single(x, out, into, name)

    def start_to_and_from(self, x: torch.Tensor, *ends: Any) -> torch.Tensor:
        self.sent += x.numel() * x.element_size()
        return self.shift(x, *ends)

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.wait_tensor(x)


def _rank_in(name: str, rank: int) -> int:
    """This rank's index in a group."""
    return c10d.get_group_rank(c10d._resolve_process_group(name), rank)


def wire(rank: int, ranks: int) -> dict[tuple[str, int, str], list[tuple[int, int]]]:
    """(formula, counted) of the forward and of the backward pass."""
    found = {}
    operators = collectives._ops
    for method in methods_of(ranks):
        core = context_parallel_attention(FusedAttention(), mesh_of(method, ranks), method)
        for groups in (12, 4, 1):
            for dtype in (torch.float32, torch.bfloat16):
                case = Case(96, 12, groups)
                rows = case.rows(case.cut(ranks), rank)
                given = [x[rows].requires_grad_() for x in case.tensors(dtype)]
                layout = TokenLayout(case.batch, case.length // ranks, cut=case.cut(ranks))
                layout = core.prepare(layout, [case.spec], dtype, torch.device("cpu"))
                counter = collectives._ops = Wire(operators, rank)
                collectives._start_to_and_from = counter.start_to_and_from
                out, _ = core(*given[:3], layout, case.spec)
                forward = counter.sent
                out.sum().backward()
                collectives._ops, collectives._start_to_and_from = operators, counter.shift
                sizes = Exchanged(len(rows), 12, groups, case.width, dtype.itemsize, ranks, 2)
                formula = bytes_sent(method, sizes)
                counted = forward, counter.sent - forward
                found[method, groups, str(dtype)] = list(zip(formula, counted, strict=True))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_on_the_wire_are_those_of_the_formula(ranks: int) -> None:
    for part in run_distributed(wire, ranks):
        assert len(part) == len(methods_of(ranks)) * 6
        for key, pairs in part.items():
            assert all(formula == counted > 0 for formula, counted in pairs), (key, pairs)


def test_flops_are_those_of_the_pairs_that_are_seen() -> None:
    sizes = Exchanged(tokens=64, heads=2, groups=1, head_dim=8, element=2, cp=4)
    for window, ids, document in ((None, None, None), (10, None, None), (None, [64] * 4, 64), (10, [64] * 4, 64)):
        documents = None if ids is None else torch.arange(4).repeat_interleave(64)[None]
        pairs = Case(256, 2, 1, documents, batch=1).cut(4).work(window).double().mean()
        flops = attention_flops(sizes, 256, Seen(window, document))
        assert flops == pytest.approx(4 * 8 * 2 * float(pairs))


def chosen(of: Exchanged, seen: Seen = ALL, length: int = 131072, machine: Any = H100, **options: Any) -> str:
    return choose_comm_type(of, length, machine, {seen: 1}, **options).best.kind


def test_the_choice_follows_heads_links_windows_and_documents() -> None:
    assert chosen(LLAMA) in ("p2p", "all_gather")  # hidden behind 131,072 tokens
    assert chosen(LLAMA, Seen(1024)) == "a2a+p2p"  # little to hide behind: few bytes, part of them hidden
    assert chosen(LLAMA, Seen(16)) == "a2a"  # nothing to hide behind: fewest bytes
    odd = replace(LLAMA, heads=12, groups=12)
    assert chosen(odd, Seen(1024)) == "a2a+p2p"  # 8 ranks cannot share 12 heads, 4 can
    assert chosen(replace(LLAMA, heads=9, groups=9), Seen(9)) != "a2a"
    many = chosen(replace(LLAMA, tokens=2048), Seen(document=64), 16384, CPU)
    assert many == "a2a"  # one call for all documents
    assert chosen(LLAMA, Seen(document=4096), whole_only=True) == "a2a"
    with pytest.raises(ValueError, match="nothing takes documents under torch.compile"):
        choose_comm_type(odd, 131072, H100, {Seen(document=4096): 1}, whole_only=True)


def test_a_mean_over_layers_decides() -> None:
    """Some layers with chunks and some that see all, as Llama 4 has them: costs are those of each, by their number."""
    whole, chunks = Seen(), Seen(document=1024)
    each = {seen: choose_comm_type(LLAMA, 131072, H100, {seen: 1}) for seen in (whole, chunks)}
    mixed = choose_comm_type(LLAMA, 131072, H100, {whole: 2, chunks: 2})
    assert (each[whole].best.kind, each[chunks].best.kind) == ("p2p", "a2a") and mixed.best.kind == "a2a+p2p"
    assert mixed.lines[0].startswith("context parallelism of 8, the mean layer: ")
    times = {seen: float(choice.lines[0].split(": ")[1].split()[0]) for seen, choice in (*each.items(), (None, mixed))}
    assert times[None] == pytest.approx((times[whole] + times[chunks]) / 2, rel=0.01)
    assert mixed.best.sent == sum(bytes_sent("a2a+p2p", replace(LLAMA, heads_group=mixed.best.heads_group)))


LONG = (
    "--mock-data --vocab-size 1000 --train-iters 1 --bf16 --num-layers 4 --hidden-size 4096 --num-attention-heads 32 "
    "--num-query-groups 8 --seq-length 131072 --max-position-embeddings 131072 --context-parallel-size 8 "
)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "p2p"),
        ("--attention-chunk-size 1024", "a2a"),
        ("--attention-chunk-size 131072", "p2p"),
        ("--attention-chunk-size 1024 --no-rope-freq 2", "a2a+p2p"),
        ("--attention-chunk-size 1024 --no-rope-freq [1,1,0,1] --mtp-num-layers 1", "p2p"),
        ("--attention-chunk-size 1024 --no-rope-freq [1,1,1,0] --mtp-num-layers 1", "a2a+p2p"),  # made as the last
        ("--window-size 16", "a2a"),
        ("--window-size 16 --window-attn-skip-freq 2", "a2a"),
    ],
)
def test_windows_and_chunks_of_a_run_count(flags: str, kind: str) -> None:
    config = resolve(load_config([*LONG.split(), *flags.split()], {}), 8)
    assert exchange_of(config, "cuda").kind == kind


def test_the_table_says_what_was_compared() -> None:
    choice = choose_comm_type(LLAMA, 131072, H100)
    assert choice.lines[0].startswith("context parallelism of 8, one layer: ")
    rows = {line.split()[0]: line for line in choice.lines[2:]}
    assert set(rows) == {"a2a", "all_gather", "p2p", "a2a+p2p"}
    assert [line for line in choice.lines if line.endswith("chosen")] == [rows[choice.best.kind]]
    assert f"{sum(bytes_sent('p2p', LLAMA)) / 2**20:.1f}" in rows["p2p"]


def test_recurrences_exchange_what_is_less_of() -> None:
    """States do not grow with the length, heads do; and heads have to be shared."""
    base = "--mock-data --vocab-size 100 --train-iters 1 --num-layers 2 --linear-attention-type gated_delta_net "
    base += "--linear-num-key-heads 4 --linear-num-value-heads 8 --max-position-embeddings 65536 "
    base += "--context-parallel-size 2 "

    def of(flags: str) -> tuple[str, list[str]]:
        return recurrence_exchange(resolve(load_config([*base.split(), *flags.split()], {}), 2))

    assert of("--seq-length 65536 --cp-comm-type auto")[0] == "states"
    assert of("--seq-length 64 --cp-comm-type auto")[0] == "heads"
    assert of("--seq-length 64 --cp-comm-type auto --linear-num-key-heads 1")[0] == "states"
    assert of("--seq-length 65536 --cp-comm-type a2a")[0] == "heads"
    kind, (line,) = of("--seq-length 64 --cp-comm-type p2p")
    assert kind == "states"
    assert line.startswith("context parallelism of recurrences: states; of a layer and micro-batch a process sends ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bf16 --cp-comm-type p2p", "torch for delta_rule (context parallelism by states multiplies them in fp32"),
        ("--cp-comm-type a2a", "torch for delta_rule (flash-linear-attention does not take fp32)"),
        ("--bf16 --cp-comm-type a2a", "fla for delta_rule (--kernels triton)"),
    ],
)
def test_what_flash_linear_attention_does_not_compute_is_said(
    flags: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--mock-data --vocab-size 100 --train-iters 1 --num-layers 2 --linear-attention-type gated_delta_net "
    words += f"--context-parallel-size 2 --seq-length 64 {flags}"
    chosen = Kernels(delta_rule="fla"), {"delta_rule": "--kernels triton"}
    monkeypatch.setattr(build, "choose_kernels", lambda *args, **more: chosen)
    uncut: Any = SimpleNamespace(cp_exchange=None)
    config = resolve(load_config(words.split(), {}), 2)
    kernels, lines = build.choose_backends(config, uncut, torch.device("cpu"), documents=False)
    assert lines[0].startswith(f"kernels: {said}") and lines[0].startswith(f"kernels: {kernels.delta_rule} for")


def test_bytes_of_states_are_those_of_the_plan() -> None:
    """What a process sends to each of the others: what its rows make of states, and their last tokens."""
    words = "--mock-data --vocab-size 100 --train-iters 1 --num-layers 2 --linear-attention-type gated_delta_net "
    words += "--linear-num-key-heads 4 --linear-num-value-heads 8 --context-parallel-size 4 --seq-length 64 "
    words += "--micro-batch-size 3 --linear-key-head-dim 6 --linear-value-head-dim 5"
    config = resolve(load_config(words.split(), {}), 4)
    mixer = layer_specs(config.model)[0].mixer
    *_, plan = states_plan(cut_sequences(3, 64, 4), 1, mixer.conv, torch.device("cpu"))
    maps, last = 8 * 6 * (6 + 5) * 4, (mixer.conv - 1) * (2 * 4 * 6 + 8 * 5) * 4
    assert recurrence_bytes(config, mixer)[0] == 3 * plan.rows * (maps + last)
