"""Forward and backward passes of a step through a pipeline: puts plan, stages, messages and runner together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from smp.config import Config
from smp.layers.heads.head import ModelOutput
from smp.layers.linear_functions import WeightGradients
from smp.models.part import ModelPart
from smp.models.protocol import StagedModel
from smp.parallel.context import ParallelContext
from smp.parallel.links import Channel, Links
from smp.pipeline.actions import SEND, Op
from smp.pipeline.recorder import Recorder, Watcher
from smp.pipeline.run import Runner
from smp.pipeline.stage_plan import Plan
from smp.pipeline.timeline import Timeline
from smp.sharding.offload import Offload
from smp.sharding.stages import ShardedStages
from smp.sharding.tied import TiedMatrix
from smp.training.forward_backward import detached
from smp.training.micro_batches import MicroBatches

_Key = tuple[int, int]  # stage, micro-batch
# With a split backward pass BACKWARD_INPUT uses the activations; gradients of weights come later.
_BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)


class Pipelined:
    """Forward and backward passes in the order of a schedule, over the ranks of ``context.pp``.

    Args:
        plan: of the full batch.
        plans: for each number of micro-batches, see ``plans_by_size``.
        model: has this rank's parts.
        progress: called after each part of what is made together with the other ranks.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        plans: Mapping[int, Plan],
        model: StagedModel,
        context: ParallelContext,
        device: torch.device,
        offload: Offload | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.model, self.device, self.offload = plan, model, device, offload
        self._plans = dict(plans)
        pp = context.pp
        assert pp is not None and config.data.seq_length is not None, "a pipeline has ranks"
        self._group = pp.get_group()
        ends = plan.training.rank_of(0), plan.training.rank_of(plan.training.stages - 1)
        # Under adapters the matrix is frozen: nothing has to be kept equal.
        tied = model.embeds_at_the_end and ends[0] != ends[1] and not config.has_adapters
        # Of all schedules: a channel that is first used in the middle of a run would connect then, and might block.
        channels = message_channels(plans.values(), ends if tied else None)
        links = Links(pp, channels, timedelta(minutes=config.parallel.distributed_timeout_minutes), progress)
        # One shape for all messages: a receiver must know it before the message comes.
        shape = model.hidden_shape(config.rows_per_micro_batch, config.data.seq_length // context.cp_size)
        dtype = torch.bfloat16 if config.parallel.bf16 else torch.float32
        self._runner = Runner(links, shape, dtype, device)
        self._parts = plan.stages_of(links.rank)
        # FSDP of each stage by hand: the schedule says when to gather and reduce.
        self._sharded = ShardedStages(model, self._parts, split_backward=plan.split_backward)
        self._tied = TiedMatrix(model, links, ends) if tied else None
        self.before_last: Callable[[], None] | None = None
        self._recorder: Recorder | None = None
        self._watcher: Watcher | None = None

    @property
    def links(self) -> Links:
        """Messages to the other ranks of the pipeline."""
        return self._runner.links

    @property
    def place(self) -> str:
        """The rank's number and stages, as text for messages."""
        stages = ", ".join(map(str, self._parts))
        return f"pipeline rank {self._runner.links.rank} (stage{'s' * (len(self._parts) > 1)} {stages})"

    @property
    def waited(self) -> float:
        """Seconds so far in which the host waited for messages."""
        return self._runner.waited

    def add_plan(self, plan: Plan) -> None:
        """Add a schedule for steps with another number of micro-batches, over the same channels."""
        self._plans[plan.training.micro_batches] = plan

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        return {} if self._tied is None else self._tied.copies

    def train(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        stages = _Stages(self.model, self._parts, self._sharded, micro_batches, self.offload)
        schedule = self._plans[len(micro_batches)].training
        if self.offload is not None:
            own = schedule.actions[self._runner.links.rank]
            # The order of backward passes: the offloader loads activations ahead of them.
            self.offload.plan([(action.stage, action.micro_batch) for action in own if action.op in _BACKWARD])
        if self.before_last is not None:
            self.before_last()  # gradients are reduced once per step, and final then
        self._runner.run(schedule, stages, self._recorder or self._watcher)
        self._sharded.finish()
        # After ``finish``: what is added is the gradient reduced over the data-parallel ranks.
        if self._tied is not None:
            self._tied.sum_gradients()
        return list(stages.outputs.values())

    @torch.no_grad()
    def forward(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        stages = _Stages(self.model, self._parts, self._sharded, micro_batches)
        self._runner.run(self.plan.evaluation, stages)
        self._sharded.finish()
        # In the order of stage and micro-batch: a caller puts results together by their number.
        return [stages.outputs[key] for key in sorted(stages.outputs)]

    def watched_by(self, watcher: Watcher) -> None:
        """Report the actions of all training steps to ``watcher``, except those that :meth:`record` times."""
        self._watcher = watcher

    def record(self) -> None:
        """Record the times of the next training step; every rank calls it."""
        self._recorder = Recorder(self._group, self.device)

    def recorded(self) -> Timeline | None:
        """The timeline of the step after :meth:`record`, on pipeline rank 0; every rank calls it."""
        assert self._recorder is not None, "record() comes first"
        recorder, self._recorder = self._recorder, None
        return recorder.timeline()


def message_channels(plans: Iterable[Plan], tied_ends: Channel | None) -> set[Channel]:
    """(source, destination) of all messages: those of the schedules, and in both directions between the ends of a tied
    matrix."""
    schedules = [schedule for plan in plans for schedule in (plan.training, plan.evaluation)]
    sends = {
        (rank, schedule.peer(action))
        for schedule in schedules
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        if action.op in SEND
    }
    # Both ways: each end sends its gradient to the other.
    return sends if tied_ends is None else sends | {tied_ends, tied_ends[::-1]}


@dataclass(eq=False)
class _Gradients:
    """The gradients that arrive at the ends of a stage's graph."""

    of_input: torch.Tensor | None = None
    of_output: torch.Tensor | None = None


class _Entry(torch.autograd.Function):
    """The beginning of a stage's graph, instead of a leaf, which would hold the hidden states as long as the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, ends: _Gradients) -> torch.Tensor:
        ctx.ends = ends
        # A new tensor: a function must not return its input, and a stage's hidden states are free when its graph is.
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.ends.of_input = gradient
        return None, None, None


class _Exit(torch.autograd.Function):
    """The end of a stage's graph, without the hidden states that were handed on."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, ends: _Gradients) -> torch.Tensor:
        ctx.ends = ends
        # A number without a meaning: the gradient comes by way of ``ends``, not through this.
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.ends.of_output, None


class _Stages:
    """This rank's stages in one step, as ``smp.pipeline.run`` calls them."""

    def __init__(
        self,
        model: StagedModel,
        parts: dict[int, ModelPart],
        sharded: ShardedStages,
        micro_batches: MicroBatches,
        offload: Offload | None = None,
    ) -> None:
        self.model, self.parts, self.sharded, self.micro_batches = model, parts, sharded, micro_batches
        self.outputs: dict[_Key, ModelOutput] = {}  # what is not handed on
        self.unshard, self.reshard, self.reduce = sharded.unshard, sharded.reshard, sharded.reduce
        self._offload = offload
        self._kept: dict[_Key, tuple[_Gradients, list[torch.Tensor | None]]] = {}
        self._pending: dict[_Key, list[WeightGradients]] = {}

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Forward of one stage. The graph ends at the stage: the gradient that comes to its input is the message to the
        stage before."""
        training, key = torch.is_grad_enabled(), (stage, micro_batch)
        # Gathering was begun by the schedule, some computations ago.
        self.sharded.gathered(stage)
        ends = _Gradients()
        if hidden is not None and training:
            # Autograd records the function only if an input wants a gradient; the message is no such input.
            hidden = _Entry.apply(torch.empty(0, requires_grad=True), hidden, ends)
        with nullcontext() if self._offload is None else self._offload.of_pass(key):
            output: ModelOutput = self.model(self.micro_batches[micro_batch], hidden=hidden, part=self.parts[stage])
        if training:
            root = None if output.hidden is None else _Exit.apply(output.hidden, ends)
            self._kept[key] = ends, [output.total, root]
        self.outputs[key] = detached(output)
        # Only the stage's own losses stay; hidden states belong to the message now.
        return None if output.hidden is None else output.hidden.detach()

    def backward_input(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Backward of one stage to its input, from the gradient of what was handed on and from the losses of this
        stage."""
        # Free when the backward pass is over, whatever stays for the weights' gradients.
        ends, roots = self._kept.pop((stage, micro_batch))
        self.sharded.gathered(stage)
        ends.of_output = gradient
        # a first stage without anything to train has no graph
        used = [tensor for tensor in roots if tensor is not None and tensor.requires_grad]
        if used:
            # Both at once: one pass through the graph, from the message and from this stage's own losses.
            torch.autograd.backward(used)
        # Of this micro-batch: the next backward pass of another one may come before its weights' gradients.
        self._pending[stage, micro_batch] = self.sharded.take_pending()
        return ends.of_input

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self.sharded.gathered(stage)
        self.sharded.backward_weight(stage, self._pending.pop((stage, micro_batch)))

    def backward(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        result = self.backward_input(stage, micro_batch, gradient)
        self.backward_weight(stage, micro_batch)
        return result
