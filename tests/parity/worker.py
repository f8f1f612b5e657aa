"""What every rank does: train each case with the trainer that users run, and write its parts of what came out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from smp.config import Layout
from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.kernels.copier import copier_of
from smp.layers.fp8 import history, scaling
from smp.layers.heads.head import CHUNK_BYTES, ModelOutput
from smp.models import tokens
from smp.models.gpt import GPT
from smp.optim import optimizer as optimizer_module
from smp.optim.optimizer import build_optimizer
from smp.parallel import collectives
from smp.parallel.context import ParallelContext, build_context
from smp.parallel.dtensor_region import local_region
from smp.pipeline.actions import Action, Op, Schedule
from smp.pipeline.run import Runner
from smp.pipeline.stage_plan import plan_pipeline
from smp.sharding import parallelize
from smp.sharding.stages import ShardedStages
from smp.sharding.tied import TiedMatrix
from smp.training.build import RunSetup, build_forward_backward, build_model, choose_backends
from smp.training.exchange import exchange_of
from smp.training.forward_backward import ForwardBackward
from smp.training.micro_batches import MicroBatches
from smp.training.objectives import next_token as objective_module
from smp.training.objectives.next_token import NextToken
from smp.training.trainer import Progress, Trainer
from tests.one_card import device_of
from tests.parity.cases import Case, config_of
from tests.parity.communication import Recorder
from tests.parity.data import share
from tests.parity.offload_cases import CountingOffload
from tests.parity.result import Tensors

Contexts = dict[tuple[Layout, int], ParallelContext]


def run_cases(rank: int, world_size: int, cases: list[Case], folder: str, device: str = "cpu") -> None:
    """Run ``cases``, all of this world size, one after the other; file ``<number>.<rank>`` holds a rank's part."""
    contexts: Contexts = {}
    for number, case in enumerate(cases):
        with pytest.MonkeyPatch.context() as patch:
            if case.spread.chunk_bytes is not None:
                patch.setitem(CHUNK_BYTES, device_of(device, rank).type, case.spread.chunk_bytes)
            if case.sabotage:
                SABOTAGE[case.sabotage](patch)
            with fp64() if case.problem.fp8 else nullcontext():
                record = train(case, contexts, device_of(device, rank))
        part = Path(folder) / f"{number}.{rank}.part"
        torch.save(record, part)
        part.rename(part.with_suffix(""))  # a file under its final name is whole


class Recording:
    """Keeps this rank's part of the gradients of some steps, as they are before clipping."""

    def __init__(self, inner: ForwardBackward, model: GPT, recorded: tuple[int, ...]) -> None:
        self.inner, self.model, self.copies, self.recorded = inner, model, inner.copies, recorded
        self.step, self.gradients = 0, list[Tensors]()
        self.before_last: Callable[[], None] | None = None

    def train(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        self.inner.before_last = self.before_last
        outputs = self.inner.train(micro_batches)
        if self.step in self.recorded:
            # Of frozen ones it is zero.
            grads = {n: p.grad if p.requires_grad else torch.zeros_like(p) for n, p in self.model.named_parameters()}
            biases = {name: torch.zeros_like(b) for name, b in self.model.named_buffers()}
            self.gradients.append({name: _local(g) for name, g in (grads | biases).items() if g is not None})
        self.step += 1
        return outputs

    def forward(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        return self.inner.forward(micro_batches)


def train(case: Case, contexts: Contexts, device: torch.device) -> dict[str, Any]:
    """One run, and this rank's part of its result."""
    config, problem, spread = config_of(case), case.problem, case.spread
    layout = Layout.from_config(config.parallel, spread.world_size)
    key = layout, exchange_of(config, device.type).heads_group
    if key not in contexts:
        contexts[key] = build_context(layout, device.type, heads_group=key[1])
    context = replace(contexts[key], sequence_parallel=config.parallel.sequence_parallel)
    plan = plan_pipeline(config, layout) if spread.pp > 1 else None
    kernels, _ = choose_backends(config, context, device, documents=config.data.reset_attention_mask)
    offload = CountingOffload(config.parallel, copier_of(device)) if spread.horizon else None
    setup = RunSetup(context, device, kernels, plan, offload)
    model = build_model(config, setup)
    initial = _weights(model)
    optimizer = build_optimizer(model, config.optim, context.fsdp, context.expert_fsdp)
    recording = Recording(build_forward_backward(config, setup, model), model, problem.recorded_steps)
    objective = NextToken(device, context.cp_group, mtp=problem.mtp)
    trainer = Trainer(config, model, recording, objective, optimizer, context, device, Progress())
    recorder = Recorder()
    steps = []
    for step in range(problem.steps):
        # The second step is like all others. Torch does not compile where operations are watched.
        with recorder if step == 1 and not spread.compile else nullcontext():
            steps.append(trainer.train_step(share(problem, spread, context.data_rank, step)))
    if spread.compile:
        torch._dynamo.reset()
    if offload is not None:
        offload.check(first=context.pp_rank == 0)
    return {
        "recorded": problem.recorded_steps,
        "communication": recorder.log,
        "losses": [s.loss for s in steps],
        "norms": [s.grad_norm for s in steps],
        "tensors": [initial, *recording.gradients, _weights(model)],
        "shapes": {name: (tuple(p.shape), _logical_rows(model, name)) for name, p in _tensors(model).items()},
        "regions": {name: _region(p) for name, p in _tensors(model).items()},
    }


@contextmanager
def fp64() -> Iterator[None]:
    """Weights, activations, messages and reductions in fp64. A number that two layouts compute with an error of eps is
    rounded to another one of 8 bits with a probability of about 16 eps: in fp32 some are, in fp64 none."""
    whole, make, before = Runner.__init__, objective_module.token_micro_batch, torch.get_default_dtype()

    def with_wide_weights(*args: Any, **named: Any) -> Any:
        batch = make(*args, **named)
        assert batch.loss_weights is not None
        return replace(batch, loss_weights=batch.loss_weights.double())

    def wide(self: Runner, links: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
        whole(self, links, shape, torch.float64, device)

    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "__init__", wide)
            patch.setattr(objective_module, "token_micro_batch", with_wide_weights)
            patch.setattr(parallelize, "_precision", lambda bf16: MixedPrecisionPolicy(cast_forward_inputs=False))
            yield
    finally:
        torch.set_default_dtype(before)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone().cpu()


def _weights(model: GPT) -> Tensors:
    return {name: _local(p) for name, p in _tensors(model).items()}


def _tensors(model: GPT) -> Tensors:
    """Parameters, and expert biases, whose gradient is zero."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _region(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    region = local_region(parameter)
    return region.offsets, region.sizes


def _logical_rows(model: GPT, name: str) -> int:
    """Rows of a parameter without the vocabulary padding."""
    return model.config.vocab_size if name in ("embedding.weight", "head.weight") else _tensors(model)[name].shape[0]  # type: ignore[return-value]


def _function(name: str) -> Any:
    """The autograd.Function of a collective."""
    return inspect.getclosurevars(getattr(collectives, name)).nonlocals["Pair"]


def _break_adjoint(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The gradient passes as it is, where it should be summed over the ranks."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(_function(name), "backward", staticmethod(lambda ctx, grad: (grad, None)))

    return sabotage


def _keep_own_sums(patch: pytest.MonkeyPatch) -> None:
    """Gradients of a block's norms are those of the rank's own tokens."""
    patch.setattr(collectives._SumGradients, "backward", staticmethod(lambda ctx, *grads: (None, *grads)))


def _keep_own_part(patch: pytest.MonkeyPatch) -> None:
    """gather_tokens as if all ranks did the same work behind it: each keeps its part of the gradient."""
    backward = lambda ctx, grad: (collectives._own_part(grad, ctx.group), None)  # noqa: E731
    patch.setattr(_function("gather_tokens"), "backward", staticmethod(backward))


def _average_gradients(patch: pytest.MonkeyPatch) -> None:
    """FSDP divides by the number of data-parallel ranks, as it does unless told otherwise."""
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def _count_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by its own number of valid tokens, and the ranks' losses are averaged."""

    def count(self: Trainer, batch: RankBatch) -> tuple[int, int, int, int]:
        return int((batch.labels != IGNORE_INDEX).sum()) * self.context.data_size, 0, 0, 1

    patch.setattr(Trainer, "_counts", count)


def _count_copies(patch: pytest.MonkeyPatch) -> None:
    """The gradient norm counts an element once per rank that holds it."""
    patch.setattr(optimizer_module, "_copies", lambda tensor, group: 1)


def _drop_a_weight_gradient(patch: pytest.MonkeyPatch) -> None:
    """What the backward pass of every second micro-batch leaves for later is lost."""
    whole, calls = ShardedStages.backward_weight, itertools.count()
    lost = lambda self, stage, pending: whole(self, stage, pending if next(calls) % 2 else [])  # noqa: E731
    patch.setattr(ShardedStages, "backward_weight", lost)


def _count_on_every_stage(patch: pytest.MonkeyPatch) -> None:
    """Every stage counts the tokens of the batch that all of them read."""

    def count(self: Trainer, batch: RankBatch) -> tuple[int, int, int, int]:
        return int((batch.labels != IGNORE_INDEX).sum()) * self.context.pp_size, 0, 0, 1

    patch.setattr(Trainer, "_counts", count)


def _swap_two_sends(patch: pytest.MonkeyPatch) -> None:
    """The first stage sends its second micro-batch before its first. The shapes are the same, so both arrive."""
    run = Runner.run

    def swapped(self: Runner, schedule: Schedule, *arguments: Any) -> None:
        own = list(schedule.actions[0])
        first, second = (Action(Op.SEND_ACTIVATION, 0, i) for i in (0, 1))
        own.remove(first)
        own.insert(own.index(second) + 1, first)
        run(self, replace(schedule, actions=(tuple(own), *schedule.actions[1:])), *arguments)

    patch.setattr(Runner, "run", swapped)


def _count_on_every_part(patch: pytest.MonkeyPatch) -> None:
    """Every context-parallel rank counts the tokens of the batch that all of them read."""

    def count(self: Trainer, batch: RankBatch) -> tuple[int, int, int, int]:
        return int((batch.labels != IGNORE_INDEX).sum()) * self.context.cp_size, 0, 0, 1

    patch.setattr(Trainer, "_counts", count)


def _place_tokens_per_rank(patch: pytest.MonkeyPatch) -> None:
    """RoPE turns as if every context-parallel rank held the first tokens."""
    whole = objective_module.token_micro_batch

    def make(*args: Any, **options: Any) -> Any:
        made = whole(*args, **options)
        return replace(made, position_ids=torch.arange(made.input_ids.shape[1]).expand_as(made.input_ids))

    patch.setattr(objective_module, "token_micro_batch", make)


def _number_tokens_per_rank(patch: pytest.MonkeyPatch) -> None:
    """Under sequence parallelism every rank drops as if it held the first tokens."""
    patch.setattr(tokens, "_own", lambda x, group: x if group is None else x[: x.shape[0] // group.size])


def _scale_by_own_maximum(patch: pytest.MonkeyPatch) -> None:
    """Every rank takes the maximum of its own part of a tensor."""
    patch.setattr(scaling, "max_over", lambda x, groups: x)


def _scale_of_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """Every rank takes the maximum of the first one's part."""

    def of_first(x: torch.Tensor, groups: Sequence[collectives.Group]) -> torch.Tensor:
        return collectives.max_over(x if all(group.rank == 0 for group in groups) else torch.zeros_like(x), groups)

    patch.setattr(scaling, "max_over", of_first)


def _stale_scale(patch: pytest.MonkeyPatch) -> None:
    """Tensors have the maxima that others had before them."""
    before: dict[torch.Size, torch.Tensor] = {}

    def stale(x: torch.Tensor, groups: Sequence[collectives.Group]) -> torch.Tensor:
        now = collectives.max_over(x, groups)
        then, before[x.shape] = before.get(x.shape, now), now
        return then

    patch.setattr(scaling, "max_over", stale)


def _history_of_own_rank(patch: pytest.MonkeyPatch) -> None:
    """The maxima of a step stay those of each rank."""
    patch.setattr(history, "max_over", lambda x, groups: x)


def _stale_history(patch: pytest.MonkeyPatch) -> None:
    """Scales stay those of the first step."""
    whole = history.AmaxHistory._set_scales

    def once(self: Any) -> None:
        if bool((self.inverse == 1).all()):
            whole(self)

    patch.setattr(history.AmaxHistory, "_set_scales", once)


SABOTAGE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "sum_gradient": _break_adjoint("sum_gradient"),
    "sum_gradients": _keep_own_sums,
    "copy_to_group": _break_adjoint("copy_to_group"),
    "gather_tokens": _keep_own_part,
    "average_gradients": _average_gradients,
    "count_own_tokens": _count_own_tokens,
    "count_copies": _count_copies,
    "number_tokens_per_rank": _number_tokens_per_rank,
    "tied_sum": lambda patch: patch.setattr(TiedMatrix, "sum_gradients", lambda self: None),
    "tied_norm": lambda patch: patch.setattr(TiedMatrix, "copies", {}),
    "drop_weights": _drop_a_weight_gradient,
    "count_all_tokens": _count_on_every_stage,
    "swap_sends": _swap_two_sends,
    "count_all_parts": _count_on_every_part,
    "local_positions": _place_tokens_per_rank,
    "own_maximum": _scale_by_own_maximum,
    "first_maximum": _scale_of_the_first_rank,
    "stale_scale": _stale_scale,
    "own_history": _history_of_own_rank,
    "stale_history": _stale_history,
}
"""Bugs of the negative control, by name: each is one that parallel training programs have had."""
