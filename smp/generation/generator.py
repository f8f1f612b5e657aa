"""Batched generation on the model that trains, where it is: under any mix of TP, SP, PP, CP, EP and FSDP."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.config import ModelConfig
from smp.generation import equal
from smp.generation.equal import EqualTexts, keeps
from smp.generation.sampling import Sampled, Sampling, choose
from smp.generation.slots import Forward, Slots, idle
from smp.generation.stages import Ring
from smp.generation.texts import Completion, Request, Stops, Text
from smp.models.part import ModelPart
from smp.models.protocol import Model, require_capability, require_stages
from smp.parallel.collectives import Group, max_over
from smp.parallel.context import ParallelContext
from smp.sharding.stages import gathered

NO_STOPS = Stops()


class Generator:
    """Writes texts.

    Args:
        model: as it trains, in any mode; whole, or this rank's parts of it.
        context: of the run; None: of a whole model that at most TP cuts.
        batch_size: texts that are written at once, on each data-parallel rank.
        stages: under pipeline parallelism, of the whole pipeline (part, rank), in the order of the layers.
        dtype: of hidden states between stages.
        progress: called before each pass.

    Ranks that have parts of the same texts (of TP, CP, PP) get the same requests; data-parallel ranks get their own,
    any number of them, also none. All ranks call :meth:`write` together. Under FSDP all weights of a rank's layers are
    gathered for the time of a call.

    Raises:
        ValueError: a batch without a text.
        ConfigError: the model writes no texts, or not in stages.
    """

    def __init__(
        self,
        model: Model,
        context: ParallelContext | None = None,
        *,
        batch_size: int = 32,
        stages: Sequence[tuple[ModelPart, int]] | None = None,
        dtype: torch.dtype = torch.float32,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"{batch_size} texts at once cannot be: give 1 or more")
        require_capability(model, "generation", "to write texts")
        self.model, self.batch_size, self._progress = model, batch_size, progress
        self._has_own_cache = "own cache" in model.capabilities
        self._cached: bool | None = None
        self.device = next(model.parameters()).device
        self._cp = None if context is None else context.cp_group
        # Ranks whose experts, or scales of FP8, a forward pass needs: they make the same number of passes.
        shares = any(getattr(module, "scaling", None) is not None for module in model.modules())
        self._together: tuple[Group, ...] = ()
        if context is not None and (shares or context.ep is not None):
            self._together = context.data_groups
        # They meet in collectives inside of the layers, so a rank without texts computes an idle
        # pass.
        self._ring: Ring | None = None
        if stages is not None and context is not None and context.pp is not None:
            staged = require_stages(model)
            self._ring = Ring(staged, context.pp, stages, dtype, self.device)
        # One group of texts for each pipeline rank: while the tokens of one travel back to the
        # first stage, the stages compute the others.
        self._groups = 1 if self._ring is None or context is None else min(context.pp_size, batch_size)

    def write(self, requests: Iterable[Request], sampling: Sampling, stops: Stops = NO_STOPS) -> Iterator[Completion]:
        """The texts, as they end. To stop before, close the iterator, on every rank at the same text.

        Args:
            requests: any number, of any lengths.
            sampling: how tokens are chosen.
            stops: what ends texts.

        Raises:
            ValueError: a request that cannot be, before anything is computed; while it writes: logits that are no
                numbers.
        """
        # Not inside of the generator below: a bad request is an error here, not at the first
        # ``next()``.
        texts = [self._text(request, sampling, stops) for request in requests]
        passes = self._passes([text for text in texts if text.finish is None], sampling, stops)
        ended = chain([text for text in texts if text.finish is not None], chain.from_iterable(passes))
        return (text.completion() for text in ended)

    def tokens(self, request: Request, sampling: Sampling, stops: Stops = NO_STOPS) -> Iterator[int]:
        """The tokens of one text, as they are chosen; otherwise as :meth:`write`."""
        text = self._text(request, sampling, stops)
        return self._tokens(text, sampling, stops)

    def _tokens(self, text: Text, sampling: Sampling, stops: Stops) -> Iterator[int]:
        shown = len(text.ids)
        for _ in self._passes([text] if text.finish is None else [], sampling, stops):
            yield from text.ids[shown:]
            shown = len(text.ids)

    def _text(self, request: Request, sampling: Sampling, stops: Stops) -> Text:
        """A request as a text with no tokens written yet.

        Raises:
            ValueError: the request cannot be fulfilled.
        """
        longest, vocab = self.model.config.max_position_embeddings, self.model.config.vocab_size
        ids = [*request.prompt, *request.written]
        assert vocab is not None
        if request.max_new_tokens < 0:
            raise ValueError(f"{request.max_new_tokens} new tokens cannot be: give 0 or more")
        if not request.prompt or len(ids) > longest:
            raise ValueError(f"the prompt has {len(ids)} tokens, this model takes 1 to {longest}")
        if min(ids) < 0 or max(ids) >= vocab:
            raise ValueError(f"token ids {min(ids)}..{max(ids)} are outside of the model's vocabulary of {vocab}")
        most = min(len(request.prompt) + request.max_new_tokens, longest)
        text = Text(request, sampling.key(request.index, request.sample), most, ids)
        text.look_for_end(stops)  # what was written before may have one
        return text

    @torch.no_grad()
    def _passes(self, texts: list[Text], sampling: Sampling, stops: Stops) -> Iterator[list[Text]]:
        """Yields, after each forward pass, the texts that ended."""
        # Long ones first: prompts of about one length come in together, without much padding.
        waiting = deque(sorted(texts, key=lambda text: -len(text.ids)))
        longest, rope = self.model.config.max_position_embeddings, _new_rope_at(self.model.config)
        # The batch in groups whose sizes differ by one at most. All groups take from one queue.
        counts = [len(range(i, self.batch_size, self._groups)) for i in range(self._groups)]
        # What each group computed in the round before. Its tokens are taken only when its turn
        # comes again, so that under pipeline parallelism they travel while the other groups
        # compute.
        pending: list[tuple[Forward, Sampled | None] | None] = [None] * len(counts)
        busy = True
        with _evaluating(self.model), gathered(self.model):
            groups: list[Slots | EqualTexts]
            if self._has_own_cache:
                groups = [EqualTexts(count, waiting, self.device, rope, self._keeps()) for count in counts]
            else:
                groups = [Slots(count, waiting, self.device, longest, rope, self._cp) for count in counts]
            while busy:
                busy = False
                self._progress()
                for i, slots in enumerate(groups):
                    if (passed := pending[i]) is not None:
                        yield self._finish(slots, *passed, stops)
                    forward = slots.next()
                    # A collective over the ranks that share experts or scales: every rank asks once
                    # for each group and round, whether it has texts or not, so that all leave the
                    # loop in the same round.
                    if self._somebody_works(forward is not None):
                        busy = True
                        pending[i] = self._pass(slots, forward, sampling)
                    else:
                        pending[i] = None
        if self._ring is not None:
            self._ring.finish()

    def _keeps(self) -> bool:
        """Whether the model's own cache gives the right logits; tested once."""
        if self._cached is None:
            self._cached = keeps(self.model)
            if not self._cached and dist.get_rank() == 0:
                print(
                    "note: what transformers keeps of this model's texts does not give the logits of whole ones: whole "
                    "texts are computed for every token, which is slow",
                    file=sys.stderr,
                )
        return self._cached

    def _somebody_works(self, this: bool) -> bool:
        """Whether this rank has a pass to compute, or another rank that needs this one in its collectives.
        Collective."""
        if not self._together:
            return this
        return bool(max_over(torch.tensor([int(this)], device=self.device), self._together))

    def _pass(
        self, slots: Slots | EqualTexts, forward: Forward | None, sampling: Sampling
    ) -> tuple[Forward, Sampled | None]:
        """Run a forward pass, or an idle one. Returns it with the chosen tokens, which only the last stage's rank
        has."""
        if forward is None:
            forward = equal.idle(self.device) if self._has_own_cache else idle(self.device)
        micro_batch = forward.micro_batch
        logits = self.model(micro_batch).logits if self._ring is None else self._ring.forward(micro_batch)
        if not forward.texts:
            return forward, None
        slots.copied(forward)
        if logits is None:
            return forward, None
        output = self.model.output_shard()
        assert output is not None, "the last stage has it"
        rows = torch.tensor(forward.rows, device=self.device)
        # The samples of a prompt share a row of logits and differ by their keys alone.
        if len(forward.rows) != len(logits):
            logits = logits[rows]
        # One key for each text and position: the draw does not depend on the batch that the text is
        # in.
        keys = [text.key + text.written for text in forward.texts]
        sampled = choose(logits, output.shard, sampling, torch.tensor(keys, device=self.device))
        if self._cp is not None:
            # All ranks computed it of the same numbers; a difference would be two texts.
            sampled = Sampled(max_over(sampled.ids, [self._cp]), max_over(sampled.log_probs, [self._cp]))
        if self._ring is not None:
            self._ring.chosen(sampled)
        return forward, sampled

    def _finish(self, slots: Slots | EqualTexts, forward: Forward, sampled: Sampled | None, stops: Stops) -> list[Text]:
        """Append the tokens of a pass; returns the texts that ended."""
        if not forward.texts:
            return []
        if sampled is None:
            assert self._ring is not None, "without a pipeline this rank chose them"
            sampled = self._ring.received(len(forward.texts))
        return slots.finish(forward, sampled.ids.tolist(), sampled.log_probs.tolist(), stops)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode inside; afterwards each module has its former mode."""
    # Of each module: parts that a caller froze in evaluation mode stay there, as ``model.train()``
    # at the end would not leave them.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _new_rope_at(config: ModelConfig) -> range:
    """Lengths at which a text gets other frequencies of RoPE: with LongRoPE once, with dynamic NTK by every token."""
    if config.transformers_config is not None:
        return _new_rope_of(json.loads(config.transformers_config), config.max_position_embeddings)
    first, kind = config.rope_original_max_position + 1, config.rope_scaling_type
    if not config.use_rope_scaling or kind not in ("longrope", "dynamic"):
        return range(0)
    return range(first, first + 1 if kind == "longrope" else config.max_position_embeddings + 1)


def _new_rope_of(content: dict[str, Any], longest: int) -> range:
    """Lengths as of :func:`_new_rope_at`, from a config.json, at whatever depth it names the scaling."""
    for value in content.values():
        if not isinstance(value, dict):
            continue
        kind = value.get("rope_type", value.get("type"))
        if kind in ("longrope", "dynamic"):
            known = value.get("original_max_position_embeddings", content.get("original_max_position_embeddings"))
            first = (known or content.get("max_position_embeddings") or longest) + 1
            return range(first, first + 1 if kind == "longrope" else longest + 1)
        if found := _new_rope_of(value, longest):
            return found
    return range(0)
