"""Completions of some prompts with their rewards, the same on all ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from smp.data.tuning.prompts import Prompt, PromptDataset
from smp.data.tuning.tokenizer import TuningTokenizer
from smp.generation import Completion, Request, Sampling, Stops
from smp.parallel.agree import any_rank, gather
from smp.rewards.functions import Call, RewardError, Scored
from smp.rewards.pool import RewardPool
from smp.training.errors import TrainingError
from smp.training.rollouts.engines.engine import RolloutEngine
from smp.training.rollouts.episodes import PAUSE, Episodes
from smp.training.rollouts.scoring import RewardModel


class Group(NamedTuple):
    """The completions of one prompt.

    Attributes:
        draw: number of the prompt in the order of this run.
        prompt: what it continued from.
        ids: int32, of each completion, with the token that ended it.
        log_probs: fp32, like ``ids``: when they were drawn.
        truncated: whether the length ended it.
        spoken: bool, like ``ids``: what the model wrote, and not an environment.
        said: each completion as rewards see it.
        failed: whether its environment failed: it has no rewards.
        rewards: fp64 (completions, functions); NaN: the function does not apply.
    """

    draw: int
    prompt: Prompt
    ids: list[npt.NDArray[np.int32]]
    log_probs: list[npt.NDArray[np.float32]]
    truncated: list[bool]
    spoken: list[npt.NDArray[np.bool_]]
    said: list[Any]
    failed: list[bool]
    rewards: npt.NDArray[np.float64]


class Written(NamedTuple):
    """Completions of some prompts, in the order in which they were drawn.

    Attributes:
        groups: one for each prompt.
        sampling, scoring: seconds, of the slowest rank: until all was written, and from then until all was rewarded.
        errors: calls of reward functions that gave nothing.
    """

    groups: list[Group]
    sampling: float
    scoring: float
    errors: int


@dataclass
class Pending:
    """Completions of this rank whose reward functions are still running.

    Attributes:
        finish: waits for them, and for the other ranks, which call it at the same time.
    """

    finish: Callable[[], Written]


class _Text(NamedTuple):
    """A completion as ranks send it to each other: see :class:`Group`; the environment's reward, NaN without one, and
    its error."""

    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    truncated: bool
    spoken: npt.NDArray[np.bool_]
    reward: float
    error: str
    said: Any


_Sent = tuple[int, list[_Text], "list[Scored] | None"]


@dataclass(frozen=True)
class Writing:
    """Writes completions and has them rewarded.

    Attributes:
        engine: with the weights of the model that is trained.
        tokenizer: of the model.
        pool: of reward functions, on one rank of those that write the same texts; else None.
        sampling: how tokens are chosen.
        stops: what ends a completion.
        longest: most tokens of a completion.
        functions: number of reward functions.
        episodes: writes in turns with an environment, whose reward comes after those of functions; None: at once.
        scorer: a reward model, whose scores come after those of functions; None: there is none.
        skips: calls that fail are left out, instead of ending the run.
        progress: called as completions are rewarded.
    """

    engine: RolloutEngine
    tokenizer: TuningTokenizer
    pool: RewardPool | None
    sampling: Sampling
    stops: Stops
    longest: int
    functions: int
    episodes: Episodes | None
    scorer: RewardModel | None
    skips: bool
    progress: Callable[[], None]

    def begin(self, dataset: PromptDataset, draws: Sequence[int], count: int, *, again: bool = False) -> Pending:
        """Write ``count`` completions for each of the prompts with these numbers. Rewards are requested when the last
        completion of a prompt ends. ``again``: with the weights of the call before."""
        started, share = time.perf_counter(), self.engine.share
        if not again:
            self.engine.update()
        # A prompt's completions are written by one rank: the prompt is computed once.
        # Prompts are dealt out round robin.
        own = list(draws)[share.index :: share.count]
        prompts = {draw: dataset.drawn(draw) for draw in own}
        ended: dict[int, dict[int, _Text]] = {draw: {} for draw in own}
        scores: dict[int, Future[list[Scored]]] = {}
        reason = ""
        try:
            for draw, sample, text in self._texts(prompts, count):
                ended[draw][sample] = text
                # Reward functions get all completions of a prompt in one call.
                if len(ended[draw]) == count and self.pool is not None:
                    # A failed episode is half a conversation: it gets no reward.
                    texts = [text for i in range(count) if not (text := ended[draw][i]).error]
                    if texts:
                        scores[draw] = self.pool.submit(_call(prompts[draw], texts))
        except ValueError as error:  # logits that are no numbers: ranks that wrote other texts have to hear of it
            reason = str(error)
        written = time.perf_counter() - started

        def finish() -> Written:
            asked, sent, problem = time.perf_counter(), list[_Sent](), reason
            # All ranks wait in short collectives, and not in one that takes as long as the slowest function.
            while any_rank(not all(future.done() for future in scores.values())):
                time.sleep(PAUSE)
                self.progress()
            try:
                # One rank of those that wrote the same texts sends them.
                for draw in own if share.leads and not reason else ():
                    texts = [ended[draw][sample] for sample in range(count)]
                    scored = scores[draw].result() if draw in scores else None
                    sent.append((draw, texts, scored))
            except Exception as error:  # of whatever kind: the other ranks wait
                problem = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
            return self._gathered(dataset, sent, written, time.perf_counter() - asked, problem)

        return Pending(finish)

    def _texts(self, prompts: Mapping[int, Prompt], count: int) -> Iterator[tuple[int, int, _Text]]:
        """(draw, sample, completion) of this rank's prompts, as they end."""
        if self.episodes is None:
            requests = [Request(prompts[draw].ids, self.longest, draw, i) for draw in prompts for i in range(count)]
            for completion in self.engine.write(requests, self.sampling, self.stops):
                draw = completion.request.index
                yield draw, completion.request.sample, self._packed(prompts[draw], completion)
            return
        every = self.episodes.write(prompts, count, self.sampling, self.stops, self.longest)
        for (draw, sample), episode in every.items():
            yield (
                draw,
                sample,
                _Text(
                    np.array(episode.ids, np.int32),
                    np.array(episode.log_probs, np.float32),
                    episode.truncated,
                    np.array(episode.spoken, np.bool_),
                    math.nan if episode.reward is None else episode.reward,
                    episode.error,
                    episode.messages,
                ),
            )

    def _packed(self, prompt: Prompt, text: Completion) -> _Text:
        ids = np.array(text.ids, np.int32)
        log_probs, spoken = np.array(text.log_probs, np.float32), np.ones(len(ids), np.bool_)
        return _Text(ids, log_probs, text.finish == "length", spoken, math.nan, "", self._said(prompt, text.ids))

    def _gathered(
        self, dataset: PromptDataset, sent: list[_Sent], written: float, scoring: float, problem: str
    ) -> Written:
        """The completions of all ranks, on each of them.

        Raises:
            TrainingError: a rank could not write or reward, or a reward function failed and the run is to end.
        """
        # Completions are small next to weights: every rank gets all of them.
        told = gather((sent, written, scoring, problem))
        for rank, (_, _, _, why) in enumerate(told):
            if why:
                raise TrainingError(f"rank {rank} has no completions: {why}")
        parts = [(texts, seconds, more) for texts, seconds, more, _ in told]
        groups, errors = list[Group](), 0
        # In the order of the draws, whichever rank wrote them.
        for draw, texts, scored in sorted(itertools.chain.from_iterable(s for s, _, _ in parts), key=lambda s: s[0]):
            failed = [s.error for s in scored or [] if s.error]
            if failed and not self.skips:
                raise TrainingError(f"{failed[0]} (prompt {draw} of this run; --reward-errors skip continues)")
            errors += len(failed) + sum(bool(text.error) for text in texts)
            # The environment's reward is the last column of functions.
            rewards = np.full((len(texts), self.functions + (self.episodes is not None)), math.nan)
            # Functions saw only the completions whose episode did not fail.
            whole = [i for i, text in enumerate(texts) if not text.error]
            for i, found in enumerate(scored or ()):
                rewards[whole, i] = [math.nan if reward is None else reward for reward in found.rewards]
            if self.episodes is not None:
                rewards[:, -1] = [text.reward for text in texts]
            ids, log_probs, truncated, spoken, _, problems, said = (list(values) for values in zip(*texts, strict=True))
            failed_here = [bool(error) for error in problems]
            prompt = dataset.drawn(draw)
            groups.append(Group(draw, prompt, ids, log_probs, truncated, spoken, said, failed_here, rewards))
        if self.scorer is not None:
            groups = self._scored(groups, self.scorer)
            errors += sum(int(np.isnan(group.rewards[:, -1]).sum()) for group in groups)
        return Written(groups, max(w for _, w, _ in parts), max(s for _, _, s in parts), errors)

    def _scored(self, groups: list[Group], scorer: RewardModel) -> list[Group]:
        """The groups with the reward model's scores as one more column."""
        rows = [(group.prompt.said, said) for group in groups for said in group.said]
        scores = scorer.scores([prompt for prompt, _ in rows], [said for _, said in rows]).reshape(len(groups), -1)
        return [
            group._replace(
                rewards=np.concatenate([group.rewards, np.where(group.failed, math.nan, of)[:, None]], axis=1)
            )
            for group, of in zip(groups, scores, strict=True)
        ]

    def _said(self, prompt: Prompt, ids: Sequence[int]) -> Any:
        """The text of a completion without special tokens; as a message where the prompt is a conversation."""
        text = self.tokenizer.decode([i for i in ids if i not in self.tokenizer.special])
        return [{"role": "assistant", "content": text}] if prompt.is_chat else text

    def evaluating(self, temperature: float, seed: int) -> Writing:
        """This writer for evaluations, whose texts depend on ``seed`` and not on when they are written."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature, seed=seed))


def _call(prompt: Prompt, texts: Sequence[_Text]) -> Call:
    """The arguments of a call of reward functions for one prompt."""
    columns = {name: [value] * len(texts) for name, value in prompt.columns.items()}
    said, ids = [text.said for text in texts], [text.ids.tolist() for text in texts]
    return Call([prompt.said] * len(texts), said, ids, columns)
