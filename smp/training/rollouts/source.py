"""The batches of a reinforcement-learning run: generations of completions, and the steps that train on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from smp.config import Config
from smp.config.rules.online import reward_names, reward_weights
from smp.data.loader import RankBatch, Unreadable
from smp.data.tuning.prompts import PromptDataset
from smp.data.tuning.samples import Samples
from smp.layers.heads.answers import AnswerLoss
from smp.parallel.context import ParallelContext
from smp.training.checkpoints.persistence import CARRIED
from smp.training.objectives.contract import answer_micro_batches
from smp.training.objectives.reference import FollowingReference, ModelReference
from smp.training.rollouts.advantages import advantages, overlong_penalty, spreads, total_rewards
from smp.training.rollouts.rollout import Cut, Rollout, engine_mismatch, fill_table
from smp.training.rollouts.writing import Group, Pending, Writing


@dataclass
class Position:
    """Where a run is in its prompts and generations.

    Attributes:
        draws: prompts that were drawn.
        step: steps that were done on the generation at hand.
        consumed: samples that all ranks have trained.
    """

    draws: int = 0
    step: int = 0
    consumed: int = 0


class RolloutSource:
    """Batches of what the model writes. All ranks ask for them together.

    Args:
        config: resolved.
        context: of the run.
        dataset: prompts.
        writing: writes and rewards them.
        cut: of batches.
        policy: the model as it is; reference: what it is compared with, if with anything; following: moves it.
        consumed: samples that were trained before.
        carried: what a checkpoint has of this source.
        say: tells the user a line.
    """

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        dataset: PromptDataset,
        writing: Writing,
        cut: Cut,
        policy: ModelReference,
        reference: ModelReference | None,
        consumed: int,
        carried: Mapping[str, torch.Tensor],
        say: Callable[[str], None],
        following: FollowingReference | None = None,
    ) -> None:
        assert config.rollouts is not None and config.rollouts.num_generations is not None, "filled in before"
        self.settings, self.group = config.rollouts, config.rollouts.num_generations
        self.context, self.dataset, self.writing, self.cut = context, dataset, writing, cut
        self.policy, self.reference, self.device = policy, reference, policy.device
        self.following = following
        self.names = reward_names(config.rollouts)
        self.weights = np.array(reward_weights(config.rollouts))
        self.at = Position(consumed=consumed)
        self._current: Rollout | None = None
        self._next: Rollout | Pending | None = None
        self._restore(carried, say)

    @property
    def _completions(self) -> int:
        """Completions of one generation."""
        return self.cut.batch_size * self.settings.steps_per_generation

    @property
    def _steps(self) -> int:
        """Optimizer steps on one generation."""
        return self.settings.steps_per_generation * self.settings.num_iterations

    def next_or_reason(self) -> RankBatch | Unreadable:
        """The next step's batch; where a generation is used up, the model writes the next one first."""
        if self.following is not None:
            # Number of steps that are done: a resumed run mixes at the same ones.
            self.following.after(self.at.consumed // self.cut.batch_size)
        if self._current is None:
            self._current = self._prepared(self._take())
            self.at.step = 0
            if self.settings.one_step_off_policy:
                # Written by the weights that these steps change, rewarded while they do.
                self._next = self._begin()
        # --num-iterations goes over the same parts again.
        part = self.at.step % self.settings.steps_per_generation
        batch = self.cut.batch(self._current, part, self.at.consumed - part * self.cut.batch_size)
        first = self.at.step == 0
        # Measured once for a generation, shown with its first step.
        batch = replace(batch, metrics=self._current.measured, table=self._current.table if first else [])
        self.at.step += 1
        self.at.consumed += self.cut.batch_size
        if self.at.step == self._steps:
            self._current = None
        return batch

    def close(self) -> None:
        """Nothing is open here: the kind of run ends the processes of reward functions."""

    def state(self) -> dict[str, torch.Tensor]:
        """The state for a checkpoint, equal on all ranks. Collective."""
        # At most one step of a generation is half-way: its number, and the completions, are the
        # whole state.
        state = {
            "position": torch.tensor([self.at.draws, self.at.step], dtype=torch.int64),
            "settings": self._settings(),
        }
        if self._current is not None:
            state |= {f"current.{name}": x for name, x in self._current.state().items()}
        if isinstance(self._next, Pending):
            # Rewards of a pending generation are waited for: a future cannot be saved.
            self._next = self._rewarded(self._next)
        if self._next is not None:
            state |= {f"next.{name}": x for name, x in self._next.state().items()}
        return {CARRIED + name: x for name, x in state.items()}

    def _restore(self, carried: Mapping[str, torch.Tensor], say: Callable[[str], None]) -> None:
        state = {name.removeprefix(CARRIED): x for name, x in carried.items()}
        if "position" not in state:
            return
        self.at.draws, step = state["position"].tolist()
        found = {}
        for part in ("current", "next"):
            own = {name.removeprefix(f"{part}."): x for name, x in state.items() if name.startswith(f"{part}.")}
            if own:
                found[part] = Rollout.of_state(own)
        # A changed temperature, say, would make the stored log-probabilities wrong.
        same = torch.equal(state.get("settings", torch.empty(0)), self._settings())
        if found and not (same and all(len(rollout) == self._completions for rollout in found.values())):
            say(
                "note: the completions in the checkpoint are of other settings (sizes, temperature, rewards): the "
                "model writes others"
            )
            return
        self._current, self._next = found.get("current"), found.get("next")
        self.at.step = step if self._current is not None else 0
        if self._current is not None and step >= self._steps:  # fewer iterations now
            self._current = None

    def _settings(self) -> torch.Tensor:
        """What the meaning of stored completions depends on, as JSON in uint8: a checkpoint holds tensors."""
        # ``names``: columns of rewards are by reward function.
        said = [self.group, self.cut.length, self.settings.temperature, self.names]
        said += [self.settings.rollout_engine] * self._compares
        return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    @property
    def _compares(self) -> bool:
        """Whether another program drew the tokens, whose log-probabilities may differ from the trainer's."""
        return self.settings.rollout_engine != "smp"

    def _take(self) -> Rollout:
        """The next generation, with rewards."""
        ahead, self._next = self._next, None
        if ahead is None:
            return self._made()
        return self._rewarded(ahead) if isinstance(ahead, Pending) else ahead

    def _begin(self) -> Rollout | Pending:
        """Write the next generation. With dynamic sampling its rewards decide what else has to be written, so they are
        waited for."""
        if self._rounds > 1:
            return self._made()
        return self._drawn(self._completions // self.group)

    @property
    def _rounds(self) -> int:
        assert self.settings.max_sampling_rounds is not None, "filled in before"
        return self.settings.max_sampling_rounds

    def _drawn(self, prompts: int, *, again: bool = False) -> Pending:
        draws = range(self.at.draws, self.at.draws + prompts)
        self.at.draws += prompts
        return self.writing.begin(self.dataset, draws, self.group, again=again)

    def _made(self) -> Rollout:
        """A generation, where prompts whose completions all have one reward are replaced while rounds are left (dynamic
        sampling, DAPO, arXiv 2503.14476)."""
        wanted = self._completions // self.group
        kept, others, rounds = list[Group](), list[Group](), 0
        sampling = scoring = 0.0
        errors = drawn = without = 0
        while len(kept) < wanted and rounds < self._rounds:
            # Weights have not changed since the first round: the engine keeps them.
            written = self._drawn(wanted, again=rounds > 0).finish()
            rounds, drawn = rounds + 1, drawn + wanted
            sampling, scoring = sampling + written.sampling, scoring + written.scoring
            errors += written.errors
            for group in written.groups:
                spread = bool(spreads(total_rewards(group.rewards, self.weights), self.group)[0])
                without += not spread
                (kept if spread or self._rounds == 1 else others).append(group)
        # After the last round groups of equal rewards fill up: their advantages, so their
        # gradients, are 0.
        groups = [*kept, *others][:wanted]
        seconds = {"sampling seconds": sampling, "scoring seconds": scoring}
        more = {"sampling rounds": float(rounds)} if self._rounds > 1 else {}
        return self._rollout(groups, {**seconds, **more, "groups without spread": without / drawn}, errors)

    def _rewarded(self, pending: Pending) -> Rollout:
        written = pending.finish()
        rewards = np.concatenate([total_rewards(group.rewards, self.weights) for group in written.groups])
        without = 1.0 - float(spreads(rewards, self.group).mean())
        seconds = {"sampling seconds": written.sampling, "scoring seconds": written.scoring}
        return self._rollout(written.groups, {**seconds, "groups without spread": without}, written.errors)

    def _rollout(self, groups: list[Group], measured: dict[str, float], errors: int) -> Rollout:
        of, rows = self.settings, [(group, i) for group in groups for i in range(len(group.ids))]
        lengths = np.array([len(group.ids[i]) for group, i in rows], np.int64)
        truncated = np.array([group.truncated[i] for group, i in rows], np.bool_)
        rewards = np.concatenate([group.rewards for group in groups])
        assert of.overlong_buffer_len is not None, "filled in before"
        penalty = overlong_penalty(lengths, of.max_completion_length, of.overlong_buffer_len)
        prompts = [np.array(group.prompt.ids, np.int32) for group, _ in rows]
        texts = [np.concatenate([prompt, group.ids[i]]) for prompt, (group, i) in zip(prompts, rows, strict=True)]
        spoken = [group.spoken[i] for group, i in rows]
        # Prompts are read and not trained; environments' answers inside a completion neither
        # (``spoken``).
        unsaid = [np.zeros(len(prompt), np.bool_) for prompt in prompts]
        asked = [np.concatenate(both) for both in zip(unsaid, spoken, strict=True)]
        drawn = [
            np.concatenate([np.zeros(len(prompt), np.float32), group.log_probs[i]])
            for prompt, (group, i) in zip(prompts, rows, strict=True)
        ]
        # Their tokens do not train; their rewards still count in the mean of the prompt.
        if of.mask_truncated_completions:
            asked = [trained & ~cut for trained, cut in zip(asked, truncated, strict=True)]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(text) for text in texts])])
        samples = Samples(np.concatenate(texts), np.concatenate(asked), offsets)
        asked_for = np.array([len(prompt) for prompt in prompts], np.int64)
        rollout = Rollout(samples, asked_for, np.concatenate(drawn), truncated, rewards, penalty, np.zeros(len(rows)))
        rollout.measured = self._measured(rollout, lengths) | measured
        tokens = sum(int(mask.sum()) for mask in spoken)
        rollout.measured["sampled tokens/s"] = tokens / max(measured["sampling seconds"], 1e-9)
        if of.reward_errors == "skip":
            rollout.measured["reward errors"] = float(errors)
        return rollout

    def _prepared(self, rollout: Rollout) -> Rollout:
        """Complete a generation with what needs the weights before its first step: log-probabilities, and the
        advantages."""
        of, rollout.table = self.settings, self._table(rollout)
        in_reward = of.kl_placement == "reward" and self.reference is not None
        # With one step per generation the policy is still the old one: the loss takes its own
        # log-probabilities.
        if self._steps > 1 or in_reward or self._compares:
            rollout.old = self._log_probs(self.policy, rollout)
        if self._compares:
            rollout.measured |= engine_mismatch(rollout, self.cut.length)
        if self.reference is not None:
            rollout.reference = self._log_probs(self.reference, rollout)
        rewards = total_rewards(rollout.rewards, self.weights) + rollout.penalty
        # KL in the reward: advantages contain it, not the loss (--kl-placement).
        if in_reward:
            rewards = rewards - (of.beta or 0.0) * self._divergences(rollout)
            rollout.measured["KL in reward"] = float(self._divergences(rollout).mean())
        assert of.advantage_estimator is not None and of.scale_rewards is not None, "filled in before"
        rollout.advantages = advantages(rewards, self.group, of.advantage_estimator, of.scale_rewards)
        return rollout

    def _divergences(self, rollout: Rollout) -> Any:
        """Estimates of the KL divergence from the reference, fp64 (completions,): sums over the tokens of each."""
        assert rollout.old is not None and rollout.reference is not None
        d = (rollout.reference - rollout.old).double().clamp(-20, 20)
        found = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[self.settings.kl_estimator or "k1"]
        return found.view(len(rollout), self.cut.length).sum(1).numpy()

    def _log_probs(self, model: ModelReference, rollout: Rollout) -> torch.Tensor:
        """Log-probabilities of all completions, fp32 (completions x length,), on all ranks: each rank computes those
        that it trains."""
        table = torch.zeros(len(rollout) * self.cut.length, device=self.device)
        for part in range(self.settings.steps_per_generation):
            batch = self.cut.batch(rollout, part, 0)
            asked = answer_micro_batches(batch, lambda _: AnswerLoss(), self.device, self.context.cp_group)
            # Nothing on pipeline ranks without the head.
            if values := model.of_tokens(batch):
                fill_table(table, asked, values)
            self.writing.progress()
        # Ranks have different completions and columns, the others' are 0: the sum has all.
        return self.context.sum_loss(table).cpu()

    def _measured(self, rollout: Rollout, lengths: Any) -> dict[str, float]:
        rewards = total_rewards(rollout.rewards, self.weights)
        known, of = ~np.isnan(rewards), rewards.reshape(-1, self.group)
        # NaN: no reward function applies.
        deviations = [float(np.std(g[~np.isnan(g)], ddof=1)) for g in of if (~np.isnan(g)).sum() > 1]
        each = rollout.rewards
        by_function = {
            f"rewards/{name}": float(np.nanmean(each[:, i])) if (~np.isnan(each[:, i])).any() else math.nan
            for i, name in enumerate(self.names)
        }
        return {
            "reward": float(rewards[known].mean()) if known.any() else math.nan,
            "reward deviation": float(np.mean(deviations)) if deviations else 0.0,
            **(by_function if len(self.names) > 1 else {}),
            **({"overlong penalty": float(rollout.penalty.mean())} if self.settings.overlong_buffer_len else {}),
            **({"without reward": 1.0 - float(known.mean())} if not known.all() else {}),
            "completion length": float(lengths.mean()),
            "truncated": float(rollout.truncated.mean()),
        }

    def _table(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Some completions for people, the first of each prompt before the second of any."""
        # ``row % group`` first: every prompt is shown once before any is twice.
        order = sorted(range(len(rollout)), key=lambda row: (row % self.group, row // self.group))
        rewards = total_rewards(rollout.rewards, self.weights)
        out = []
        for row in order[: self.settings.log_completions]:
            ids, prompt = rollout.samples[row][0].tolist(), int(rollout.prompts[row])
            out.append(
                {
                    "prompt": self.writing.tokenizer.decode(ids[:prompt]),
                    "completion": self.writing.tokenizer.decode(ids[prompt:]),
                    "reward": None if np.isnan(rewards[row]) else float(rewards[row]),
                    "truncated": bool(rollout.truncated[row]),
                }
            )
        return out


def mean_reward(writing: Writing, dataset: PromptDataset, prompts: int, count: int, weights: list[float]) -> float:
    """Mean reward of ``count`` completions of each of the first prompts; NaN where no function applies."""
    written = writing.begin(dataset, range(prompts), count).finish()
    rewards = np.concatenate([total_rewards(group.rewards, np.array(weights)) for group in written.groups])
    known = rewards[~np.isnan(rewards)]
    return float(known.mean()) if len(known) else math.nan
