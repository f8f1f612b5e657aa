"""Losses of reinforcement learning: policy gradients with a clipped ratio, and their kin.

Of a token t of a completion with advantage A: lp is its log-probability now, ``old`` before the updates on this
generation, ``sampled`` when it was drawn, ``ref`` by the reference model; w = exp(lp - old), of each token, or of a
completion the exp of the mean (GSPO) or of the sum (RLOO) of lp - old.

- grpo, dapo, dr_grpo, luspo: -min(w' A, clip(w, 1 - epsilon, 1 + epsilon_high) A), w' = min(w, delta) if there is one
  (PPO's, Schulman et al. 2017, arXiv 1707.06347; delta: INTELLECT-2, 2505.07291)
- cispo: -min(w, epsilon_high) A lp, the weight without gradient (MiniMax-M1, 2506.13585)
- sapo: -4 / tau sigmoid(tau (w - 1)) A (2511.20347)

plus beta times an estimate of the KL divergence from the reference, all in nats. They are added up with one weight for
every token of a completion of n tokens, of the batch's B completions and N tokens:

- dapo, cispo: 1 / N (DAPO, 2503.14476); grpo, sapo: 1 / (n B) (GRPO, 2402.03300)
- dr_grpo: 1 / (B x --max-completion-length) (2503.20783); luspo: 1 / B (2602.05261)

B and N are those of the whole optimizer step, counted before it: neither micro-batches nor the layout matter. Names and
values are those of TRL 1.16, with which tests compare.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from smp.config import Config
from smp.config.rollouts import RolloutConfig
from smp.data.loader import RankBatch
from smp.kernels.transfer import to_device
from smp.layers.heads.answers import AnswerLoss, Judged, TokenValues
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group
from smp.training.micro_batches import MicroBatches, token_micro_batch
from smp.training.objectives.contract import Implementation, Surroundings

METRICS = ("entropy", "KL", "clipped low", "clipped high", "sampling difference", "importance weight")
"""Means over tokens: entropy of the policy in nats; the estimate of the KL divergence (0 without a reference); shares
of tokens whose ratio is clipped below (with A < 0) and above (A > 0); abs(lp - sampled), which before the first update
is by how much sampling and training differ; the weight of --importance-sampling-mode (1 without)."""

_FARTHEST = 20.0
"""Log-ratios are clamped to this magnitude, or exp would overflow in a sum."""


@dataclass(frozen=True, eq=False)
class RolloutBatch(RankBatch):
    """Completions with what is known of them.

    Attributes:
        advantages: fp64 (num_microbatches, micro_batch).
        tables: fp32 (num_microbatches, micro_batch, length), by name: "sampled", "old", "reference": log-probabilities
            of labels; the last two only where they are needed.
        completions: of the global batch.
    """

    advantages: torch.Tensor | None = None
    tables: dict[str, torch.Tensor] | None = None
    completions: int = 0


@dataclass(frozen=True)
class Known:
    """What is known of the completions of a micro-batch before the model runs; log-probabilities are fp64 (rows,
    length) on this rank's columns.

    Attributes:
        advantages: fp64 (rows, 1).
        sampled, old, reference: see the top of this file; None: not needed.
        tokens, completions: of the global batch: what the losses are averaged over.
    """

    advantages: torch.Tensor
    sampled: torch.Tensor
    old: torch.Tensor | None
    reference: torch.Tensor | None
    tokens: int
    completions: int


@dataclass(frozen=True)
class PolicyLoss:
    """A loss of completions, by the module's formula that the settings name."""

    settings: RolloutConfig

    @property
    def beta(self) -> float:
        """Coefficient of the KL term of the loss."""
        return (self.settings.beta or 0.0) if self.settings.kl_placement == "loss" else 0.0

    def judge(self, known: Known, tokens: TokenValues) -> Judged:
        """Judge a micro-batch."""
        counted, of = tokens.counted, self.settings
        # At least 1: rows that fill up would be 0 / 0.
        lengths = tokens.over_sequence(counted.sum(1, keepdim=True)).clamp(min=1)
        with torch.enable_grad():
            # fp64: ratios are exp of differences of sums.
            lp = tokens.values.double().requires_grad_()

            def own(x: torch.Tensor | None) -> torch.Tensor:
                """0 outside of the completions, where tables may hold anything; without one: the policy now."""
                return torch.where(counted, lp.detach() if x is None else x, 0.0)

            old = own(known.old)
            ratio = self._ratio(lp - old, tokens, lengths)
            weights = self._token_weights(known, lengths) * counted
            # old / sampled: the engine that sampled may compute other probabilities than the
            # trainer.
            correction = self._correction(own(known.old) - own(known.sampled), tokens)
            # A constant: it decides which completions count, without a gradient.
            kept = self._kept(known.advantages, own(known.sampled) - lp.detach(), tokens, lengths)
            part, value = self._summed(self._losses(ratio, lp, known.advantages), weights * correction * kept, tokens)
            kl = self._kl(own(known.reference) - lp) if known.reference is not None else torch.zeros_like(lp)
            if self.beta and of.use_bias_correction_kl:
                kl_part, kl_value = self._weighted(kl, ratio, weights, tokens)
            else:
                kl_part = kl_value = (weights * kl).sum()
            # One backward pass to log-probabilities, not to the model: the model's follows with
            # these slopes.
            (slopes,) = torch.autograd.grad(part + self.beta * kl_part, lp)
        loss = value.detach() + self.beta * kl_value.detach()
        metrics = self._metrics(ratio.detach(), lp.detach() - own(known.sampled), kl.detach(), known, tokens)
        metrics["importance weight"] = (correction * counted).sum()
        return Judged(loss.float(), slopes.float(), metrics)

    def _ratio(self, log_ratio: torch.Tensor, tokens: TokenValues, lengths: torch.Tensor) -> torch.Tensor:
        """w, the importance ratio: (rows, length), or (rows, 1) of whole completions."""
        level = self.settings.importance_sampling_level
        if level == "token":
            return log_ratio.clamp(-_FARTHEST, _FARTHEST).exp()
        here = log_ratio.sum(1, keepdim=True)
        # The sum over all ranks of a sequence, with the gradient of this rank's part.
        whole = tokens.over_sequence(here.detach()) + (here - here.detach())
        return (whole / lengths if level == "sequence" else whole).clamp(-_FARTHEST, _FARTHEST).exp()

    def _token_weights(self, known: Known, lengths: torch.Tensor) -> torch.Tensor:
        """The weight of each token of a completion, fp64 (rows, 1)."""
        ones = torch.ones_like(known.advantages)
        match self.settings.loss_type:
            case "grpo" | "sapo":
                return ones / (lengths * known.completions)
            case "dr_grpo":
                return ones / (known.completions * self.settings.max_completion_length)
            case "luspo":
                return ones / known.completions
        return ones / max(known.tokens, 1)

    def _losses(self, ratio: torch.Tensor, lp: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Losses of tokens (rows, length), or (rows, 1) where they are the same for every token of a completion."""
        of = self.settings
        assert of.epsilon is not None and of.epsilon_high is not None, "filled in before"
        if of.loss_type == "cispo":
            # The clipped weight is a constant; the gradient goes through lp for every token, which
            # PPO's clip would cut.
            return -ratio.detach().clamp(max=of.epsilon_high) * advantages * lp
        if of.loss_type == "sapo":
            steep = torch.where(advantages > 0, of.sapo_temperature_pos, of.sapo_temperature_neg)
            # A soft gate instead of the clip, with a temperature for each sign of the advantage.
            return -4 / steep * torch.sigmoid(steep * (ratio - 1)) * advantages
        clipped = ratio.clamp(1 - of.epsilon, 1 + of.epsilon_high)
        # delta bounds the ratio where A < 0, where PPO's minimum leaves it unbounded.
        capped = ratio if of.delta is None else ratio.clamp(max=of.delta)
        return -torch.minimum(capped * advantages, clipped * advantages)

    def _summed(
        self, losses: torch.Tensor, weights: torch.Tensor, tokens: TokenValues
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what has the gradient of the sum of weights x losses by this rank's tokens, this rank's part of the sum).

        A loss of a whole completion depends on tokens of all ranks that share it, and each rank computes it: there the
        gradient is that of the whole, and the value counts once."""
        # A ratio of tokens has as many entries as there are tokens.
        if losses.shape == weights.shape:
            return (total := (weights * losses).sum()), total
        # Weights of all tokens of the completion, on whichever rank.
        whole = tokens.over_sequence(weights.sum(1, keepdim=True))
        total = (whole * losses).sum()
        return total, total if tokens.leads else torch.zeros_like(total)

    def _weighted(
        self, kl: torch.Tensor, ratio: torch.Tensor, weights: torch.Tensor, tokens: TokenValues
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_summed` for KL terms times the ratio."""
        if ratio.shape == kl.shape:
            return (total := (weights * kl * ratio).sum()), total
        # Two factors with a gradient: KL of the rank's tokens, and the ratio of the whole
        # completion.
        value = (weights * kl * ratio.detach()).sum()
        whole = tokens.over_sequence((weights * kl).sum(1, keepdim=True).detach())
        return value + (whole * ratio).sum(), value

    def _kl(self, distance: torch.Tensor) -> torch.Tensor:
        """An estimate of the KL divergence for each token from d = ref - lp, Schulman's k1, k2 or k3
        (http://joschu.net/blog/kl-approx.html)."""
        d = distance.clamp(-_FARTHEST, _FARTHEST)
        match self.settings.kl_estimator:
            case "k1":
                return -d
            case "k2":
                return d.square() / 2
        # k3: unbiased, and never negative.
        return d.exp() - d - 1

    def _correction(self, log_ratio: torch.Tensor, tokens: TokenValues) -> torch.Tensor:
        """Importance weights of samples that another policy drew, constants, (rows, length) or (rows, 1), from old -
        sampled."""
        of = self.settings
        if of.importance_sampling_mode is None:
            return torch.ones_like(log_ratio)
        unit, _, way = of.importance_sampling_mode.partition("_")
        if unit == "sequence":
            log_ratio = tokens.over_sequence(log_ratio.detach().sum(1, keepdim=True))
        weight = log_ratio.detach().clamp(-_FARTHEST, _FARTHEST).exp()
        low, high = of.importance_sampling_clip_min, of.importance_sampling_clip_max
        inside = (weight >= low) & (weight <= high)
        # truncate: weights at the bounds (TIS); mask: tokens beyond have weight 0.
        return weight.clamp(low, high) if way == "truncate" else torch.where(inside, weight, 0.0)

    def _kept(
        self, advantages: torch.Tensor, log_ratio: torch.Tensor, tokens: TokenValues, lengths: torch.Tensor
    ) -> torch.Tensor:
        """1, or 0 for completions that --off-policy-mask-threshold leaves out, (rows, 1), from sampled - lp."""
        threshold = self.settings.off_policy_mask_threshold
        if threshold is None:
            return torch.ones_like(advantages)
        mean = tokens.over_sequence(log_ratio.sum(1, keepdim=True)) / lengths
        # Only negative advantages: what is far off policy and is to become less likely.
        return 1.0 - ((advantages < 0) & (mean > threshold)).double()

    def _metrics(
        self, ratio: torch.Tensor, apart: torch.Tensor, kl: torch.Tensor, known: Known, tokens: TokenValues
    ) -> dict[str, torch.Tensor]:
        """Sums of the metrics over this rank's tokens."""
        of, counted, positive = self.settings, tokens.counted, known.advantages > 0
        assert of.epsilon is not None and of.epsilon_high is not None, "filled in before"
        # CISPO's epsilon_high is the bound itself.
        highest = of.epsilon_high if of.loss_type == "cispo" else 1 + of.epsilon_high
        low = (ratio < 1 - of.epsilon) & (known.advantages < 0) & (of.loss_type not in ("cispo", "sapo"))
        high = (ratio > highest) & positive & (of.loss_type != "sapo")
        entropy = torch.zeros_like(kl) if tokens.entropy is None else tokens.entropy.double()
        found = {
            "entropy": entropy,
            "KL": kl,
            "clipped low": low.double(),
            "clipped high": high.double(),
            "sampling difference": apart.abs(),
        }
        return {name: torch.where(counted, x, 0.0).sum() for name, x in found.items()}


@dataclass(frozen=True)
class PolicyObjective:
    """The loss of completions, a mean as --loss-type says.

    Attributes:
        device: of the model.
        loss: the formula.
        temperature: of log-probabilities.
        cp: ranks that share every sequence.
        metrics: means over tokens.
    """

    device: torch.device
    loss: PolicyLoss
    temperature: float
    cp: Group | None = None
    metrics: tuple[str, ...] = METRICS

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        assert isinstance(batch, RolloutBatch) and batch.advantages is not None and batch.tables is not None
        tables = {name: to_device(table, self.device) for name, table in batch.tables.items()}
        advantages, length = to_device(batch.advantages, self.device), batch.input_ids.shape[-1]

        def make(i: int) -> MicroBatch:
            micro_batch = token_micro_batch(batch, i, 1, self.device, self.cp)
            assert micro_batch.token_index is not None
            # token_index is sample x length + column; a context-parallel rank has some of the
            # columns.
            columns = micro_batch.token_index - to_device(batch.sample_index[i], self.device)[:, None] * length
            # (rows, length) -> (rows, this rank's columns)
            found = {name: table[i].gather(1, columns).double() for name, table in tables.items()}
            known = Known(
                advantages[i][:, None],
                found["sampled"],
                found.get("old"),
                found.get("reference"),
                num_valid,
                batch.completions,
            )
            judge = partial(self.loss.judge, known)
            # Entropy is reported; the temperature is that at which completions were drawn.
            return replace(micro_batch, answers=AnswerLoss(judge, entropy=True, temperature=self.temperature))

        return MicroBatches(len(batch.input_ids), make)


def _build(config: Config, around: Surroundings) -> PolicyObjective:
    assert config.rollouts is not None, "settings of a fine-tuning run"
    loss = PolicyLoss(config.rollouts)
    return PolicyObjective(around.device, loss, config.rollouts.temperature, around.context.cp_group)


IMPLEMENTATION = Implementation(_build)
