"""From settings to the samples of a run and what they are laid out as. No torch, so that bad data end a run at once."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smp.config.blend import parse_split
from smp.config.schema import Config, ConfigError
from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.encode import Encoder, marked
from smp.data.tuning.files import read_records
from smp.data.tuning.prompts import Prompt, read_prompts
from smp.data.tuning.samples import Samples, collect
from smp.data.tuning.sequences import Sequences, lay_out, split_samples
from smp.data.tuning.shapes import label_of
from smp.data.tuning.tokenizer import TuningTokenizer


@dataclass(frozen=True)
class TuningData:
    """What a run trains and validates on.

    Attributes:
        tokenizer: of the model.
        samples: all texts.
        train, valid: sequences of the two parts.
        pairs: whether two sequences are a pair of answers.
        lines: what the user should hear.
    """

    tokenizer: TuningTokenizer
    samples: Samples
    train: Sequences
    valid: Sequences
    pairs: bool
    lines: tuple[str, ...]

    @property
    def samples_per_epoch(self) -> int:
        """Sequences (pairs) of the training part."""
        return len(self.train) // (2 if self.pairs else 1)

    def preview(self, count: int, colours: bool) -> list[str]:
        """The first ``count`` samples of the training part, with what is trained marked, by colours or by brackets; of
        a pair the chosen answer comes first."""
        texts = self.train.order[: count * (2 if self.pairs else 1)].tolist()
        return [f"--- text {n}\n{marked(self.tokenizer, self.samples[n], colours)}" for n in texts]


@dataclass(frozen=True)
class PromptData:
    """Prompts that a run trains and validates on.

    Attributes:
        tokenizer: of the model.
        prompts: all of them.
        train, valid: numbers of those of the two parts.
        each: samples that one prompt makes in an epoch.
        lines: what the user should hear.
    """

    tokenizer: TuningTokenizer
    prompts: list[Prompt]
    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]
    each: int
    lines: tuple[str, ...]

    @property
    def samples_per_epoch(self) -> int:
        """Completions of the training part, as often as each is trained on."""
        return len(self.train) * self.each

    def preview(self, count: int, colours: bool) -> list[str]:
        """The first ``count`` prompts of the training part, as the model sees them."""
        shown = [(n, self.prompts[n].ids) for n in self.train[:count].tolist()]
        texts = [(n, (np.array(ids, np.int32), np.zeros(len(ids), np.bool_))) for n, ids in shown]
        return [f"--- prompt {n}\n{marked(self.tokenizer, text, colours)}" for n, text in texts]


def read_data(config: Config, tokenizer: TuningTokenizer) -> TuningData | PromptData:
    """Read, encode and lay out everything for a resolved ``config``. Raises ConfigError, one line that says which and
    why, when the data cannot be used."""
    return _read_prompts(config, tokenizer) if config.is_online else _read_samples(config, tokenizer)


def _read_prompts(config: Config, tokenizer: TuningTokenizer) -> PromptData:
    data, rollouts, training = config.data, config.rollouts, config.training
    assert data.seq_length is not None and config.model.vocab_size is not None and data.data_path is not None
    assert rollouts is not None and rollouts.num_generations is not None, "filled in before"
    template = chat_template_of(data.chat_template, tokenizer)
    try:
        prompts, report = read_prompts(
            read_records(shlex.split(data.data_path)),
            Encoder(tokenizer, template, as_messages=data.apply_chat_template),
            longest=data.seq_length + 1 - rollouts.max_completion_length,
            vocab_size=config.model.vocab_size,
            threshold=data.bad_sample_threshold,
        )
    except ValueError as error:
        raise ConfigError(f"--data-path {error}") from error  # damage is another exit code
    train, valid = split_samples(len(prompts), parse_split(data.split), training.seed)
    if len(train) == 0:
        raise ConfigError(f"--split {data.split} leaves none of {len(prompts)} prompts to train on")
    if training.eval_interval is not None and len(valid) == 0:
        raise ConfigError(f"--eval-interval: --split {data.split} leaves none of {len(prompts)} prompts for validation")
    columns = sorted({name for prompt in prompts for name in prompt.columns})
    lines = [
        f"prompts: {report.used:,} of {report.records:,} used, {report.tokens:,} tokens, {len(report.bad):,} dropped",
        *report.beside_template("prompts are texts"),
        *_without_tokens(template),
        *report.dropped(),
        f"columns for rewards: {', '.join(columns) or 'none'}",
        f"training: {len(train):,} prompts, validation: {len(valid):,} prompts",
    ]
    each = rollouts.num_generations * rollouts.num_iterations
    return PromptData(tokenizer, prompts, train, valid, each, tuple(lines))


def _read_samples(config: Config, tokenizer: TuningTokenizer) -> TuningData:
    data, facts = config.data, config.objective_facts
    labelled = facts.reads == "labelled"
    assert data.seq_length is not None and config.model.vocab_size is not None and data.data_path is not None
    assert data.packing is not None and data.packing != "stream", "filled in before"
    template = chat_template_of(data.chat_template, tokenizer)
    encoder = Encoder(tokenizer, template, mask_prompt=data.mask_prompt, as_messages=data.apply_chat_template)
    try:
        samples, report = collect(
            read_records(shlex.split(data.data_path)),
            {"sample": encoder.sample, "pair": encoder.pair, "labelled": encoder.labelled}[facts.reads],
            seq_length=data.seq_length - facts.has_scores,  # their last tokens are read, too
            vocab_size=config.model.vocab_size,
            threshold=data.bad_sample_threshold,
            keep_end=data.truncation_side == "left",
            label=label_of if labelled else None,
        )
    except ValueError as error:
        raise ConfigError(f"--data-path {error}") from error  # damage is another exit code
    rows = facts.rows
    # By samples, so that both answers of a pair are on the same side.
    chosen = split_samples(len(samples) // rows, parse_split(data.split), config.training.seed)
    train, valid = (
        lay_out(samples, (part[:, None] * rows + np.arange(rows)).ravel(), data.seq_length, data.packing)
        for part in chosen
    )
    if len(train) == 0:
        raise ConfigError(f"--split {data.split} leaves none of {report.used} samples to train on")
    if config.training.eval_interval is not None and len(valid) == 0:
        raise ConfigError(f"--eval-interval: --split {data.split} leaves none of {report.used} samples for validation")
    for part, used in (("training", len(train)), ("validation", len(valid) if config.training.eval_interval else 0)):
        if facts.mismatched and used == 1:
            raise ConfigError(
                f"--objective kto compares prompts with answers of other samples: there is one sample only for {part}"
            )
    parts = (_described(name, part) for name, part in (("training", train), ("validation", valid)))
    lines = [*report.lines(), *_without_tokens(template), *parts]
    return TuningData(tokenizer, samples, train, valid, facts.rows == 2, tuple(lines))


def chat_template_of(path: str | None, tokenizer: TuningTokenizer) -> ChatTemplate | None:
    """Of --chat-template, or the tokenizer's; None: there is none. Raises ConfigError when it cannot be used."""
    try:
        source = tokenizer.template if path is None else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error
    if path is not None and _is_json(source):
        raise ConfigError(f"--chat-template {path} is JSON: write the template in it to a file of its own")
    try:
        return None if source is None else ChatTemplate(source, tokenizer.template_tokens)
    except ValueError as error:
        raise ConfigError(f"--chat-template {path}: {error}" if path else f"the tokenizer's: {error}") from error


def _without_tokens(template: ChatTemplate | None) -> list[str]:
    """A note on special tokens that the template names in vain."""
    if template is None or not template.empty_tokens:
        return []
    names = ", ".join(template.empty_tokens)
    return [f"note: the chat template names {names}, which the tokenizer does not have: nothing stands in its place"]


def _is_json(source: str | None) -> bool:
    """As tokenizer_config.json is, which as a template would be a text of braces."""
    try:
        return isinstance(json.loads(source or ""), dict)
    except ValueError:
        return False


def _described(name: str, part: Sequences) -> str:
    return (
        f"{name}: {len(part.order):,} texts in {len(part):,} sequences of {part.length:,} tokens, "
        f"{100 * part.efficiency:.2f} % full"
    )
