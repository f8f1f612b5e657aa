"""Samples or prompts of a fine-tuning run, read and laid out from the settings. It does not import torch, so that bad
data end a run before a GPU is touched."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smp.config.blend import parse_split
from smp.config.command_line.fields import given
from smp.config.schema import Config, ConfigError
from smp.data.tuning.apart import ApartEncoder
from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.encode import Encoder, marked
from smp.data.tuning.files import read_records
from smp.data.tuning.images import IMAGE_MARK
from smp.data.tuning.processor import open_processor
from smp.data.tuning.prompts import Prompt, read_prompts
from smp.data.tuning.samples import Report, Samples, collect
from smp.data.tuning.sequences import Sequences, lay_out, split_samples
from smp.data.tuning.shapes import label_of
from smp.data.tuning.tokenizer import TuningTokenizer
from smp.data.tuning.vision import ImageProcessor, VisionEncoder


@dataclass(frozen=True)
class TuningData:
    """Training and validation data of a run.

    Attributes:
        tokenizer: of the model.
        samples: all texts.
        texts: how many of them are of --data-path; those of --valid-data-path, if it is given, are after them.
        train, valid: sequences of the two parts.
        pairs: whether two sequences are a pair of answers.
        lines: what the user should hear.
        images: what has made samples with images; None: the model sees none.
        ends: special tokens that end a text's last part that is trained.
    """

    tokenizer: TuningTokenizer
    samples: Samples
    texts: int
    train: Sequences
    valid: Sequences
    pairs: bool
    lines: tuple[str, ...]
    images: VisionEncoder | None = None
    ends: frozenset[int] = frozenset()

    @property
    def samples_per_epoch(self) -> int:
        """Sequences (pairs) of the training part."""
        # A pair takes two sequences: chosen, then rejected.
        return len(self.train) // (2 if self.pairs else 1)

    def preview(self, count: int, colours: bool) -> list[str]:
        """The first ``count`` samples of the training part, with what is trained marked by colours or by brackets. Of a
        pair the chosen answer comes first."""
        texts = self.train.order[: count * (2 if self.pairs else 1)].tolist()
        return [f"--- text {n}\n{marked(self.tokenizer, self.samples[n], colours)}" for n in texts]


@dataclass(frozen=True)
class PromptData:
    """Prompts that a run trains and validates on.

    Attributes:
        tokenizer: of the model.
        prompts: all of them.
        own: how many of them are of --data-path; those of --valid-data-path, if it is given, are after them.
        train, valid: numbers of those of the two parts.
        each: samples that one prompt makes in an epoch.
        lines: what the user should hear.
    """

    tokenizer: TuningTokenizer
    prompts: list[Prompt]
    own: int
    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]
    each: int
    lines: tuple[str, ...]

    @property
    def samples_per_epoch(self) -> int:
        """Completions of the training part, counted as often as each is trained on."""
        return len(self.train) * self.each

    def preview(self, count: int, colours: bool) -> list[str]:
        """The first ``count`` prompts of the training part, as the model sees them."""
        # Nothing in a prompt is trained: the completion is.
        shown = [(n, self.prompts[n].ids) for n in self.train[:count].tolist()]
        texts = [(n, (np.array(ids, np.int32), np.zeros(len(ids), np.bool_))) for n, ids in shown]
        return [f"--- prompt {n}\n{marked(self.tokenizer, text, colours)}" for n, text in texts]


def read_data(config: Config, tokenizer: TuningTokenizer) -> TuningData | PromptData:
    """Read, encode and lay out all data of a resolved ``config``. Raises ConfigError, one line with the flag and the
    reason, when the data cannot be used."""
    return _read_prompts(config, tokenizer) if config.is_online else _read_samples(config, tokenizer)


def _read_prompts(config: Config, tokenizer: TuningTokenizer) -> PromptData:
    data, rollouts = config.data, config.rollouts
    assert data.seq_length is not None and config.model.vocab_size is not None and data.data_path is not None
    assert rollouts is not None and rollouts.num_generations is not None, "filled in before"
    template, vocab_size = chat_template_of(data.chat_template, tokenizer), config.model.vocab_size
    encoder = Encoder(tokenizer, template, as_messages=data.apply_chat_template)
    # seq_length labels need seq_length + 1 tokens: the last token is predicted, never read. A
    # prompt must leave room for the longest completion, or rollouts would not fit into a sequence.
    longest = data.seq_length + 1 - rollouts.max_completion_length

    def read(flag: str, path: str) -> tuple[list[Prompt], Report]:
        with _named(flag):
            return read_prompts(
                read_records(shlex.split(path)),
                encoder,
                longest=longest,
                vocab_size=vocab_size,
                threshold=data.bad_sample_threshold,
            )

    prompts, report = read("--data-path", data.data_path)
    told, own = _of_prompts(report, "prompts"), len(prompts)
    if data.valid_data_path is not None:
        more, report = read("--valid-data-path", data.valid_data_path)
        prompts, told = prompts + more, told + _of_prompts(report, "validation prompts")
    train, valid = _parts(config, own, len(prompts), "prompts")
    columns = sorted({name for prompt in prompts for name in prompt.columns})
    # What a row does not have is None there, as in a table: a function that names a column gets it for every prompt.
    prompts = [replace(prompt, columns=dict.fromkeys(columns) | prompt.columns) for prompt in prompts]
    lines = [
        *told,
        # A template that names a token the tokenizer lacks renders it as an empty text, without an
        # error.
        *_without_tokens(template),
        f"columns for rewards: {', '.join(columns) or 'none'}",
        f"training: {len(train):,} prompts, validation: {len(valid):,} prompts",
    ]
    # Each completion is trained on num_iterations times (the mu of GRPO, arXiv 2402.03300).
    each = rollouts.num_generations * rollouts.num_iterations
    return PromptData(tokenizer, prompts, own, train, valid, each, tuple(lines))


def _of_prompts(report: Report, what: str) -> list[str]:
    """Lines for the user about the prompts that were read."""
    return [
        f"{what}: {report.used:,} of {report.records:,} used, {report.tokens:,} tokens, {len(report.bad):,} dropped",
        *report.template_notes("prompts are texts"),
        *report.dropped(),
    ]


@contextlib.contextmanager
def _named(flag: str) -> Iterator[None]:
    """Turn ValueError into ConfigError with the flag that names the files. Its cause stays: ``exit_code`` finds a
    DamageError there."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from error


def _parts(config: Config, own: int, count: int, what: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers of the samples to train on, and of those for validation.

    Args:
        own: samples of --data-path; after them stand those of --valid-data-path, if it is given.
        count: all samples.
        what: they are.
    """
    if config.data.valid_data_path is not None:
        return np.arange(own), np.arange(own, count)
    split = config.data.split
    # Keyed by the training seed: the same command splits the same files in the same way.
    train, valid = split_samples(count, parse_split(split), config.training.seed)
    if len(train) == 0:
        raise ConfigError(f"--split {split} leaves none of {count} {what} to train on")
    if config.training.evaluates and len(valid) == 0:
        # Either of two flags asks for validation: the error names the one that was given.
        flag = given(config.training, "eval_interval", "eval_epochs")[0]
        raise ConfigError(f"{flag}: --split {split} leaves none of {count} {what} for validation")
    return train, valid


def _read_samples(config: Config, tokenizer: TuningTokenizer) -> TuningData:
    data, facts = config.data, config.objective_facts
    assert data.seq_length is not None and config.model.vocab_size is not None and data.data_path is not None
    assert data.packing is not None and data.packing != "stream", "filled in before"
    # With images the template gets content parts, as transformers passes them to vision models.
    template = chat_template_of(
        data.chat_template, tokenizer, image_mark=IMAGE_MARK if config.model.sees_images else None
    )
    encoder = _encoder(config, tokenizer, template)
    # facts.reads says which form the objective needs: one text, a pair, or a text with a label.
    read = partial(
        collect,
        encode={"sample": encoder.sample, "pair": encoder.pair, "labelled": encoder.labelled}[facts.reads],
        seq_length=data.seq_length - facts.has_scores,  # their last tokens are read, too
        vocab_size=config.model.vocab_size,
        threshold=data.bad_sample_threshold,
        keep_end=data.truncation_side == "left",
        label=label_of if facts.reads == "labelled" else None,
        # Images are read once here, for their sizes and hashes; batches read them again when they
        # come.
        images=config.model.sees_images,
    )
    with _named("--data-path"):
        samples, report = read(read_records(shlex.split(data.data_path)))
    told, texts, rows, ends = report.lines(), len(samples), facts.rows, frozenset(report.ends)
    if data.valid_data_path is not None:
        with _named("--valid-data-path"):
            more, report = read(read_records(shlex.split(data.valid_data_path)))
        samples, told = samples + more, [*told, *report.lines("validation samples")]
    # By samples, so that both answers of a pair are on the same side.
    # rows is 2 for pairs, else 1: samples are counted in pairs here.
    chosen = _parts(config, texts // rows, len(samples) // rows, "samples")
    train, valid = (
        # Text numbers of sample s are s * rows .. s * rows + rows - 1; [samples, rows] flattened.
        lay_out(samples, (part[:, None] * rows + np.arange(rows)).ravel(), data.seq_length, data.packing)
        for part in chosen
    )
    # The KL term of KTO pairs a prompt with the answer of another sample (arXiv 2402.01306).
    for part, used in (("training", len(train)), ("validation", len(valid) if config.training.evaluates else 0)):
        if facts.mismatched and used == 1:
            raise ConfigError(
                f"--objective kto compares prompts with answers of other samples: there is one sample only for {part}"
            )
    parts = [_described(name, part) for name, part in (("training", train), ("validation", valid))]
    if len(valid) and not config.training.evaluates:
        parts[1] += "; held out, and not evaluated without --eval-interval (--split 100,0 trains on all)"
    lines = [*told, *_without_tokens(template), *parts]
    images = encoder if isinstance(encoder, VisionEncoder) else None
    return TuningData(tokenizer, samples, texts, train, valid, rows == 2, tuple(lines), images, ends)


def _encoder(config: Config, tokenizer: TuningTokenizer, template: ChatTemplate | None) -> Encoder:
    data, vision = config.data, config.vision
    options = {"mask_prompt": data.mask_prompt, "as_messages": data.apply_chat_template}
    if config.model.reads_apart:
        return ApartEncoder(tokenizer, template, _decoder_start(config), as_messages=data.apply_chat_template)
    if not config.model.sees_images:
        return Encoder(tokenizer, template, **options)
    assert vision is not None, "settings of a fine-tuning run"
    # Images stand in content parts, which only a template can turn into text.
    if template is None:
        raise ConfigError("--load has no chat template, which says where images are: give --chat-template")
    processor = ImageProcessor(open_processor(tokenizer.folder), template)
    folder = None if vision.image_folder is None else Path(vision.image_folder)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--image-folder {folder}: there is no such folder")
    return VisionEncoder(tokenizer, template, processor, folder, **options)


def _decoder_start(config: Config) -> int | None:
    """The token that the decoder of an encoder with a decoder begins with."""
    content = json.loads(config.model.transformers_config or "{}")
    own = content.get("decoder_start_token_id")
    inner = content.get("decoder")
    return own if own is not None or not isinstance(inner, dict) else inner.get("bos_token_id")


def chat_template_of(
    path: str | None, tokenizer: TuningTokenizer, image_mark: str | None = None
) -> ChatTemplate | None:
    """The template of --chat-template, or the tokenizer's, or None. Raises ConfigError when it cannot be used.
    ``image_mark`` stands for an image in messages, which are passed to the template as content parts then."""
    try:
        # utf-8-sig: editors on Windows write a byte order mark, which would start every text.
        source = tokenizer.template if path is None else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error
    if path is not None and _is_json(source):
        raise ConfigError(f"--chat-template {path} is JSON: write the template in it to a file of its own")
    try:
        return None if source is None else ChatTemplate(source, tokenizer.template_tokens, image_mark)
    except ValueError as error:
        raise ConfigError(f"--chat-template {path}: {error}" if path else f"the tokenizer's: {error}") from error


def _without_tokens(template: ChatTemplate | None) -> list[str]:
    """A note on special tokens that the template names and the tokenizer does not have."""
    if template is None or not template.empty_tokens:
        return []
    names = ", ".join(template.empty_tokens)
    return [f"note: the chat template names {names}, which the tokenizer does not have: nothing stands in its place"]


def _is_json(source: str | None) -> bool:
    """Whether the text is a JSON object, such as tokenizer_config.json: as a template it would render as itself."""
    try:
        return isinstance(json.loads(source or ""), dict)
    except ValueError:
        return False


def _described(name: str, part: Sequences) -> str:
    return (
        f"{name}: {len(part.order):,} texts in {len(part):,} sequences of {part.length:,} tokens, "
        f"{100 * part.efficiency:.2f} % full"
    )
