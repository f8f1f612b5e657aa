"""Image tensors of a batch: what a vision-language model takes apart from token ids.

transformers' processors give three kinds of tensors, and which is which is seen on an example: one number or row per
token (``mm_token_type_ids``), one row per text (Idefics 3, Mllama), and all others, whose first dimension counts
images, tiles or patches. Those of a micro-batch are joined along it; what differs in other dimensions is padded with
zeros, as the processors pad a batch of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from smp.config import ConfigError
from smp.data.loader import RankBatch
from smp.data.tuning.images import Shown
from smp.data.tuning.messages import BadSampleError
from smp.data.tuning.samples import Samples
from smp.data.tuning.vision import ImageProcessor

# Of the batch itself: the trainer has them from the packed sequences.
_OF_TEXT = ("input_ids", "attention_mask")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ImageTensors:
    """Tensors of the images in a micro-batch, as a model reads them.

    Attributes:
        values: by the names of its arguments.
        tokens: those with a number, or a row, for each token, (rows, columns, ...).
        filler: int64 (rows, n), tokens after those of the texts, with an image of their own, where no text has one:
            every rank runs the same modules in every micro-batch. None: there are none.
    """

    values: Tensors
    tokens: Tensors
    filler: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ImageTensors:
        """A copy with ``change`` applied to every tensor, such as a move to a device."""
        values, tokens = ({name: change(t) for name, t in of.items()} for of in (self.values, self.tokens))
        return ImageTensors(values, tokens, None if self.filler is None else change(self.filler))


@dataclass(frozen=True)
class ImageBatch(RankBatch):
    """Sequences with images.

    Attributes:
        images: of each micro-batch.
    """

    images: tuple[ImageTensors, ...] = ()

    def pinned(self) -> RankBatch:
        """Page-locked memory, also for the images."""
        images = tuple(of.each(lambda t: t.pin_memory()) for of in self.images)
        return replace(super().pinned(), images=images)  # type: ignore[call-arg]


@dataclass(frozen=True)
class _Read:
    """One text with images: its first column in the row, how many columns it has, and what the processor gives."""

    at: int
    count: int
    made: Tensors


class ImageReader:
    """Reads and processes the images of texts when their batch is built.

    Args:
        samples: with their images.
        processor: that made them.
        begins: whether a rendered text gets what the tokenizer puts in front of texts.
        keep_end: long texts were cut at their beginning.

    Raises:
        ConfigError: the processor gives what is not understood here.
    """

    def __init__(
        self, samples: Samples, processor: ImageProcessor, begins: Callable[[str], bool], keep_end: bool
    ) -> None:
        assert samples.shown is not None
        self._samples, self._shown, self._processor = samples, samples.shown, processor
        self._begins, self._keep_end = begins, keep_end
        self._filler, self._of_tokens, self._of_rows = _example(processor)

    def micro_batch(self, rows: Sequence[npt.NDArray[np.int64]], length: int) -> ImageTensors:
        """Image tensors of the texts in each row; ``length`` columns are read.

        Raises:
            ValueError: an image cannot be read any more.
        """
        read = [self._row(texts) for texts in rows]
        filler = None
        # A micro-batch without images would skip the vision tower, and FSDP's all-gathers of its
        # weights would then wait on some ranks for ever: a small image is put after the texts, and
        # no label reads it.
        if not any(read):
            ids = self._filler["input_ids"]
            read[0] = [_Read(length, ids.shape[1], self._filler)]
            filler = F.pad(ids, (0, 0, 0, len(rows) - 1))  # rows of zeros for the others
            length += ids.shape[1]
        names = [name for name in self._filler if name not in _OF_TEXT]
        tokens = {name: _of_tokens(read, name, length) for name in names if name in self._of_tokens}
        # A tensor is per token, per row, or per image, tile or patch: three ways to join them.
        values = {n: (_of_rows if n in self._of_rows else _joined)(read, n) for n in names if n not in self._of_tokens}
        return ImageTensors(values, tokens, filler)

    def _row(self, texts: npt.NDArray[np.int64]) -> list[_Read]:
        out, at = [], 0
        for number in texts.tolist():
            ids, _ = self._samples[number]
            shown = self._shown[number]
            if shown is not None:
                out.append(_Read(at, len(ids) - 1, self._made(shown, ids)))
            # Columns are positions that are read: a text of n tokens has n - 1.
            at += len(ids) - 1  # the last one is only predicted
        return out

    def _made(self, shown: Shown, ids: npt.NDArray[np.int32]) -> Tensors:
        """What the processor gives for a text, with per-token tensors cut as the text was."""
        try:
            pictures = [image.read() for image in shown.images]
            _, made = self._processor(shown.text, pictures, special=self._begins(shown.text))
        except ValueError as error:
            raise BadSampleError(f"{shown.where}: {error}") from None
        whole = made["input_ids"].shape[1]
        # The same end is cut as in samples._cut.
        kept = slice(whole - len(ids), whole) if self._keep_end else slice(0, len(ids))
        # Ids depend on image sizes (number of patches): another picture gives another length.
        if not np.array_equal(made["input_ids"][0, kept].numpy(), ids):
            raise BadSampleError(f"{shown.where}: its images give other tokens than when the run began")
        return {name: t[:, kept] if name in self._of_tokens else t for name, t in made.items()}


def _example(processor: ImageProcessor) -> tuple[Tensors, frozenset[str], frozenset[str]]:
    """(what the processor gives for a small image without text, names of per-token tensors, names of per-row
    tensors)."""
    from PIL import Image

    # Grey and 64 x 64: any processor resizes it, and it costs little.
    picture = Image.new("RGB", (64, 64), (127, 127, 127))
    try:
        # The same with one and with two images: the dimension that grows in step says what a tensor
        # counts.
        (_, one), (_, two) = (processor(processor.image_mark * n, [picture] * n, special=False) for n in (1, 2))
    except ValueError as error:
        raise ConfigError(f"the processor of --load cannot be used: {error}") from None
    strange = [name for name, value in one.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ConfigError(f"the processor of --load gives {strange[0]}, which is no tensor: it cannot be used here")
    columns = [of["input_ids"].shape[1] for of in (one, two)]
    of_tokens = {
        # Both must agree: by chance a single size may equal the number of tokens.
        n
        for n in one
        if all(t.ndim > 1 and t.shape[1] == c for t, c in zip((one[n], two[n]), columns, strict=True))
    }
    # Two images in one row leave the first dimension at 1 for tensors per row only.
    of_rows = {name for name in one if name not in of_tokens and len(two[name]) == 1}
    return one, frozenset(of_tokens), frozenset(of_rows)


def _of_tokens(read: Sequence[Sequence[_Read]], name: str, length: int) -> torch.Tensor:
    """(rows, length, ...), zeros for tokens of texts without images."""
    found = [(row, one) for row, of in enumerate(read) for one in of]
    tail = _largest([one.made[name].shape[2:] for _, one in found])
    first = found[0][1].made[name]
    out = torch.zeros(len(read), length, *tail, dtype=first.dtype)
    for row, one in found:
        out[row, one.at : one.at + one.count] = _padded(one.made[name][0, : one.count], (one.count, *tail))
    return out


def _of_rows(read: Sequence[Sequence[_Read]], name: str) -> torch.Tensor:
    """(rows, images, ...), zeros for a row without images and for missing images."""
    rows = [[one.made[name] for one in of] for of in read]
    every = [t for of in rows for t in of]
    tail = _largest([t.shape[2:] for t in every])
    joined = [torch.cat([_padded(t, (*t.shape[:2], *tail)) for t in of], 1) if of else None for of in rows]
    images = max(t.shape[1] for t in joined if t is not None)
    empty = every[0].new_zeros(1, images, *tail)
    return torch.cat([empty if t is None else _padded(t, (1, images, *tail)) for t in joined])


def _joined(read: Sequence[Sequence[_Read]], name: str) -> torch.Tensor:
    """The tensor ``name`` of all texts of a micro-batch, joined along the first dimension, (images or patches, ...)."""
    every = [one.made[name] for of in read for one in of]
    tail = _largest([t.shape[1:] for t in every])
    return torch.cat([_padded(t, (len(t), *tail)) for t in every])


def _largest(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*shapes, strict=True)))


def _padded(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``tensor`` with zeros after its end in every dimension, up to ``shape``."""
    more = [(0, size - have) for have, size in zip(tensor.shape, shape, strict=True)]
    return (
        # F.pad takes (before, after) pairs from the last dimension to the first.
        F.pad(tensor, [n for pair in reversed(more) for n in pair]) if tuple(tensor.shape) != tuple(shape) else tensor
    )
