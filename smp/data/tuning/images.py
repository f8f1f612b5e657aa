"""Images of samples: where a record has them, and the decoded pictures, checked.

A record has them as content parts of its messages (``{"type": "image", "path": ...}``, OpenAI's ``image_url``), or in
a column ``images`` (``image``) whose places are written as ``<image>`` in the text, as LLaVA does. Each may be the path
of a file, a data URL, base64 or bytes (``{"bytes": ..., "path": ...}``, as Hugging Face's datasets keep them
in tables).
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from smp.data.tuning.messages import BadSampleError, role_of

IMAGE_MARK = "\ufdd5"
"""Stands for an image in a message; a Unicode noncharacter, which data must not hold."""
WRITTEN = "<image>"
"""LLaVA's placeholder in a text."""
# LLaVA writes the placeholder on a line before or after the question: its line end goes with it.
_WITH_LINE_END = re.compile(rf"\n?{WRITTEN}$|{WRITTEN}\n?")
_COLUMNS = ("images", "image")
_TURNS = ("messages", "conversations", "conversation", "prompt", "completion")
_KINDS = ("image", "image_url", "input_image")
_SOURCES = ("path", "url", "base64", "bytes", "image", "image_url")
_MOST_PIXELS = 89_478_485
"""PIL's MAX_IMAGE_PIXELS, above which it warns of decompression bombs."""


@dataclass(frozen=True)
class ImageSource:
    """An image that was read and checked once.

    Attributes:
        path: of its file; None: its bytes are kept.
        data: these.
        digest: xxh3_64 of the bytes.
        mode: what PIL calls its pixels, such as RGB.
    """

    path: Path | None
    data: bytes | None
    digest: str
    mode: str

    def read(self) -> Any:
        """The decoded picture. Raises ValueError where its file has changed."""
        data = self.data if self.data is not None else _file(self.path)  # type: ignore[arg-type]
        if xxhash.xxh3_64_hexdigest(data) != self.digest:
            raise BadSampleError(f"{self.path} has changed since the run began")
        return open_image(data)[0]


def take_images(record: dict[str, Any], folder: Path) -> list[ImageSource]:
    """Take the images out of a record. Each leaves :data:`IMAGE_MARK` in its message; the result is in their order.

    Args:
        record: is changed.
        folder: that relative paths begin at.

    Raises:
        BadSampleError: one cannot be read, or there are not as many as places for them.
    """
    name = next((name for name in _COLUMNS if record.get(name) is not None), None)
    column = [] if name is None else record[name]
    # One image may stand alone, without a list.
    waiting = list(column) if isinstance(column, list) else [column]
    slots = _Images(waiting)
    for key in _TURNS:
        if key not in record:
            continue
        if isinstance(record[key], list):
            # Messages in their order, so that the n-th placeholder takes the n-th image of the
            # column.
            record[key] = [slots.taken(turn, i) for i, turn in enumerate(record[key])]
        elif isinstance(record[key], str) and key == "prompt":
            record[key] = slots.written(record[key])
    if slots.used < len(waiting):
        raise BadSampleError(
            f"it has {len(waiting)} {_plural(len(waiting))} under {name}, and places for {slots.used} of them "
            f"({WRITTEN}, or parts of type image)"
        )
    return [_source(found, folder, i) for i, found in enumerate(slots.found)]


class _Images:
    """Walks over messages and collects the image of each placeholder."""

    def __init__(self, waiting: list[Any]) -> None:
        self.waiting, self.used, self.found = waiting, 0, list[Any]()

    def taken(self, turn: Any, number: int) -> Any:
        """The message with text only: placeholders for its images."""
        if not isinstance(turn, dict):
            return turn
        key = "content" if turn.get("content") is not None else "value"
        said = turn.get(key)
        if isinstance(said, str):
            # An answer is what the model learns to write: "<image>" in one is plain text.
            return {**turn, key: self._checked(said) if role_of(turn) == "assistant" else self.written(said)}
        if not isinstance(said, list) or not all(isinstance(part, dict) for part in said):
            return turn
        return {**turn, key: [self._part(part, f"message {number}", role_of(turn)) for part in said]}

    def written(self, text: str) -> str:
        """The text with LLaVA's placeholder replaced, without the line end next to it."""
        for _ in range(self._checked(text).count(WRITTEN)):
            self._next()
        return _WITH_LINE_END.sub(IMAGE_MARK, text)

    def _part(self, part: dict[str, Any], where: str, role: str | None) -> dict[str, Any]:
        part = {key: value for key, value in part.items() if value is not None}  # a column that other rows use
        kind = part.get("type")
        if kind not in _KINDS:
            if isinstance(part.get("text"), str):
                self._checked(part["text"])
            return part
        if role == "assistant":
            raise BadSampleError(f"{where}: the assistant shows an image, which no model here learns to write")
        source = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
        if isinstance(source, dict) and "url" in source:  # OpenAI's {"image_url": {"url": ...}}
            source = source["url"]
        # A part of type image without a source takes the next image of the column (Hugging Face's
        # form).
        if source is None:
            self._next()
        else:
            self.found.append(_base64(source, where) if part.get("base64") is source else source)
        return {"type": "text", "text": IMAGE_MARK}

    def _next(self) -> None:
        if self.used == len(self.waiting):
            raise BadSampleError(
                f"it has more places for images ({WRITTEN}, or parts of type image without a source) than the "
                f"{len(self.waiting)} under images"
            )
        self.found.append(self.waiting[self.used])
        self.used += 1

    @staticmethod
    def _checked(text: str) -> str:
        if IMAGE_MARK in text:
            raise BadSampleError("it holds U+FDD5, which is no character of any text")
        return text


def _source(said: Any, folder: Path, number: int) -> ImageSource:
    """Read and decode an image fully: a damaged one must be found now, not in the middle of a run."""
    where = f"image {number}"
    if isinstance(said, dict):
        # Hugging Face's datasets store {"bytes", "path"}, where path is only a name when bytes are
        # there.
        said = next((said[key] for key in ("bytes", "path") if said.get(key) is not None), None)
    path, data = None, None
    if isinstance(said, bytes):
        data = said
    elif isinstance(said, str) and said.startswith("data:"):
        data = _base64(said.partition(",")[2], where)
    elif isinstance(said, str) and said:
        path = _path(said, folder, where)
        data = _file(path)
    else:
        raise BadSampleError(f"{where} is neither a path, nor a data URL, nor bytes")
    try:
        _, mode = open_image(data)
    except BadSampleError as error:
        raise BadSampleError(f"{where}{f' ({path})' if path else ''} {error}") from None
    # Files are read again when needed; bytes from tables and data URLs have no file, and stay in
    # memory.
    return ImageSource(path, None if path else data, xxhash.xxh3_64_hexdigest(data), mode)


def _path(said: str, folder: Path, where: str) -> Path:
    # No downloads: a run must not depend on what a server answers.
    scheme = said.partition("://")[0] if "://" in said else ""
    if scheme and scheme != "file":
        raise BadSampleError(f"{where} is a URL ({said[:80]}): download it, and give the path of the file")
    return folder / said.removeprefix("file://")


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadSampleError(f"image {path} cannot be read: {error.strerror or error}") from None


def _base64(text: Any, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise BadSampleError(f"{where}: what should be base64 is not") from None


def open_image(data: bytes) -> tuple[Any, str]:
    """(the picture in RGB and upright, its mode before).

    Raises:
        BadSampleError: it is none, is damaged, or it cannot be told what of it is meant. The text follows its name.
    """
    from PIL import Image, ImageOps

    if not data:
        raise BadSampleError("is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its limits, which are below
            image = Image.open(io.BytesIO(data))
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise BadSampleError(f"has {width} x {height} pixels, more than {_MOST_PIXELS:,}: make it smaller")
            # Which frame the text is about cannot be told.
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise BadSampleError(f"is animated ({frames} frames): write one of them to a file of its own")
            mode = image.mode
            # convert("RGB") would clip 16-bit and float pixels to 255.
            if mode.startswith(("I", "F")):
                raise BadSampleError(f"has pixels of type {mode}, which do not fit into 8 bits: convert it")
            # Image.open reads the header only; load decodes.
            image.load()
            # Cameras store the rotation in EXIF, which models never see.
            return ImageOps.exif_transpose(image).convert("RGB"), mode
    except BadSampleError:
        raise
    except Image.DecompressionBombError as error:
        raise BadSampleError(f"is too large: {error}") from None
    except Exception as error:  # of any kind: each format has a reader of its own
        said = " ".join(str(error).split()).replace("<_io.BytesIO object at ", "").split(" 0x")[0][:150]
        raise BadSampleError(f"cannot be decoded: {said or type(error).__name__}") from None


def _plural(count: int) -> str:
    return "image" if count == 1 else "images"


@dataclass(frozen=True)
class Shown:
    """The images of a text.

    Attributes:
        where: it stands, ``file:line``.
        text: as the chat template renders it, with a place for each image.
        images: in their order.
        tokens: (first, last + 1) of the tokens from the first image to the last.
    """

    where: str
    text: str
    images: tuple[ImageSource, ...]
    tokens: tuple[int, int]
