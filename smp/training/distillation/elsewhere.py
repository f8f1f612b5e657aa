"""A teacher in a layout of its own over the ranks of the run: samples go to the ranks that have it, states come back.

Both models lie over all ranks, each cut in its own way. What travels are whole micro-batches: number n of a step is the
same samples in every layout, and is computed by data-parallel rank n mod (number of these) of either model. Its states
in front of the output matrix come back token by token to the ranks that have the student's output matrix, each of which
keeps a share of the tokens of its tensor-parallel group. Both ends know both layouts and the micro-batch, so they agree
on what goes where without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smp.data.loader import RankBatch
from smp.kernels.transfer import to_device
from smp.layers.heads.distillation import TeacherHead, TeacherStates
from smp.models.micro_batch import MicroBatch
from smp.models.protocol import OutputShard
from smp.parallel.agree import gather
from smp.parallel.collectives import Group, start_exchange
from smp.parallel.context import ParallelContext
from smp.training.distillation.teacher import ModelTeacher
from smp.training.micro_batches import held_tokens
from smp.training.objectives.contract import Said

_FIELDS = ("input_ids", "labels", "document_ids", "position_ids", "sequence_lengths")
"""Fields of a batch that have an entry for every token."""


@dataclass(frozen=True)
class TokenOwners:
    """Which rank has which part of one of both models.

    Attributes:
        data_size, cp_size, tp_size: of its layout.
        tp_group: of its layout, which this rank is in; None: it is alone.
        data_rank, part: of this rank. A part is a share of the tokens of a micro-batch: one for each of the
            context-parallel ranks times the tensor-parallel ones, which take equal pieces.
        has_head: whether this rank has its output matrix.
        data_ranks: of all ranks.
        heads: (data rank, part) -> the rank that has it and the output matrix.
    """

    data_size: int
    cp_size: int
    tp_size: int
    tp_group: Group | None
    data_rank: int
    part: int
    has_head: bool
    data_ranks: list[int]
    heads: Mapping[tuple[int, int], int]

    @staticmethod
    def of(context: ParallelContext, *, has_head: bool) -> TokenOwners:
        """Of the model of ``context``. All ranks call it together."""
        tp_size = context.tp.size()
        # In the order of ``_parts``: all pieces of a sequence chunk, then those of the next.
        part = context.cp_rank * tp_size + context.tp.get_local_rank()
        # All ranks hear who has the output matrix: in a pipeline only some.
        every = gather((context.data_rank, part, has_head))
        heads = {(data, part): rank for rank, (data, part, there) in enumerate(every) if there}
        layout = context.data_size, context.cp_size, tp_size, context.tp_group if tp_size > 1 else None
        return TokenOwners(*layout, context.data_rank, part, has_head, [data for data, _, _ in every], heads)

    def asks(self, number: int) -> int:
        """The rank that sends the samples of a micro-batch: the first of those that have them."""
        return self.data_ranks.index(number % self.data_size)

    def share(self, tokens: int) -> int:
        """How many of a context-parallel rank's tokens each of its tensor-parallel ranks takes."""
        # Rounded up: the last piece may be shorter.
        return -(-tokens // self.tp_size)

    def tokens(self, batch: RankBatch, i: int, part: int) -> torch.Tensor:
        """Token indices of a part of micro-batch ``i`` of ``batch``, int64, row x columns + column; the last
        tensor-parallel rank's may be fewer."""
        return self._parts(batch, i)[part]

    def ranks(self, batch: RankBatch, i: int, number: int, tokens: torch.Tensor) -> torch.Tensor:
        """For each of ``tokens`` the rank that has it and the output matrix, int64; -1: it is left out as padding.
        Micro-batch ``i`` of ``batch`` is number ``number`` of the step."""
        holder = torch.full((batch.input_ids[i].numel(),), -1)
        for part, held in enumerate(self._parts(batch, i)):
            holder[held] = self.heads[number % self.data_size, part]
        return holder[tokens]

    def _parts(self, batch: RankBatch, i: int) -> list[torch.Tensor]:
        every = held_tokens(batch, i, self.cp_size)
        size = self.share(len(every[0]))
        return [held[j * size : (j + 1) * size] for held in every for j in range(self.tp_size)]


class Question(NamedTuple):
    """A step's samples.

    Attributes:
        batch: the student's share of this rank.
        asked: the teacher's, cut as the student's.
        total: micro-batches of the whole step.
    """

    batch: RankBatch
    asked: RankBatch
    total: int


class Facts(NamedTuple):
    """A rank's rows of the teacher's output matrix: ``rows`` from token id ``start`` on, of which ``valid`` are not
    padding; and the dtype of the states in front of it."""

    start: int
    rows: int
    valid: int
    hidden: int
    dtype: torch.dtype
    vocab_size: int
    softcap: float | None
    of_states: torch.dtype


class Head(NamedTuple):
    """The teacher's output matrix, once its first pass has shown it.

    Attributes:
        own: with this rank's rows of the student's; None: another pipeline rank has that.
        facts: of the first part.
    """

    own: TeacherHead | None
    facts: Facts


@dataclass(frozen=True)
class TeacherElsewhere:
    """A frozen model that is run on every batch, in a layout of its own.

    Attributes:
        teacher: it, where it is.
        student: the output matrix of the model that is trained; None: another pipeline rank has it.
        there, here: where the parts of the teacher and of the student are.
        trims: whether the teacher leaves out columns of padding.
    """

    teacher: ModelTeacher
    student: OutputShard | None
    there: TokenOwners
    here: TokenOwners
    trims: bool
    _heads: list[Head] = field(default_factory=list)

    def begin(self, batch: RankBatch) -> Said:
        question = self._ask(batch)
        states = self.teacher.states(self._trimmed(question.asked))
        # Collective, and the head does not change: only at the first batch.
        if not self._heads:
            self._heads.append(self._fetch_head(states))
            self.teacher.forget_matrix()
        head = self._heads[0]
        answers = self._answers(question, states, head)

        def said(i: int, micro_batch: MicroBatch) -> TeacherStates | None:
            return None if head.own is None else TeacherStates(head.own, answers[i])

        return said

    @property
    def world(self) -> Group:
        """All ranks."""
        assert dist.group.WORLD is not None, "two layouts need several ranks"
        return Group(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())

    def _trimmed(self, batch: RankBatch) -> RankBatch:
        """The batch that the teacher computes: without lengths where it does not leave out padding."""
        return batch if self.trims else replace(batch, lengths=None)

    # All ranks take part, also those that send or receive nothing.
    def _ask(self, batch: RankBatch) -> Question:
        """Send this rank's micro-batches to the ranks of the teacher that compute them."""
        here, there, world = self.here, self.there, self.world
        # Every rank needs the number of samples of the sender, to know how many micro-batches there
        # are.
        told = gather((batch.num_samples, batch.lengths))
        rows, of_rank = batch.input_ids.shape[1], here.data_rank
        # Rounded up: the last micro-batch may not be full.
        count = -(-sum(told[here.asks(data)][0] for data in range(here.data_size)) // rows)
        # The same number of micro-batches for each of the teacher's data-parallel ranks, or its
        # collectives would not match.
        each = range(-(-count // there.data_size))
        # What fills up repeats another micro-batch, whose states nobody gets.
        wanted = [[(i * there.data_size + data) % count for i in each] for data in range(there.data_size)]
        # One sender for each micro-batch: tensor- and context-parallel ranks have the same samples.
        own, sends = wanted[there.data_rank], here.asks(of_rank) == world.rank
        sent = [
            [n // here.data_size for n in wanted[data] if sends and n % here.data_size == of_rank]
            for data in there.data_ranks
        ]
        asking = [here.asks(n) for n in own]
        names = [name for name in _FIELDS if getattr(batch, name) is not None]
        # (micro-batches, fields, rows, columns)
        every = torch.stack([getattr(batch, name).long() for name in names], 1)
        chosen = to_device(every[torch.tensor([i for to in sent for i in to], dtype=torch.int64)], self.teacher.device)
        received = [asking.count(rank) for rank in range(world.size)]
        came = start_exchange(chosen, [len(to) for to in sent], received, world)().cpu()
        asked = torch.empty_like(came)
        # Rows come sorted by sender; a stable sort keeps each sender's order, which is that of
        # ``own``.
        asked[torch.tensor(asking).argsort(stable=True)] = came
        found: dict[str, Any] = dict(zip(names, asked.unbind(1), strict=True))
        known = [told[rank][1] for rank in asking]
        lengths = tuple(of[n // here.data_size] for of, n in zip(known, own, strict=True) if of is not None)
        # Numbers of tokens are those within their micro-batch then.
        index = torch.arange(rows).expand(len(own), rows)
        mine = RankBatch(**found, sample_index=index, lengths=lengths or None)
        return Question(batch, mine, count)

    def _answers(self, question: Question, states: list[torch.Tensor], head: Head) -> list[torch.Tensor]:
        """The teacher's states for this rank's share of the tokens of each of the student's micro-batches, 0 where it
        computes none (padding, and rows that fill up); an empty list where the student's output matrix is not."""
        batch, device, here = question.batch, self.teacher.device, self.here
        out = []
        for i in range(len(batch.input_ids) if here.has_head else 0):
            size = here.share(len(held_tokens(batch, i, here.cp_size)[0]))
            out.append(torch.zeros(size, head.facts.hidden, dtype=head.facts.of_states, device=device))
        # One micro-batch of each of the teacher's data-parallel ranks at a time: what travels is there twice.
        for i in range(len(question.asked.input_ids)):
            sent, splits = self._to_send(question, i, states, head)
            positions, received = self._to_receive(question, i)
            rows = start_exchange(sent, splits, received, self.world)()
            for micro_batch, to, came in positions:
                out[micro_batch][to.to(device)] = rows[came.to(device)]
        return out

    def _to_send(
        self, question: Question, i: int, states: list[torch.Tensor], head: Head
    ) -> tuple[torch.Tensor, list[int]]:
        """(states of this rank's share of its micro-batch ``i``, in the order of the ranks that get them; how many each
        gets)."""
        there, here, size, device = self.there, self.here, self.world.size, self.teacher.device
        number = i * there.data_size + there.data_rank
        # Filler micro-batches and ranks without the output matrix still take part in the exchange.
        if not there.has_head or number >= question.total:
            return torch.empty(0, head.facts.hidden, dtype=head.facts.of_states, device=device), [0] * size
        own = there.tokens(self._trimmed(question.asked), i, there.part)
        found, splits = _in_order(here.ranks(question.asked, i, number, own), own, size)
        share = states[i]
        # Without sequence parallelism all tensor-parallel ranks have all states: each sends its piece.
        if self.teacher.head.shared_by is None:
            tokens = len(held_tokens(self._trimmed(question.asked), i, there.cp_size)[0])
            begin = (there.part % there.tp_size) * there.share(tokens)
            share = share[begin : begin + len(own)]
        return share[found.to(device)], splits

    def _to_receive(self, question: Question, i: int) -> tuple[list[tuple[int, torch.Tensor, torch.Tensor]], list[int]]:
        """(for each of this rank's micro-batches that come from round ``i`` of the teacher's ranks: its number,
        positions in its states, and which of the rows that arrive go there; numbers of rows that come from each
        rank)."""
        there, here, batch, size = self.there, self.here, question.batch, self.world.size
        found, received = [], [0] * size
        for number in range(i * there.data_size, min((i + 1) * there.data_size, question.total)):
            if here.has_head and number % here.data_size == here.data_rank:
                micro_batch = number // here.data_size
                own = here.tokens(batch, micro_batch, here.part)
                held_by = there.ranks(self._trimmed(batch), micro_batch, number, own)
                positions, splits = _in_order(held_by, own, size)
                found.append((micro_batch, positions, splits))
                # Of other data-parallel ranks come other micro-batches: each rank sends of one.
                received = [n + m for n, m in zip(received, splits, strict=True)]
        # Rows arrive sorted by sender: those of a rank begin after all rows of lower ranks.
        begins = [sum(received[:rank]) for rank in range(size)]
        return [
            (micro_batch, positions, torch.cat([torch.arange(b, b + n) for b, n in zip(begins, splits, strict=True)]))
            for micro_batch, positions, splits in found
        ], received

    def _fetch_head(self, states: list[torch.Tensor]) -> Head:
        """The rows of the teacher's output matrix for the token ids that this rank has of the student's. Fetched once:
        it is frozen."""
        there, student, device = self.there, self.student, self.teacher.device
        own = self.teacher.head if there.has_head else None
        told = gather(None if own is None else _facts(own, states[0].dtype))
        # One tensor-parallel group of the teacher has the whole matrix.
        parts = {rank: found for rank in (there.heads[0, j] for j in range(there.tp_size)) if (found := told[rank])}
        facts = next(iter(parts.values()))
        begin, valid, common = 0, 0, facts.vocab_size
        if student is not None:
            # Vocabularies may be padded to different sizes, or one may have more tokens: only
            # common ids get rows.
            begin, common = student.shard.start, min(common, student.shard.vocab_size)
            valid = min(max(common - begin, 0), student.shard.valid)
        rows = torch.empty(valid, facts.hidden, dtype=facts.dtype, device=device)
        # Broadcasts go to all ranks, in one order on all of them.
        for rank, of in parts.items():
            if own is not None and rank == self.world.rank:
                part = own.matrix.contiguous()
            else:
                part = torch.empty(of.rows, of.hidden, dtype=of.dtype, device=device)
            dist.broadcast(part, rank)
            # The overlap of the part's token ids with this rank's.
            low, high = max(begin, of.start), min(begin + valid, of.start + of.valid)
            if low < high:
                rows[low - begin : high - begin] = part[low - of.start : high - of.start]
        if student is None:
            return Head(None, facts)
        shard = replace(student.shard, valid=valid, vocab_size=common, softcap=facts.softcap)
        return Head(TeacherHead(rows, shard, self.here.tp_group), facts)


def _facts(head: TeacherHead, of_states: torch.dtype) -> Facts:
    matrix, shard = head.matrix, head.shard
    sizes = shard.start, len(matrix), shard.valid, matrix.shape[1]
    return Facts(*sizes, matrix.dtype, shard.vocab_size, shard.softcap, of_states)


def _in_order(ranks: torch.Tensor, tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, list[int]]:
    """(indices into ``tokens`` of those that some rank has, sorted by ``ranks`` and then by token; how many each of
    ``size`` ranks has). Sender and receiver compute the same order. -1: no rank has the token."""
    # Sorted by token first: the stable sort by rank keeps that order within a rank.
    there = (ranks >= 0).nonzero().flatten()
    by_token = there[tokens[there].argsort()]
    found = by_token[ranks[by_token].argsort(stable=True)]
    return found, torch.bincount(ranks[found], minlength=size).tolist()
