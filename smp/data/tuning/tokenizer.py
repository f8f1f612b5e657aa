"""What fine-tuning needs of a tokenizer: token ids and their offsets in a text, special tokens, the chat template."""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from smp.data.tokenizer import SentencePieceTokenizer, check_text
from smp.data.tokenizer_files import open_tokenizer_json

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TuningTokenizer(ABC):
    """A tokenizer as fine-tuning sees it.

    Attributes:
        vocab_size: token ids are below.
        eos: the token that ends a text.
        bos: the token that begins one, if there is one, whether or not it is put in front of texts.
        before: token ids that a plain text begins with.
        special: ids of tokens that are no text.
        template: source of the chat template, or None.
        unread_template: a file with a chat template that lies beside and is not read; None: there is none.
        template_tokens: special tokens that the template may name.
    """

    vocab_size: int
    eos: int
    bos: int | None
    before: list[int]
    special: frozenset[int]
    template: str | None = None
    unread_template: Path | None = None
    template_tokens: dict[str, str]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, nothing added."""

    @abstractmethod
    def encode_at(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids of ``text`` and the offset of the first character of each. Offsets in ``cuts`` matter: a token
        that could cross one may be cut there."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens too."""


class FolderTokenizer(TuningTokenizer):
    """``tokenizer.json`` of a Hugging Face folder. Special tokens and chat template come from tokenizer_config.json,
    special_tokens_map.json, chat_template.jinja or chat_template.json. Raises ValueError when a file is missing or
    damaged, or no token ends a text."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        self._tokenizer = open_tokenizer_json(folder / "tokenizer.json")
        config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.template_tokens = {name: text for name in _TEMPLATE_TOKENS if (text := _token(config.get(name)))}
        eos = self._tokenizer.token_to_id(self.template_tokens.get("eos_token", ""))
        if eos is None:
            raise ValueError(f"{folder}: tokenizer_config.json names no eos_token that is in tokenizer.json")
        self.eos = int(eos)
        self.bos = self._tokenizer.token_to_id(self.template_tokens.get("bos_token", ""))
        self.before = self._before()
        self.template = _template(folder, config)

    def _before(self) -> list[int]:
        """What its own rules put in front of a text; what they put behind it is left to :attr:`eos`."""
        # Seen on a text that any tokenizer knows; the rules themselves have no common form.
        ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        return next((list(ids[:i]) for i in range(len(ids)) if bare and ids[i : i + len(bare)] == bare), [])

    def encode(self, text: str) -> list[int]:
        check_text(text)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_at(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """In one piece, as the model sees it when it is used."""
        check_text(text)
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoded.ids), [first for first, _ in encoded.offsets]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class PieceTokenizer(SentencePieceTokenizer, TuningTokenizer):
    """A sentencepiece model file. It has no chat template of its own; one that is given may write the texts of its
    begin and end pieces.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.eos, self.before = self.eod, []
        pieces = self.control_pieces()
        self.template_tokens = {name: text for name, (text, _) in pieces.items()}
        self._ids = dict(pieces.values())
        self.bos = self._ids.get(self.template_tokens.get("bos_token", ""))
        self._texts = {i: text for text, i in pieces.values()}
        self._control = re.compile("|".join(map(re.escape, self._ids)))
        self.special = frozenset(self._texts)

    def encode_at(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Piece by piece between the cuts and around begin and end pieces: which token comes from where is known to
        that precision."""
        ids: list[int] = []
        offsets: list[int] = []
        control = [edge for match in self._control.finditer(text) for edge in match.span()]
        for first, last in pairwise(sorted({0, *cuts, *control, len(text)})):
            part = text[first:last]
            piece = [self._ids[part]] if part in self._ids else self.encode(part)
            ids += piece
            offsets += [first] * len(piece)
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        parts = []
        for control, group in groupby(ids, key=self._texts.__contains__):
            part = list(group)
            parts += [self._texts[i] for i in part] if control else [super().decode(part)]
        return "".join(parts)


def open_tokenizer(path: str | Path) -> TuningTokenizer:
    """The tokenizer of a folder, or of a sentencepiece file. Raises ValueError when there is none."""
    path = Path(path)
    if not path.is_dir():
        return PieceTokenizer(path)
    if (path / "tokenizer.json").is_file() or not (path / "tokenizer.model").is_file():
        return FolderTokenizer(path)
    tokenizer = PieceTokenizer(path / "tokenizer.model")
    # Not read: most write tokens that only such a folder's other files add, and here these would be encoded as text.
    tokenizer.unread_template = _template_file(path)
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _token(value: Any) -> str | None:
    """A special token's text: written as text, or as an object around it."""
    return value.get("content") if isinstance(value, dict) else value


def _template_file(folder: Path) -> Path | None:
    """The newest of the files that have one."""
    if (folder / "chat_template.jinja").is_file():
        return folder / "chat_template.jinja"
    for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        with contextlib.suppress(ValueError):  # damage of what nothing here reads
            if _json(file).get("chat_template"):
                return file
    return None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """From the newest of the files that may have one. Of several templates the one named "default"."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    value = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value
