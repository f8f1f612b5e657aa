"""The completions of one generation, whole on every rank, and the batches that are cut from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smp.data.loader import rank_share
from smp.data.tuning.batches import TuningDataset
from smp.data.tuning.samples import Samples
from smp.data.tuning.sequences import lay_out
from smp.training.micro_batches import MicroBatches
from smp.training.objectives.policy import RolloutBatch

Table = torch.Tensor
"""fp32 (completions x length,), on the CPU: a value for the label in each column of each completion's row."""


@dataclass
class Rollout:
    """The completions of one generation, in the order in which they are trained.

    Attributes:
        samples: prompt and completion of each; the completion is what is trained.
        prompts: int64, tokens of each prompt.
        sampled: fp32 like ``samples.tokens``, log-probabilities when they were drawn; 0 for prompts.
        truncated: of each, whether the length ended it.
        rewards: fp64 (completions, functions), NaN where one does not apply.
        penalty: fp64 (completions,), added to their weighted sum.
        advantages: fp64 (completions,).
        old, reference: tables of log-probabilities; None: not needed, or not yet there.
        measured: what the log says of it.
        table: some completions, for people.
    """

    samples: Samples
    prompts: npt.NDArray[np.int64]
    sampled: npt.NDArray[np.float32]
    truncated: npt.NDArray[np.bool_]
    rewards: npt.NDArray[np.float64]
    penalty: npt.NDArray[np.float64]
    advantages: npt.NDArray[np.float64]
    old: Table | None = None
    reference: Table | None = None
    measured: dict[str, float] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.samples)

    def state(self) -> dict[str, torch.Tensor]:
        """The rollout as tensors, for checkpoints."""
        arrays = {
            "tokens": self.samples.tokens,
            "trained": self.samples.trained.astype(np.uint8),
            "offsets": self.samples.offsets,
            "prompts": self.prompts,
            "sampled": self.sampled,
            "truncated": self.truncated.astype(np.uint8),
            "rewards": self.rewards,
            "penalty": self.penalty,
            "advantages": self.advantages,
        }
        tables = {name: table for name in ("old", "reference") if (table := getattr(self, name)) is not None}
        measured = {
            f"measured.{name}": torch.tensor(value, dtype=torch.float64) for name, value in self.measured.items()
        }
        return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()} | tables | measured

    @staticmethod
    def of_state(state: Mapping[str, torch.Tensor]) -> Rollout:
        """The rollout that :meth:`state` has written as tensors."""
        array = {name: x.numpy() for name, x in state.items()}
        samples = Samples(array["tokens"], array["trained"].astype(np.bool_), array["offsets"])
        return Rollout(
            samples,
            array["prompts"],
            array["sampled"],
            array["truncated"].astype(np.bool_),
            array["rewards"],
            array["penalty"],
            array["advantages"],
            state.get("old"),
            state.get("reference"),
            {name.removeprefix("measured."): float(x) for name, x in state.items() if name.startswith("measured.")},
        )


@dataclass(frozen=True)
class Cut:
    """How a generation is divided into batches of a rank.

    Attributes:
        batch_size: completions of an optimizer step.
        micro_batch_size: of a forward pass.
        data_rank, data_size: of this rank.
        length: columns of a row.
        trim: leave out columns of padding, see ``TuningDataset``.
    """

    batch_size: int
    micro_batch_size: int
    data_rank: int
    data_size: int
    length: int
    trim: bool

    def batch(self, rollout: Rollout, part: int, first: int) -> RolloutBatch:
        """The batch of step ``part`` of a generation. Micro-batches are divided over ranks as those of files are.

        Args:
            first: sample number of its first completion.
        """
        first_row, ranks = part * self.batch_size, (self.data_rank, self.data_size)
        share = rank_share(first_row, self.batch_size, self.micro_batch_size, *ranks)
        # Negative numbers are rows that fill up (~row).
        own = np.where(share < 0, ~share, share)
        every = lay_out(rollout.samples, np.arange(len(rollout)), self.length, "off")
        dataset = TuningDataset(rollout.samples, every, seed=None, trim=self.trim)
        plain = dataset.batch(share)
        # This rank's rows only: what a step moves to the device does not grow with the generation.
        tables = {"sampled": self._sampled(rollout, own)}
        whole = {name: table for name in ("old", "reference") if (table := getattr(rollout, name)) is not None}
        tables |= {name: table.view(len(rollout), -1)[torch.from_numpy(own)] for name, table in whole.items()}
        fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
        # Sample numbers go on over generations: dropout is keyed by them.
        fields["sample_index"] = plain.sample_index + first
        return RolloutBatch(
            **fields,
            advantages=torch.from_numpy(rollout.advantages[own]),
            tables=tables,
            completions=self.batch_size,
        )

    def _sampled(self, rollout: Rollout, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Log-probabilities at sampling, by column, fp32 (*rows, length)."""
        table = _by_columns(rollout, rollout.sampled, rows.ravel(), self.length)
        return torch.from_numpy(table).view(*rows.shape, self.length)


def _by_columns(
    rollout: Rollout, of_tokens: npt.NDArray[Any], rows: npt.NDArray[np.int64], length: int
) -> npt.NDArray[Any]:
    """(rows, length) of a value for each token: column t has that of token t + 1, its label; 0 after the end."""
    table = np.zeros((len(rows), length), of_tokens.dtype)
    offsets = rollout.samples.offsets
    for line, row in zip(table, rows, strict=True):
        found = of_tokens[int(offsets[row]) + 1 : int(offsets[row + 1])]
        line[: len(found)] = found
    return table


def engine_mismatch(rollout: Rollout, length: int) -> dict[str, float]:
    """How much the log-probabilities with which another program's engine drew the trained tokens differ from the
    trainer's, ``old``, at the same weights.

    Mean and largest distance; mean ratio of probabilities; an estimate of KL(engine || trainer); and the effective
    sample size, as a share of the completions: (sum of w)^2 / (n x sum of w^2), w = the ratio of a whole completion."""
    assert rollout.old is not None
    rows = np.arange(len(rollout))
    counted = _by_columns(rollout, rollout.samples.trained, rows, length)
    sampled = _by_columns(rollout, rollout.sampled, rows, length).astype(np.float64)
    apart = np.where(counted, rollout.old.view(len(rollout), length).double().numpy() - sampled, 0.0)
    of_tokens, whole = np.clip(apart[counted], -20, 20), np.exp(np.clip(apart.sum(1), -20, 20))
    if not len(of_tokens):
        return {}
    return {
        "engine difference": float(np.abs(of_tokens).mean()),
        "engine difference, largest": float(np.abs(of_tokens).max()),
        "engine ratio": float(np.exp(of_tokens).mean()),
        "engine KL": float((np.exp(of_tokens) - 1 - of_tokens).mean()),
        "effective sample size": float(whole.sum() ** 2 / (len(whole) * (whole**2).sum())),
    }


def fill_table(table: torch.Tensor, micro_batches: MicroBatches, values: Sequence[torch.Tensor]) -> None:
    """Add the values that a model found for each token of some micro-batches, whose samples are numbered from 0 on, to
    a table of zeros; see ``ModelReference.of_tokens``."""
    for micro_batch, found in zip(micro_batches, values, strict=True):
        assert micro_batch.token_index is not None
        # Added, not written: a row that fills up has zeros, and repeats a sample that may be in
        # another micro-batch.
        table.put_(micro_batch.token_index, found, accumulate=True)
