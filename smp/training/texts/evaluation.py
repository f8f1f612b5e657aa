"""What evaluations ask of a model and its tokenizer, in text, also as a model of EleutherAI's lm-evaluation-harness.

A text is scored alone. Its first token follows the tokens that the tokenizer puts in front of every text; where it puts
none, the token that begins a text, or, where there is none either, the one that ends it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smp.config.command_line.commands import pip_install
from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.tokenizer import PieceTokenizer, TuningTokenizer
from smp.generation import Generator, Request, Sampling, Stops
from smp.models.protocol import Model
from smp.models.scoring import token_scores


@dataclass(frozen=True)
class TextScorer:
    """A model with its tokenizer.

    Attributes:
        model: whole, in evaluation mode.
        tokenizer: of it.
        ends: ids that end a text that the model writes.
        length: longest window of tokens.
        stride: tokens by which windows of long texts move, see ``smp.models.scoring``.
        batch_size: texts that are written at once.
    """

    model: Model
    tokenizer: TuningTokenizer
    ends: tuple[int, ...]
    length: int
    stride: int
    batch_size: int = 32

    @property
    def prefix(self) -> list[int]:
        """Token ids that come before the first token of a text."""
        tokenizer = self.tokenizer
        return list(tokenizer.before) or [tokenizer.eos if tokenizer.bos is None else tokenizer.bos]

    def text(self, text: str) -> tuple[float, int]:
        """(log-probability, number of tokens) of a whole text, however long."""
        ids = self.tokenizer.encode(text)
        if not ids:
            return 0.0, 0
        log_probs, _ = token_scores(self.model, [*self.prefix, *ids], self.length, self.stride, len(self.prefix))
        return float(log_probs.sum()), len(ids)

    def continuation(self, context: str, text: str) -> tuple[float, bool]:
        """(log-probability of ``text`` after ``context``, whether the model would write exactly it). Both are encoded
        together, and the spaces that end the context are the text's. What does not fit is cut off at the beginning.

        Raises:
            ValueError: the text alone is longer than a window, or has no token of its own and is not empty.
        """
        empty = not text
        # A tokenizer glues a space to the word after it, so a space at the end of the context would be a token that
        # the model has never seen there.
        spaces = len(context) - len(context.rstrip())
        context, text = context[: len(context) - spaces], context[len(context) - spaces :] + text
        before = self.tokenizer.begun(context) if context else self.prefix
        # Encoded together: the border of two texts may lie in the middle of a token.
        ids = self.tokenizer.begun(context + text) if context else []
        ids = ids or [*self.prefix, *self.tokenizer.encode(text)]
        count = len(ids) - len(before)
        if count > self.length:
            raise ValueError(f"a continuation of {count} tokens is longer than the window of {self.length}")
        if count == 0 and empty:
            return 0.0, True
        if count <= 0:  # 0.0 would be the best of all choices
            raise ValueError(f"the continuation {text!r} has no token of its own after {context[-40:]!r}: no score")
        # Cut at the beginning: the continuation has to be scored in any case.
        ids = ids[-self.length - 1 :]
        log_probs, likeliest = token_scores(self.model, ids, self.length, self.length, len(ids) - count)
        return float(log_probs.sum()), bool(likeliest.all())

    def write(self, contexts: Sequence[str], until: Sequence[str], count: int, sampling: Sampling) -> list[str]:
        """The model's continuation of each of ``contexts``: at most ``count`` tokens, cut before the first of
        ``until``."""
        # The context is cut at its beginning, so that ``count`` tokens fit.
        longest = max(1, self.model.config.max_position_embeddings - count)
        requests = []
        for index, context in enumerate(contexts):
            prompt = self.tokenizer.begun(context) or self.prefix
            requests.append(Request(prompt[-longest:], count, index))
        marks = tuple(mark for mark in until if mark)
        stops = Stops(frozenset(self.ends), marks, self._decode)
        written = Generator(self.model, batch_size=self.batch_size).write(requests, sampling, stops)
        texts = {c.request.index: self._decode([i for i in c.ids if i not in self.ends]) for c in written}
        cuts = {index: [at for mark in marks if (at := text.find(mark)) >= 0] for index, text in texts.items()}
        # A mark may be found in the middle of the last tokens: the text is cut, not the ids.
        return [texts[index][: min(cuts[index], default=None)] for index in range(len(contexts))]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in self.tokenizer.special])


@dataclass
class Perplexity:
    """How well texts were predicted.

    Attributes:
        documents, tokens, bytes: that were scored; bytes of UTF-8.
        log_prob: of all of them, in nats.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    log_prob: float = 0.0

    def add(self, scorer: TextScorer, text: str) -> None:
        """Score one more document."""
        log_prob, tokens = scorer.text(text)
        self.documents += 1
        self.tokens += tokens
        self.bytes += len(text.encode())
        self.log_prob += log_prob

    def results(self) -> dict[str, float]:
        """Results by name. Bits per byte compare models with different tokenizers, perplexity per token does not.

        Raises:
            ValueError: nothing was scored.
        """
        if not self.tokens:
            raise ValueError("there is no text in the data")
        # Over all tokens: a mean of documents' means would weigh short ones more.
        nats = -self.log_prob / self.tokens
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": nats,
            "perplexity": math.exp(nats) if nats < 700 else math.inf,
            "bits per token": nats / math.log(2),
            "bits per byte": -self.log_prob / math.log(2) / self.bytes,
        }


def harness_model(scorer: TextScorer, name: str) -> Any:
    """An ``lm_eval.api.model.LM`` of a model, for ``lm_eval.simple_evaluate(model=...)``.

    Args:
        scorer: what computes.
        name: stands for model and tokenizer in the library's own cache of requests.

    Raises:
        ValueError: the library is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ValueError(f"--tasks needs lm-evaluation-harness: {pip_install('lm-eval')}") from None

    class Model(LM):  # type: ignore[misc]
        """Texts are scored one by one and written in batches."""

        tokenizer_name = name.replace("/", "__")

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [scorer.continuation(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [scorer.text(request.args[0])[0] for request in requests]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return _written(scorer, [request.args for request in requests])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            source, tokenizer = scorer.tokenizer.template, scorer.tokenizer
            if source is None and isinstance(tokenizer, PieceTokenizer):
                raise ValueError(
                    f"{tokenizer.path} is a sentencepiece model: --apply-chat-template needs a folder with "
                    "tokenizer.json"
                )
            if source is None or not add_generation_prompt:
                raise ValueError("no chat template" if source is None else "an answer cannot be begun")
            return ChatTemplate(source, tokenizer.template_tokens).prompt(chat_history)

    return Model()


def _written(scorer: TextScorer, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Texts for requests, (context, settings). Those with the same settings are written together."""
    groups: dict[str, list[int]] = {}
    for number, (_, settings) in enumerate(asked):
        groups.setdefault(repr(sorted(settings.items())), []).append(number)
    texts: dict[int, str] = {}
    for numbers in groups.values():
        contexts = [asked[number][0] for number in numbers]
        texts |= dict(zip(numbers, scorer.write(contexts, *_how(asked[numbers[0]][1])), strict=True))
    return [texts[number] for number in range(len(asked))]


def _how(settings: dict[str, Any]) -> tuple[list[str], int, Sampling]:
    """(strings that end a text, most tokens, sampling): greedy unless the task asks for sampling."""
    known = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
    # Ignoring one would change a published score in silence.
    if unknown := [name for name in settings if name not in known]:
        raise ValueError(
            f"the task asks for {', '.join(unknown)}, which is not supported; known are {', '.join(known)}"
        )
    until = settings.get("until") or []
    sampling = Sampling(temperature=0)
    if settings.get("do_sample"):
        chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        sampling = Sampling(**{name: settings.get(name, value) for name, value in chosen.items()}, seed=0)
    return [until] if isinstance(until, str) else until, int(settings.get("max_gen_toks", 256)), sampling
