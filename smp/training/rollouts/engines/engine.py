"""The interface of an engine: it writes completions and returns the log-probabilities of their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from smp.generation import Completion, Generator, Request, Sampling, Stops
from smp.parallel.agree import gather
from smp.parallel.context import ParallelContext
from smp.training.errors import TrainingError
from smp.training.rollouts.engines.live_weights import WeightStream


@dataclass(frozen=True)
class Share:
    """Which prompts a rank writes completions of: every ``count``-th, from ``index`` on.

    Attributes:
        leads: whether this rank speaks for those that write the same ones.
    """

    index: int
    count: int
    leads: bool


class RolloutEngine(Protocol):
    """Writes completions with the weights that it was last given."""

    @property
    def share(self) -> Share:
        """Which prompts this rank writes completions of."""

    def update(self) -> None:
        """Take the present weights of the model that trains. All ranks call it together."""

    def write(self, requests: Iterable[Request], sampling: Sampling, stops: Stops) -> Iterator[Completion]:
        """This rank's texts, in the order in which they end; ranks of one share ask for the same ones, and all ranks
        call it together.

        Raises:
            ValueError: they cannot be written.
        """

    def close(self) -> None:
        """Free its memory and close what is open."""


@dataclass(frozen=True)
class OwnLayers:
    """The model that trains, in its own layout."""

    generator: Generator
    context: ParallelContext

    @property
    def share(self) -> Share:
        return Share(self.context.data_rank, self.context.data_size, self.context.counts_tokens)

    def update(self) -> None:
        """Does nothing: the engine uses the trained weights themselves."""

    def write(self, requests: Iterable[Request], sampling: Sampling, stops: Stops) -> Iterator[Completion]:
        return self.generator.write(requests, sampling, stops)

    def close(self) -> None:
        """Does nothing."""


class Sampler(Protocol):
    """Another program's engine, in this process.

    Attributes:
        name: as --rollout-engine has it.
    """

    name: str

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take new weights: Hugging Face's names, whole tensors on the CPU. The memory of each one is reused for the
        next one."""

    def sample(self, requests: Sequence[Request], sampling: Sampling, stops: Stops) -> list[Completion]:
        """Write the texts, in any order. Log-probabilities are those of the whole softmax of logits / temperature."""

    def close(self) -> None:
        """Free its memory and close what is open."""


@dataclass(frozen=True)
class OutsideEngine:
    """A sampler that gets the weights of the model that trains before each generation.

    Attributes:
        sampler: of this rank.
        weights: of the model that trains.
        share: of this rank: it is no matter of the layout in which the model trains.
    """

    sampler: Sampler
    weights: WeightStream
    share: Share

    def update(self) -> None:
        problem, tensors = "", self.weights.tensors()
        try:
            self.sampler.load(tensors)
        except Exception as error:  # of whatever kind: the other ranks go on to gather
            problem = f"{type(error).__name__}: {error}"
        for _ in tensors:  # the rest: all ranks take part in gathering each tensor
            pass
        for rank, why in enumerate(gather(problem)):
            if why:
                said = " ".join(why.split())
                raise TrainingError(f"--rollout-engine {self.sampler.name}: rank {rank} has not taken weights: {said}")

    def write(self, requests: Iterable[Request], sampling: Sampling, stops: Stops) -> Iterator[Completion]:
        asked = list(requests)
        if not asked:
            return iter(())
        try:
            found = self.sampler.sample(asked, sampling, stops)
            for text in found:
                _require_log_probs(text)
            return iter(found)
        except Exception as error:  # of whatever kind: the other ranks wait for this one's texts
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"--rollout-engine {self.sampler.name}: {said}") from error

    def close(self) -> None:
        self.sampler.close()


def _require_log_probs(text: Completion) -> None:
    """Raise ValueError unless each token has a finite log-probability: a 0 instead of a missing one would mean a token
    that was certain."""
    new = len(text.ids) - len(text.request.written)
    if len(text.log_probs) != new or not all(math.isfinite(x) for x in text.log_probs):
        raise ValueError(f"{new} tokens were drawn with {len(text.log_probs)} log-probabilities, or with infinite ones")
