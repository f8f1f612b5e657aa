"""A tokenizer as fine-tuning needs it: ids and their character offsets, special tokens, the chat template."""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from smp.data.tokenizers.files import no_tokenizer, open_tokenizer_json
from smp.data.tokenizers.tokenizer import SentencePieceTokenizer, check_text

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer of transformers may have; files may name more, see :func:`_template_tokens`."""
Span = tuple[int, int]
APART = "\ue000"
"""A private use character: no vocabulary has it, so no token joins it with its neighbours."""


class TuningTokenizer(ABC):
    """A tokenizer as fine-tuning sees it.

    Attributes:
        vocab_size: token ids are below.
        eos: the token that ends a text.
        bos: the token that begins one, if there is one, whether or not it is put in front of texts.
        before: token ids that a plain text begins with.
        after: those that its rules put after a whole text, which one that continues must not have.
        special: ids of tokens that are no text.
        template: source of the chat template, or None.
        unread_template: a file with a chat template that lies next to it and is not read; None: there is none.
        template_tokens: special tokens that the template may name.
        folder: of its files.
    """

    vocab_size: int
    eos: int
    bos: int | None
    before: list[int]
    after: list[int]
    special: frozenset[int]
    template: str | None = None
    unread_template: Path | None = None
    template_tokens: dict[str, str]
    folder: Path

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text without additions. Special tokens written out in it become their ids."""

    def begun(self, text: str) -> list[int]:
        """Token ids of a text from its beginning, with the ids that a text begins with."""
        return begun(self.encode(text), self.before)

    @abstractmethod
    def encode_at(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids of ``text`` as a whole, and the span of characters that each stands for."""

    def continued(self, before: str, text: str) -> list[int]:
        """Token ids of ``text`` as it continues ``before``, without those of ``before``. Tokenizers that mark words by
        a leading space would add one if ``text`` were encoded alone."""
        ids, spans = self.encode_at(before + text)
        # A token that spans the border begins before it, and is left out.
        return [token for token, (first, _) in zip(ids, spans, strict=True) if first >= len(before)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, with special tokens."""

    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, as written in the tokenizer's files."""


class FolderTokenizer(TuningTokenizer):
    """``tokenizer.json`` of a Hugging Face folder. Special tokens and chat template come from tokenizer_config.json,
    special_tokens_map.json, chat_template.jinja or chat_template.json. Raises ValueError when a file is missing or
    damaged, or no token ends a text."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(no_tokenizer(folder))
        self.folder = folder
        self._tokenizer = open_tokenizer_json(folder / "tokenizer.json")
        # Before any encoding: offsets are compared with the template's spans.
        _keep_blanks(self._tokenizer)
        # Where both files name a token, tokenizer_config.json wins.
        config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.template_tokens = _template_tokens(config)
        eos = self._tokenizer.token_to_id(self.template_tokens.get("eos_token", ""))
        if eos is None:
            raise ValueError(f"{folder}: tokenizer_config.json names no eos_token that is in tokenizer.json")
        self.eos = int(eos)
        self.special |= {self.eos}  # also if the file does not mark it special
        self.bos = self._tokenizer.token_to_id(self.template_tokens.get("bos_token", ""))
        self.before, self.after = put_around(self._tokenizer)
        self.template = _template(folder, config)

    def encode(self, text: str) -> list[int]:
        check_text(text)
        # add_special_tokens=False: chat templates write the begin token themselves, and models are
        # not trained with two of them.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_at(self, text: str) -> tuple[list[int], list[Span]]:
        check_text(text)
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoded.ids), list(encoded.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))


class PieceTokenizer(SentencePieceTokenizer, TuningTokenizer):
    """A sentencepiece model file. It has no chat template of its own; one that is given may write the texts of its
    begin and end pieces.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path, self.folder = path, path.parent
        self.eos, self.before, self.after = self.eod, [], []
        pieces = self.control_pieces()
        self.template_tokens = {name: text for name, (text, _) in pieces.items()}
        self._ids = dict(pieces.values())
        self.bos = self._ids.get(self.template_tokens.get("bos_token", ""))
        self._texts = {i: text for text, i in pieces.values()}
        self._control = re.compile("|".join(map(re.escape, self._ids)))
        self.special = frozenset(self._texts)

    def encode(self, text: str) -> list[int]:
        # sentencepiece never parses control pieces in a text: these are cut out first.
        return self.encode_at(text)[0] if self._control.search(text) else super().encode(text)

    def encode_at(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids and spans; the text is cut at begin and end pieces."""
        ids: list[int] = []
        spans: list[Span] = []
        # Borders of all control pieces; the parts between two borders are either one of them or
        # text.
        control = [edge for match in self._control.finditer(text) for edge in match.span()]
        for first, last in pairwise(sorted({0, *control, len(text)})):
            part = text[first:last]
            found, places = ([self._ids[part]], [(0, len(part))]) if part in self._ids else self.encode_spans(part)
            ids += found
            # Spans of a part count from its own beginning.
            spans += [(first + begin, first + end) for begin, end in places]
        return ids, spans

    def decode(self, ids: Sequence[int]) -> str:
        parts = []
        # sentencepiece's decoder drops control pieces: their texts are put back.
        for control, group in groupby(ids, key=self._texts.__contains__):
            part = list(group)
            parts += [self._texts[i] for i in part] if control else [super().decode(part)]
        return "".join(parts)

    def vocabulary(self) -> dict[str, int]:
        return {str(self._processor.id_to_piece(i)): i for i in range(self.vocab_size)}


def open_tokenizer(path: str | Path) -> TuningTokenizer:
    """The tokenizer of a folder or of a sentencepiece file. Raises ValueError when there is none."""
    path = Path(path)
    if not path.is_dir():
        return PieceTokenizer(path)
    if (path / "tokenizer.json").is_file() or not (path / "tokenizer.model").is_file():
        return FolderTokenizer(path)
    tokenizer = PieceTokenizer(path / "tokenizer.model")
    # Not read: most write tokens that only such a folder's other files add, and here these would be encoded as text.
    tokenizer.unread_template = _template_file(path)
    return tokenizer


def put_in_front(tokenizer: Any) -> list[int]:
    """Token ids that the rules of a tokenizer.json put in front of a text."""
    return put_around(tokenizer)[0]


def put_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that the rules of a tokenizer.json put in front of a text, and after it."""
    # Seen on a text that any tokenizer knows; the rules themselves have no common form.
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    at = next((i for i in range(len(ids)) if bare and ids[i : i + len(bare)] == bare), None)
    return ([], []) if at is None else (list(ids[:at]), list(ids[at + len(bare) :]))


def begun(ids: list[int], before: list[int]) -> list[int]:
    """``ids`` with ``before`` in front, once: a prompt out of a chat template may have these written out already."""
    return ids if ids[: len(before)] == before else [*before, *ids]


def _keep_blanks(tokenizer: Any) -> None:
    """Let spans include the blanks of their tokens. Byte-level post-processors (RoBERTa's) cut them off by
    trim_offsets, and a blank between prompt and answer would belong to neither."""
    processor = tokenizer.post_processor
    if processor is None:
        return
    settings = processor.__getstate__()  # JSON, the only form that a sequence of processors shows
    processor.__setstate__(re.sub(rb'"trim_offsets":\s*true', b'"trim_offsets":false', settings))
    tokenizer.post_processor = processor


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _token(value: Any) -> str | None:
    """The text of a special token, given as text or as an object with "content" (AddedToken)."""
    return value.get("content") if isinstance(value, dict) else value


def _template_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Texts of special tokens by the names that a template may use, as transformers passes them: the usual ones, those
    in ``extra_special_tokens``, and keys that end in ``_token``."""
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in (*_TEMPLATE_TOKENS, *config) if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    found = {name: _token(value) for name, value in named.items()}
    return {name: text for name, text in found.items() if isinstance(text, str) and text}


def _template_file(folder: Path) -> Path | None:
    """The file with the chat template that transformers would prefer."""
    if (folder / "chat_template.jinja").is_file():
        return folder / "chat_template.jinja"
    for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        with contextlib.suppress(ValueError):  # a damaged file that is not needed
            if _json(file).get("chat_template"):
                return file
    return None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template, from the file that transformers would prefer; of several templates the one named "default"."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8-sig")
    # A file of its own wins over tokenizer_config.json, as in transformers.
    value = _json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value
