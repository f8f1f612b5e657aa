"""Text to token ids and back with a sentencepiece model."""

from __future__ import annotations

from pathlib import Path

import sentencepiece

END_OF_DOCUMENT = "<|endoftext|>"
_META_SPACE = "\u2581"  # what sentencepiece writes for a space inside a piece


class SentencePieceTokenizer:
    """A sentencepiece ``.model`` file.

    Args:
        model_path: the file.

    Raises:
        ValueError: the file is missing, is not a sentencepiece model, or has no end-of-document piece.
    """

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

    def _end_of_document(self, model_path: str | Path) -> int:
        if self._processor.eos_id() >= 0:
            return int(self._processor.eos_id())
        eod = int(self._processor.piece_to_id(END_OF_DOCUMENT))
        if eod == self._processor.unk_id():
            raise ValueError(f"{model_path}: has neither an end-of-sentence piece nor {END_OF_DOCUMENT}")
        return eod

    def _find_meta_space(self) -> list[int]:
        """Byte pieces of U+2581, or [] for a model that normalizes text and could not keep it apart anyway."""
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _META_SPACE.encode()]
        lossless = self._processor.normalize("a  b ") == "a  b ".replace(" ", _META_SPACE)
        return ids if lossless and all(map(self._processor.is_byte, ids)) else []

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without begin or end pieces. The text of a control piece is encoded like any other.

        Raises:
            ValueError: the text holds a lone surrogate, which has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the text is a lone surrogate, not Unicode text") from None
        if _META_SPACE not in text or not self._meta_space_ids:
            return list(self._processor.encode(text))
        # A literal U+2581 would come back as a space: spell it in bytes.
        first, *rest = map(self._processor.encode, text.split(_META_SPACE))
        return [*first, *(token for part in rest for token in (*self._meta_space_ids, *part))]

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``; control pieces are dropped. Raises ValueError for an id outside the vocabulary."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)}..{max(ids)} are outside a vocabulary of {self.vocab_size}")
        return str(self._processor.decode(ids))
