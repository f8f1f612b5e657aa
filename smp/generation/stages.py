"""Forward passes through the stages of a pipeline: hidden states go to the next stage, chosen tokens around the ring.

Every rank handles the groups of texts in one order. It takes the tokens that the last stage chose for a group when it
comes to that group's next pass; meanwhile it computes the other groups, so with as many groups as ranks all of them are
busy. Tokens and hidden states have process groups of their own: the order in which they follow each other differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smp.generation.sampling import Sampled
from smp.models.micro_batch import MicroBatch
from smp.models.part import ModelPart
from smp.models.protocol import StagedModel
from smp.parallel.links import Links


class Ring:
    """Sends hidden states and tokens between stages. Its construction is collective over the ranks of the pipeline.

    Args:
        model: has this rank's parts.
        mesh: 1-D, of the pipeline.
        stages: of the whole pipeline, (part, rank), in the order of the layers.
        dtype: of hidden states.
        device: of the model.
    """

    def __init__(
        self,
        model: StagedModel,
        mesh: DeviceMesh,
        stages: Sequence[tuple[ModelPart, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.stages, self.rank = list(stages), mesh.get_local_rank()
        # Neighbouring stages of one rank, at the turn of a v, pass hidden states without a message.
        ranks, size = [rank for _, rank in stages], mesh.size()
        onward = {(a, b) for a, b in itertools.pairwise(ranks) if a != b}
        self.last = ranks[-1]
        # size - 1 hops in a ring, from the rank of the last stage to the one before it.
        around = {((self.last + i) % size, (self.last + i + 1) % size) for i in range(size - 1)}
        self._hidden, self._tokens = Links(mesh, onward), Links(mesh, around)
        self._before, self._next = (self.rank - 1) % size, (self.rank + 1) % size
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """The logits, on the rank of the last stage; None elsewhere, and where none are wanted."""
        hidden: torch.Tensor | None = None
        for i, (part, rank) in enumerate(self.stages):
            if rank != self.rank:
                continue
            # A first stage embeds token ids, and a stage of this rank left ``hidden`` in the turn
            # before.
            if i > 0 and self.stages[i - 1][1] != self.rank:
                shape = self.model.hidden_shape(*micro_batch.input_ids.shape)
                hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
                self._hidden.receive(hidden, self.stages[i - 1][1]).wait()
            output = self.model(micro_batch, hidden=hidden, part=part)
            if i == len(self.stages) - 1:
                logits: torch.Tensor | None = output.logits
                return logits
            hidden, to = output.hidden, self.stages[i + 1][1]
            if to != self.rank:
                assert hidden is not None
                # A message is sent as the memory lies; of a strided view that would be other
                # elements.
                self._send(self._hidden, hidden.contiguous(), to)
        return None

    def chosen(self, sampled: Sampled) -> None:
        """Begin to send chosen tokens around the ring, on the rank of the last stage."""
        if self._next != self.last:
            # One message: ids are exact in fp64.
            message = torch.stack([sampled.ids.double(), sampled.log_probs.double()])
            self._send(self._tokens, message, self._next)

    def received(self, count: int) -> Sampled:
        """The chosen tokens of ``count`` texts, on the other ranks, which also pass them on."""
        message = torch.empty(2, count, dtype=torch.float64, device=self.device)
        self._tokens.receive(message, self._before).wait()
        if self._next != self.last:
            self._send(self._tokens, message, self._next)
        return Sampled(message[0].long(), message[1])

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _send(self, links: Links, tensor: torch.Tensor, to: int) -> None:
        # Tensors stay alive until their messages are sent.
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        self._sent.append((links.send(tensor, to), tensor))
