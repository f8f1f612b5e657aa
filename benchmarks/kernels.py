"""The table of kernels: ``make gpu`` and ``make bench-cpu`` write it to ``benchmarks/results/kernels_*.txt``.

Each operation by our kernels, by eager PyTorch, by torch.compile and by Liger where it is installed: microseconds, GB/s
by the bytes that it must move (each input read once, each output written once, see the files of ``smp/kernels``), and
that as a part of the measured bandwidth of a copy. Products (output layer with its loss, attention) in TFLOP/s instead.
The backward pass is timed alone, except for the cross-entropy's, which writes over its input.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from products import products
from timing import Clock, Report, copy_bandwidth, product_rate

from smp.kernels import norm, rope, swiglu
from smp.kernels.cuda.library import library_path
from smp.kernels.experts.permute import combine_rows, repeat_rows
from smp.kernels.experts.router import choose_experts
from smp.layers.heads.cross_entropy import VocabShard, vocab_parallel_cross_entropy
from smp.parallel.collectives import Group

Function = Callable[..., Any]
NOT_MEASURED = "not yet measured"


@dataclass(frozen=True)
class Sizes:
    """Llama 3 8B's widths on a GPU; on a CPU what takes milliseconds."""

    tokens: int
    hidden: int
    ffn: int
    vocabulary: int
    heads: int
    groups: int
    head_dim: int
    length: int
    dtype: torch.dtype
    device: str


ON = {
    "cuda": Sizes(8192, 4096, 14336, 128_256, 32, 8, 128, 8192, torch.bfloat16, "cuda"),
    "cpu": Sizes(1024, 1024, 2816, 8192, 16, 4, 64, 512, torch.float32, "cpu"),
}


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        inputs: shapes of what it takes and has gradients for.
        versions: name -> function of the inputs; None is not there.
        forward, backward: bytes in elements of the compute dtype that each pass must move.
        together: the passes cannot be told apart; ``backward`` is then what both must move.
        dtype: of the inputs and those elements; None: the compute dtype.
    """

    name: str
    inputs: list[tuple[int, ...]]
    versions: dict[str, Function | None]
    forward: int
    backward: int
    together: bool = False
    dtype: torch.dtype | None = None


def liger(module: str, function: str) -> Any:
    """An autograd function of Liger's, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply


def compiled(function: Function) -> Function:
    return torch.compile(function, dynamic=False)


def moving(s: Sizes, fused: bool) -> Iterator[Case]:
    """Operations whose floor is memory; ``fused`` says whether Triton can run."""
    row, rows, mlp = (s.hidden,), s.tokens * s.hidden, s.tokens * s.ffn

    def case(name: str, inputs: Any, plain: Function, ours: Function, theirs: Any, forward: int, backward: int) -> Case:
        versions = {
            "smp triton": ours if fused else None,
            "eager": plain,
            "torch.compile": compiled(plain),
            "liger": theirs,
        }
        return Case(name, inputs, versions, forward, backward)

    def plain_rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, row, w, 1e-5)

    def plain_layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, row, w, b, 1e-5)

    def plain_add(x: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + a
        return F.rms_norm(total, row, w, 1e-5), total

    def plain_swiglu(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return F.silu(g) * u

    rms, layer, silu = (
        liger("rms_norm", "LigerRMSNormFunction"),
        liger("layer_norm", "LigerLayerNormFunction"),
        liger("swiglu", "LigerSiLUMulFunction"),
    )
    x = (s.tokens, s.hidden)
    yield case(
        "RMSNorm",
        [x, row],
        plain_rms,
        lambda x, w: norm.norm(x, w, None, 1e-5, "triton"),
        rms and (lambda x, w: rms(x, w, 1e-5)),
        2 * rows,
        3 * rows,
    )
    yield case(
        "LayerNorm",
        [x, row, row],
        plain_layer,
        lambda x, w, b: norm.norm(x, w, b, 1e-5, "triton"),
        layer and (lambda x, w, b: layer(x, w, b, 1e-5)),
        2 * rows,
        3 * rows,
    )
    yield case(
        "add + RMSNorm",
        [x, x, row],
        plain_add,
        lambda x, a, w: norm.add_norm(x, a, w, None, 1e-5, "triton"),
        None,
        4 * rows,
        4 * rows,
    )
    yield case(
        "SwiGLU",
        [(s.tokens, s.ffn)] * 2,
        plain_swiglu,
        lambda g, u: swiglu.swiglu(g, u, "triton"),
        silu,
        3 * mlp,
        5 * mlp,
    )
    yield rotation(s, case)
    yield routing(s, fused)
    yield from moves_of_rows(s, fused)
    yield loss(s, fused)


def rotation(s: Sizes, case: Callable[..., Case]) -> Case:
    angle = torch.rand(s.tokens, 1, s.head_dim // 2, device=s.device) * 6
    angle = torch.cat((angle, angle), dim=-1)
    table = angle.cos(), angle.sin()
    elements = s.tokens * (s.heads + s.groups) * s.head_dim
    return case(
        "RoPE of q and k",
        [(s.tokens, s.heads * s.head_dim), (s.tokens, s.groups * s.head_dim)],
        lambda q, k: rope.rope(q, k, *table, s.head_dim),
        lambda q, k: rope.rope(q, k, *table, s.head_dim, "triton"),
        None,
        2 * elements,
        2 * elements,
    )


def routing(s: Sizes, fused: bool) -> Case:
    """Qwen 3's: 8 of 128 experts by softmax. Logits are fp32, experts int64."""
    experts, k = 128, 8
    logits, choices = s.tokens * experts, 3 * s.tokens * k

    def plain(z: torch.Tensor) -> torch.Tensor:
        return choose_experts(z, k, "softmax")[1]

    versions: dict[str, Function | None] = {
        "smp triton": (lambda z: choose_experts(z, k, "softmax", backend="triton")[1]) if fused else None,
        "eager": plain,
        "torch.compile": compiled(plain),
    }
    sizes = [(s.tokens, experts)]
    return Case("router, 8 of 128", sizes, versions, logits + choices, 2 * logits + choices, dtype=torch.float32)


def moves_of_rows(s: Sizes, fused: bool) -> Iterator[Case]:
    """Of experts that are chosen at random, 8 of a token. Weights are fp32; cast they are a part of what is timed."""
    k, one = 8, s.tokens * s.hidden
    order = torch.randperm(s.tokens * k, device=s.device)
    inverse = order.argsort()

    def repeat(backend: str) -> Function:
        return lambda x: repeat_rows(x, order, inverse, k, backend)

    def combine(backend: str) -> Function:
        return lambda rows, w: combine_rows(rows, w.float(), order, inverse, backend)

    cases: list[tuple[str, list[tuple[int, ...]], Callable[[str], Function], int]] = [
        ("8 rows to experts", [(s.tokens, s.hidden)], repeat, (1 + k) * one),
        ("8 rows from experts", [(s.tokens * k, s.hidden), (s.tokens, k)], combine, (1 + 2 * k) * one),
    ]
    for name, sizes, made, backward in cases:
        versions: dict[str, Function | None] = {
            "smp triton": made("triton") if fused else None,
            "smp torch": made("torch"),
            "torch.compile": compiled(made("torch")),
        }
        yield Case(name, sizes, versions, (1 + k) * one, backward)


def loss(s: Sizes, fused: bool) -> Case:
    labels = torch.randint(0, s.vocabulary, (s.tokens,), device=s.device)
    shard = VocabShard.of(Group("", 1, 0), s.vocabulary, s.vocabulary)

    def ours(backend: str) -> Function:
        return lambda z: vocab_parallel_cross_entropy(z, labels, shard, overwrite=True, backend=backend)

    def plain(z: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(z.float(), labels, reduction="none")

    theirs = liger("cross_entropy", "LigerCrossEntropyFunction")
    versions: dict[str, Function | None] = {
        "smp triton": ours("triton") if fused else None,
        "smp cuda": ours("cuda") if fused and library_path().exists() else None,
        "smp torch": ours("torch"),
        "eager": plain,
        "torch.compile": compiled(plain),
        "liger": theirs and (lambda z: theirs(z, labels, None)[0]),
    }
    logits = s.tokens * s.vocabulary
    return Case("cross-entropy", [(s.tokens, s.vocabulary)], versions, logits, 3 * logits, together=True)


class Table:
    """Measures cases and writes lines."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.sizes, self.clock = device, ON[device], Clock(device, rounds)
        self.bandwidth, self.failed = copy_bandwidth(self.clock), 0
        product = (8192, 8192, 8192) if device == "cuda" else (1024, 1024, 2816)
        self.product = product_rate(self.clock, *product, self.sizes.dtype)
        s, self.say = self.sizes, Report("kernels", device).say
        self.say(
            f"\nceilings: copy {self.bandwidth / 1e9:.0f} GB/s (read + written), product "
            f"{' x '.join(map(str, product))} {self.product / 1e12:.3f} TFLOP/s"
        )
        self.say(
            f"{s.tokens} tokens, hidden {s.hidden}, ffn {s.ffn}, vocabulary {s.vocabulary}, "
            f"{s.heads} + {s.groups} heads of {s.head_dim}, {s.dtype}"
        )
        self.say(f"\n{'operation':34s}{'version':16s}{'us':>12s}{'GB/s':>10s}{'of copy':>10s}")

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype).requires_grad_()

    def add(self, case: Case) -> None:
        """Rows of one operation; forward and backward pass each have their own."""
        dtype = case.dtype or self.sizes.dtype
        for name, function in case.versions.items():
            try:
                for title, elements, seconds in self.passes(case, function):
                    self.say_bytes(f"{case.name}, {title}", name, elements * dtype.itemsize, seconds)
            except Exception as error:  # the others are wanted all the same
                self.fell(case.name, name, error)

    def fell(self, label: str, name: str, error: Exception) -> None:
        """A row that says why there is no number; one of ours makes the table fail."""
        self.say(f"{label:34s}{name:16s}  {type(error).__name__}: {error}".splitlines()[0][:120])
        self.failed += name.startswith("smp")

    def say_bytes(self, label: str, name: str, nbytes: int, seconds: float | None) -> None:
        """A row whose ceiling is memory; ``seconds`` None: not measured."""
        if seconds is None:
            self.say(f"{label:34s}{name:16s}{NOT_MEASURED:>32s}")
            return
        rate = nbytes / seconds
        self.say(f"{label:34s}{name:16s}{seconds * 1e6:12.1f}{rate / 1e9:10.1f}{rate / self.bandwidth:10.2f}")

    def passes(self, case: Case, function: Function | None) -> Iterator[tuple[str, int, float | None]]:
        names = (
            [("both passes", case.backward)]
            if case.together
            else [("forward", case.forward), ("backward", case.backward)]
        )
        if function is None:
            yield from ((name, elements, None) for name, elements in names)
            return
        leaves = [self.draw(shape, case.dtype or self.sizes.dtype) for shape in case.inputs]
        outputs = as_tuple(function(*leaves))
        grads = [torch.randn_like(y) for y in outputs]
        if case.together:
            (leaf,), source = leaves, leaves[0].detach().clone()

            def both() -> None:
                torch.autograd.grad(as_tuple(function(leaf)), leaf, grads)

            def restore() -> None:
                leaf.data.copy_(source)

            yield "both passes", case.backward, self.clock.seconds(both, restore)
            return
        yield "forward", case.forward, self.clock.seconds(lambda: function(*leaves))
        made: list[torch.Tensor] = []

        def forward() -> None:  # anew each time: a compiled backward pass may use up what was kept for it
            made[:] = as_tuple(function(*leaves))

        backward = self.clock.seconds(lambda: torch.autograd.grad(made, leaves, grads), forward)
        yield "backward", case.backward, backward

    def add_product(self, label: str, name: str, flops: float, run: Callable[[], object] | None) -> None:
        """A row whose ceiling is arithmetic."""
        try:
            seconds = None if run is None else self.clock.seconds(run)
        except Exception as error:  # as above; Triton's are of no common kind
            self.fell(label, name, error)
            return
        if seconds is None:
            self.say(f"{label:34s}{name:16s}{NOT_MEASURED:>32s}")
            return
        rate = flops / seconds
        self.say(f"{label:34s}{name:16s}{seconds * 1e6:12.1f}{rate / 1e12:10.3f}{rate / self.product:10.2f}")


def loads_ahead(table: Table) -> None:
    """The backward passes of norms whose programs load the next rows while they sum these; 1 is what runs have."""
    from smp.kernels.triton import norm as launchers

    s = table.sizes
    dy, total, x = (torch.randn(s.tokens, s.hidden, device=s.device).to(s.dtype) for _ in range(3))
    weight, rows = torch.ones(s.hidden, device=s.device, dtype=s.dtype), torch.rand(s.tokens, device=s.device)
    for name, added, has_bias in (("RMSNorm", None, False), ("add + RMSNorm", total, False), ("LayerNorm", None, True)):
        nbytes = (3 if added is None else 4) * x.nbytes
        for stages in (1, 2, 3):
            given = dy, added, x, weight, rows, rows, has_bias, stages
            seconds = table.clock.seconds(partial(launchers.backward, *given))
            table.say_bytes(f"{name}, backward", f"{stages} stages", nbytes, seconds)


def as_tuple(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def main() -> int:
    """Measure, print and write; 1 if one of our versions failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each version")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    table, fused = Table(arguments.device, arguments.rounds), arguments.device == "cuda"
    for case in moving(table.sizes, fused):
        table.add(case)
    if fused:
        loads_ahead(table)
    products(table, fused)
    return int(table.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
