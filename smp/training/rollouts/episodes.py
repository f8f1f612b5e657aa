"""Completions of several turns: the model speaks, an environment answers.

Token ids are never made of text again: each turn goes on after the ids of those before, and of an answer only the new
ids are encoded. Those of answers are read and not trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from smp.data.tuning.encode import Encoder
from smp.data.tuning.prompts import Prompt
from smp.generation import Completion, Request, Sampling, Stops
from smp.parallel.agree import any_rank, gather
from smp.rewards.environment_pool import EnvironmentPool
from smp.rewards.functions import RewardError
from smp.training.errors import TrainingError
from smp.training.rollouts.engines.engine import RolloutEngine

PAUSE = 0.02
"""Seconds between two looks at work in other processes."""
Key = tuple[int, int]
"""(draw number of a prompt, number of the completion among those of the prompt)."""
Question = tuple[str, dict[str, Any]]
"""A method of an environment and its arguments."""


@dataclass
class Episode:
    """One completion.

    Attributes:
        ids: what follows the prompt.
        log_probs: when they were drawn; 0 for what an environment said.
        spoken: which of them the model wrote.
        messages: both sides'.
        truncated: whether the length ended it.
        reward: of the environment; None: it has none.
        error: why the environment failed.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spoken: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False
    reward: float | None = None
    error: str = ""

    def speak(self, completion: Completion, text: str) -> None:
        """Add a turn of the model: the part of ``completion`` after all that is there."""
        new = completion.ids[len(self.ids) :]
        self.ids += new
        self.log_probs += completion.log_probs
        self.spoken += [True] * len(new)
        self.messages.append({"role": "assistant", "content": text})
        self.truncated = completion.finish == "length"

    def hear(self, ids: list[int], messages: list[dict[str, Any]]) -> None:
        """Add an answer of the environment."""
        self.ids += ids
        self.log_probs += [0.0] * len(ids)
        self.spoken += [False] * len(ids)
        self.messages += messages


@dataclass(frozen=True)
class Episodes:
    """Writes completions in turns.

    Attributes:
        engine: with the weights of the model.
        vocab_size: of the model.
        pool: of environments, on one rank of those that write the same texts; else None.
        encoder: of answers.
        turns: most of the model.
        skips: an episode whose environment fails ends, instead of the run.
        progress: called while environments work.
    """

    engine: RolloutEngine
    vocab_size: int
    pool: EnvironmentPool | None
    encoder: Encoder
    turns: int
    skips: bool
    progress: Callable[[], None]

    def write(
        self, prompts: Mapping[int, Prompt], count: int, sampling: Sampling, stops: Stops, longest: int
    ) -> dict[Key, Episode]:
        """``count`` episodes for each of this rank's prompts, by draw. All ranks call it together.

        Raises:
            TrainingError: on all ranks, where one cannot write, or an environment failed and the run is to end.
        """
        made = {(draw, sample): Episode() for draw in prompts for sample in range(count)}
        opened = {key: ("reset", {"prompt": prompts[key[0]].said, "columns": prompts[key[0]].columns}) for key in made}
        self._asked(made, opened)
        active, problem = {key for key in made if not made[key].error}, ""
        for turn in range(self.turns):
            # Together: a rank that speaks no more would leave the others in the collectives of a forward pass.
            if any_rank(bool(problem)) or not any_rank(bool(active)):
                break
            problem = self._speak(made, prompts, active, sampling, stops, longest)
            # A turn that the length has cut is not shown to the environment.
            active = {key for key in active if not made[key].truncated}
            asked: dict[Key, Question] = {key: ("step", {"text": self._text(made[key])}) for key in active}
            answers = self._asked(made, asked, problem)
            if turn + 1 == self.turns:
                break
            active = {key for key in active if self._heard(made[key], prompts[key[0]], answers[key], stops, longest)}
            problem = "" if self.skips else next((episode.error for episode in made.values() if episode.error), "")
        # An environment whose answer was refused does not know that its episode has ended: it is
        # told to drop it.
        closed: dict[Key, Question] = {key: ("drop" if made[key].error else "reward", {}) for key in made}
        for key, reward in self._asked(made, closed, problem).items():
            made[key].reward = reward
        return made

    def _speak(
        self,
        made: Mapping[Key, Episode],
        prompts: Mapping[int, Prompt],
        active: set[Key],
        sampling: Sampling,
        stops: Stops,
        longest: int,
    ) -> str:
        """One turn of all active episodes; returns why it failed, or ""."""
        # Sorted: ranks of one share have to ask for the same texts in one order.
        requests = [Request(prompts[d].ids, longest, d, s, tuple(made[d, s].ids)) for d, s in sorted(active)]
        try:
            for completion in self.engine.write(requests, sampling, stops):
                episode = made[completion.request.index, completion.request.sample]
                episode.speak(completion, self._decoded(completion.ids[len(episode.ids) :]))
        except ValueError as error:  # logits that are no numbers: ranks that wrote other texts have to hear of it
            return str(error)
        return ""

    def _decoded(self, ids: list[int]) -> str:
        tokenizer = self.encoder.tokenizer
        return tokenizer.decode([i for i in ids if i not in tokenizer.special])

    def _text(self, episode: Episode) -> str:
        """The text of the last turn."""
        return str(episode.messages[-1]["content"]) if episode.messages else ""

    def _heard(self, episode: Episode, prompt: Prompt, answer: Any, stops: Stops, longest: int) -> bool:
        """Add an answer to an episode; returns whether the model has another turn."""
        if answer is None or episode.error:
            return False
        try:
            ids = self.encoder.reply(answer, stops.ids, prompt.tools)
            if max(ids, default=0) >= self.vocab_size:
                raise ValueError(f"the tokenizer gave id {max(ids)}, the model's vocabulary has {self.vocab_size}")
        except ValueError as error:
            episode.error = f"an answer of --environment cannot be shown to the model: {error}"
            return False
        if len(episode.ids) + len(ids) >= longest:  # no room for another turn: an answer that nobody reads is not kept
            episode.truncated = True
            return False
        episode.hear(ids, answer)
        return True

    def _asked(
        self, made: Mapping[Key, Episode], questions: Mapping[Key, Question], reason: str = ""
    ) -> dict[Key, Any]:
        """Answers to this rank's questions, once all ranks have theirs; errors are noted in the episodes.

        Args:
            reason: why this rank has none to ask.
        """
        futures: dict[Key, Future[Any]] = {}
        if self.pool is not None and not reason:
            futures = {key: self.pool.ask(method, key, **given) for key, (method, given) in questions.items()}
        # All ranks wait in short collectives, and not in one that takes as long as the slowest environment.
        while any_rank(not all(future.done() for future in futures.values())):
            time.sleep(PAUSE)
            self.progress()
        # Every rank gets all answers: those without a pool need them as well.
        told = gather((reason, {key: _result(future) for key, future in futures.items()}))
        for rank, (why, _) in enumerate(told):
            if why:
                raise TrainingError(f"rank {rank} has no completions: {why}")
        answers = {key: answer for _, here in told for key, answer in here.items()}
        errors = [error for _, error in answers.values() if error]
        if errors and not self.skips:
            raise TrainingError(f"{errors[0]} (--reward-errors skip continues)")
        for key in questions:
            made[key].error = made[key].error or answers[key][1]
        return {key: answers[key][0] for key in questions}


def _result(future: Future[Any]) -> tuple[Any, str]:
    """(answer, error)."""
    try:
        return future.result(), ""
    except RewardError as error:
        return None, str(error)
