"""The passes of a step through a pipeline: plan, stages, messages and the runner put together."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh

from smp.config import Config, Layout
from smp.data.loader import GlobalBatch
from smp.layers.deferred import WeightGradients
from smp.models.gpt import GPT
from smp.models.part import ModelPart
from smp.parallel.links import Links
from smp.parallel.mesh import MESH_DIMS
from smp.pipeline.actions import SEND
from smp.pipeline.plan import Plan, plans_by_size
from smp.pipeline.recorder import Recorder
from smp.pipeline.run import Runner
from smp.pipeline.timeline import Timeline
from smp.sharding.stages import ShardedStages
from smp.sharding.tied import TiedMatrix
from smp.training.passes import Inputs, MakeInputs

_Key = tuple[int, int]  # stage, micro-batch


class Pipelined:
    """Forward and backward passes in the order of a schedule, over the ranks of ``mesh["pp"]``.

    Args:
        config: resolved settings.
        plan: of the run, for its full batch.
        model: this rank's parts, after ``parallelize``.
        mesh: of the run.
        device: where the model is.
        make_inputs: of (batch, valid tokens, device).
        rows: of a sample: 2 when it is a pair.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        model: GPT,
        mesh: DeviceMesh,
        device: torch.device,
        make_inputs: MakeInputs = Inputs,
        rows: int = 1,
    ) -> None:
        self.plan, self.model, self.device, self.make_inputs = plan, model, device, make_inputs
        ranks = {name: mesh[name].size() for name in MESH_DIMS}
        self._plans = plans_by_size(config, Layout(**ranks))
        pp = mesh["pp"]
        self._group = pp.get_group()
        ends = plan.training.rank_of(0), plan.training.rank_of(plan.training.stages - 1)
        tied = model.tied and ends[0] != ends[1] and not model.frozen
        channels = {
            *(c for planned in self._plans.values() for c in _channels(planned)),
            *([ends, ends[::-1]] if tied else []),
        }
        links = Links(pp, channels, timedelta(minutes=config.parallel.distributed_timeout_minutes))
        assert config.data.seq_length is not None
        shape = model.hidden_shape(rows * config.data.micro_batch_size, config.data.seq_length)
        dtype = torch.bfloat16 if config.parallel.bf16 else torch.float32
        self._runner = Runner(links, shape, dtype, device)
        self._parts = plan.stages_of(links.rank)
        self._sharded = ShardedStages(model, self._parts, split_backward=plan.split_backward)
        self._tied = TiedMatrix(model, links, ends) if tied else None
        self._recorder: Recorder | None = None

    @property
    def place(self) -> str:
        """This rank in the pipeline, for messages."""
        stages = ", ".join(map(str, self._parts))
        return f"pipeline rank {self._runner.links.rank} (stage{'s' * (len(self._parts) > 1)} {stages})"

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        return {} if self._tied is None else self._tied.copies

    def train(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        inputs = self.make_inputs(batch, valid_tokens, self.device)
        stages = _Stages(self.model, self._parts, self._sharded, inputs)
        self._runner.run(self._plans[len(batch.tokens)].training, stages, self._recorder)
        self._sharded.finish()
        if self._tied is not None:
            self._tied.sum_gradients()
        return self._sum(list(stages.outputs.values()))

    def evaluate(self, batch: GlobalBatch, valid_tokens: int) -> torch.Tensor:
        return self._sum(self.outputs(self.make_inputs(batch, valid_tokens, self.device)))

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> list[torch.Tensor]:
        stages = _Stages(self.model, self._parts, self._sharded, inputs)
        self._runner.run(self.plan.evaluation, stages)
        self._sharded.finish()
        return [stages.outputs[i] for i in sorted(stages.outputs)]

    def _sum(self, losses: list[torch.Tensor]) -> torch.Tensor:
        return sum(losses, torch.zeros((), device=self.device))

    def record(self) -> None:
        """Take the times of the next training step; every rank calls it."""
        self._recorder = Recorder(self._group, self.device)

    def recorded(self) -> Timeline | None:
        """The step after :meth:`record`, on pipeline rank 0; every rank calls it."""
        assert self._recorder is not None, "record() comes first"
        recorder, self._recorder = self._recorder, None
        return recorder.timeline()


def _channels(plan: Plan) -> set[tuple[int, int]]:
    """(source, destination) of all messages."""
    return {
        (rank, schedule.peer(action))
        for schedule in (plan.training, plan.evaluation)
        for rank, actions in enumerate(schedule.actions)
        for action in actions
        if action.op in SEND
    }


class _Stages:
    """This rank's stages in one step: what ``smp.pipeline.run`` calls."""

    def __init__(self, model: GPT, parts: dict[int, ModelPart], sharded: ShardedStages, inputs: Inputs) -> None:
        self.model, self.parts, self.sharded, self.inputs = model, parts, sharded, inputs
        self.outputs: dict[int, torch.Tensor] = {}  # of the head, by micro-batch
        self.unshard, self.reshard, self.reduce = sharded.unshard, sharded.reshard, sharded.reduce
        self._kept: dict[_Key, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._pending: dict[_Key, list[WeightGradients]] = {}

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Graphs end at stages: the input is a leaf, and the gradient that it gets is the message back."""
        part, training = self.parts[stage], torch.is_grad_enabled()
        self.sharded.gathered(stage)
        if hidden is not None and training:
            hidden.requires_grad_()
        output = self.model(*self.inputs[micro_batch], hidden=hidden, part=part)
        if training:
            self._kept[stage, micro_batch] = hidden, output
        if not part.head:
            return output.detach()
        self.outputs[micro_batch] = output.detach()
        return None

    def backward_input(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        hidden, output = self._kept.pop((stage, micro_batch))
        self.sharded.gathered(stage)
        if output.requires_grad:  # not that of a first stage without anything to train
            torch.autograd.backward(output, gradient)
        self._pending[stage, micro_batch] = self.sharded.take_pending()
        return None if hidden is None else hidden.grad

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        self.sharded.gathered(stage)
        self.sharded.backward_weight(stage, self._pending.pop((stage, micro_batch)))

    def backward(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        result = self.backward_input(stage, micro_batch, gradient)
        self.backward_weight(stage, micro_batch)
        return result
