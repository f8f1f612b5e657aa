"""All samples of a run in a few arrays, and a report on those that could not be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from smp.data.tuning.encode import Encoded
from smp.data.tuning.files import Record, parse
from smp.data.tuning.images import ImageSource, Shown
from smp.data.tuning.messages import BadSampleError

# How many bad samples a report names.
_NAMED = 5


@dataclass(frozen=True)
class Samples:
    """Texts one after the other. For pairs, text 2 i is the chosen answer of pair i and text 2 i + 1 the rejected one.

    Attributes:
        tokens: int32 (sum of lengths,).
        trained: bool like ``tokens``: the model is trained to say this token.
        offsets: int64 (texts + 1,), where each text begins.
        desirable: bool (texts,), what the label of each says; None: they have none.
        shown: of each text its images, None where it has none; None: the model sees no images.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    desirable: npt.NDArray[np.bool_] | None = None
    shown: tuple[Shown | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each text."""
        return np.diff(self.offsets)

    def fingerprint(self) -> str:
        """A hash of tokens, mask, offsets, labels and images."""
        arrays: list[npt.NDArray[Any]] = [self.tokens, self.trained, self.offsets]
        seen = [image.digest for shown in self.shown or () if shown is not None for image in shown.images]
        arrays += [] if self.desirable is None else [self.desirable]
        arrays += [np.frombuffer("".join(seen).encode(), np.uint8)] if seen else []
        return " ".join(map(fingerprint, arrays))

    def first(self, texts: int) -> Samples:
        """The first ``texts`` texts, with the same numbers."""
        end = int(self.offsets[texts])
        labels = None if self.desirable is None else self.desirable[:texts]
        return Samples(self.tokens[:end], self.trained[:end], self.offsets[: texts + 1], labels)

    def __add__(self, other: Samples) -> Samples:
        """These texts followed by those of ``other``."""
        labels = None
        if self.desirable is not None and other.desirable is not None:
            labels = np.concatenate([self.desirable, other.desirable])
        return Samples(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.trained, other.trained]),
            # The second part's offsets begin where the first one ends; its leading 0 would be
            # double.
            np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]]),
            labels,
            None if self.shown is None or other.shown is None else (*self.shown, *other.shown),
        )

    def __getitem__(self, text: int) -> Encoded:
        part = slice(int(self.offsets[text]), int(self.offsets[text + 1]))
        return self.tokens[part], self.trained[part]


def fingerprint(array: npt.NDArray[Any]) -> str:
    """xxh3_64 of an array's bytes."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8).data)


@dataclass
class Report:
    """A report of what was read, for the user.

    Attributes:
        records: lines with something on them.
        used: samples that are trained on.
        tokens: of them, ``supervised`` of which are trained.
        truncated: texts that were cut at the sequence length.
        desirable: samples whose label says so; None: labels are not read.
        labels: samples with a label that is not read.
        equal: pairs whose two answers are the same.
        unread: keys of samples that nothing used, and of how many.
        hidden: keys of messages that the chat template does not name, and in how many samples.
        in_part: samples of which the chat template leaves out a part of what a message says.
        as_text: samples whose prompt and answer are texts, where there is a chat template.
        unended: samples of which the chat template ends something that is trained without a special token.
        ends: special tokens that end a text's last part that is trained.
        bad: (where, why) of samples that were left out.
        images: of all samples.
    """

    records: int = 0
    used: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    desirable: int | None = None
    labels: int = 0
    equal: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    hidden: Counter[str] = field(default_factory=Counter)
    in_part: int = 0
    as_text: int = 0
    unended: int = 0
    ends: set[int] = field(default_factory=set)
    bad: list[tuple[str, str]] = field(default_factory=list)
    images: list[ImageSource] = field(default_factory=list)

    def lines(self, what: str = "samples") -> list[str]:
        """Lines for the user; ``what`` names what was read."""
        share = 100 * self.supervised / max(self.tokens, 1)
        text = (
            f"{what}: {self.used:,} of {self.records:,} used, {self.tokens:,} tokens, {self.supervised:,} of them "
            f"trained ({share:.1f} %), {self.truncated:,} texts cut at the sequence length, {len(self.bad):,} dropped"
        )
        notes = self._of_images()
        if self.desirable is not None:
            notes += [f"labels: {self.desirable:,} desirable, {self.used - self.desirable:,} undesirable"]
        elif self.labels:
            notes += [f"note: {self.labels:,} samples have a label, which this --objective does not read"]
        if self.equal:
            notes.append(f"note: {self.equal:,} pairs have two equal answers: nothing is learned by comparing them")
        if self.unread:
            notes.append(f"note: rows also have {_counted(self.unread)}: not used")
        return [text, *notes, *self.template_notes("samples have a prompt and an answer as text"), *self.dropped()]

    def _of_images(self) -> list[str]:
        if not self.images:
            return []
        held = sum(len(image.data) for image in self.images if image.data is not None)
        others = Counter(image.mode for image in self.images if image.mode != "RGB")
        converted = f", {sum(others.values()):,} converted to RGB, of {_counted(others)}" if others else ""
        memory = f", {held / 1e6:,.1f} MB of them held in memory" if held else ""
        return [f"images: {len(self.images):,}{memory}{converted}"]

    def template_notes(self, texts: str) -> list[str]:
        """Notes on what the chat template does not show, or on texts that it was not asked for (``texts`` names
        these)."""
        notes = []
        if self.hidden:
            notes.append(f"note: messages also have {_counted(self.hidden)}: the chat template does not name them")
        if self.in_part:
            notes.append(
                f"note: of {self.in_part:,} samples the chat template leaves out a part of what a message says, such "
                "as reasoning before </think>"
            )
        if self.unended:
            notes.append(
                f"note: of {self.unended:,} samples the chat template ends what is trained without a special token: "
                "nothing teaches the model to stop there; one in the next message's heading belongs into the "
                "generation block"
            )
        if self.as_text:
            notes.append(
                f"note: {self.as_text:,} {texts}: they are taken as they are, without the chat template; "
                "--apply-chat-template makes them messages"
            )
        return notes

    def dropped(self) -> list[str]:
        """Some of the dropped samples, and why."""
        more = [f"  and {len(self.bad) - _NAMED:,} more"] if len(self.bad) > _NAMED else []
        return [*(f"  dropped {where}: {why}" for where, why in self.bad[:_NAMED]), *more]


def _counted(keys: Counter[str]) -> str:
    """``id (1,200), source (7)``, most frequent first."""
    return ", ".join(f"{key if key.isidentifier() else repr(key)} ({n:,})" for key, n in keys.most_common())


def collect(
    records: Iterable[tuple[str, Record]],
    encode: Callable[[dict[str, Any]], list[Encoded]],
    *,
    seq_length: int,
    vocab_size: int,
    threshold: float,
    keep_end: bool = False,
    label: Callable[[dict[str, Any]], bool] | None = None,
    images: bool = False,
) -> tuple[Samples, Report]:
    """Encode every record.

    Args:
        records: with where each stands.
        encode: gives the texts of one (``Encoder.sample`` or ``Encoder.pair``).
        seq_length: the longest text is one token more: the last is only predicted.
        vocab_size: token ids from here on are refused.
        threshold: largest fraction of records that may be dropped.
        keep_end: cut the beginnings of long texts, not their ends.
        label: says whether the one text of a record is desirable.
        images: records may show some, which ``encode`` leaves in their ``shown``.

    Raises:
        ValueError: no sample is left, or more than ``threshold`` were dropped; the message names some.
    """
    report, texts, labels, shown = Report(), list[Encoded](), list[bool](), list[Shown | None]()
    for where, record in records:
        report.records += 1
        try:
            # Order: encoding fills in the row's notes (hidden, unended, ...), which are counted
            # below.
            content = parse(record, where)
            found, cut = _cut(encode(content), seq_length, keep_end, content.shown)
            labels += [] if label is None else [label(content)]
        # One bad sample must not end a run; more than the threshold do, in check_report.
        except ValueError as error:
            report.bad.append((where, str(error)))
            continue
        report.used += 1
        report.labels += "label" in content
        # A label has a count and a note of its own.
        report.unread.update(key for key in content.unread() if key != "label")
        report.hidden.update(content.hidden)
        report.in_part += content.in_part
        report.as_text += content.as_text
        report.unended += content.unended
        report.ends |= content.ends
        report.truncated += cut
        # DPO's loss of two equal answers is log 2 whatever the model says: no gradient.
        report.equal += len(found) == 2 and np.array_equal(found[0][0], found[1][0])
        texts += found
        shown.append(content.shown)
        report.images += [] if content.shown is None else content.shown.images
    check_report(report, threshold)
    # Flat arrays and offsets: two arrays for each text would be millions of Python objects.
    lengths = np.array([len(ids) for ids, _ in texts], np.int64)
    samples = Samples(
        np.concatenate([ids for ids, _ in texts]),
        np.concatenate([trained for _, trained in texts]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        None if label is None else np.array(labels, np.bool_),
        tuple(shown) if images else None,
    )
    report.desirable = None if label is None else sum(labels)
    # Once for all, and not for each text.
    if samples.tokens.max() >= vocab_size:
        raise ValueError(f"the tokenizer gave id {samples.tokens.max()}, the model's vocabulary has {vocab_size}")
    report.tokens, report.supervised = len(samples.tokens), int(samples.trained.sum())
    return samples, report


def _cut(texts: list[Encoded], seq_length: int, keep_end: bool, shown: Shown | None) -> tuple[list[Encoded], int]:
    """The texts cut to ``seq_length`` + 1 tokens, and how many were longer. Raises BadSampleError when images would be
    cut or nothing trained is left."""
    # seq_length positions are read, and each predicts the next token.
    longest = seq_length + 1
    if shown is not None:
        first, last = shown.tokens
        length = len(texts[0][0])
        # Cutting inside an image would leave fewer image tokens than features, which models refuse.
        if first < length - longest if keep_end else last > longest:
            raise BadSampleError(
                f"its images take tokens {first} to {last} of {length}, and its {'last' if keep_end else 'first'} "
                f"{longest} would cut them: give a larger --seq-length"
            )
    kept = [_end(text, longest) if keep_end else (text[0][:longest], text[1][:longest]) for text in texts]
    for _, trained in kept:
        # The first token is never a label.
        if not trained[1:].any():
            raise BadSampleError(f"nothing in its {'last' if keep_end else 'first'} {longest} tokens is trained")
    return kept, sum(len(ids) > longest for ids, _ in texts)


def _end(text: Encoded, longest: int) -> Encoded:
    """The last ``longest`` tokens of a text. The first of them has no context and is not predicted."""
    ids, trained = text
    if len(ids) <= longest:
        return ids, trained
    # A copy: the mask of the whole text is not this function's to change.
    trained = trained[-longest:].copy()
    trained[0] = False
    return ids[-longest:], trained


def check_report(report: Report, threshold: float) -> None:
    """Raise ValueError when no sample is left, or more than ``threshold`` of them were dropped."""
    some = "; ".join(f"{where}: {why}" for where, why in report.bad[:_NAMED])
    # Strict: with a threshold of 0 a single bad sample ends the run.
    if len(report.bad) > threshold * report.records:
        raise ValueError(
            f"{len(report.bad)} of {report.records} samples cannot be used, --bad-sample-threshold allows "
            f"{100 * threshold:g} %: {some}"
        )
    if report.records == 0:
        raise ValueError("names files without a single sample")
    if report.used == 0:
        raise ValueError(f"no sample is left of {report.records}" + (f": {some}" if some else ""))
