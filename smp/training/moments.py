"""When a training step needs most memory, by formula. No torch; symbols as in :mod:`smp.training.memory`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Bytes on one process that are there for some of a step.

    Attributes:
        gradients: of all its weights, as they are when the backward pass ends.
        waiting: of them in a forward pass, of an earlier micro-batch.
        before: what an earlier micro-batch's last reduction read, until the next reduction.
        late: of them that come in the first blocks' backward pass or behind it.
        activations: kept for the backward pass when it begins.
        kept_by_block, kept_behind: of them, of one on average, and what is gone when the last one's begins.
        at_loss, in_blocks, in_first: weights in compute precision that are gathered, or kept as they were cast.
        split: activations and activations' gradients at most, where backward passes have two parts; 0: they are whole.
        logits: of the loss, and the gradients that it leaves.
        backward: activations' gradients, and what is replayed.
        head: the gradient of the output matrix on its way to its reduction.
        block: that of the largest block.
        own: that in compute precision, while it comes.
        ends: what comes and goes when gradients of the embedding, or of a pipeline's step, are reduced.
    """

    gradients: int
    waiting: int
    before: int
    late: int
    activations: int
    kept_by_block: int
    kept_behind: int
    split: int
    at_loss: int
    in_blocks: int
    in_first: int
    logits: int
    backward: int
    head: int
    block: int
    own: int
    ends: int

    @property
    def most(self) -> int:
        """At one of: the loss, the last block's backward pass, the next one's beside the reduction of the last, the
        first block's, the end of it, and where its parts are split."""
        kept = self.waiting + self.activations
        return max(
            kept + self.before + self.at_loss + self.logits,
            kept - self.kept_behind + self.in_blocks + self.backward + self.head,
            kept - self.kept_by_block + self.in_blocks + max(self.backward, self.own) + self.block,
            self.gradients - self.late + self.in_first + self.backward + self.block,
            self.gradients + self.ends,
            self.waiting + self.split + self.in_blocks,
        )
