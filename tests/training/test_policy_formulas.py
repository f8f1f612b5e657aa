"""Reinforcement learning against formulas written out: in real runs, at every step, the loss and every gradient are
what plain loops over completions and whole rows of logits give, in fp64.

What a formula gets of the run are the texts, the rewards of each function, what the length ended and the
log-probabilities of sampling. Advantages, divergences, ratios and means are its own.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from smp.config.rollouts import RolloutConfig
from smp.models.micro_batch import MicroBatch
from smp.training.rollouts.rollout import Rollout
from smp.training.rollouts.source import RolloutSource
from tests.distributed import run_distributed
from tests.parity.worker import fp64
from tests.training.rl_lab import flags, write_inputs
from tests.training.tuning_lab import Recording, tune

pytest.importorskip("transformers")

MOVES = "--num-iterations 2 --lr 0.3 "
"""The second step on a generation is off its policy, by enough that ratios are clipped."""
BEFORE = "--one-step-off-policy --lr 0.3 --importance-sampling-clip-max 1.02 --importance-sampling-mode "
OBJECTIVES = {
    "grpo": f"--objective grpo {MOVES}",
    "dr_grpo": f"--objective dr_grpo {MOVES}",
    "dapo": f"--objective dapo {MOVES} --overlong-buffer-len 4 --max-sampling-rounds 1",
    "gspo": f"--objective gspo {MOVES} --lr 0.01",
    "cispo": f"--objective cispo {MOVES} --epsilon-high 1.01",
    "rloo": f"--objective rloo {MOVES} --num-generations 4",
    "reinforce++": f"--objective reinforce++ {MOVES} --beta 0.1",
}
OPTIONS = {
    "k1": f"--objective grpo {MOVES} --beta 0.3 --kl-estimator k1",
    "k2": f"--objective grpo {MOVES} --beta 0.3 --kl-estimator k2",
    "k3": f"--objective grpo {MOVES} --beta 0.3",
    "k1 alone": f"--objective grpo {MOVES} --beta 0.3 --kl-estimator k1 --no-use-bias-correction-kl",
    "k2 alone": f"--objective grpo {MOVES} --beta 0.3 --kl-estimator k2 --no-use-bias-correction-kl",
    "k3 alone": f"--objective grpo {MOVES} --beta 0.3 --no-use-bias-correction-kl",
    "gspo with a reference": f"--objective gspo {MOVES} --beta 0.3",
    "k2 in the reward": f"--objective rloo {MOVES} --num-generations 4 --kl-estimator k2 --beta 0.3",
    "k3 in the reward": f"--objective grpo {MOVES} --kl-placement reward --kl-estimator k3 --beta 0.3",
    "clip higher": f"--objective grpo {MOVES} --epsilon 0.001 --epsilon-high 0.01",
    "two-sided": f"--objective grpo {MOVES} --epsilon 0.001 --delta 1.002",
    "batch": f"--objective grpo {MOVES} --scale-rewards batch",
    "off": f"--objective grpo {MOVES} --scale-rewards off",
    "baseline": f"--objective grpo {MOVES} --advantage-estimator reinforce++-baseline",
    "mean of means": f"--objective grpo {MOVES} --loss-type grpo",
    "luspo": f"--objective grpo {MOVES} --loss-type luspo --importance-sampling-level sequence",
    "sapo": f"--objective grpo {MOVES} --loss-type sapo",
    "truncated": f"--objective grpo {MOVES} --mask-truncated-completions --loss-type grpo",
    "off-policy mask": f"--objective grpo {MOVES} --off-policy-mask-threshold -0.001",
    "temperature, two steps": f"--objective grpo {MOVES} --temperature 0.7 --steps-per-generation 2 --beta 0.1",
    "rewards that do not apply": f"--objective grpo {MOVES} --reward-funcs {{0}}/rewards.py:even "
    "{0}/rewards.py:vowels --reward-weights 0.5 2",
    **{mode: f"--objective grpo {BEFORE}{mode}" for mode in ("token_truncate", "token_mask")},
    **{mode: f"--objective grpo {BEFORE}{mode}" for mode in ("sequence_truncate", "sequence_mask")},
    "both ends": f"--objective grpo {BEFORE}token_mask --importance-sampling-clip-min 0.98",
}


class Compared(Recording):
    """Asks the formulas before each step."""

    def record(self) -> Compared:
        super().record()
        assert self.config.rollouts is not None and isinstance(self.batches, RolloutSource)
        self.settings: RolloutConfig = self.config.rollouts
        self.expected: list[float] = []
        self.errors: list[float] = []
        self._first, self._step = copy.deepcopy(self.trainer.model), 0
        prepared = self.batches._prepared
        self.batches._prepared = lambda rollout: self._began(prepared(rollout))  # type: ignore[method-assign]
        return self

    def _began(self, rollout: Rollout) -> Rollout:
        """A generation, before any step on it."""
        self._rollout, self._step = rollout, 0
        every = range(len(rollout))
        with torch.no_grad():
            self._old = [self._log_probs(self.trainer.model, i) for i in every]
            self._reference = [self._log_probs(self._first, i) for i in every]
        self._advantages = self._of_rewards()
        return rollout

    def _log_probs(self, model: torch.nn.Module, i: int) -> torch.Tensor:
        """Of each token of a completion, from whole rows of logits."""
        ids, asked = torch.from_numpy(self._rollout.samples[i][0]).long(), int(self._rollout.prompts[i])
        training = model.training
        model.eval()
        logits = model(MicroBatch(ids[None, :-1])).logits[0, asked - 1 :].double() / self.settings.temperature
        model.train(training)
        return torch.stack([row.log_softmax(0)[token] for row, token in zip(logits, ids[asked:], strict=True)])

    def _divergence(self, lp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        match self.settings.kl_estimator:
            case "k1":
                return lp - reference
            case "k2":
                return (lp - reference) ** 2 / 2
        return torch.exp(reference - lp) - (reference - lp) - 1

    def _of_rewards(self) -> list[float]:
        of, rollout, n = self.settings, self._rollout, self.settings.num_generations
        weights = [float(word) for word in (of.reward_weights or "1 1").split()]
        rewards: list[float] = []
        for i, each in enumerate(rollout.rewards):
            applies = [(w, r) for w, r in zip(weights, each, strict=True) if r == r]
            assert applies, "of every completion one function at least says something"
            total, length = sum(w * float(r) for w, r in applies), len(self._old[i])
            if of.overlong_buffer_len:
                over = length - (of.max_completion_length - of.overlong_buffer_len)
                total -= min(max(over / of.overlong_buffer_len, 0), 1)
            if of.beta and of.kl_placement == "reward":
                total -= of.beta * float(self._divergence(self._old[i], self._reference[i]).sum())
            rewards.append(total)
        groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]  # type: ignore[operator]
        mean = lambda x: sum(x) / len(x)  # noqa: E731
        deviation = lambda x: (sum((r - mean(x)) ** 2 for r in x) / (len(x) - 1)) ** 0.5  # noqa: E731
        out: list[float] = []
        for group in groups:
            for i, reward in enumerate(group):
                match of.advantage_estimator:
                    case "rloo":
                        out.append(reward - mean(group[:i] + group[i + 1 :]))
                    case "reinforce++":
                        out.append((reward - mean(rewards)) / (deviation(rewards) + 1e-4))
                    case "reinforce++-baseline":
                        apart = [r - mean(g) for g in groups for r in g]
                        out.append((reward - mean(group) - mean(apart)) / (deviation(apart) + 1e-4))
                    case _:
                        by = {"group": deviation(group) + 1e-4, "batch": deviation(rewards) + 1e-4, "off": 1.0}
                        out.append((reward - mean(group)) / by[str(of.scale_rewards)])
        return out

    def _loss(self) -> torch.Tensor:
        of, rollout, size = self.settings, self._rollout, int(self.config.data.global_batch_size or 0)
        part = self._step % of.steps_per_generation
        rows = range(part * size, (part + 1) * size)
        trained = [i for i in rows if not (of.mask_truncated_completions and rollout.truncated[i])]
        tokens, longest = sum(len(self._old[i]) for i in trained), of.max_completion_length
        total = torch.zeros((), dtype=torch.float64)
        for i in trained:
            lp, old, advantage = self._log_probs(self.trainer.model, i), self._old[i], self._advantages[i]
            n, begin = len(lp), int(rollout.samples.offsets[i] + rollout.prompts[i])
            sampled = torch.from_numpy(rollout.sampled[begin : begin + n]).double()
            if not of.one_step_off_policy:
                torch.testing.assert_close(sampled, old, rtol=0, atol=1e-5)
            apart = lp - old
            level = {"token": apart, "sequence": apart.mean().expand(n), "sequence_sum": apart.sum().expand(n)}
            ratio = level[str(of.importance_sampling_level)].exp()
            losses = [self._of_token(ratio[t], lp[t], advantage) + 0 * lp[t] for t in range(n)]
            loss = torch.stack(losses) * self._correction(old - sampled)
            threshold = of.off_policy_mask_threshold
            if threshold is not None and advantage < 0 and (sampled - lp.detach()).mean() > threshold:
                loss = loss * 0
            if of.beta and of.kl_placement == "loss":
                divergence = self._divergence(lp, self._reference[i])
                loss = loss + of.beta * divergence * (ratio if of.use_bias_correction_kl else 1)
            over = {
                "grpo": n * size,
                "sapo": n * size,
                "dr_grpo": size * longest,
                "luspo": size,
                "dapo": tokens,
                "cispo": tokens,
            }
            total = total + loss.sum() / over[str(of.loss_type)]
        return total

    def _of_token(self, ratio: torch.Tensor, lp: torch.Tensor, advantage: float) -> torch.Tensor:
        of = self.settings
        assert of.epsilon is not None and of.epsilon_high is not None
        if of.loss_type == "cispo":
            return -min(float(ratio), of.epsilon_high) * advantage * lp
        if of.loss_type == "sapo":
            steep = of.sapo_temperature_pos if advantage > 0 else of.sapo_temperature_neg
            return -4 / steep * torch.sigmoid(steep * (ratio - 1)) * advantage
        inside = min(max(float(ratio), 1 - of.epsilon), 1 + of.epsilon_high) == float(ratio)
        bounded = ratio if inside else torch.tensor(1 - of.epsilon if ratio < 1 else 1 + of.epsilon_high).double()
        capped = ratio if of.delta is None or ratio < of.delta else torch.tensor(of.delta).double()
        return -(capped if capped * advantage <= bounded * advantage else bounded) * advantage

    def _correction(self, apart: torch.Tensor) -> torch.Tensor:
        """Of old - sampled; a constant."""
        of = self.settings
        if of.importance_sampling_mode is None:
            return torch.ones_like(apart)
        weight = (apart.sum().expand(len(apart)) if "sequence" in of.importance_sampling_mode else apart).exp()
        low, high = of.importance_sampling_clip_min, of.importance_sampling_clip_max
        cut = [min(max(w, low), high) for w in weight.tolist()]
        if "mask" in of.importance_sampling_mode:
            cut = [w if low <= w <= high else 0.0 for w in weight.tolist()]
        return torch.tensor(cut, dtype=torch.float64)

    def _before_step(self, *given: Any) -> None:
        super()._before_step(*given)
        trained = {name: p for name, p in self.trainer.model.named_parameters() if p.requires_grad}
        with torch.enable_grad():  # optimizers step without
            loss = self._loss()
            wanted = torch.autograd.grad(loss, list(trained.values()))
        self.expected.append(float(loss.detach()))
        for (name, p), want in zip(trained.items(), wanted, strict=True):
            got, want = (x.full_tensor() if isinstance(x, DTensor) else x for x in (p.grad, want))
            assert got is not None and got.dtype == torch.float64, name
            self.errors.append(float((got - want).abs().max()))
        self._step += 1


def compared(rank: int, world: int, lines: list[str]) -> list[dict[str, Any]]:
    runs: list[Compared] = []

    class Here(Compared):
        def record(self) -> Compared:
            runs.append(self)
            return super().record()

    with fp64():
        found = [tune(rank, world, line, Here) for line in lines]
    return [
        {"losses": of["losses"], "more": of["more"], "expected": run.expected, "gradients": max(run.errors)}
        for of, run in zip(found, runs, strict=True)
    ]


@pytest.mark.parametrize(
    ("cases", "steps"),
    [(OBJECTIVES, 2), pytest.param(OPTIONS, 4, marks=pytest.mark.slow)],
    ids=["objectives", "options"],
)
def test_losses_and_gradients_are_those_of_the_formulas(cases: dict[str, str], steps: int, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    lines = [flags(tmp_path, method, f"--train-iters {steps}") for method in cases.values()]
    (found,) = run_distributed(compared, 1, lines)
    for name, run in zip(cases, found, strict=True):
        apart = max(abs(got - want) for got, want in zip(run["losses"], run["expected"], strict=True))
        clipped = [step["clipped low"] + step["clipped high"] for step in run["more"]]
        print(f"{name}: loss {apart:.1e}, gradients {run['gradients']:.1e}, losses {run['losses']}, clipped {clipped}")
        assert len(run["losses"]) == steps, name
        assert apart <= 1e-6 and run["gradients"] <= 1e-6, name
