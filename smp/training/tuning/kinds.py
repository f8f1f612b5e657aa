"""Choose the kind of a fine-tuning run."""

from __future__ import annotations

from smp.config import Config
from smp.data.tuning.build import PromptData, TuningData
from smp.training.kind import RunKind
from smp.training.tuning.distilling import Distilling
from smp.training.tuning.finetuning import Finetuning
from smp.training.tuning.reinforcement import Reinforcement
from smp.training.tuning.saving_logits import SavingLogits


def tuning_kind(config: Config, data: TuningData | PromptData) -> RunKind:
    """The kind of run for this data and objective."""
    if isinstance(data, PromptData):
        return Reinforcement(config, data)
    distillation, objective = config.distillation, config.objective
    if distillation is None or objective is None or objective.objective != "distill":
        return Finetuning(config, data)
    return (Distilling if distillation.logits_save_dir is None else SavingLogits)(config, data)
