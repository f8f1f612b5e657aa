"""The settings of each entry point: a view of the one tree of ``smp.config.schema``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Own:
    """What an entry point changes about a setting. Fields that are not given are the schema's."""

    text: str | None = None
    default: Any = ...
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class EntryPoint:
    """The settings of an entry point, and how they differ from the schema's.

    Attributes:
        groups: name of a group -> names of its settings, in order; None: all of the schema's.
        leaves_out: settings of those groups that there are not.
        titles: what groups are about, where it is another thing than in the schema.
        own: by the name of the setting.
    """

    groups: Mapping[str, tuple[str, ...] | None]
    leaves_out: frozenset[str] = frozenset()
    titles: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Own] = field(default_factory=dict)


PRETRAIN = EntryPoint(
    groups=dict.fromkeys(("model", "parallel", "data", "optim", "training", "checkpoint", "logging")),
    leaves_out=frozenset(
        (
            *("chat_template", "apply_chat_template", "mask_prompt", "truncation_side", "bad_sample_threshold"),
            *("preview", "train_epochs", "eval_epochs", "save_epochs", "full_validation", "resume", "scalar_head"),
            "transformers_config",
        )
    ),
    own={"packing": Own(choices=("stream", "best-fit"))},
)
"""``pretrain_gpt.py``."""

FINETUNE = EntryPoint(
    groups={
        "model": None,
        "parallel": None,
        "data": (
            *("data_path", "valid_data_path", "split", "tokenizer_model", "chat_template", "apply_chat_template"),
            *("mask_prompt",),
            *("truncation_side", "packing", "seq_length", "micro_batch_size", "global_batch_size"),
            *("bad_sample_threshold", "preview"),
        ),
        "lora": None,
        "objective": None,
        "rollouts": None,
        "distillation": None,
        "vision": None,
        "optim": None,
        "training": None,
        "checkpoint": (
            *("load", "ckpt_step", "save", "resume", "save_interval", "save_epochs", "save_mtbf_hours", "async_save"),
            *(
                "keep_last_k",
                "save_retain_interval",
                "keep_best_k",
                "save_hf",
                "peer_snapshot_interval",
                "peer_snapshot_dir",
            ),
        ),
        "logging": None,
    },
    # The weights of a model are loaded, so nothing is initialized; --objective and --load decide
    # the others.
    # all weights are read; --objective and --load say the others
    leaves_out=frozenset(("init_method_std", "model_config", "scalar_head", "transformers_config")),
    titles={
        "data": "What is fine-tuned on, and how samples become sequences.",
        "checkpoint": "Where a run starts from, and saving.",
    },
    own={
        "data_path": Own(
            "Files of samples (.jsonl, .json, .csv, also .gz and .zst; .parquet, .arrow), folders of them (of "
            "save_to_disk, too) or glob patterns. The shape of each sample is detected: messages, prompt/completion, "
            "text, ShareGPT, Alpaca; prompt/chosen/rejected for dpo, orpo and reward, prompt/completion/label for kto, "
            "a prompt and any columns for reinforcement learning."
        ),
        "valid_data_path": Own(
            "Samples for validation, in files as in --data-path, whose samples are then all trained on; with "
            "--eval-interval or --eval-epochs. Default: the second part of --split."
        ),
        "split": Own(
            "Relative sizes of the train, validation and test parts; which sample goes where is drawn by the seed.",
            default="95,5,0",
        ),
        "tokenizer_model": Own(
            "Folder with tokenizer.json, or a sentencepiece model file. Default: what is in the folder of --load."
        ),
        "packing": Own(
            "best-fit lays several samples into one sequence, which do not see each other; with off each has its own. "
            "Default: best-fit, but off for pairs.",
            default=None,
            choices=("best-fit", "off"),
        ),
        "seq_length": Own(
            "Tokens per sequence; longer samples are cut, see --truncation-side. Default: --max-position-embeddings, "
            "at most 8192."
        ),
        "micro_batch_size": Own(
            "Sequences (pairs with dpo, orpo and reward; completions with grpo and its kind) in one forward pass of "
            "one data-parallel process."
        ),
        "global_batch_size": Own(
            "Sequences (pairs with dpo, orpo and reward; completions with grpo and its kind) per optimizer step, any "
            "number: the last micro-batches are padded with rows of weight 0. Default: micro batch x data-parallel "
            "processes."
        ),
        "lr": Own("Peak learning rate. Adapters take about ten times as much as whole models.", default=2e-5),
        "weight_decay": Own(default=0.0),
        "load": Own(
            "Folder with the model to start from: a Hugging Face folder or checkpoints of this project. The "
            "architecture comes from it."
        ),
        "ckpt_step": Own("Start from this iteration of the checkpoints in --load and not from the newest."),
        "save": Own(
            "Folder that checkpoints are saved under, or a URL such as s3://bucket/run. With adapters they hold the "
            "adapters only, and the end of the run leaves them in <save>/adapter in peft's format."
        ),
        "log_dir": Own(default="runs/finetune"),
    },
)
"""``finetune.py``."""
