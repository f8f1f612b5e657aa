"""All samples of a run in a few arrays, and what became of those that could not be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from smp.data.tuning.encode import Encoded
from smp.data.tuning.files import Record, parse
from smp.data.tuning.shapes import BadSampleError

_NAMED = 5


@dataclass(frozen=True)
class Samples:
    """Texts one after the other. Of pairs, text 2 i is the chosen answer of pair i and text 2 i + 1 the rejected one.

    Attributes:
        tokens: int32 (sum of lengths,).
        trained: bool like ``tokens``: the model is trained to say this token.
        offsets: int64 (texts + 1,), where each text begins.
        desirable: bool (texts,), what the label of each says; None: they have none.
    """

    tokens: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    desirable: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each text."""
        return np.diff(self.offsets)

    def fingerprint(self) -> str:
        """Of all that is in it."""
        arrays = [self.tokens, self.trained, self.offsets]
        return " ".join(map(fingerprint, arrays if self.desirable is None else [*arrays, self.desirable]))

    def __getitem__(self, text: int) -> Encoded:
        part = slice(int(self.offsets[text]), int(self.offsets[text + 1]))
        return self.tokens[part], self.trained[part]


def fingerprint(array: npt.NDArray[Any]) -> str:
    """xxh3_64 of an array's bytes."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8).data)


@dataclass
class Report:
    """What was read.

    Attributes:
        records: lines with something on them.
        used: samples that are trained on.
        tokens: of them, ``supervised`` of which are trained.
        truncated: texts that were cut at the sequence length.
        desirable: samples whose label says so; None: labels are not read.
        labels: samples with a label that is not read.
        equal: pairs whose two answers are the same.
        bad: (where, why) of samples that were left out.
    """

    records: int = 0
    used: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    desirable: int | None = None
    labels: int = 0
    equal: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        share = 100 * self.supervised / max(self.tokens, 1)
        text = (
            f"samples: {self.used:,} of {self.records:,} used, {self.tokens:,} tokens, {self.supervised:,} of them "
            f"trained ({share:.1f} %), {self.truncated:,} texts cut at the sequence length, {len(self.bad):,} dropped"
        )
        notes = []
        if self.desirable is not None:
            notes = [f"labels: {self.desirable:,} desirable, {self.used - self.desirable:,} undesirable"]
        elif self.labels:
            notes = [f"note: {self.labels:,} samples have a label, which this --objective does not read"]
        if self.equal:
            notes.append(f"note: {self.equal:,} pairs have two equal answers: nothing is learned by comparing them")
        more = [f"  and {len(self.bad) - _NAMED:,} more"] if len(self.bad) > _NAMED else []
        return [text, *notes, *(f"  dropped {where}: {why}" for where, why in self.bad[:_NAMED]), *more]


def collect(
    records: Iterable[tuple[str, Record]],
    encode: Callable[[dict[str, Any]], list[Encoded]],
    *,
    seq_length: int,
    vocab_size: int,
    threshold: float,
    label: Callable[[dict[str, Any]], bool] | None = None,
) -> tuple[Samples, Report]:
    """Encode every record.

    Args:
        records: with where each stands.
        encode: gives the texts of one (``Encoder.sample`` or ``Encoder.pair``).
        seq_length: the longest text is one token more: the last is only predicted.
        vocab_size: token ids from here on are refused.
        threshold: largest fraction of records that may be dropped.
        label: says whether the one text of a record is desirable.

    Raises:
        ValueError: no sample is left, or more than ``threshold`` were dropped; the message names some.
    """
    report, texts, labels = Report(), list[Encoded](), list[bool]()
    for where, record in records:
        report.records += 1
        try:
            content = parse(record)
            found, cut = _cut(encode(content), seq_length)
            labels += [] if label is None else [label(content)]
        except ValueError as error:
            report.bad.append((where, str(error)))
            continue
        report.used += 1
        report.labels += "label" in content
        report.truncated += cut
        report.equal += len(found) == 2 and np.array_equal(found[0][0], found[1][0])
        texts += found
    _check(report, threshold)
    lengths = np.array([len(ids) for ids, _ in texts], np.int64)
    samples = Samples(
        np.concatenate([ids for ids, _ in texts]),
        np.concatenate([trained for _, trained in texts]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        None if label is None else np.array(labels, np.bool_),
    )
    report.desirable = None if label is None else sum(labels)
    # Once for all, and not for each text.
    if samples.tokens.max() >= vocab_size:
        raise ValueError(f"the tokenizer gave id {samples.tokens.max()}, the model's vocabulary has {vocab_size}")
    report.tokens, report.supervised = len(samples.tokens), int(samples.trained.sum())
    return samples, report


def _cut(texts: list[Encoded], seq_length: int) -> tuple[list[Encoded], int]:
    """Texts of at most ``seq_length`` + 1 tokens, and how many were longer."""
    longest = seq_length + 1
    for _, trained in texts:
        if not trained[1:longest].any():
            raise BadSampleError(f"nothing in its first {longest} tokens is trained")
    return [(ids[:longest], trained[:longest]) for ids, trained in texts], sum(len(ids) > longest for ids, _ in texts)


def _check(report: Report, threshold: float) -> None:
    some = "; ".join(f"{where}: {why}" for where, why in report.bad[:_NAMED])
    if len(report.bad) > threshold * report.records:
        raise ValueError(
            f"{len(report.bad)} of {report.records} samples cannot be used, --bad-sample-threshold allows "
            f"{100 * threshold:g} %: {some}"
        )
    if report.records == 0:
        raise ValueError("names files without a single sample")
    if report.used == 0:
        raise ValueError(f"no sample is left of {report.records}" + (f": {some}" if some else ""))
