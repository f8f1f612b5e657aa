"""Distillation: which teacher, how much of it, and where what it says comes from.

``beta``, ``temperature`` and what completions are sampled by are shared with reinforcement learning
(``smp.config.rollouts``). Names are those of TRL's ``GKDConfig`` and of Megatron-LM's ``--logits-...`` flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smp.config.declare import GIVEN, only_with


@dataclass
class DistillationConfig:
    """Distillation: the teacher of --objective distill."""

    teacher: str | None = only_with(None, objective="distill")
    """Folder of the teacher: a Hugging Face model or a checkpoint, of any family, with the same tokenizer. It stays as
    it is, and has the layout of the run, except for what the next settings say."""
    teacher_tensor_model_parallel_size: int | None = only_with(None, teacher=GIVEN)
    """TP of the teacher. Default: that of the run. Above 1 with sequence parallelism, but where the run has TP without
    it."""
    teacher_pipeline_model_parallel_size: int | None = only_with(None, teacher=GIVEN)
    """PP of the teacher, with one stage per process. Default: the pipeline of the run."""
    teacher_context_parallel_size: int | None = only_with(None, teacher=GIVEN)
    """CP of the teacher. Default: that of the run."""
    teacher_expert_model_parallel_size: int | None = only_with(None, teacher=GIVEN)
    """Neighbouring ranks that divide the teacher's experts, where it has some. Default: those of the run, where its
    model has experts, too; else 1. --expert-tensor-parallel-size of the run is the teacher's, too."""
    lmbda: float = only_with(0.0, teacher=GIVEN)
    """Share of the steps that train on completions which the model itself writes for the prompts of the data, in place
    of the completions there (on policy)."""
    kd_loss_alpha: float = only_with(1.0, objective="distill")
    """Share of the divergence from the teacher in the loss; the rest is the cross-entropy of the samples."""
    logits_load_dir: str | None = only_with(None, objective="distill")
    """In place of --teacher: what --logits-save-dir has written for the same samples."""
    logits_save_dir: str | None = only_with(None, objective="distill")
    """Train nothing: run the model in --load, the teacher, over all samples and write the log-probabilities of its
    likeliest tokens to this new folder, for --logits-load-dir."""
    logits_top_k: int = only_with(128, logits_save_dir=GIVEN)
    """How many tokens are written for each that is trained; all others are summed up in one number."""
    logits_save_dtype: Literal["fp16", "fp32"] = only_with("fp16", logits_save_dir=GIVEN)
    """Precision of log-probabilities in files: fp16 is off by 0.0005 of each."""
