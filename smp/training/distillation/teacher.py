"""The teacher of a distillation run: a second model in the layout of the run, or log-probabilities in files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.distributed.fsdp import FSDPModule

from smp.config import Config
from smp.data.loader import RankBatch
from smp.data.tuning.batches import NumberedBatch
from smp.kernels.transfer import to_device
from smp.layers.heads.answers import AnswerLoss
from smp.layers.heads.distillation import TeacherHead, TeacherStates, TopLogits
from smp.models.micro_batch import MicroBatch
from smp.models.protocol import Model, OutputShard
from smp.parallel.collectives import Group
from smp.sharding.parallelize import free_gathered
from smp.training.build import RunSetup, build_forward_backward
from smp.training.distillation.stored import StoredLogits
from smp.training.eight_bit import without_history
from smp.training.forward_backward import ForwardBackward
from smp.training.micro_batches import MicroBatches
from smp.training.objectives.contract import Said, answer_micro_batches
from smp.training.tuning.model import build_finetune_model


@dataclass(frozen=True)
class ModelTeacher:
    """A frozen model that is run on every batch.

    Attributes:
        model, forward_backward: of the teacher.
        student: the output matrix of the model that is trained; None: another pipeline rank has it.
        device: of both.
        cp: ranks that share every sequence.
    """

    model: Model
    forward_backward: ForwardBackward
    student: OutputShard | None
    device: torch.device
    cp: Group | None
    _heads: list[TeacherHead] = field(default_factory=list)

    def begin(self, batch: RankBatch) -> Said:
        states = self.states(batch)
        if not states:
            assert self.student is None, "one stage has both heads"
            return lambda i, micro_batch: None
        head = self.head
        return lambda i, micro_batch: TeacherStates(head, states[i])

    def states(self, batch: RankBatch) -> list[torch.Tensor]:
        """The input of the output matrix for each micro-batch, (tokens [/p], hidden); empty on a pipeline rank without
        the head."""
        # Dropout off. The student's mode is its own.
        self.model.eval()
        outputs = self.forward_backward.forward(self.micro_batches(batch))
        free_gathered(self.model)  # no backward pass comes that would
        # Only the stage with the head returns values.
        return [output.values for output in outputs if output.values is not None]

    def micro_batches(self, batch: RankBatch) -> MicroBatches:
        """The micro-batches of the teacher's forward pass, which keeps the states in front of its head."""
        wanted = AnswerLoss(states=self._take)
        return answer_micro_batches(batch, lambda _: wanted, self.device, self.cp)

    @property
    def head(self) -> TeacherHead:
        """The output matrix that turns the states into logits, known from the first batch on."""
        return self._heads[0]

    def forget_matrix(self) -> None:
        """Keep no rows of the output matrix, which are where the student has those of its own."""
        self._heads[:] = [replace(head, matrix=head.matrix.new_empty(0)) for head in self._heads]

    def _take(self, matrix: torch.Tensor) -> None:
        """Keep this rank's rows of the teacher's output matrix. It is frozen, and used after FSDP has freed the
        teacher's gathered weights: under FSDP it is copied."""
        if self._heads:
            return
        own = self.model.output_shard()
        assert own is not None, "it has just been used"
        kept = matrix.detach().clone() if isinstance(self.model, FSDPModule) else matrix.detach()
        head = TeacherHead(kept, own.shard, own.shard.group if own.sequence_parallel else None)
        self._heads.append(head if self.student is None else _fitting(head, self.student))


def _fitting(head: TeacherHead, student: OutputShard) -> TeacherHead:
    """``head`` with the student's rows of the vocabulary, copied only where they differ."""
    # The softcap is of the teacher's own logits, and does not matter for which rows there are.
    same = replace(head.shard, softcap=None) == replace(student.shard, softcap=None)
    return head if same else head.aligned(student.shard)


def build_teacher(config: Config, setup: RunSetup, student: OutputShard | None) -> tuple[ModelTeacher, list[str]]:
    """(the teacher, what the user should hear). ``config`` is that of ``teacher_config``."""
    model, notes = build_finetune_model(config, setup, None, trainable=False)
    forward_backward = build_forward_backward(config, setup, model)
    made = ModelTeacher(model, forward_backward, student, setup.device, setup.context.cp_group)
    return made, [f"teacher: {config.checkpoint.load}", *without_history(config, "teacher"), *notes]


@dataclass(frozen=True)
class StoredTeacher:
    """A teacher whose log-probabilities were stored before.

    Attributes:
        stored: by the number of a label.
        device: of the model.
        has_head: whether this rank needs it.
    """

    stored: StoredLogits
    device: torch.device
    has_head: bool

    def begin(self, batch: RankBatch) -> Said:
        assert isinstance(batch, NumberedBatch) and batch.numbers is not None
        numbers, length = batch.numbers, batch.input_ids.shape[-1]

        def said(i: int, micro_batch: MicroBatch) -> TopLogits | None:
            if not self.has_head:
                return None
            assert micro_batch.token_index is not None
            # token_index is sample x length + column; a context-parallel rank has some of the columns.
            columns = micro_batch.token_index.cpu() - batch.sample_index[i][:, None] * length
            # (rows, columns) -> (tokens,) numbers of labels
            found = self.stored[numbers[i].gather(1, columns).flatten()]
            ids, log_probs, rest = (to_device(x, self.device) for x in (found.ids, found.log_probs, found.rest))
            return TopLogits(ids, log_probs, rest, found.vocab_size)

        return said
