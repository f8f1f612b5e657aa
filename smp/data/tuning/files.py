"""Records of .jsonl, .json, .csv (also .gz and .zst), .parquet and .arrow files, each with its place ``file:line``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from smp.data.files.text_files import expand_paths, is_blank, kind_of, parse_record, read_chunks

if TYPE_CHECKING:
    from smp.data.tuning.images import Shown

Record = bytes | dict[str, Any]
"""One sample as its file has it: a line of .jsonl (bytes), or a row."""


def read_records(patterns: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Every record of every file, in order, with where it stands: ``file:line``, counted from 1 (``file:row`` for
    rows). Blank lines are skipped.

    Raises:
        ValueError: a pattern without a file, a file of an unknown kind or a damaged one, or a library is missing.
    """
    for path in expand_paths(patterns):
        if kind_of(path) == ".txt":
            raise ValueError(f"{path}: samples come in .jsonl, .json, .csv, .parquet and .arrow files")
        for chunk in read_chunks([path]):
            for number, record in enumerate(chunk.records, start=chunk.first):
                if not is_blank(record, chunk.path):
                    yield f"{path}:{number}", record


class Row(dict[str, Any]):
    """A record that notes which of its keys were read, so that the user can be told of those that nothing used.

    Attributes:
        read: keys whose values were read.
        hidden: keys of its messages that the chat template does not name.
        in_part: the chat template leaves out a part of what a message says.
        as_text: its prompt and answer are texts, where there is a chat template that they are not rendered by.
        unended: something that its assistant says ends without a special token that is trained.
        ends: special tokens that end a text's last part that is trained.
        where: it stands, ``file:line``.
        shown: the images that it shows, with the text around them.
    """

    def __init__(self, content: dict[str, Any], where: str = "") -> None:
        # dict's own methods (in, keys, items) do not count as reading: shapes are recognised by
        # them.
        super().__init__(content)
        self.where = where
        self.shown: Shown | None = None
        self.read, self.hidden, self.ends = set[str](), set[str](), set[int]()
        self.in_part = self.as_text = self.unended = False

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def unread(self) -> list[str]:
        """Keys with a value that nothing has read."""
        return [key for key, value in self.items() if key not in self.read and value not in (None, "", [], {})]


def parse(record: Record, where: str = "") -> Row:
    """The record as a Row; ``where`` it stands. Raises ValueError when it is no JSON object."""
    found = record if isinstance(record, dict) else parse_record(record)
    # A column that other rows use is null here: the sample does not have it.
    return Row({key: value for key, value in found.items() if value is not None}, where)
