"""Texts that are written together against running the whole sequence every time, one at a time, and what ends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from smp.config import Layout, ModelConfig
from smp.generation import Completion, Generator, Request, Sampling, Stops, slots
from smp.kernels.token_layout import TokenLayout
from smp.layers import init_weights, local
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel.context import build_context
from tests.distributed import run_distributed
from tests.generation.models import MODELS, SIZES

GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=1.5, top_k=0, seed=3)
CUT = Sampling(temperature=1.1, top_k=12, top_p=0.8, seed=3)
PROMPTS = [[3, 1, 4, 1, 5], [7], [2, 9, 11, 3, 8, 6, 12, 10, 1, 30, 31], [3, 1, 4, 1, 5, 9]]


def built(settings: dict[str, Any], world: int = 1) -> GPT:
    model = GPT(ModelConfig(**settings), build_context(Layout(tp=world), "cpu").tp, device="cpu")
    init_weights(model, 1)
    return model


def ids_of(texts: Sequence[Completion]) -> dict[tuple[int, int], list[int]]:
    return {(text.request.index, text.request.sample): text.ids for text in texts}


def slow(model: GPT, prompt: list[int], total: int) -> list[int]:
    """The likeliest tokens, by whole sequences."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < total:
            ids.append(int(model(MicroBatch(torch.tensor([ids]))).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def texts(rank: int, world: int) -> dict[str, tuple[bool, ...]]:
    """Of each model: whether texts are the same with the cache and without it, in batches and alone, and in pieces."""
    out = {}
    for name, settings in MODELS.items():
        model = built(settings, world).eval()
        asked = [Request(prompt, 24 - len(prompt), i) for i, prompt in enumerate(PROMPTS)]
        fast = ids_of(list(Generator(model, batch_size=3).write(asked, GREEDY)))
        wanted = {(i, 0): slow(model, prompt, 24) for i, prompt in enumerate(PROMPTS[:3])}
        more = [Request(prompt, 6, i, sample) for i, prompt in enumerate(PROMPTS) for sample in range(2)]
        same = []
        for sampling in (DRAWN, CUT):
            together = ids_of(list(Generator(model, batch_size=5).write(more, sampling)))
            alone = ids_of(list(Generator(model, batch_size=1).write(reversed(more), sampling)))
            half = [Request(r.prompt, 6, r.index, r.sample, together[r.index, r.sample][:3]) for r in more]
            resumed = ids_of(list(Generator(model, batch_size=7).write(half, sampling)))
            same.append(together == alone == resumed and len({str(ids) for ids in together.values()}) == 8)
        whole, slots.PROMPT_TOKENS = slots.PROMPT_TOKENS, 7
        long = [Request([*PROMPTS[0], *fast[0, 0][:13]], 6, 0, sample) for sample in range(2)]
        pieces = ids_of(list(Generator(model).write(long, GREEDY)))
        slots.PROMPT_TOKENS = whole
        out[name] = fast.items() >= wanted.items(), *same, pieces[0, 0] == pieces[0, 1] == fast[0, 0][13:]
    return out


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_neither_the_cache_nor_the_batch_changes_a_text(tp: int) -> None:
    for rank in run_distributed(texts, tp):
        assert rank == dict.fromkeys(MODELS, (True, True, True, True))


def one_process(rank: int, world: int) -> dict[str, Any]:
    """What is said and done in one process."""
    model, out = built(SIZES), dict[str, Any]()
    generator = Generator(model, batch_size=3)
    out["messages"] = []
    for prompt, count in (([], 1), ([0] * 41, 1), ([50], 1), ([0], -1)):
        with pytest.raises(ValueError) as error:
            generator.write([Request(prompt, count)], GREEDY)  # at once, before anything is computed
        out["messages"].append(str(error.value))
    full = list(generator.write([Request([7] * 30, 99), Request([7] * 40, 9), Request([7], 0)], GREEDY))
    out["longest"] = sorted((len(text.ids), text.finish) for text in full)
    text = next(generator.write([Request(PROMPTS[0], 25)], GREEDY)).ids
    ended = next(generator.write([Request(PROMPTS[0], 25)], GREEDY, Stops(frozenset([text[9]]))))
    out["end"] = ended.finish, ended.ids == text[: text.index(text[9]) + 1], len(ended.log_probs) == len(ended.ids)
    spelt = "".join(chr(65 + i) for i in text)
    # It begins in the middle of what was written before, and the resumed text knows it.
    stops = Stops(strings=("??", spelt[7:10]), decode=lambda ids: "".join(chr(65 + i) for i in ids))
    found = [next(generator.write([Request(PROMPTS[0], 25, written=text[:n])], GREEDY, stops)) for n in (0, 8, 10)]
    out["strings"] = [(f.finish, f.ids == text[: spelt.index(spelt[7:10]) + 3], len(f.log_probs)) for f in found]
    out["streamed"] = list(generator.tokens(Request(PROMPTS[0], 25), GREEDY)) == text
    iterator = generator.write([Request(PROMPTS[0], 25), Request([1], 3)], GREEDY)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    out["training"] = model.training and torch.is_grad_enabled()
    with torch.no_grad():
        local(model.head.weight)[3] = torch.nan  # type: ignore[union-attr, arg-type]
    with pytest.raises(ValueError) as error:
        list(generator.write([Request([7], 1)], DRAWN))
    out["damaged"] = str(error.value), model.training
    return out


def test_what_ends_texts_and_what_cannot_be() -> None:
    (said,) = run_distributed(one_process, 1)
    assert said == {
        "messages": [
            "the prompt has 0 tokens, this model takes 1 to 40",
            "the prompt has 41 tokens, this model takes 1 to 40",
            "token ids 50..50 are outside of the model's vocabulary of 50",
            "-1 new tokens cannot be: give 0 or more",
        ],
        "longest": [(0, "length"), (0, "length"), (10, "length")],
        "end": ("end", True, True),
        "strings": [("string", True, 10), ("string", True, 2), ("string", True, 0)],
        "streamed": True,
        "training": True,
        "damaged": (
            "the model's logits are not finite: its weights are damaged, or too large for this dtype",
            True,
        ),
    }


def work(rank: int, world: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]], list[tuple[int, int]]]:
    """Shapes of the masks while a long prompt goes through in pieces, and tokens of the passes of many texts."""
    model, shapes, passes = built(SIZES), list[tuple[int, ...]](), list[tuple[int, int]]()
    made, forward = TokenLayout.make_mask, GPT.forward

    def noted(self: TokenLayout, *args: Any) -> torch.Tensor:
        mask = made(self, *args)
        shapes.append(tuple(mask.shape))
        return mask

    def counted(self: GPT, micro_batch: MicroBatch, *args: Any, **named: Any) -> Any:
        passes.append(tuple(micro_batch.input_ids.shape))  # type: ignore[arg-type]
        return forward(self, micro_batch, *args, **named)

    TokenLayout.make_mask, GPT.forward, slots.PROMPT_TOKENS = noted, counted, 12  # type: ignore[assignment, method-assign]
    list(Generator(model).write([Request([7] * 30, 3)], GREEDY))
    masks, long = list(shapes), list(passes)
    passes.clear()
    asked = [Request([5] * 4, 6, 0, sample) for sample in range(4)] + [Request([1, 2], 2, 1), Request([3, 4], 1, 2)]
    list(Generator(model, batch_size=4).write(asked, DRAWN))
    return masks, long, passes


def test_what_is_computed() -> None:
    """A token costs memory for one row of the mask: all pairs of 131072 tokens would be 137 GB for each. A mask is made
    once for all layers, and a prompt once for all samples; a text that waits comes in as soon as another one ends."""
    ((shapes, long, passes),) = run_distributed(work, 1)
    assert shapes == [(1, 1, 12, 24), (1, 1, 6, 30), (1, 1, 1, 31), (1, 1, 1, 32)]
    assert long == [(1, 12), (1, 12), (1, 6), (1, 1), (1, 1)]
    assert passes == [(1, 4), *[(4, 1)] * 5, (2, 2), (1, 1)]
