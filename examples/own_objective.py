"""An objective of one's own for finetune.py: the focal loss, which counts tokens less that are likely already.

    torchrun --nproc-per-node 2 examples/own_objective.py --objective focal --load HF_FOLDER --data-path chats.jsonl \
        --train-epochs 1 --lora-rank 16 --seq-length 1024 --tensor-model-parallel-size 2

The loss gets the log-probability of each token of the answers, and returns the loss, its derivative by each
log-probability, and metrics. It knows no vocabulary, no tensor parallelism and no pipeline, and trains in all of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

import finetune
from smp.config.objectives import ObjectiveFacts
from smp.data.loader import RankBatch
from smp.layers.heads.answers import AnswerLoss, Judged, TokenValues
from smp.training import objectives
from smp.training.micro_batches import MicroBatches
from smp.training.objectives.contract import Implementation, Surroundings, answer_micro_batches


@dataclass(frozen=True)
class Focal:
    """-(1 - p)^power log p of each token of an answer, a mean over tokens (Lin et al. 2017, arXiv 1708.02002).

    Attributes:
        around: device and process groups of the run.
        power: 0 is the cross-entropy.
        metrics: sums over tokens that the log shows as means, by name.
    """

    around: Surroundings
    power: float = 2.0
    metrics: tuple[str, ...] = ("entropy",)

    def micro_batches(self, batch: RankBatch, num_valid: int) -> MicroBatches:
        """This rank's samples of a step, of whose tokens ``num_valid`` count on all ranks together."""

        def judge(tokens: TokenValues) -> Judged:
            assert tokens.entropy is not None, "asked for below"
            with torch.enable_grad():
                log_p = tokens.values.detach().double().requires_grad_()
                losses = torch.where(tokens.counted, -((1 - log_p.exp()) ** self.power) * log_p, 0.0)
                loss = losses.sum() / max(num_valid, 1)
                (slopes,) = torch.autograd.grad(loss, log_p)
            return Judged(loss.detach().float(), slopes.float(), {"entropy": tokens.entropy.double().sum()})

        answers = AnswerLoss(judge, entropy=True)
        return answer_micro_batches(batch, lambda _: answers, self.around.device, self.around.context.cp_group)


def add(name: str = "focal", power: float = 2.0) -> None:
    """Let --objective know it; before the command line is read."""
    facts = ObjectiveFacts("likelihood of answers, of what is unlikely more", of_answers=True)
    objectives.add(name, facts, Implementation(lambda config, around: Focal(around, power)))


if __name__ == "__main__":
    add()
    sys.exit(finetune.main(sys.argv[1:]))
