"""Requests for texts, and texts that are being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["end", "string", "length"]


@dataclass(frozen=True)
class Request:
    """One text to write.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to write; fewer where the model's longest sequence ends.
        index: number of the prompt in its data. A new visit of a prompt needs another one, or gets the same text.
        sample: number of the text among those of the prompt.
        written: tokens that were written before, as far as an interrupted run came; the text goes on after them.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    index: int = 0
    sample: int = 0
    written: Sequence[int] = ()


@dataclass(frozen=True)
class Stops:
    """Stop ids and stop strings, which end a text before its greatest length.

    Attributes:
        ids: tokens; they belong to the text.
        strings: a text ends with the token that completes one of them.
        decode: text of token ids; needed for strings.

    Raises:
        ValueError: strings without ``decode``, or an empty one.
    """

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.strings and self.decode is None:
            raise ValueError("stop strings need a function that decodes tokens")
        if "" in self.strings:
            raise ValueError("an empty stop string would end every text")

    @property
    def window(self) -> int:
        """Tokens in which a string lies that the last of them completes: a token has a byte at least. And one before
        them, for tokenizers treat the space in front of a text in a way of its own."""
        return max((len(s.encode()) for s in self.strings), default=0) + 1

    def found(self, tail: list[int]) -> Finish | None:
        """Whether the last token of ``tail``, the last ``window`` tokens that were written, ends the text."""
        if tail[-1] in self.ids:
            return "end"
        if not self.strings or self.decode is None:
            return None
        text = self.decode(tail)
        return "string" if any(s in text for s in self.strings) else None


@dataclass(frozen=True)
class Completion:
    """A finished text.

    Attributes:
        request: what was asked for.
        ids: written tokens, those of ``request.written`` first, and the one that ended it last.
        log_probs: of those that this run wrote, see :class:`smp.generation.sampling.Sampled`.
        finish: a stop id ended it ("end"), a stop string, or the length did.
    """

    request: Request
    ids: list[int]
    log_probs: list[float]
    finish: Finish


@dataclass(eq=False)
class Text:
    """A text that is being written.

    Attributes:
        request: what was asked for.
        key: of its draws.
        most: tokens that it may have, with the prompt.
        ids: all tokens.
        log_probs: of the tokens that were written here.
        finish: why it ended.
    """

    request: Request
    key: int
    most: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def written(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.ids) - len(self.request.prompt)

    def add(self, token: int, log_prob: float, stops: Stops) -> None:
        """Append a token, and test whether the text ends with it."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.look_for_end(stops)

    def look_for_end(self, stops: Stops) -> None:
        """Set ``finish`` if the text has ended."""
        # Tokens of the prompt end nothing.
        if tail := self.ids[max(len(self.request.prompt), len(self.ids) - stops.window) :]:
            self.finish = stops.found(tail)
        if self.finish is None and len(self.ids) >= self.most:
            self.finish = "length"

    def completion(self) -> Completion:
        """The result, after the text has ended."""
        assert self.finish is not None
        return Completion(self.request, self.ids[len(self.request.prompt) :], self.log_probs, self.finish)


def take(texts: Sequence[Text], ids: Sequence[int], log_probs: Sequence[float], stops: Stops) -> None:
    """Add one more token to each text.

    Raises:
        ValueError: the logits were not finite.
    """
    for text, token, log_prob in zip(texts, ids, log_probs, strict=True):
        # NaN fails both comparisons.
        if not -1e30 < log_prob < 1e30:
            raise ValueError("the model's logits are not finite: its weights are damaged, or too large for this dtype")
        text.add(token, log_prob, stops)
