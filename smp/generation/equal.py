"""Generation with a model that has a cache of its own (``MicroBatch.own_cache``), in batches of texts of equal length.

Equal lengths need no padding: not every architecture can mask it (a recurrent state takes every token that it reads).
Everything else is as in :mod:`smp.generation.slots`.

The content of such a cache is not known here, so it is tried once (:func:`keeps`). Where it gives other logits than
whole texts do, whole texts go through the model for every token.
"""

from __future__ import annotations

from collections import deque

import torch

from smp.generation.slots import Forward
from smp.generation.texts import Stops, Text, take
from smp.models.micro_batch import MicroBatch, OwnCache
from smp.models.protocol import Model
from smp.parallel.collectives import max_over


class EqualTexts:
    """A batch of texts of equal length. Waiting texts come in when all of them have ended.

    Args:
        count: of them at most.
        waiting: texts that wait, the longest first; others may take from it too.
        device: of the model.
        new_rope_at: lengths at which a text gets other frequencies of RoPE; it is computed anew then.
        cached: whether the model's cache is used; else each pass reads whole texts.
    """

    def __init__(
        self, count: int, waiting: deque[Text], device: torch.device, new_rope_at: range, cached: bool
    ) -> None:
        self.count, self.waiting, self.device, self.new_rope_at = count, waiting, device, new_rope_at
        self.cached = cached
        self.texts: list[Text] = []
        self._cache = OwnCache()

    def next(self) -> Forward | None:
        """The next forward pass; None: all texts are finished."""
        if self.texts and self.cached:
            new = [text.ids[-1:] for text in self.texts]
            return self._forward(new, list(range(len(new))))
        if not self.texts and not self.waiting:
            return None
        if not self.texts:
            self._begin()
        # A new cache: the old one holds texts that have ended; without ``cached`` each pass reads
        # whole texts.
        self._cache = OwnCache()
        # The samples of a prompt begin alike: they are computed once.
        prompts = {tuple(text.ids): text.ids for text in self.texts}
        places = {prompt: row for row, prompt in enumerate(prompts)}
        return self._forward(list(prompts.values()), [places[tuple(text.ids)] for text in self.texts])

    def _begin(self) -> None:
        # The longest come first, so texts of one length are neighbours in the queue.
        length = len(self.waiting[0].ids)
        while self.waiting and len(self.texts) < self.count and len(self.waiting[0].ids) == length:
            self.texts.append(self.waiting.popleft())

    def _forward(self, ids: list[list[int]], rows: list[int]) -> Forward:
        micro_batch = MicroBatch(torch.tensor(ids, device=self.device), own_cache=self._cache)
        return Forward(micro_batch, tuple(self.texts), tuple(rows))

    def copied(self, forward: Forward) -> None:
        """After a pass: let every sample of a prompt continue from what was computed once."""
        if self.cached and len(forward.rows) != len(forward.micro_batch.input_ids):
            self._cache.select(torch.tensor(forward.rows, device=self.device))

    def finish(self, forward: Forward, ids: list[int], log_probs: list[float], stops: Stops) -> list[Text]:
        """Append the tokens that a pass gave; returns the texts that ended.

        Raises:
            ValueError: the logits were not finite.
        """
        take(forward.texts, ids, log_probs, stops)
        stay = [row for row, text in enumerate(self.texts) if text.finish is None]
        if self.texts and len(self.texts[0].ids) in self.new_rope_at:
            # The cached keys are rotated by the old frequencies. The texts go back to the head of
            # the queue in their order, and are computed from their first token.
            self.waiting.extendleft(self.texts[row] for row in reversed(stay))
            stay = []
        if self.cached and stay and len(stay) < len(self.texts):
            self._cache.select(torch.tensor(stay, device=self.device))
        self.texts = [self.texts[row] for row in stay]
        return [text for text in forward.texts if text.finish is not None]


def idle(device: torch.device) -> Forward:
    """A forward pass of a rank without texts, which takes part in the collectives of other ranks' experts."""
    return Forward(MicroBatch(torch.zeros(1, 1, dtype=torch.int64, device=device), own_cache=OwnCache()))


@torch.no_grad()
def keeps(model: Model) -> bool:
    """Whether ``model``, in evaluation mode, gives with its cache the logits that it gives of whole texts; every rank
    that has a part of it calls this."""
    device, output = next(model.parameters()).device, model.output_shard()
    assert output is not None, "it has no stages"
    shard, vocab = output.shard, model.config.vocab_size or 1
    # Two prompts of three tokens, then three single tokens. The rows are swapped and one is doubled
    # in between, as samples of a prompt and ended texts do it.
    ids = torch.tensor([[1, 3, 5, 2, 7, 4], [6, 2, 3, 8, 1, 5]], device=device).remainder(vocab)
    rows, cache = torch.tensor([1, 0, 1], device=device), OwnCache()
    model(MicroBatch(ids[:, :3], own_cache=cache))
    if cache.value is None:
        return False
    cache.select(rows)
    found = [model(MicroBatch(ids[rows, i : i + 1], own_cache=cache)).logits for i in range(3, ids.shape[1])][-1]
    wanted = model(MicroBatch(ids[rows])).logits[:, -1, shard.start : shard.start + shard.valid]
    # Relative error of the last logits. A wrong cache gives other logits altogether; the order of
    # sums alone changes them by far less than this.
    near = 1e-3 if wanted.dtype == torch.float32 else 0.1
    apart = (found.float() - wanted.float()).norm() / wanted.float().norm()
    # Each rank compares its columns of the vocabulary, and one verdict holds for all: ranks that
    # disagreed would run different numbers of passes.
    return not bool(max_over(apart > near, [shard.group]))
