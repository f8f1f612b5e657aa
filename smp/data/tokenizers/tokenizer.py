"""Text to token ids and back: the interface of tokenizers, and the sentencepiece one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import sentencepiece

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Text is always plain text: what looks like a control token in it is encoded like any other text.

    Attributes:
        vocab_size: ids are below it.
        eod: id of the token that ends a document.
        unk: id of the token that stands for what the vocabulary cannot spell; None: it spells everything.
    """

    vocab_size: int
    eod: int

    @property
    def unk(self) -> int | None: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. Raises ValueError for a lone surrogate, which has no UTF-8 form."""

    def encode_batch(self, texts: Sequence[str]) -> Batch:
        """As ``encode``, for many texts at once; every text has a UTF-8 form."""

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``; control tokens are dropped. Raises ValueError for an id outside the vocabulary."""


class Batch:
    """Ids of several texts one after the other, (tokens,), and the number of ids of each, (texts,)."""

    def __init__(self, ids: npt.NDArray[np.integer], lengths: npt.NDArray[np.signedinteger]) -> None:
        self.ids, self.lengths = ids, lengths

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]]) -> Batch:
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return cls(np.fromiter(chain.from_iterable(lists), np.int64, int(lengths.sum())), lengths)

    def with_ends(self, eod: int) -> Batch:
        """The ids with ``eod`` after every text. As in Megatron, an empty text stays an empty document."""
        ends, full = np.cumsum(self.lengths), self.lengths > 0
        return Batch(np.insert(self.ids, ends[full], eod), self.lengths + full)


def check_text(text: str) -> None:
    """Raises ValueError for a text that has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is a lone surrogate, not Unicode text") from None


def check_ids(ids: list[int], vocab_size: int) -> None:
    """Raises ValueError for an id outside of the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"token ids {min(ids)}..{max(ids)} are outside a vocabulary of {vocab_size}")


_META_SPACE = "\u2581"  # sentencepiece's character for a space in a piece


class SentencePieceTokenizer:
    """A sentencepiece ``.model`` file. Raises ValueError when it is none, or has no end-of-document piece."""

    def __init__(self, model_path: str | Path) -> None:
        if not Path(model_path).is_file():
            raise ValueError(f"{model_path}: no such tokenizer model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
        except RuntimeError:
            raise ValueError(f"{model_path}: not a sentencepiece model") from None
        self.vocab_size: int = self._processor.vocab_size()
        self.eod = self._end_of_document(model_path)
        self._meta_space_ids = self._find_meta_space()

    @property
    def unk(self) -> int | None:
        return int(self._processor.unk_id())

    def _end_of_document(self, model_path: str | Path) -> int:
        if self._processor.eos_id() >= 0:
            return int(self._processor.eos_id())
        eod = int(self._processor.piece_to_id(END_OF_DOCUMENT))
        if eod == self._processor.unk_id():
            raise ValueError(f"{model_path}: has neither an end-of-sentence piece nor {END_OF_DOCUMENT}")
        return eod

    def _find_meta_space(self) -> list[int]:
        """Ids of the byte pieces of U+2581, or [] for a model that normalizes text and could not keep it apart
        anyway."""
        # A model has pieces for all 256 bytes, or for none.
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _META_SPACE.encode()]
        # Lossless models write every space as U+2581.
        # One that keeps every space writes each as this character, so a literal one has to look different.
        lossless = self._processor.normalize("a  b ") == "a  b ".replace(" ", _META_SPACE)
        return ids if lossless and all(map(self._processor.is_byte, ids)) else []

    def control_pieces(self) -> dict[str, tuple[str, int]]:
        """(text, id) by "eos_token" of the end-of-document piece, and by "bos_token" of the beginning one, if there is
        one."""
        ids = {"eos_token": self.eod, "bos_token": int(self._processor.bos_id())}
        return {name: (str(self._processor.id_to_piece(i)), i) for name, i in ids.items() if i >= 0}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without begin or end pieces. The text of a control piece is encoded like any other."""
        check_text(text)
        if _META_SPACE not in text or not self._meta_space_ids:
            return list(self._processor.encode(text))
        # A literal U+2581 would come back as a space: spell it in bytes.
        first, *rest = map(self._processor.encode, text.split(_META_SPACE))
        return [*first, *(token for part in rest for token in (*self._meta_space_ids, *part))]

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids as ``encode``, span of characters that each token stands for)."""
        check_text(text)
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for i, part in enumerate(text.split(_META_SPACE) if self._meta_space_ids else [text]):
            if i:
                ids += self._meta_space_ids
                # Its byte pieces all stand for the one character.
                spans += [(at, at + 1)] * len(self._meta_space_ids)
                at += 1
            # sentencepiece counts UTF-8 bytes: a table from each byte to the number of its
            # character.
            characters = [i for i, character in enumerate(part) for _ in character.encode()] + [len(part)]
            pieces = self._processor.encode(part, return_type="proto").pieces
            ids += [piece.id for piece in pieces]
            spans += [(at + characters[piece.begin], at + characters[piece.end]) for piece in pieces]
            at += len(part)
        return ids, spans

    def encode_batch(self, texts: Sequence[str]) -> Batch:
        """As ``encode``, by the library's call for a list, on one core."""
        if self._meta_space_ids and any(_META_SPACE in text for text in texts):
            return Batch.of_lists([self.encode(text) for text in texts])
        return Batch.of_lists(self._processor.encode(list(texts), num_threads=1))

    def decode(self, ids: list[int]) -> str:
        check_ids(ids, self.vocab_size)
        return str(self._processor.decode(ids))
