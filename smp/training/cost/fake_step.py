"""One training step of any layout on fake tensors: what a rank would hold, compute and communicate.

The run's own model, sharding, passes, clipping and optimizer, in a process group in which nothing is sent and on
tensors without memory. So a plan for a thousand GPUs is tried on a laptop's CPU, and no formula has to follow the code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools import fake_collectives  # noqa: F401 (says what collectives do to fake tensors)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp.config import Config, Layout
from smp.config.batch import count_micro_batches
from smp.config.layers import hides_tokens, scores_flag
from smp.config.rules.mtp import mtp_layers
from smp.kernels import Kernels
from smp.kernels.attention_cores.attention_core import AttentionCore, AttentionSpec, Pair
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.copier import Copier, HostCopier
from smp.kernels.dispatch import LONGEST_ROW
from smp.kernels.sequence_cut import SequenceCut, cut_sequences
from smp.kernels.token_layout import TokenLayout
from smp.layers.context_parallel.make_core import context_parallel_attention
from smp.layers.fp8.apply import fp8_history
from smp.layers.heads.head import CHUNK_BYTES, VocabParallelHead
from smp.layers.moe.layer import MoE
from smp.layers.recurrences.documents import Documents, DocumentsNeed
from smp.layers.token_needs import TokenNeed
from smp.models.micro_batch import MicroBatch, MTPBatch
from smp.models.protocol import Model
from smp.optim.optimizer import build_optimizer, clip_gradients
from smp.parallel.context import ParallelContext, build_context
from smp.parallel.links import Links
from smp.parallel.mailboxes import fits
from smp.parallel.network.secondary import secondary_shards
from smp.parallel.network.select_collectives import NetworkCollectives
from smp.pipeline.recorder import Watcher
from smp.pipeline.stage_plan import Plan
from smp.sharding.offload import offload_of
from smp.sharding.parallelize import parallelize
from smp.training.build import RunSetup, assemble, build_forward_backward
from smp.training.cost.fake_tuning import FakeReference, judged, tuned
from smp.training.cost.meter import Counts, Meter
from smp.training.exchange import exchange_of, recurrence_exchange
from smp.training.forward_backward import ForwardBackward, stream_gradients
from smp.training.micro_batches import MicroBatches
from smp.training.pipelined import Pipelined

_CPU = torch.device("cpu")
MOST_MICRO_BATCHES = 3


@dataclass(frozen=True)
class StepMeasures:
    """What a step of one rank allocates, computes and communicates.

    Attributes:
        parameters, optimizer, gradients: bytes that are there between steps, and after the backward pass.
        peaks: most bytes at once by phase: reference (of pairs), forward, backward, clipping, optimizer.
        counts: work and traffic of the step.
        host: bytes of the host's memory that activations and the optimizer have.
        copied: bytes to the host and back, in the micro-batches that were run.
        secondary: bytes of weights that are kept once more for backward passes.
    """

    parameters: int
    optimizer: int
    gradients: int
    peaks: dict[str, int]
    counts: Counts
    host: int = 0
    copied: tuple[int, int] = (0, 0)
    secondary: int = 0

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return max(self.peaks.values())


def gpu_kernels(config: Config) -> Kernels:
    """The kernels that a run would choose on a GPU, of which there is none to ask. FlashAttention is assumed to work,
    with spans instead of a mask; key/value heads are repeated for it. PyTorch's RMSNorm is a single kernel on a GPU,
    which keeps what the Triton one does; on a CPU it is made of operators in fp32."""
    model, parallel = config.model, config.parallel
    fused = parallel.kernels != "torch" and not parallel.compile
    masked = hides_tokens(model)
    grouped = (model.num_query_groups or model.num_attention_heads) < model.num_attention_heads and not masked
    kernel = model.normalization == "RMSNorm" and not model.apply_layernorm_1p
    math = parallel.attention_backend == "math" or bool(scores_flag(model))
    return Kernels(
        cross_entropy="triton" if parallel.kernels != "torch" else "torch",
        norm="triton" if kernel or (fused and model.hidden_size <= LONGEST_ROW) else "torch",
        swiglu="triton" if fused else "torch",
        rope="triton" if fused else "torch",
        router="triton" if parallel.kernels == "triton" else "torch",
        permute="triton" if parallel.kernels == "triton" else "torch",
        attention=MathAttention() if math else FusedAttention("flash", grouped=grouped),
        rope_in_place=fused and parallel.recompute_granularity != "selective",
    )


def fake_gpu_step(config: Config, layout: Layout, plan: Plan | None = None, pp_rank: int = 0) -> StepMeasures:
    """:func:`fake_step` with a GPU's kernels, whatever this machine's processor is: oneDNN's matrix products, which
    :mod:`smp.kernels.matmul` takes on some CPUs, copy their operands."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        return fake_step(config, layout, gpu_kernels(config), "cuda", plan, pp_rank)
    finally:
        torch.backends.mkldnn.enabled = before


def fake_step(
    config: Config,
    layout: Layout,
    kernels: Kernels,
    device_type: Literal["cpu", "cuda"],
    plan: Plan | None = None,
    pp_rank: int = 0,
    make_meter: Callable[[Mapping[str, str]], Meter] = Meter,
) -> StepMeasures:
    """A step after the first one, of pretraining or fine-tuning on sequences or pairs, on the first rank of a pipeline
    stage.

    Without a pipeline it runs three micro-batches at most and counts the others as the second: memory does not grow any
    more. Experts get even loads, also where a capacity would drop some. Documents are left out, a window is only left
    out of the mask, and compiled code counts as what it is made of.

    Args:
        config: resolved.
        layout: degrees of the mesh.
        kernels: of the run, for whole sequences; :func:`gpu_kernels`.
        device_type: whose chunks of logits, exchange of context parallelism and collectives (gloo's or NCCL's) it has.
        plan: of the pipeline.
        pp_rank: whose step.
        make_meter: from the groups' names. One that watches actions of a pipeline is its recorder.
    """
    exchange = exchange_of(config, device_type)  # the run's, which windows and chunks have a say in
    config = _plain(config)
    # The first rank of the pipeline stage: pp is the slowest mesh dimension.
    with _fake_group(layout, pp_rank * layout.world_size // layout.pp):
        context = build_context(
            layout, "cpu", sequence_parallel=config.parallel.sequence_parallel, heads_group=exchange.heads_group
        )
        secondary = secondary_shards(context.secondary_parts(config.parallel.zero_hpz_partition_size))
        context = replace(context, collectives=NetworkCollectives(secondary=secondary))
        if context.cp_exchange is not None:
            core = context_parallel_attention(kernels.attention, context.cp_exchange, exchange.kind)  # type: ignore[arg-type]
            of_recurrences, _ = recurrence_exchange(config)
            kernels = replace(kernels, attention=_PlannedOnTheHost(core), recurrence_exchange=of_recurrences)
        meter = make_meter(_names(context))
        # Gloo works on copies of whole tensors, NCCL does not.
        meter.over_gloo = device_type == "cpu"
        copier = _Uncounted(meter)
        setup = RunSetup(context, _CPU, kernels, plan, offload_of(config.parallel, copier))

        def build(trained: bool) -> tuple[Model, ForwardBackward]:
            model = _built(config, setup, CHUNK_BYTES[device_type], trained=trained)
            passes = build_forward_backward(config, setup, model)
            if isinstance(passes, Pipelined) and device_type == "cpu" and config.parallel.cpu_collectives == "auto":
                passes.links.mailboxes = cast(Any, _Delivered(passes.links))
            return model, passes

        model, passes = build(True)
        reference = FakeReference(config, model, passes, build)
        if isinstance(passes, Pipelined) and isinstance(meter, Watcher):
            passes.watched_by(meter)
        with FakeTensorMode(allow_non_fake_inputs=True), meter.counting():
            return _measure(config, context, _Tried(model, passes, reference), meter, copier)


@dataclass(frozen=True)
class _Delivered:
    """Stands for the mailboxes of ranks that share memory, where what is sent is copied at once: its tensor is free.
    The message goes over the group, too, and is counted there."""

    links: Links

    def send(self, x: torch.Tensor, to: int) -> int | None:
        if not fits(x):
            return 0
        self.links.send_over_group(x, to, 0)
        return None

    def receive(self, into: torch.Tensor, source: int, over_group: Callable[[int], dist.Work]) -> dist.Work:
        return over_group(0)


@dataclass(frozen=True)
class _Tried:
    """The models and micro-batch runners of a step."""

    model: Model
    passes: ForwardBackward
    reference: FakeReference


def _built(config: Config, setup: RunSetup, chunk_bytes: int, *, trained: bool) -> Model:
    """A model as a run has it before weights are initialized."""
    with redirect_stdout(sys.stderr):  # stdout of a dry run is a recipe
        model = assemble(config, setup)
    if setup.context.cp_group is not None:
        tokens: Any = model.tokens
        # Documents of split sequences are laid out by position, which fake tensors do not have.
        tokens.needs = tuple(_cut_on_the_host(need) for need in tokens.needs)
    tuned(model, config, trained=trained)
    for module in model.modules():
        if isinstance(module, VocabParallelHead):
            # The size of a chunk of logits depends on the device type, and tensors are on a CPU
            # here.
            module.chunk_bytes = chunk_bytes
        if isinstance(module, MoE):
            # How many rows each expert gets is read by the host in a run: here loads are even.
            module.read_counts = even_counts
    if config.model.reads_apart:
        # Lengths of texts are read by the host in a run.
        cast(Any, model).shift.read_widths = half_widths
    parallelize(model, setup.context, config.parallel, setup.offload)
    if (history := fp8_history(model)) is not None:
        history.is_empty = False  # as after a step
    return model


def half_widths(first: torch.Tensor, last: torch.Tensor, length: int) -> tuple[int, int]:
    """Tokens of a prompt and of its answer, which fill a row of ``length`` by halves; see
    :func:`smp.hf.run.apart.read_widths`."""
    return (length + 1) // 2, length + 1 - (length + 1) // 2


def even_counts(counts: torch.Tensor, rows: int) -> Any:
    """Numbers of rows of each expert, where ``rows`` go to experts as evenly as possible and each rank sends equally
    many; in the shape of ``counts``, (experts,) or (both directions, ranks, experts of a rank)."""
    experts = counts.shape[-1] if counts.ndim == 1 else counts.shape[1] * counts.shape[2]
    each = [rows // experts + (i < rows % experts) for i in range(experts)]
    if counts.ndim == 1:
        return each
    own = counts.shape[2]
    table = [each[start : start + own] for start in range(0, experts, own)]
    return [table for _ in range(counts.shape[0])]


@dataclass(frozen=True)
class _PlannedOnTheHost:
    """Attention of sequences that are split over ranks. The plan of what each rank computes follows from positions,
    which fake tensors do not have: it is made on real ones."""

    core: AttentionCore

    @property
    def name(self) -> str:
        return self.core.name

    def prepare(self, layout: TokenLayout, *rest: Any) -> TokenLayout:
        with unset_fake_temporarily():
            return self.core.prepare(layout, *rest)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        return self.core(q, k, v, layout, spec, dropout_key, sinks)


@dataclass(frozen=True)
class _DocumentsOnTheHost:
    """Document layout of split sequences, made on real tensors as in :class:`_PlannedOnTheHost`."""

    need: DocumentsNeed

    @property
    def key(self) -> str:
        return self.need.key

    def prepare(self, layout: TokenLayout, sequence_lengths: Callable[[], torch.Tensor]) -> Documents:
        with unset_fake_temporarily():
            return self.need.prepare(layout, sequence_lengths)


def _cut_on_the_host(need: TokenNeed) -> TokenNeed:
    return _DocumentsOnTheHost(need) if isinstance(need, DocumentsNeed) else need


class _Uncounted(HostCopier):
    """Allocations on the host do not count as the device's memory."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def host(self, nbytes: int, *, copied: bool = True) -> torch.Tensor:
        with self._meter.elsewhere():
            return super().host(nbytes, copied=copied)


def _plain(config: Config) -> Config:
    """The settings without what fake tensors cannot do: compile, windows and chunks in a mask. apex's Adam has the same
    state as torch's."""
    whole = config.parallel.attention_backend == "math" or bool(scores_flag(config.model))
    model = replace(config.model, window_size=None) if hides_tokens(config.model) and not whole else config.model
    if not whole or config.parallel.context_parallel_size > 1:  # a cut's chunks are counted, which needs numbers
        model = replace(model, attention_chunk_size=None)
    optim = replace(config.optim, optimizer="adam") if config.optim.optimizer == "apex-adam" else config.optim
    return replace(config, model=model, optim=optim, parallel=replace(config.parallel, compile=False))


def _allocate(model: Model) -> None:
    """Allocate memory for all of ``model``. Tied parameters stay one, of which ``to_empty`` makes one for each name."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((module, name))
    model.to_empty(device=_CPU)
    for (first, own), *others in users.values():
        for module, name in others:
            module._parameters[name] = first._parameters[own]


def _measure(config: Config, context: ParallelContext, tried: _Tried, meter: Meter, copier: Copier) -> StepMeasures:
    model, passes = tried.model, tried.passes
    _allocate(model)
    if tried.reference.copy is not None:
        _allocate(tried.reference.copy)
    parameters = meter.held
    optimizer = build_optimizer(model, config.optim, context.fsdp, context.expert_fsdp, copier=copier)
    # torch's optimizers allocate their state at the first step: one is made before the measured step.
    # torch makes no state for a parameter without a gradient.
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    clip_gradients(model.parameters(), config.optim.clip_grad, device=_CPU)
    optimizer.step()
    optimizer.zero_grad()
    # Peaks count from here: what rests between two steps is in them.
    resting, copied = meter.held, (copier.bytes_out, copier.bytes_back)
    meter.start()
    count, counted, compared = _count(config, context), _Snapshots(meter), _Snapshots(meter)
    # A pipeline's schedule needs all its micro-batches; accumulation repeats one pattern.
    run = count if context.pp_size > 1 else min(count, MOST_MICRO_BATCHES)
    if tried.reference.is_computed:
        with meter.phase("reference"):
            tried.reference.run(_micro_batches(config, context, run, compared, by_reference=True))
    # Optimizer offload copies gradients while the backward pass runs.
    stream_gradients(passes, optimizer)
    with meter.phase("forward"):
        passes.train(_micro_batches(config, context, run, counted))
    secondary = sum(shards.nbytes for shards in (context.collectives or NetworkCollectives()).secondary.values())
    # Secondary shards are made in the forward pass and stay, but are counted on their own.
    gradients = meter.held - resting - secondary
    with meter.phase("clipping"):
        clip_gradients(model.parameters(), config.optim.clip_grad, copies=passes.copies, device=_CPU)
    with meter.phase("optimizer"):
        optimizer.step()
    # All but the first and the last are like the second, so it stands for those that were not run.
    again = max(count - MOST_MICRO_BATCHES, 0) if context.pp_size == 1 else 0
    total = meter.counts
    for snapshots in (counted, compared) if again else ():
        total = total.plus(snapshots.second(), again)
    out, back = copier.bytes_out - copied[0], copier.bytes_back - copied[1]
    return StepMeasures(
        parameters=parameters,
        optimizer=resting - parameters,
        gradients=gradients,
        peaks=meter.peaks,
        counts=total,
        host=meter.elsewhere_held,
        copied=(out, back),
        secondary=secondary,
    )


class _Snapshots:
    """Snapshots of the counts at the time each micro-batch was asked for first."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._before = meter, dict[int, Counts]()

    def take(self, micro_batch: int) -> None:
        if micro_batch not in self._before:
            # A copy: the meter's counts go on.
            self._before[micro_batch] = Counts().plus(self._meter.counts, 1)

    def second(self) -> Counts:
        """Counts of the second micro-batch, which stands for each but the first and the last; zero if none was asked
        for."""
        if not self._before:
            return Counts()
        # From asking for the second one to asking for the third.
        return self._before[2].plus(self._before[1], -1)


def _count(config: Config, context: ParallelContext) -> int:
    """Micro-batches of a rank."""
    return count_micro_batches(config.data, context.data_size)


def _micro_batches(
    config: Config, context: ParallelContext, count: int, counted: _Snapshots, *, by_reference: bool = False
) -> MicroBatches:
    assert config.data.seq_length is not None, "resolved before"
    rows = config.rows_per_micro_batch
    cut = _cut(config, context, rows)
    shape = rows, config.data.seq_length // context.cp_size

    # Values do not matter, shapes do: zeros.
    def make(i: int) -> MicroBatch:
        counted.take(i)
        ids = torch.zeros(shape, dtype=torch.int64)
        whole = MicroBatch(
            ids,
            labels=ids.clone(),
            loss_weights=torch.ones(shape),
            position_ids=None if cut is None else ids.clone(),
            token_index=ids.clone(),
            cut=cut,
            # The reference model of pairs has no use for multi-token prediction.
            mtp=tuple(
                MTPBatch(ids, ids.clone(), torch.ones(shape)) for _ in mtp_layers(config.model) if not by_reference
            ),
        )
        return judged(config, whole, by_reference=by_reference)

    return MicroBatches(count, make)


def _cut(config: Config, context: ParallelContext, rows: int) -> SequenceCut | None:
    """The cut of sequences that are one document each."""
    if context.cp_group is None:
        return None
    with unset_fake_temporarily():
        return cut_sequences(rows, config.data.seq_length or 0, context.cp_group.size)


@contextmanager
def _fake_group(layout: Layout, rank: int) -> Iterator[None]:
    """A default process group of all ranks that sends nothing."""
    # The "fake" backend of torch completes every collective at once and sends nothing.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    _clear_sharding_prop_cache()  # its entries hold meshes of an earlier rank, which compare equal
    try:
        yield
    finally:
        dist.destroy_process_group()


def _names(context: ParallelContext) -> dict[str, str]:
    """Names of the process groups as users know them, by torch's group name."""
    meshes = {"tp": context.tp, "cp": context.cp, "pp": context.pp}
    names: dict[str, str] = {mesh.get_group().group_name: name for name, mesh in meshes.items() if mesh is not None}
    if (exchange := context.cp_exchange) is not None:
        names |= {exchange.get_group(i).group_name: "cp" for i in range(exchange.ndim)}
    if (fsdp := context.fsdp) is not None:
        dims = fsdp.mesh_dim_names or ()
        names |= {fsdp.get_group(i).group_name: name for i, name in enumerate(dims)}
    if context.ep is not None and (experts := context.expert_fsdp) is not None:
        dims = experts.mesh_dim_names or ()
        names |= {experts.get_group(i).group_name: f"{name} of experts" for i, name in enumerate(dims)}
        names[context.ep.get_group().group_name] = "ep"
    if (collectives := context.collectives) is not None:
        names |= {shards.group.group_name: "secondary" for shards in collectives.secondary.values()}
    return names
