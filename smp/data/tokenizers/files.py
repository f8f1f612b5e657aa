"""Tokenizers from files: which kind a file is, Hugging Face's tokenizer.json, and tiktoken's list of merges."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from smp.config.command_line.commands import pip_install
from smp.data.tokenizers.tokenizer import (
    END_OF_DOCUMENT,
    Batch,
    SentencePieceTokenizer,
    Tokenizer,
    check_ids,
    check_text,
)

_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the end-of-document token, for a tokenizer.json without a tokenizer_config.json."""


@dataclass(frozen=True)
class Pattern:
    """Parts of a tiktoken encoding that its file does not hold.

    Attributes:
        regex: cuts text before the merges.
        eod: id of the end of a document, counted from the number of merges.
        extra: ids after the merges, the unused ones too.
    """

    regex: str
    eod: int
    extra: int


# The patterns are those of tiktoken's own encodings (tiktoken_ext/openai_public.py).
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt2": Pattern(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", 0, 1),
    "cl100k": Pattern(_CL100K, 1, 21),
    "o200k": Pattern(_O200K, 1, 21),
    # Llama 3 has 256 special tokens after its merges, of which the second is <|end_of_text|>.
    "llama3": Pattern(_CL100K, 1, 256),
}
"""Patterns by the value of --tiktoken-pattern."""


def tokenizer_file(path: str | Path) -> Path:
    """The file of a tokenizer: ``path``, or what lies in it when it is a folder, such as a Hugging Face model's. Raises
    ValueError when there is none."""
    path = Path(path)
    if not path.is_dir():
        return path
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            return path / name
    raise ValueError(no_tokenizer(path))


_OLDER = ("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers from before tokenizer.json."""


def no_tokenizer(folder: Path | None) -> str:
    """The message for a model without a tokenizer, with advice; ``folder``: where it was looked for."""
    give = "give --tokenizer-model, or --reference a folder that has one"
    if folder is None:
        return f"there is no tokenizer next to the model: {give}"
    if older := [name for name in _OLDER if (folder / name).is_file()]:
        return (
            f"{folder}: neither tokenizer.json nor tokenizer.model in this folder, only {older[0]}: transformers' "
            "AutoTokenizer reads that, and its save_pretrained writes a tokenizer.json"
        )
    return (
        f"{folder}: neither tokenizer.json nor tokenizer.model in this folder, as after an export without a tokenizer: "
        "put the files of its tokenizer there, or name a folder that has them by --tokenizer-model"
    )


def load_tokenizer(path: str | Path, tiktoken_pattern: str | None = None) -> Tokenizer:
    """The tokenizer of a file: tokenizer.json, a tiktoken file, or a sentencepiece model; or of a folder with one.

    Raises:
        ValueError: the file is missing or is none of these, or ``tiktoken_pattern`` is missing or given for another
            kind of file.
    """
    path = tokenizer_file(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such tokenizer model")
    with Path(path).open("rb") as file:
        # By content, not by name: all of them are called tokenizer.model.
        line = file.readline(1 << 16)
    tiktoken = _merge(line) is not None
    if tiktoken != (tiktoken_pattern is not None):
        known = ", ".join(PATTERNS)
        hint = f"a tiktoken file needs --tiktoken-pattern ({known})" if tiktoken else "--tiktoken-pattern is not for it"
        raise ValueError(f"{path}: {hint}")
    if tiktoken_pattern is not None:
        return TiktokenTokenizer(path, tiktoken_pattern)
    return HuggingFaceTokenizer(path) if line.lstrip()[:1] == b"{" else SentencePieceTokenizer(path)


def tokenizer_key(path: str | Path, tiktoken_pattern: str | None = None) -> str:
    """A hash of everything that the ids of a text and the end of a document depend on, 16 hexadecimal digits."""
    path = tokenizer_file(path)
    # tokenizer_config.json names the end of a document.
    state = xxhash.xxh3_64(path.read_bytes())
    if (config := _config_of(path)).is_file():
        state.update(config.read_bytes())
    state.update((tiktoken_pattern or "").encode())
    return str(state.hexdigest())


def _config_of(path: Path) -> Path:
    return path.with_name("tokenizer_config.json")


def open_tokenizer_json(path: str | Path) -> Any:
    """The tokenizers library's object for a tokenizer.json. Raises ValueError for another file, or without the
    library."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"{path}: needs the library tokenizers: {pip_install('tokenizers')}") from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer.json ({error})") from None
    # The file may have padding and truncation switched on, which would change the ids of a text.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the library tokenizers. The end of a document is the ``eos_token`` of the
    tokenizer_config.json next to it, or the usual name that the vocabulary has; ValueError if there is none."""

    def __init__(self, path: str | Path) -> None:
        self._tokenizer = open_tokenizer_json(path)
        # Text that looks like a special token is text.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        # Not their number: ids may have gaps.
        self.vocab_size: int = max(ids) + 1
        self.eod = self._end_of_document(Path(path))
        self.end_of_document = str(self._tokenizer.id_to_token(self.eod))

    @property
    def unk(self) -> int | None:
        model = json.loads(self._tokenizer.to_str())["model"]  # the library's object does not tell a Unigram's
        token = model.get("unk_token")
        found: int | None = model.get("unk_id") if token is None else self._tokenizer.token_to_id(token)
        return (
            None if found == self.eod else found
        )  # GPT-2's file names one token for both; byte-level merges need no unknown token

    def _end_of_document(self, path: Path) -> int:
        config = _config_of(path)
        names: Sequence[str] = _ENDS
        if config.is_file():
            try:
                named: Any = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{config}: not the settings of a tokenizer ({error})") from None
            # eos_token may be an object with its content.
            names = [named["content"] if isinstance(named, dict) else named] if named else _ENDS
        found = [token for name in names if (token := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            raise ValueError(f"{path}: has no end-of-document token ({', '.join(names)})")
        return found[0]

    def encode(self, text: str) -> list[int]:
        check_text(text)
        # No begin or end tokens: the caller adds the end of a document.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> Batch:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return Batch.of_lists([encoding.ids for encoding in encodings])

    def decode(self, ids: list[int]) -> str:
        check_ids(ids, self.vocab_size)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class TiktokenTokenizer:
    """A tiktoken file: a line for each merge, its bytes in base64 and its id. ``pattern`` is one of PATTERNS. Raises
    ValueError when it is no such file, or the library is not installed."""

    def __init__(self, path: str | Path, pattern: str) -> None:
        try:
            import tiktoken
        except ImportError:
            raise ValueError(f"{path}: needs the library tiktoken: {pip_install('tiktoken')}") from None
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
            merge = _merge(line)
            if merge is None:
                raise ValueError(f"{path}:{number}: not a merge and its id")
            ranks[merge[0]] = merge[1]
        if sorted(ranks.values()) != list(range(len(ranks))):
            # Ids of special tokens are counted from the number of merges.
            raise ValueError(f"{path}: ids are not 0 to {len(ranks) - 1}")
        kind = PATTERNS[pattern]
        self._merges = len(ranks)
        self.vocab_size, self.eod = self._merges + kind.extra, self._merges + kind.eod
        self._encoding = tiktoken.Encoding(
            pattern, pat_str=kind.regex, mergeable_ranks=ranks, special_tokens={END_OF_DOCUMENT: self.eod}
        )

    @property
    def unk(self) -> int | None:
        return None  # its pieces spell all bytes

    def encode(self, text: str) -> list[int]:
        check_text(text)
        return list(self._encoding.encode_ordinary(text))

    def encode_batch(self, texts: Sequence[str]) -> Batch:
        parts = [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        return Batch(np.concatenate(parts) if parts else np.empty(0, np.uint32), lengths)

    def decode(self, ids: list[int]) -> str:
        check_ids(ids, self.vocab_size)
        # Special and unused ids have no bytes.
        return str(self._encoding.decode([token for token in ids if token < self._merges]))


def _merge(line: bytes) -> tuple[bytes, int] | None:
    """(bytes, id) of a line of a tiktoken file; None: it is another line."""
    words = line.split()
    if len(words) != 2 or not words[1].isdigit():
        return None
    try:
        return base64.b64decode(words[0], validate=True), int(words[1])
    except binascii.Error:
        return None
