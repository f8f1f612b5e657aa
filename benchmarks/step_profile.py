"""Where a step's milliseconds go: ``make gpu`` and ``make bench-cpu`` write it to ``benchmarks/results/step_*.txt``.

One profile of one training step of Llama 3 8B's shape (12 layers, 8,192 tokens, bf16) becomes one table: products,
attention, head with its loss, norms, RoPE, SwiGLU, experts, optimizer, clipping, casts, copies, what else there is, and
the time in which the device did nothing. Beside each is its limit: the FLOPs that it must do at the measured rate of a
large product, and the bytes that it must move (inputs read once, outputs written once) at the measured bandwidth of a
copy. The largest distance to a limit is what is worth most. A second table has the products by shape, each beside the
rate of the same product alone, with the same strides, in a loop.

On a GPU times are those of kernels, by the operator that launched them; on a CPU an operator's own, without those that
it calls, and what is between them is the host's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from timing import Clock, Report, copy_bandwidth, product_rate, synchronize
from torch.profiler import ProfilerActivity, profile
from training_step import MODEL, Work, smp_step
from training_table import llama

from smp.config import Layout
from smp.models.arithmetic import count_parameters
from smp.parallel.context import build_context
from smp.training.cost.meter import FREE

TYPES = {
    **{"float": torch.float32, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16, "double": torch.float64},
    **{"long int": torch.int64, "long": torch.int64, "int": torch.int32, "bool": torch.bool},
    **{"unsigned char": torch.uint8, "signed char": torch.int8},
    **{"c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2},
}
"""Of torch's profiles."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
GROUPED = ("aten::_grouped_mm", "smp::grouped_product", "smp::grouped_input_gradient", "smp::grouped_weight_gradient")
ATTENTION, HEAD, IDLE = "attention", "head and loss", "nothing (gaps)"
OPTIMIZER, CLIPPING = "optimizer", "gradient norm, clipping"
KINDS: list[tuple[str, tuple[str, ...]]] = [
    (OPTIMIZER, ("Optimizer.step", "aten::_fused_adam")),
    (CLIPPING, ("aten::_foreach_norm", "aten::linalg_vector_norm", "aten::_foreach_mul_")),
    ("collectives", ("c10d::", "nccl", "ncclDev", "gloo:")),
    (
        ATTENTION,
        (
            "aten::_scaled_dot_product",
            "aten::_flash_attention",
            "aten::_efficient_attention",
            "torch_attn::",
            "smp::cpp_",
        ),
    ),
    (HEAD, ("smp::softmax_stats", "smp::logits_to_gradient_", "aten::_log_softmax", "aten::nll_loss")),
    ("experts' products", GROUPED),
    ("experts' routers, rows", ("smp::choose_experts", "smp::gather_rows", "smp::combine_rows")),
    ("norms", ("smp::norm", "aten::_fused_rms_norm", "aten::native_layer_norm")),
    ("SwiGLU", ("smp::swiglu", "aten::silu")),
    ("RoPE", ("smp::rope",)),
    ("embedding", ("aten::embedding", "aten::index_put_", "aten::_index_put_impl_")),
    ("products", PRODUCTS),
    ("fused by the compiler", ("triton_",)),
]
"""What an operator, or one that it is called by, makes of its time; the first that fits."""
OUTPUTS = {
    **dict.fromkeys(("aten::copy_", "aten::fill_", "aten::zero_", "aten::sum"), 0),
    **{"smp::softmax_stats": 0, "smp::swiglu_backward": 2},
}
"""Written by an operator, in tensors as large as its largest input; 1 if it is not here."""
OF_A_PARAMETER = {OPTIMIZER: 28, CLIPPING: 12}
"""Bytes in fp32: AdamW reads four numbers and writes three, a norm reads one, clipping reads and writes it. (A trace
says nothing of the tensors in lists of more than 30.)"""


@dataclass(frozen=True)
class Tensor:
    """An input, as a profile tells of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """An operator that was called, and the time that it took.

    Attributes:
        name: of the operator, or of a kernel that none launched.
        around: those that called it, from the outermost.
        inputs: tensors, without lists.
        seconds: of the device.
        moves: whether the time is of its own bytes, and not of what it calls.
    """

    name: str
    around: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    seconds: float = 0.0
    moves: bool = True


@dataclass(frozen=True)
class Profile:
    """Of one step: its calls, and the seconds from its first to its last work, and of those without any."""

    calls: list[Call]
    seconds: float
    idle: float


def tensors_of(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Inputs that are tensors, of an operator in a trace."""
    given = (arguments.get(name, []) for name in ("Input type", "Input Dims", "Input Strides"))
    return tuple(
        Tensor(tuple(shape), tuple(stride), TYPES[name])
        for name, shape, stride in zip(*given, strict=False)
        if name in TYPES and shape and all(isinstance(n, int) for n in shape)
    )


@dataclass
class Nested:
    """An event of the host's, the names around it, microseconds of it alone, and whether others are in it."""

    event: dict[str, Any]
    around: tuple[str, ...]
    alone: float
    calls: bool = False

    @property
    def end(self) -> float:
        """Microseconds."""
        return float(self.event["ts"] + self.event["dur"])


def nested(events: Sequence[dict[str, Any]]) -> list[Nested]:
    """The host's events, by thread."""
    found, threads = list[Nested](), defaultdict(list)
    for event in events:
        threads[event.get("pid"), event["tid"]].append(event)
    for own in threads.values():
        stack: list[Nested] = []
        for event in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            while stack and event["ts"] >= stack[-1].end:
                stack.pop()
            names: tuple[str, ...] = ()
            if stack:
                stack[-1].alone -= event["dur"]
                stack[-1].calls = True
                names = (*stack[-1].around, stack[-1].event["name"])
            stack.append(Nested(event, names, event["dur"]))
            found.append(stack[-1])
    return found


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(From the first begin to the last end, without any of them) of spans (begin, end), which may overlap."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    first, reached, idle = ordered[0][0], ordered[0][0], 0.0
    for begin, end in ordered:
        idle += max(begin - reached, 0.0)
        reached = max(reached, end)
    return reached - first, idle


def read(trace: dict[str, Any], device: str) -> Profile:
    """A profile of a step in Chrome's format, of its kernels or on a CPU of its operators."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    on_host = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    host = nested(on_host)
    if device == "cpu":
        made = [_call(own, own.alone) for own in host if "::" in own.event["name"]]
        calls = [call for call in made if not call.name.startswith(("autograd::", "torch::autograd::"))]
        span, _ = covered((event["ts"], event["ts"] + event["dur"]) for event in on_host)
        busy = sum(call.seconds for call in calls)
        return Profile(calls, span / 1e6, max(span / 1e6 - busy, 0.0))
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_operator, others = defaultdict[Any, float](float), list[Call]()
    operators = {own.event["args"]["External id"]: own for own in host if "External id" in own.event.get("args", {})}
    for kernel in kernels:
        if (number := kernel["args"].get("External id")) in operators:
            by_operator[number] += kernel["dur"]
        else:
            others.append(Call(kernel["name"], seconds=kernel["dur"] / 1e6))
    calls = [replace(_call(operators[number], took), moves=True) for number, took in by_operator.items()]
    span, idle = covered((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    return Profile(calls + others, span / 1e6, idle / 1e6)


def _call(own: Nested, microseconds: float) -> Call:
    inputs, name = tensors_of(own.event.get("args", {})), own.event["name"]
    moves = name in OUTPUTS or (not own.calls and name.removeprefix("aten::") not in FREE)
    return Call(name, own.around, inputs, microseconds / 1e6, moves)


def kind_of(call: Call, vocabulary: int) -> str:
    """What a call is a part of; products with the vocabulary's matrix are the head's."""
    names = (*call.around, call.name)
    for kind, beginnings in KINDS:
        if any(name.startswith(beginnings) for name in names):
            of_head = kind == "products" and any(vocabulary in own.shape for own in call.inputs)
            return HEAD if of_head else kind
    if call.name == "aten::copy_" and len({own.dtype for own in call.inputs}) > 1:
        return "casts"
    if call.name in ("aten::copy_", "aten::cat", "aten::split_with_sizes_copy") or call.name.startswith("Mem"):
        return "copies, zeros"
    return "copies, zeros" if call.name in ("aten::fill_", "aten::zero_") else "other operations"


def flops_of(call: Call) -> float:
    """That a product must do; 0: it is none."""
    if call.name not in PRODUCTS:
        return 0.0
    a, b = _operands(call)
    return 2.0 * math.prod(a.shape) * b.shape[-1]


def attention_flops(work: Work) -> float:
    """Of all layers, forward and backward: causal, half of the pairs of tokens, two products forward and five back."""
    model = work.model
    heads = model.num_attention_heads * (model.kv_channels or 0)
    return 14.0 * work.tokens * work.length / 2 * heads * model.num_layers


def _operands(call: Call) -> tuple[Tensor, Tensor]:
    """The two that are multiplied: behind what a product is added to."""
    first = 1 if call.name in ("aten::addmm", "aten::baddbmm") else 0
    return call.inputs[first], call.inputs[first + 1]


def bytes_of(call: Call) -> float:
    """That the call must move: its inputs once, and its outputs."""
    own = [each.nbytes for each in call.inputs]
    largest = max(own, default=0)
    written = OUTPUTS.get(call.name, 1)
    if call.name == "smp::norm" and len(call.inputs) > 2 and call.inputs[0].shape == call.inputs[1].shape:
        written = 2  # the sum and its norm
    return sum(own) + written * largest


@dataclass
class Row:
    """Of a table: how often, seconds, and seconds at the limits."""

    calls: int = 0
    seconds: float = 0.0
    limit: float = 0.0

    def add(self, seconds: float, limit: float) -> None:
        """One more call."""
        self.calls, self.seconds, self.limit = self.calls + 1, self.seconds + seconds, self.limit + limit


def by_kind(profile: Profile, work: Work, rate: float, bandwidth: float) -> dict[str, Row]:
    """The first table's rows, the longest first, and the gaps. What is in a cache can be faster than memory: a call's
    limit is at most the time that it took."""
    rows: dict[str, Row] = defaultdict(Row)
    vocabulary = work.model.vocab_size or 0
    parameters = count_parameters(work.model, vocabulary).total
    known = {kind: nbytes * parameters / bandwidth for kind, nbytes in OF_A_PARAMETER.items()}
    known[ATTENTION] = attention_flops(work) / rate
    for call in profile.calls:
        kind, flops = kind_of(call, vocabulary), flops_of(call)
        limit = flops / rate if flops else bytes_of(call) / bandwidth if call.moves and kind not in known else 0.0
        rows[kind].add(call.seconds, min(limit, call.seconds))
    for kind in known.keys() & rows.keys():
        rows[kind].limit = min(known[kind], rows[kind].seconds)
    ordered = dict(sorted(rows.items(), key=lambda row: -row[1].seconds))
    return ordered | {IDLE: Row(0, profile.idle, 0.0)}


def by_shape(profile: Profile) -> dict[tuple[str, tuple[Tensor, ...]], tuple[Row, float]]:
    """Products: (operator, inputs) -> (row, FLOPs of all of them), the longest first."""
    rows, flops = defaultdict[Any, Row](Row), defaultdict[Any, float](float)
    for call in profile.calls:
        if call.name in PRODUCTS and (work := flops_of(call)):
            key = call.name, call.inputs
            rows[key].add(call.seconds, 0.0)
            flops[key] += work
    return {key: (row, flops[key]) for key, row in sorted(rows.items(), key=lambda item: -item[1].seconds)}


def alone(name: str, inputs: Sequence[Tensor], clock: Clock) -> float | None:
    """Seconds of the same product of random numbers; None: of its kind nothing is known here."""
    run: dict[str, Callable[..., object]] = {"aten::mm": torch.mm, "aten::bmm": torch.bmm, "aten::addmm": torch.addmm}
    if name not in run:
        return None
    wanted = inputs[: 3 if name == "aten::addmm" else 2]
    given = []
    for own in wanted:
        data = torch.empty_strided(own.shape, own.strides, dtype=own.dtype, device=clock.device)
        given.append(data.normal_())
    more = inputs[len(wanted) :]  # what a product writes to, in fp32 where weight gradients are summed in it
    options = {"out_dtype": more[0].dtype} if more and more[0].dtype != wanted[-1].dtype else {}
    return clock.seconds(lambda: run[name](*given, **options))


def shape_of(name: str, inputs: Sequence[Tensor]) -> str:
    """Such as ``8192 x 4096 x 14336, bf16, nt``: t is an operand that lies transposed."""
    a, b = _operands(Call(name, inputs=tuple(inputs)))
    sizes = (*a.shape, b.shape[-1])
    lies = "".join("n" if own.strides[-1] == 1 else "t" for own in (a, b))
    return f"{' x '.join(map(str, sizes))}, {str(a.dtype).removeprefix('torch.')}, {lies}"


def shape_on(device: str) -> Work:
    """What is trained."""
    if device == "cpu":
        return Work(replace(MODEL, num_layers=2, vocab_size=4096), 1, 512, device)
    return Work(llama("llama3-8b", 12), 1, 8192, device)


def recorded(step: Callable[[], object], device: str) -> Profile:
    """One step, after three others."""
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    synchronize(device)
    with profile(activities=activities, record_shapes=True) as found:
        step()
        synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return read(json.loads(path.read_text()), device)


def say_kinds(report: Report, rows: dict[str, Row], total: float) -> None:
    """The first table. The last column is what would be gained at the limit."""
    report.say(f"{'':28s}{'calls':>8s}{'ms':>10s}{'share':>8s}{'limit ms':>10s}{'of limit':>10s}{'distance ms':>13s}")
    for kind, row in rows.items():
        near = f"{row.limit / row.seconds:10.2f}" if row.seconds else f"{'-':>10s}"
        report.say(
            f"{kind:28s}{row.calls:8d}{row.seconds * 1e3:10.2f}{row.seconds / total:8.3f}{row.limit * 1e3:10.2f}{near}"
            f"{(row.seconds - row.limit) * 1e3:13.2f}"
        )


def say_products(report: Report, found: Profile, rate: float, clock: Clock, most: int = 24) -> None:
    """The second table."""
    report.say(
        f"\n{'products':48s}{'calls':>7s}{'ms':>10s}{'TFLOP/s':>10s}{'of rate':>9s}{'alone':>10s}{'of alone':>10s}"
    )
    for (name, inputs), (row, flops) in list(by_shape(found).items())[:most]:
        speed = flops / row.seconds
        seconds = alone(name, inputs, clock)
        label = f"{name.split('::')[-1]} {shape_of(name, inputs)}"
        line = f"{label:48s}{row.calls:7d}{row.seconds * 1e3:10.2f}{speed / 1e12:10.3f}{speed / rate:9.2f}"
        by_itself = "" if seconds is None else f"{flops / row.calls / seconds / 1e12:10.3f}"
        beside = "" if seconds is None else f"{row.calls * seconds / row.seconds:10.2f}"
        report.say(f"{line}{by_itself:>10s}{beside:>10s}")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each product alone")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    torch.set_float32_matmul_precision("high")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    clock, work, report = Clock(device, arguments.rounds), shape_on(device), Report("step", device)
    sides = (8192, 8192, 8192) if device == "cuda" else (1024, 512, 1536)
    rate, bandwidth = product_rate(clock, *sides, torch.bfloat16), copy_bandwidth(clock)
    step = smp_step(work, build_context(Layout(), device), bf16=True)
    found = recorded(step, device)
    del step
    vocabulary = work.model.vocab_size or 0
    report.say(
        f"\n{work.model.num_layers} layers of {work.model.hidden_size}, vocabulary {vocabulary}, {work.batch} x "
        f"{work.length} tokens, bf16: {found.seconds * 1e3:.2f} ms; limits: {rate / 1e12:.1f} TFLOP/s (product "
        f"{' x '.join(map(str, sides))}), {bandwidth / 1e9:.0f} GB/s (copy)"
    )
    say_kinds(report, by_kind(found, work, rate, bandwidth), found.seconds)
    say_products(report, found, rate, clock)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
