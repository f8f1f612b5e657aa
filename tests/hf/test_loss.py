"""The vocabulary-parallel losses are Hugging Face's loss, with less in memory."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.config import ConfigError
from smp.hf.loss import check
from smp.hf.planning.module_plan import Plan, make_plan
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, batch, build, whole, worst

pytest.importorskip("transformers")
CASES = [
    ("Llama", "vocab_parallel"),
    ("Llama", "chunked"),
    ("Qwen2", "chunked"),  # tied
    ("Phi", "vocab_parallel"),  # a head with a bias
    ("Gemma 2", "vocab_parallel"),  # caps its logits
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"num_items_in_batch": torch.tensor(7)},
    {"num_items_in_batch": 7},
    {"shift_labels": True},
    {"ignore_index": 5},
]


class _Largest(TorchDispatchMode):
    """Elements of the largest floating-point tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


def _data(arguments: dict[str, Any]) -> dict[str, Any]:
    data = {**batch(3, rows=4, length=40), **arguments}
    if "shift_labels" in arguments:
        data["shift_labels"] = data["labels"].roll(-3, 1)
    if "ignore_index" in arguments:
        data["labels"] = data["labels"].masked_fill(data["labels"] == -100, arguments["ignore_index"])
    return data


def _observe(model: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for number, arguments in enumerate(ARGUMENTS):
        model.zero_grad()
        out = model(**_data(arguments))
        out.loss.backward()
        seen[f"loss {number}"] = out.loss.detach().view(1)
        seen |= {f"{number} {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        logits = out.logits
    model.zero_grad()
    with torch.no_grad():
        evaluated = model(**_data({}))
    seen |= {"loss of evaluation": evaluated.loss.view(1), "logits of evaluation": evaluated.logits}
    seen["logits without labels"] = model(input_ids=_data({})["input_ids"]).logits.detach()
    return {"seen": seen, "logits": logits}


def _compare(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    results = []
    for family, kind in CASES:
        reference = build(family)
        fresh = copy.deepcopy(reference)
        wanted = _observe(reference)
        for tp in (1, 2) if family == "Llama" else (2,):
            smp.state.reset()
            smp.init({"tensor_parallel_degree": tp})
            model = smp.transform(copy.deepcopy(fresh), loss=kind)
            assert inspect.signature(model.forward) == inspect.signature(reference.forward)
            if tp == 1:  # the head is a unit of its own, as torch's examples have it
                fully_shard(model.lm_head, mesh=smp.state.data_mesh)
                fully_shard(model, mesh=smp.state.data_mesh)
            found = _observe(copy.deepcopy(model) if tp == 2 else model)
            error, where = worst(found["seen"], wanted["seen"])
            if kind == "chunked":
                assert found["logits"] is None
            else:
                error = max(error, worst({"": whole(found["logits"])}, {"": wanted["logits"].detach()})[0])
            results.append((family, kind, tp, error, where))
    return results


def test_losses_equal_hugging_faces() -> None:
    for results in run_distributed(_compare, 2):
        assert len(results) == len(CASES) + 2
        assert all(error <= 1e-5 for *_, error, _ in results), results


def test_a_head_that_is_not_cut_is_refused() -> None:
    import transformers

    bert = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            is_decoder=True,
        )
    )
    whole_head = {"lm_head": "replicate"}
    for model, rows, message in (
        (bert, None, "cls.predictions.decoder is replicate: its rows are not cut over the ranks"),
        (build("Llama"), whole_head, "lm_head is replicate: its rows are not cut over the ranks"),
        (build("Llama"), {"lm_head": "rowwise_split_input"}, "lm_head is rowwise_split_input: its rows are not cut"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(model, "vocab_parallel", 2, make_plan(model, rows, 2, 0))
    check(build("Llama"), "chunked", 2, make_plan(build("Llama"), None, 2, 0))
    check(build("Llama"), "chunked", 1, Plan())


def test_chunks_of_logits_that_a_model_changes_are_refused() -> None:
    for family, number in (
        ("Granite", "logits_scaling"),
        ("Cohere", "logit_scale"),
        ("Gemma 2", "final_logit_softcapping"),
    ):
        model = build(family)
        plan = make_plan(model, None, 2, 0)
        message = rf"ForCausalLM computes between its head and its loss \(config.{number}\); loss='vocab_parallel'"
        with pytest.raises(ConfigError, match=message):
            check(model, "chunked", 2, plan)
        check(model, "vocab_parallel", 2, plan)
    check(build("Gemma 3"), "chunked", 2, make_plan(build("Gemma 3"), None, 2, 0))


def _without_labels(model: Any) -> None:
    """A batch without any label gives Hugging Face's loss, 0 or NaN, and zero gradients."""
    alone = build("Llama")
    labels = torch.full_like(_data({})["labels"], -100)
    for arguments in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": 0}):
        seen = []
        for one in (alone, model):
            one.zero_grad()
            loss = one(input_ids=_data({})["input_ids"], labels=labels, **arguments).loss
            loss.backward()
            seen.append((loss.detach(), *(whole(p.grad) for p in one.parameters())))
        torch.testing.assert_close(seen[1], seen[0], rtol=0.0, atol=0.0, equal_nan=True)


def _memory(rank: int, world_size: int) -> dict[str, int]:
    smp.init({"tensor_parallel_degree": 2})
    largest = {}
    for kind in ("gathered", "vocab_parallel", "chunked"):
        model = smp.transform(build("Llama"), loss=kind)
        with pytest.MonkeyPatch.context() as patch, _Largest() as mode:
            patch.setattr("smp.layers.heads.head.CHUNK_BYTES", {"cpu": 16 * VOCAB // 2 * 4, "cuda": 1})
            model(**_data({})).loss.backward()
        largest[kind] = mode.elements
        _without_labels(model)
    for family, kind, message in (
        ("Gemma 2", "chunked", "Gemma2ForCausalLM computes between its head and its loss"),
        ("Phi", "chunked", "the head has a bias; loss='vocab_parallel' takes one"),
        ("Llama, vocabulary of 97", "chunked", "97 ids are not divisible by tensor_parallel_degree 2"),
        ("Llama", "chunkd", "did you mean chunked"),
    ):
        with pytest.raises(ConfigError, match=message):
            smp.transform(build(family), loss=kind)(**_data({}))
    with pytest.raises(ConfigError, match="without return_dict=False"):
        model(**_data({}), return_dict=False)
    return largest


def test_no_rank_holds_all_logits() -> None:
    for largest in run_distributed(_memory, 2):
        tokens = 4 * 40
        assert largest["gathered"] >= tokens * VOCAB
        assert tokens * VOCAB // 2 <= largest["vocab_parallel"] < tokens * VOCAB
        assert largest["chunked"] < tokens * VOCAB // 2
