"""The next token: cross-entropy, of pretraining and of samples (--objective sft)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from smp.config import Config
from smp.data.loader import RankBatch
from smp.parallel.collectives import Group
from smp.training.micro_batches import MicroBatches, token_micro_batch
from smp.training.objectives.contract import Implementation, Surroundings


@dataclass(frozen=True)
class NextToken:
    """Cross-entropy, a mean over the tokens that have a label.

    Attributes:
        device: of the model.
        cp: ranks that share every sequence.
        metrics: none.
        mtp: layers of multi-token prediction.
    """

    device: torch.device
    cp: Group | None = None
    metrics: tuple[str, ...] = ()
    mtp: int = 0

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        make = partial(
            token_micro_batch,
            batch,
            num_valid_tokens=num_valid,
            device=self.device,
            cp=self.cp,
            mtp=self.mtp,
        )
        return MicroBatches(len(batch.input_ids), make)


def _build(config: Config, around: Surroundings) -> NextToken:
    return NextToken(around.device, around.context.cp_group, mtp=config.model.mtp_num_layers or 0)


# None: the fake micro-batch has its cross-entropy already.
IMPLEMENTATION = Implementation(_build, fake=lambda config, rows: None)
