"""Batches of a run that learns from a teacher on what it writes itself (GKD, arXiv 2306.13649)."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import numpy.typing as npt
import torch

from smp.data.loader import RankBatch, Unreadable, rank_share
from smp.data.tuning.batches import TuningDataset
from smp.data.tuning.samples import Samples
from smp.data.tuning.sequences import lay_out
from smp.generation import Completion, Generator, Request, Sampling, Stops
from smp.parallel.agree import gather
from smp.parallel.context import ParallelContext
from smp.parallel.rng import stable_hash


@dataclasses.dataclass(frozen=True)
class Division:
    """How a step's samples are divided, as those of files are.

    Attributes:
        batch_size: samples of an optimizer step.
        micro_batch_size: of a forward pass.
        data_rank, data_size: of this rank.
    """

    batch_size: int
    micro_batch_size: int
    data_rank: int
    data_size: int

    def own(self, first: int) -> npt.NDArray[np.int64]:
        """This rank's samples of the step that begins at sample ``first``, int64 (micro-batches, samples); see
        ``rank_share``."""
        return rank_share(first, self.batch_size, self.micro_batch_size, self.data_rank, self.data_size)


class OwnCompletions:
    """Steps on samples of the data, and for a share of the steps on completions that the model writes for their
    prompts.

    Which steps these are and what is written in them is a function of (seed, sample number) and the weights, so a
    resumed run writes the same. All ranks ask for batches together.

    Args:
        dataset: samples, one in a sequence.
        generator: of the model that is trained.
        context: of the run.
        division: of steps.
        sampling: how tokens are chosen; its seed also draws the steps.
        stops: what ends a completion.
        longest: most tokens of one.
        share: of the steps, 0 to 1.
        consumed: samples that were trained before.
    """

    def __init__(
        self,
        dataset: TuningDataset,
        generator: Generator,
        context: ParallelContext,
        division: Division,
        *,
        sampling: Sampling,
        stops: Stops,
        longest: int,
        share: float,
        consumed: int,
    ) -> None:
        self.dataset, self.generator, self.context, self.division = dataset, generator, context, division
        self.sampling, self.stops, self.longest, self.share = sampling, stops, longest, share
        self._consumed = consumed

    def next_or_reason(self) -> RankBatch | Unreadable:
        """The next step's batch."""
        first = self._consumed
        self._consumed += self.division.batch_size
        own = self.division.own(first)
        # Keyed by the sample number: all ranks and a resumed run draw the same number in [0, 1).
        draw = stable_hash(self.sampling.seed, "lmbda", first) / 2**63
        if draw >= self.share:
            return dataclasses.replace(self.dataset.batch(own), metrics={"on policy": 0.0})
        return self._written(own)

    def state(self) -> dict[str, torch.Tensor]:
        """No tensors: the number of consumed samples determines what comes next."""
        return {}

    def close(self) -> None:
        """Nothing is open."""

    def _written(self, share: npt.NDArray[np.int64]) -> RankBatch | Unreadable:
        started = time.perf_counter()
        # Completions are also written for rows that only fill up (~number): generation is
        # collective, and a rank may have no others.
        own, real = np.where(share < 0, ~share, share), set(share[share >= 0].tolist())
        prompts = [self._prompt(int(number)) for number in own.flat]
        # A sequence holds seq_length + 1 tokens, of which the last is only a label.
        room = self.dataset.seq_length + 1
        # By number: a sample that a rank has twice is written once.
        requests = [
            Request(prompt, min(self.longest, room - len(prompt)), number)
            for number, prompt in dict(zip(own.ravel().tolist(), prompts, strict=True)).items()
        ]
        ended: dict[int, Completion] = {}
        reason = ""
        try:
            for completion in self.generator.write(requests, self.sampling, self.stops):
                ended[completion.request.index] = completion
        except ValueError as error:  # logits that are no numbers: ranks that wrote other texts have to hear of it
            reason = str(error)
        counted = [completion for number, completion in ended.items() if number in real]
        lengths = [len(completion.ids) for completion in counted]
        cut = sum(completion.finish == "length" for completion in counted)
        # Every rank calls it, also one with an error, so that none waits.
        told = gather((reason, lengths, cut, time.perf_counter() - started))
        for why, _, _, _ in told:
            if why:
                return Unreadable(why)
        every = [length for _, here, _, _ in told for length in here]
        metrics = {
            "on policy": 1.0,
            "completion length": float(np.mean(every)),
            "truncated": sum(c for _, _, c, _ in told) / len(every),
            "sampling seconds": max(seconds for *_, seconds in told),
        }
        texts = [
            np.array([*prompt, *ended[int(number)].ids], np.int32)
            for number, prompt in zip(own.flat, prompts, strict=True)
        ]
        # Only the completion is trained.
        asked = [np.arange(len(text)) >= len(prompt) for text, prompt in zip(texts, prompts, strict=True)]
        return dataclasses.replace(self._batch(share, texts, asked), metrics=metrics)

    def _batch(
        self, share: npt.NDArray[np.int64], texts: list[npt.NDArray[np.int32]], asked: list[npt.NDArray[np.bool_]]
    ) -> RankBatch:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(text) for text in texts])])
        samples = Samples(np.concatenate(texts), np.concatenate(asked), offsets)
        sequences = lay_out(samples, np.arange(len(texts)), self.dataset.seq_length, "off")
        # No shuffle: rows stay in the order of the share.
        dataset = TuningDataset(samples, sequences, seed=None, trim=self.dataset.trim)
        rows = np.arange(len(texts)).reshape(share.shape)
        batch = dataset.batch(np.where(share < 0, ~rows, rows))
        # Dropout is keyed by the data's sample numbers, not by the rows made here.
        return dataclasses.replace(batch, sample_index=torch.from_numpy(np.where(share < 0, ~share, share)))

    def _prompt(self, number: int) -> list[int]:
        """Token ids of everything before the last answer of a sample."""
        ids, trained = self.dataset.text(number)
        # Index after the last trained token; before it the last token that is not trained ends the
        # prompt.
        end = len(trained) - int(trained[::-1].argmax())
        untrained = np.flatnonzero(~trained[:end])
        return [int(i) for i in ids[: untrained[-1] + 1 if len(untrained) else 1]]
