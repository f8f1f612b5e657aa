"""At which point in time a training step needs most memory, by formula (these moments are not the
optimizer's). No torch; symbols as in :mod:`smp.training.cost.memory`."""

from __future__ import annotations

from dataclasses import dataclass

from smp.pipeline.actions import Op


@dataclass(frozen=True)
class Moments:
    """Bytes on one process that are there for some of a step.

    Attributes:
        gradients: of all its weights, as they are when the backward pass ends.
        waiting: of them in a forward pass, of an earlier micro-batch.
        head_gradient, before_last: of them, in a step's only backward pass, the output matrix's and the last block's;
            below 0: what the last block's reduction has freed of those that are there.
        before: what an earlier micro-batch's last reduction read, until the next reduction.
        late: of them that come in the first blocks' backward pass or after it.
        activations: kept for the backward pass when it begins.
        kept_by_block, kept_by_head: of them, of one on average, and what is gone when the last one's begins.
        to_the_end: activations, besides its own, that are there in the first block's.
        at_last, at_copy: weights in compute precision when the last block begins, where they stay until its backward
            pass, with the buffer that it was gathered into, and while it is copied out of that; else 0.
        at_loss, in_blocks, in_next, in_first: weights in compute precision that are gathered, or kept as they were
            cast: at the loss and in the backward passes of the last, the next and the first block.
        logits: of the loss, and the gradients that it leaves.
        backward: activations' gradients, and what is replayed.
        input_part, weight_part: what a backward pass in two parts has in flight: what its first block has kept and
            activations' gradients, less what is pending of them at its end; and a stage's gradients in compute
            precision, which are added to their sums at its end.
        embedding: its gradient in compute precision between both parts, which no block's weight part makes; or 0.
        head: the gradient of the output matrix on its way to its reduction.
        block: that of the largest block; with expert parallelism without its experts, which are a unit of their own.
        experts: what is there when the experts' gradients begin their reduction, before those of the rest come; or 0.
        own, own_first: that in compute precision, while it comes; of it the last product's, which comes first.
        ends: what comes and goes when gradients of the embedding, or of a pipeline's step, are reduced.
        tied: of a matrix at both ends, from the loss until then: itself, and the gradient as an output matrix.
    """

    gradients: int
    waiting: int
    head_gradient: int
    before_last: int
    before: int
    late: int
    activations: int
    kept_by_block: int
    kept_by_head: int
    to_the_end: int
    at_last: int
    at_copy: int
    at_loss: int
    in_blocks: int
    in_next: int
    in_first: int
    logits: int
    backward: int
    input_part: int
    embedding: int
    head: int
    block: int
    experts: int
    own: int
    own_first: int
    ends: int
    tied: int
    weight_part: int = 0

    @property
    def most(self) -> int:
        """At one of: the loss, the last block's backward pass, the next one's during the reduction of the last, the
        first block's, and the end of it."""
        return max(self.in_forward, self.in_backward)

    def in_pass(self, op: Op) -> int:
        """In a pass of a pipeline."""
        match op:
            case Op.FORWARD:
                return self.in_forward
            case Op.BACKWARD_INPUT:
                # In its last block, with what all keep; and in its first one, when all others are pending. The
                # embedding's gradient comes last, when no block's is in flight any more.
                in_last = self.activations - self.kept_by_head + self.backward
                in_first = self.to_the_end + max(self.input_part, self.embedding)
                return self.waiting + self.in_blocks + max(in_last, in_first)
            case Op.BACKWARD_WEIGHT:
                made = self.activations + self.in_blocks + self.weight_part
                return self.gradients + max(made, self.ends)
        return self.in_backward

    @property
    def in_forward(self) -> int:
        """At the loss, or in the last block."""
        at_loss, in_last = self.at_loss + self.logits, self.at_last - self.kept_by_head
        at_copy = self.at_copy - self.kept_by_head - self.kept_by_block
        return self.waiting + self.activations + self.before + max(at_loss, in_last, at_copy)

    @property
    def in_backward(self) -> int:
        """At one of the others."""
        kept, backward = self.waiting + self.activations, self.backward + self.own_first
        return max(
            kept - self.kept_by_head + self.head_gradient + self.in_blocks + backward + self.head + self.tied,
            kept
            - self.kept_by_head
            - self.kept_by_block
            + self.head_gradient
            + self.before_last
            + self.in_next
            + max(max(backward, self.own) + self.block, self.experts)
            + self.tied,
            self.in_first_block,
            self.gradients + self.ends,
        )

    @property
    def in_first_block(self) -> int:
        """In the first block's backward pass."""
        kept = self.to_the_end + self.kept_by_block
        backward = self.backward + self.own_first
        return self.gradients - self.late + kept + self.in_first + max(backward + self.block, self.experts) + self.tied
