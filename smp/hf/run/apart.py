"""A sequence for an encoder and its decoder: the prompt for the one, the answer for the other.

Sequences of a run are a prompt with an answer after it, of which only the answer is trained. So the first token that
is trained is where the answer begins: what is in front of it goes to the encoder, and the decoder reads the answer
shifted by one, after the token that it begins with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from smp.config import ConfigError
from smp.models.micro_batch import MicroBatch


def read_widths(first: torch.Tensor, last: torch.Tensor, length: int) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest answer of a micro-batch, read by the host.

    Args:
        first, last: (rows,) the answer's first and last label in a row of ``length``.
    """
    prompt, answer = torch.stack([first.max(), (last - first).max()]).add(1).tolist()
    return prompt, answer


class Shift:
    """The decoder's inputs from the labels: the answer shifted by one.

    Args:
        module: an encoder with a decoder.

    Attributes:
        read_widths: how the host learns of the texts' lengths; a step on tensors without data takes halves.

    Raises:
        ConfigError: the model does not say what its decoder begins with.
    """

    def __init__(self, module: Any) -> None:
        try:  # by the class itself: where its configuration says so differs
            shifted = module.prepare_decoder_input_ids_from_labels(labels=torch.zeros(1, 2, dtype=torch.int64))
        except Exception as error:  # of any kind: each class has a rule of its own
            raise ConfigError(
                f"--model-implementation transformers: {type(module).__name__} does not say what its decoder begins "
                f"with: {' '.join(str(error).split())[:200]}"
            ) from None
        self._start = self._pad = int(shifted[0, 0])
        self.read_widths = read_widths

    def apart(self, batch: MicroBatch) -> tuple[dict[str, torch.Tensor], MicroBatch]:
        """(arguments of the module, the batch with labels and weights of the answers alone). Filler rows, without an
        answer, have one token in either part, of weight 0."""
        ids, labels, weights = batch.input_ids, batch.labels, batch.loss_weights
        assert labels is not None and weights is not None, "checked by the model"
        columns = torch.arange(ids.shape[1], device=ids.device)
        answered = weights > 0
        first = torch.where(answered.any(1), answered.int().argmax(1), 0)  # the label there is the answer's first token
        last = torch.where(answered, columns, 0).amax(1).maximum(first)
        # Widths of both parts are the longest of the micro-batch.
        prompt, answer = self.read_widths(first, last, ids.shape[1])
        answer_columns = first[:, None] + torch.arange(answer, device=ids.device)
        inside = answer_columns <= last[:, None]
        answer_columns = answer_columns.clamp(max=ids.shape[1] - 1)
        # -100 in wanted becomes padding in the decoder's input, as transformers' shift functions
        # do.
        wanted = labels.gather(1, answer_columns).masked_fill(~inside, -100)
        read = torch.where(wanted < 0, self._pad, wanted)
        before = torch.full_like(read[:, :1], self._start)
        # The token at ``first`` is read, and its label is the answer's first: it belongs to the
        # prompt.
        mask = columns[:prompt] <= first[:, None]
        arguments = {
            "input_ids": ids[:, :prompt].masked_fill(~mask, self._pad),
            "attention_mask": mask.long(),
            "decoder_input_ids": torch.cat((before, read[:, :-1]), 1),
        }
        counted = weights.gather(1, answer_columns).masked_fill(~inside, 0.0)
        return arguments, replace(batch, input_ids=read, labels=wanted, loss_weights=counted)
