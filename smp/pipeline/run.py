"""Executing a schedule: one rank's actions in order, over messages between ranks.

The runner holds no policy. The schedule says what comes when, :class:`Stages` computes a stage; the
runner moves tensors from one to the other. Sends and receives are posted and go on by themselves; only a computation
that reads a message waits for it.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from smp.parallel.links import Links
from smp.pipeline.actions import RECEIVE, SEND, Action, Op, Schedule, completed, counterpart, needs
from smp.pipeline.communication import known_to_have_arrived
from smp.pipeline.failure import PipelineError, naming, reason
from smp.pipeline.recorder import Watcher


class Stages(Protocol):
    """The computations of one rank's stages in one step. ``micro_batch`` counts from 0."""

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """From the output of the stage before (None: this is the first) to this one's (None: this is the last)."""

    def backward(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """From the gradient of the output (None: this is the last stage) to that of the input (None: the first)."""

    def backward_input(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The input part of :meth:`backward`: the gradient of the input alone."""

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        """The weight part of :meth:`backward`, after its input part: the gradients of the weights."""

    def unshard(self, stage: int) -> None:
        """Begin to gather the stage's parameters."""

    def reshard(self, stage: int) -> None:
        """Free the stage's gathered parameters."""

    def reduce(self, stage: int) -> None:
        """Begin to sum the stage's gradients over the data-parallel ranks."""


class Runner:
    """Runs schedules on this rank.

    Args:
        links: to the other pipeline ranks.
        shape, dtype, device: of the message between two stages.
    """

    def __init__(self, links: Links, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.links = links
        self.waited = 0.0
        """Seconds so far in which the host waited for messages."""
        self.new_message = partial(torch.empty, shape, dtype=dtype, device=device)  # a buffer to receive into

    def run(self, schedule: Schedule, stages: Stages, recorder: Watcher | None = None) -> None:
        """One step: all actions of this rank.

        Raises:
            PipelineError: a message or a collective failed, because another rank is gone or late.
        """
        step = _Step(self, schedule, stages, recorder)
        for action in schedule.actions[self.links.rank]:
            step.run(action)
        step.finish()


class _Step:
    """Tensors and messages under way in one step."""

    def __init__(self, runner: Runner, schedule: Schedule, stages: Stages, recorder: Watcher | None) -> None:
        self.runner, self.schedule, self.stages, self.recorder = runner, schedule, stages, recorder
        # By the receive that brings it. The tensor stays here while the network writes to it.
        self.received: dict[Action, tuple[dist.Work, torch.Tensor]] = {}
        self.results: dict[Action, torch.Tensor] = {}  # by the action that computed it
        self.sent: dict[Action, tuple[dist.Work, torch.Tensor]] = {}
        self.arrived = known_to_have_arrived(schedule, runner.links.rank)

    def run(self, action: Action) -> None:
        """Run one action, after waiting for what it reads."""
        if action.op in SEND:
            self._send(action)
        elif action.op in RECEIVE:
            self._receive(action)
        else:
            self._work(action)

    def _work(self, action: Action) -> None:
        """A computation, or an action on parameters. Either may communicate with other ranks than the pipeline's."""
        arguments = self._arguments(action)
        recorded = nullcontext() if self.recorder is None else self.recorder.running(action)
        with naming(f"pipeline rank {self.runner.links.rank}: {action}", function=False), recorded:
            # The values of ``Op`` are the names of the methods of ``Stages``.
            result = getattr(self.stages, action.op.value)(action.stage, *arguments)
        # A backward pass in one piece and one in two are known by the same name, so that what
        # reads it need not know which.
        if result is not None:
            self.results[completed(action)[0]] = result  # the input part of a backward pass makes what the whole makes

    def _arguments(self, action: Action) -> tuple[int | torch.Tensor | None, ...]:
        """Arguments of an action after the stage: none for actions on parameters, else the micro-batch and, for a
        computation that reads from its neighbour, that input."""
        if action.micro_batch is None:
            return ()
        if action.op is Op.BACKWARD_WEIGHT:
            return (action.micro_batch,)
        return action.micro_batch, self._input(action)

    def _input(self, action: Action) -> torch.Tensor | None:
        """A message, or the result of a neighbour on this rank; None at the model's ends."""
        # Of what has to be done before, only a neighbour's result is read: the own forward pass is
        # kept by the stage itself.
        reads = [need for need in needs(self.schedule, action) if need.op in RECEIVE or need.stage != action.stage]
        if not reads:
            return None
        (source,) = reads
        if source.op not in RECEIVE:
            # Popped: the runner must not keep an activation alive that its reader has done with.
            return self.results.pop(source)
        work, tensor = self.received.pop(source)
        self._wait(source, work)
        # The work of gloo does not know when it is completed, but an answer says it: waiting takes no time.
        for sent in self.arrived.get(source, ()):
            if sent in self.sent:
                self._wait(sent, self.sent.pop(sent)[0])
        if self.recorder is not None:
            self.recorder.arrived(source)
        return tensor

    def _receive(self, action: Action) -> None:
        tensor = self.runner.new_message()
        try:
            self.received[action] = self.runner.links.receive(tensor, self.schedule.peer(action)), tensor
        except RuntimeError as error:
            raise self._failure(action, error) from error
        if self.recorder is not None:
            self.recorder.posted(action)

    def _send(self, action: Action) -> None:
        # A message keeps its tensor alive. Those that have arrived are dropped here, or a step
        # would hold all that it sent.
        self.sent = {sent: message for sent, message in self.sent.items() if not message[0].is_completed()}
        (result,) = needs(self.schedule, action)
        # The network sends memory as it lies, and a stage's result may be a view: of a strided one it would send the
        # wrong elements, without an error.
        tensor = self.results.pop(result).contiguous()
        try:
            self.sent[action] = self.runner.links.send(tensor, self.schedule.peer(action)), tensor
        except RuntimeError as error:
            raise self._failure(action, error) from error

    def finish(self) -> None:
        """Wait for all sends of the step."""
        for action, (work, _) in self.sent.items():
            self._wait(action, work)
        # The validator proved that each result has one reader. Something left over means that
        # the runner and it disagree.
        assert not self.received and not self.results, "a valid schedule uses every result once"

    def _wait(self, action: Action, work: dist.Work) -> None:
        began = time.perf_counter()
        try:
            work.wait()
            self.runner.waited += time.perf_counter() - began
        except RuntimeError as error:
            raise self._failure(action, error) from error

    def _failure(self, action: Action, error: RuntimeError) -> PipelineError:
        """The error of a failed message. The rank at its other end is lost, or it reports an error too: then it waits
        for yet another rank."""
        links, peer, stage = self.runner.links, self.schedule.peer(action), counterpart(action).stage
        other = f"rank {links.global_rank(peer)}"
        return PipelineError(
            f"pipeline rank {links.rank}: {action} {_WAY[action.op]} stage {stage} on pipeline rank {peer} ({other}) "
            f"failed: {reason(error)}; {other} is lost, or says what it waits for itself"
        )


_WAY = dict.fromkeys(SEND, "to") | dict.fromkeys(RECEIVE, "from")
