"""Scores of completions by a reward model, a frozen second model in the layout of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smp.config import Config
from smp.config.batch import count_micro_batches
from smp.data.tuning.batches import TuningDataset
from smp.data.tuning.encode import Encoded, Encoder
from smp.data.tuning.samples import Samples
from smp.data.tuning.sequences import lay_out
from smp.parallel.context import ParallelContext
from smp.training.build import RunSetup, build_forward_backward, setup_for_second_model
from smp.training.eight_bit import without_history
from smp.training.objectives.reference import ModelReference
from smp.training.tuning.model import build_finetune_model


@dataclass(frozen=True)
class RewardModel:
    """Scores texts as it was trained to: prompt and completion, encoded by its own tokenizer and template.

    Attributes:
        model: gives a score for the last token of each text.
        encoder: of its tokenizer.
        context: ranks.
        rows: of a micro-batch.
        micro_batches: of a pass on each rank.
        length: most tokens of a text.
        trim: see ``TuningDataset``.
    """

    model: ModelReference
    encoder: Encoder
    context: ParallelContext
    rows: int
    micro_batches: int
    length: int
    trim: bool

    def scores(self, prompts: list[Any], completions: list[Any]) -> npt.NDArray[np.float64]:
        """Score of each prompt's completion, texts or messages, fp64 (completions,); NaN where the reward model cannot
        read them, or they are too long for it. All ranks ask for the same ones together, and each computes a share."""
        every_text = [self._encoded(prompt, said) for prompt, said in zip(prompts, completions, strict=True)]
        read = np.array([text is not None for text in every_text])
        texts = [text for text in every_text if text is not None]
        out = np.full(len(every_text), np.nan)
        if texts:
            out[read] = self._of_texts(texts)
        return out

    def _of_texts(self, texts: list[Encoded]) -> npt.NDArray[np.float64]:
        at_once = self.rows * self.micro_batches * self.context.data_size
        passes = -(-len(texts) // at_once)
        # Passes are full: repeated texts fill the last one up.
        order = np.arange(passes * at_once) % len(texts)
        samples = _samples(texts)
        every = lay_out(samples, order, self.length, "off")
        dataset = TuningDataset(samples, every, seed=None, scores=True, trim=self.trim)
        found = torch.zeros(passes * at_once, device=self.model.device)
        for step in range(passes):
            # (micro-batches, data-parallel ranks, rows)
            numbers = (step * at_once + np.arange(at_once)).reshape(-1, self.context.data_size, self.rows)
            own = numbers[:, self.context.data_rank]
            scored = self.model.log_probs(dataset.batch(own))
            if self.context.cp_rank == 0:  # the others have the same ones, and the sum is over all ranks
                found[torch.from_numpy(own).to(found.device)] = scored
        # Each rank has filled its own rows, the others are 0: the sum has all.
        whole: npt.NDArray[np.float64] = self.context.sum_loss(found).double().cpu().numpy()[: len(texts)]
        return whole

    def _encoded(self, prompt: Any, completion: Any) -> Encoded | None:
        try:
            (text,) = self.encoder.sample({"prompt": prompt, "completion": completion})
        except ValueError:  # its template refuses what was written
            return None
        return text if len(text[0]) <= self.length else None


def _samples(texts: list[Encoded]) -> Samples:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(ids) for ids, _ in texts])])
    return Samples(np.concatenate([ids for ids, _ in texts]), np.concatenate([t for _, t in texts]), offsets)


def build_reward_model(config: Config, encoder: Encoder, setup: RunSetup, trim: bool) -> tuple[RewardModel, list[str]]:
    """(the reward model, notes for the user). ``config`` is that of ``reward_model_config``."""
    context, data = setup.context, config.data
    assert data.global_batch_size is not None and data.seq_length is not None, "resolved before"
    setup = setup_for_second_model(config, setup, documents=False, trim=trim)
    model, notes = build_finetune_model(config, setup, None, trainable=False)
    reference = ModelReference(model, build_forward_backward(config, setup, model), setup.device, cp=context.cp_group)
    micro_batches = count_micro_batches(data, context.data_size)
    # Rows and micro-batches as in its own training: a pipeline sends messages of fixed shape.
    made = RewardModel(reference, encoder, context, config.rows_per_micro_batch, micro_batches, data.seq_length, trim)
    return made, [f"reward model: {config.checkpoint.load}", *without_history(config, "reward model"), *notes]
