"""Every setting of a fine-tuning run: pretraining's groups where they mean the same, and its own where they do not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from smp.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    Words,
)


@dataclass
class FinetuneDataConfig:
    """What is fine-tuned on, and how samples become sequences."""

    data_path: Words | None = None
    """Files of samples (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) or glob patterns. The shape of each sample is
    detected: messages, prompt/completion, text, ShareGPT, Alpaca; prompt/chosen/rejected for dpo."""
    split: str = "95,5,0"
    """Relative sizes of the train, validation and test parts; which sample goes where is drawn by the seed."""
    tokenizer_model: str | None = None
    """Folder with tokenizer.json, or a sentencepiece model file. Default: what is in the folder of --load."""
    chat_template: str | None = None
    """File with a Jinja chat template, instead of the tokenizer's own."""
    mask_prompt: bool = True
    """Train on what the assistant says (or the completion) only; --no-mask-prompt trains on all tokens."""
    packing: Literal["best-fit", "off"] | None = None
    """best-fit lays several samples into one sequence, which do not see each other; with off each has its own.
    Default: best-fit, but off for dpo."""
    seq_length: int | None = None
    """Tokens per sequence; longer samples are cut at the end. Default: --max-position-embeddings, at most 8192."""
    micro_batch_size: int = 1
    """Sequences (pairs with dpo) in one forward pass of one data-parallel process."""
    global_batch_size: int | None = None
    """Sequences (pairs with dpo) per optimizer step. Default: micro batch x data-parallel processes."""
    bad_sample_threshold: float = 0.01
    """Largest fraction of samples that may be broken (not JSON, unknown role, nothing to train on). They are left out
    and named by line number; more are an error."""
    preview: int = 0
    """Print so many samples as the model would see them, trained tokens in colour (in a pipe: in ⟦ ⟧), and end."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) instead of training all weights."""

    lora_rank: int | None = None
    """Freeze the model and train adapters of this rank. Default: all weights are trained."""
    lora_alpha: float | None = None
    """What an adapter adds is scaled by alpha / rank. Default: 2 x rank."""
    lora_dropout: float | None = None
    """Dropout on the input of adapters. Default: 0, or that of --load-adapter."""
    lora_target_modules: str | None = None
    """Linear layers that get an adapter: shell patterns with commas in between, of whole names or of their last part
    (query, key, value, output, gate, up, down). Default: all of them."""
    load_adapter: str | None = None
    """Start from the adapter in this folder of peft's format, which brings rank, alpha and target modules."""


@dataclass
class ObjectiveConfig:
    """What is minimised."""

    objective: Literal["sft", "dpo"] = "sft"
    """sft: cross-entropy of the samples; dpo: direct preference optimization on pairs of answers."""
    dpo_beta: float = 0.1
    """How far the policy is held to the reference: scales the difference of log-ratios."""
    dpo_label_smoothing: float = 0.0
    """Probability that a preference is the wrong way round, below 0.5 (conservative DPO)."""
    dpo_reference: Literal["adapters-off", "copy", "precomputed"] | None = None
    """Where log-probabilities of the reference come from: the model without its adapters, a frozen copy, or a table
    that is computed before training. Default: adapters-off with --lora-rank, else copy."""


@dataclass
class FinetuneCheckpointConfig:
    """Where a run starts from, and saving."""

    load: str | None = None
    """Folder with the model to start from: a Hugging Face folder or checkpoints of ours. The architecture comes from
    it."""
    ckpt_step: int | None = None
    """Start from this iteration of our checkpoints in --load and not from the newest."""
    save: str | None = None
    """Folder that checkpoints are saved under, or a URL such as s3://bucket/run. With adapters they hold the adapters
    only, and the end of the run leaves them in <save>/adapter in peft's format."""
    resume: bool = False
    """Go on from the newest checkpoint in --save if there is one. The same command line then survives restarts."""
    save_interval: int | None = None
    """Save every so many iterations. The end of a run is saved in any case."""
    save_mtbf_hours: float | None = None
    """Save by the clock instead: given the mean time between failures, every sqrt(2 x measured cost of a save x
    this)."""
    async_save: bool = False
    """Write checkpoints in the background."""
    keep_last_k: int | None = None
    """Delete all but so many newest checkpoints (at least 2) and those that the next two settings keep."""
    save_retain_interval: int | None = None
    """Keep checkpoints whose iteration is a multiple of this."""
    keep_best_k: int | None = None
    """Keep so many checkpoints with the lowest validation loss. Needs --eval-interval, which measures it."""


@dataclass
class FinetuneTrainingConfig(TrainingConfig):
    """Length of the run, evaluation, what ends it and how it is observed."""

    train_epochs: int | None = None
    """Passes over the training samples, instead of --train-iters and --train-samples."""


@dataclass
class FinetuneOptimizerConfig(OptimizerConfig):
    """Optimizer, learning-rate schedule and clipping."""

    lr: float = 2e-5
    """Peak learning rate. Adapters take about ten times as much as whole models."""
    weight_decay: float = 0.0
    """Decoupled weight decay; never on biases and norms (tensors with one dimension)."""


@dataclass
class FinetuneLoggingConfig(LoggingConfig):
    """Logs, metrics and where they go."""

    log_dir: str = "runs/finetune"
    """Folder of metrics.jsonl, status.json, TensorBoard events and profiles."""


@dataclass
class FinetuneConfig:
    """The whole tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: FinetuneOptimizerConfig = field(default_factory=FinetuneOptimizerConfig)
    training: FinetuneTrainingConfig = field(default_factory=FinetuneTrainingConfig)
    checkpoint: FinetuneCheckpointConfig = field(default_factory=FinetuneCheckpointConfig)
    logging: FinetuneLoggingConfig = field(default_factory=FinetuneLoggingConfig)

    def as_run(self) -> Config:
        """What trainer, mesh, checkpoints and logs need to know, in pretraining's words. A run starts from its own
        checkpoints or from none: what --load names is not a state to resume but weights to begin with."""
        checkpoint = _common(CheckpointConfig, self.checkpoint)
        checkpoint |= {"load": "auto" if self.checkpoint.resume else None, "ckpt_step": None}
        packed = self.data.packing == "best-fit"
        return Config(
            model=self.model,
            parallel=self.parallel,
            data=DataConfig(
                data_path=self.data.data_path,
                split=self.data.split,
                tokenizer_model=self.data.tokenizer_model,
                seq_length=self.data.seq_length,
                micro_batch_size=self.data.micro_batch_size,
                global_batch_size=self.data.global_batch_size,
                packing="best-fit" if packed else "stream",
                reset_attention_mask=packed,
                reset_position_ids=packed,
            ),
            optim=OptimizerConfig(**_common(OptimizerConfig, self.optim)),
            training=TrainingConfig(**_common(TrainingConfig, self.training)),
            checkpoint=CheckpointConfig(**checkpoint),
            logging=LoggingConfig(**_common(LoggingConfig, self.logging)),
        )

    def with_run(self, run: Config) -> FinetuneConfig:
        """A copy that has the values which were filled in for ``run``."""
        return replace(
            self,
            model=run.model,
            parallel=run.parallel,
            data=replace(self.data, seq_length=run.data.seq_length, global_batch_size=run.data.global_batch_size),
            optim=FinetuneOptimizerConfig(**asdict(run.optim)),
            training=FinetuneTrainingConfig(**asdict(run.training), train_epochs=self.training.train_epochs),
        )


def _common(kind: type, group: Any) -> dict[str, Any]:
    """The fields of ``group`` that ``kind`` has as well."""
    return {f.name: getattr(group, f.name) for f in fields(kind) if hasattr(group, f.name)}
