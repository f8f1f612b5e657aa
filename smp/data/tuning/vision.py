"""Samples with images to token ids, and their images to a vision-language model's other inputs.

The folder's processor makes both: it puts as many image tokens into the text as an image has features. Which of
the tokens are trained is known of the text before that, so the two texts are laid over each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.data.tuning.chat_template import ChatTemplate, Span
from smp.data.tuning.encode import Encoded, Encoder, within, without_line_ends
from smp.data.tuning.files import Row
from smp.data.tuning.images import ImageSource, Shown, take_images
from smp.data.tuning.messages import BadSampleError, Conversation
from smp.data.tuning.shapes import Plain, recognise
from smp.data.tuning.tokenizer import TuningTokenizer

_IMAGE_TOKENS = ("image_token", "boi_token")
"""Attributes of processors that may hold what a chat template writes for an image (``boi_token``: Gemma 3)."""


class ImageProcessor:
    """transformers' processor of a model.

    Args:
        processor: of ``open_processor``.
        template: of its chats, with content parts.

    Attributes:
        image_mark: what the template writes for an image.

    Raises:
        ConfigError: the template shows no images.
    """

    def __init__(self, processor: Any, template: ChatTemplate) -> None:
        self._processor = processor
        # The processor's tokenizer is replaced, so that the expanded text can be read back.
        self._heard = processor.tokenizer = _Heard(processor.tokenizer)
        self.image_mark = _image_token(processor, template)

    def __call__(self, text: str, images: Sequence[Any], *, special: bool) -> tuple[str, dict[str, Any]]:
        """(the text with its image tokens, the model's inputs as tensors of one row).

        Args:
            text: with :attr:`image_mark` for each image.
            images: pictures.
            special: add what the tokenizer puts in front of texts.

        Raises:
            ValueError: it does not take them.
        """
        if text.count(self.image_mark) != len(images):
            raise BadSampleError(
                f"there are {text.count(self.image_mark)} times {self.image_mark} in its text, for {len(images)} images"
            )
        try:
            out = self._processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=special)
        except Exception as error:  # of any kind: each class has rules of its own
            said = " ".join(str(error).split())[:200]
            raise BadSampleError(
                f"{type(self._processor).__name__} refuses it: {said or type(error).__name__}"
            ) from None
        return self._heard.text, dict(out)


class _Heard:
    """A tokenizer that remembers its last text: processors expand image tokens in it and do not return it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.text = tokenizer, ""

    def __call__(self, text: Any, **options: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _image_token(processor: Any, template: ChatTemplate) -> str:
    # Asked of the template, not assumed: Gemma 3 writes boi_token, others image_token.
    asked = [{"role": "user", "content": f"{template.image_mark}what is it?"}]
    shown = template.prompt(asked)
    for name in _IMAGE_TOKENS:
        token = getattr(processor, name, None)
        if isinstance(token, str) and token and shown.count(token) == 1:
            return token
    raise ConfigError(
        "the chat template shows no image (its content parts of type image): give --chat-template one that writes "
        f"{getattr(processor, 'image_token', 'the image token')} for each"
    )


class VisionEncoder(Encoder):
    """Turns samples with and without images into token ids; see :class:`Encoder`.

    Args:
        tokenizer: of the model.
        template: with content parts.
        processor: of the model.
        folder: that relative paths of images begin at; None: that of the file of samples.
        mask_prompt, as_messages: as of every encoder.
    """

    def __init__(
        self,
        tokenizer: TuningTokenizer,
        template: ChatTemplate,
        processor: ImageProcessor,
        folder: Path | None,
        *,
        mask_prompt: bool = True,
        as_messages: bool = False,
    ) -> None:
        super().__init__(tokenizer, template, mask_prompt=mask_prompt, as_messages=as_messages)
        self.processor, self._folder = processor, folder

    def sample(self, record: dict[str, Any]) -> list[Encoded]:
        assert isinstance(record, Row)
        # Relative paths begin at --image-folder, or where the file of samples is; ``where`` is
        # ``file:line``.
        images = take_images(record, self._folder or Path(record.where.rpartition(":")[0]).parent)
        # After the images were taken out: recognise refuses content parts of other types than text.
        sample = recognise(record, self.reading)
        if not images:
            return [self._encode(sample, record)]
        if isinstance(sample, Plain):
            raise BadSampleError("images need messages: write them, or give --apply-chat-template")
        return [self._with_images(sample, record, images)]

    def _with_images(self, sample: Conversation, record: Row, sources: Sequence[ImageSource]) -> Encoded:
        text, spans = self._template().render(sample)
        special = self.begins(text)
        whole, made = self.processor(text, [source.read() for source in sources], special=special)
        ids, offsets = self._ids(whole, special)
        # The processor tokenizes by itself: ids must be those of the offsets used for the mask.
        if made["input_ids"][0].tolist() != ids:
            raise BadSampleError("its processor gives other tokens than tokenizer.json")
        # Spans are of the template's text; tokens are of the text with each image expanded to many
        # tokens.
        laid = _Laid.over(text, whole, self.processor.image_mark)
        trained = without_line_ends(self.tokenizer, ids, within(offsets, [laid.span(span) for span in spans]))
        covered = within(offsets, laid.images)
        shows = [i for i, cover in enumerate(covered) if cover]
        record.shown = Shown(record.where, text, tuple(sources), (shows[0], shows[-1] + 1))
        # Image tokens are never trained, as in every vision-language model's loss.
        return self._finished(ids, trained, sample, record, never=covered)

    def begins(self, text: str) -> bool:
        """Whether the tokenizer's beginning is put in front of a rendered text. As in transformers' processors: not if
        it begins with the beginning of text token."""
        token = self.tokenizer.template_tokens.get("bos_token")
        return not (token and text.startswith(token))

    def _ids(self, text: str, special: bool) -> tuple[list[int], list[Span]]:
        ids, offsets = self.tokenizer.encode_at(text)
        before = self.tokenizer.before if special else []
        # Added ids stand for no characters. Their span ends before the text: (0, 0) would be within a span that begins
        # the text, be it an answer or an image.
        return [*before, *ids], [*[(-1, -1)] * len(before), *offsets]

    def _conversation(self, sample: Conversation) -> tuple[list[int], list[bool]]:
        text, spans = self._template().render(sample)
        if self.processor.image_mark in text:
            raise BadSampleError(f"it says {self.processor.image_mark}, which stands for an image, and shows none")
        ids, offsets = self._ids(text, self.begins(text))
        return ids, without_line_ends(self.tokenizer, ids, within(offsets, spans))


@dataclass(frozen=True)
class _Laid:
    """A template's text matched with the one that a processor expanded from it.

    Attributes:
        pieces: of the text between places, as (where it begins there, where in the other, its length).
        images: spans in the other that stand for images, in order.
    """

    pieces: tuple[tuple[int, int, int], ...]
    images: list[Span]

    @staticmethod
    def over(text: str, whole: str, image_mark: str) -> _Laid:
        """Match ``whole`` with ``text``. Raises BadSampleError where it is ambiguous or the processor changed text next
        to images."""
        parts = text.split(image_mark)
        # The leftmost and the rightmost match of each part. Where both agree the match is the only
        # one.
        first, last = _from_left(parts, whole), _from_right(parts, whole)
        if first is None or last is None:
            raise BadSampleError("its processor changes the text next to images, so it cannot be told what is trained")
        pieces, at = [], 0
        for part, left, right in zip(parts, first, last, strict=True):
            # A short piece, such as a line end, may be in what stands for an image, too.
            pieces.append((at, left if left == right else -1, len(part)))
            at += len(part) + len(image_mark)
        # An image takes all between the earliest end of the part before and the latest begin of the
        # part after.
        images = [(first[i] + len(parts[i]), last[i + 1]) for i in range(len(parts) - 1)]
        return _Laid(tuple(pieces), images)

    def span(self, span: Span) -> Span:
        """The span of ``whole`` for a ``span`` of the text."""
        for begin, there, length in self.pieces:
            if begin <= span[0] and span[1] <= begin + length:
                if there < 0:
                    break
                return there + span[0] - begin, there + span[1] - begin
        raise BadSampleError("it cannot be told what is trained: an answer is not apart from the images around it")


def _from_left(parts: Sequence[str], whole: str) -> list[int] | None:
    """Begin of each part in the leftmost match; None: no match."""
    if not whole.startswith(parts[0]):
        return None
    found, at = [0], len(parts[0])
    for part in parts[1:-1]:
        # + 1: an image expands to at least one character.
        start = whole.find(part, at + 1)
        if start < 0:
            return None
        found.append(start)
        at = start + len(part)
    # The last part is fixed at the end in both directions.
    return [*found, len(whole) - len(parts[-1])]


def _from_right(parts: Sequence[str], whole: str) -> list[int] | None:
    """Begin of each part in the rightmost match; None: no match."""
    if not whole.endswith(parts[-1]):
        return None
    at = len(whole) - len(parts[-1])
    found = [at]
    for part in reversed(parts[1:-1]):
        start = whole.rfind(part, 0, at - 1)
        if start < 0:
            return None
        found.append(start)
        at = start
    return [0, *reversed(found)]
