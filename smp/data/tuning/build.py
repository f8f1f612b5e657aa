"""From settings to the samples of a run and what they are laid out as. No torch, so that bad data end a run at once."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from smp.config.blend import parse_split
from smp.config.schema import Config, ConfigError
from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.encode import Encoder, marked
from smp.data.tuning.files import read_records
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


def read_data(config: Config, tokenizer: TuningTokenizer) -> TuningData:
    """Read, encode and lay out everything for a resolved ``config``. Raises ConfigError, one line that says which and
    why, when the data cannot be used."""
    data, pairs, labelled = config.data, config.has_pairs, config.has_labels
    assert data.seq_length is not None and config.model.vocab_size is not None and data.data_path is not None
    assert data.packing is not None and data.packing != "stream", "filled in before"
    encoder = Encoder(tokenizer, _template(data.chat_template, tokenizer), mask_prompt=data.mask_prompt)
    try:
        samples, report = collect(
            read_records(shlex.split(data.data_path)),
            encoder.pair if pairs else encoder.labelled if labelled else encoder.sample,
            seq_length=data.seq_length - config.has_scores,  # their last tokens are read, too
            vocab_size=config.model.vocab_size,
            threshold=data.bad_sample_threshold,
            label=label_of if labelled else None,
        )
    except ValueError as error:
        raise ConfigError(f"--data-path {error}") from error  # damage is another exit code
    rows = 2 if pairs else 1
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
        if labelled and used == 1:
            raise ConfigError(
                f"--objective kto compares prompts with answers of other samples: there is one sample only for {part}"
            )
    lines = [*report.lines(), *(_described(name, part) for name, part in (("training", train), ("validation", valid)))]
    return TuningData(tokenizer, samples, train, valid, pairs, tuple(lines))


def _template(path: str | None, tokenizer: TuningTokenizer) -> ChatTemplate | None:
    try:
        source = tokenizer.template if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error
    if path is not None and _is_json(source):
        raise ConfigError(f"--chat-template {path} is JSON: write the template in it to a file of its own")
    try:
        return None if source is None else ChatTemplate(source, tokenizer.template_tokens)
    except ValueError as error:
        raise ConfigError(f"--chat-template {path}: {error}" if path else f"the tokenizer's: {error}") from error


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
