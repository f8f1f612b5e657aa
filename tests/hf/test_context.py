"""A transformed model over sequences that are cut equals itself over whole sequences in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import smp
from smp.config import ConfigError
from smp.hf.settings import layout_of, read
from tests.distributed import run_distributed
from tests.hf.families import FAMILIES, VOCAB, batch, build, whole, worst

transformers = pytest.importorskip("transformers")
FAST = [
    ("Llama", 2, 2, "p2p", "gathered"),
    ("Mistral, sliding window", 1, 4, "all_gather", "gathered"),
    ("Qwen3", 2, 2, "all_gather", "chunked"),
    ("OLMo 2", 2, 2, "all_gather", "vocab_parallel"),  # all heads on every rank
    ("GPT-NeoX", 1, 2, "p2p", "gathered"),
]
"""Family, tp, cp, cp_comm_type, loss; what is left of four processes reads different rows."""
OTHERS = ("Llama, one", "Llama, vocab", "Gemma 2", "GPT-2", "OPT", "Mixtral", "Qwen2 MoE", "Qwen3 MoE", "OLMoE")
SLOW = [(family, 2, 2, "p2p", "gathered") for family in FAMILIES if not family.startswith(OTHERS)]


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (4, 16), generator=generator)
    # Rows in pairs have equally many labels, or a mean over ranks would not be the mean over tokens.
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) % 5 == 2, -100)}


def _whole_batch(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(**_batch()).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}


def _compare(rank: int, world_size: int, cases: list[tuple[str, int, int, str, str]]) -> list[tuple[Any, ...]]:
    results = []
    for family, tp, cp, comm_type, loss in cases:
        reference = build(family)
        model = copy.deepcopy(reference)
        wanted, gradients = _whole_batch(reference)
        smp.state.reset()
        sequence = family == "Llama"  # cut once more, over the tensor-parallel ranks
        smp.init({"tensor_parallel_degree": tp, "context_parallel_degree": cp, "sequence_parallel": sequence})
        smp.transform(model, cp_comm_type=comm_type, loss=loss)
        fully_shard(model, mesh=smp.state.data_mesh)
        rows = {key: value.chunk(smp.state.dp_size)[smp.state.dp_rank] for key, value in _batch().items()}
        out = model(**{key: smp.cut_sequence(value) for key, value in rows.items()})
        out.loss.backward()
        found = float(smp.state.mean_over_data(out.loss.detach()))
        error, where = worst({name: whole(p.grad) for name, p in model.named_parameters()}, gradients)
        results.append((family, tp, cp, abs(found - wanted) / wanted, error, where))
    return results


def _all_equal(cases: list[tuple[str, int, int, str, str]]) -> None:
    for results in run_distributed(_compare, 4, cases):
        assert len(results) == len(cases)
        assert all(loss <= 1e-5 and error <= 1e-5 for *_, loss, error, _ in results), results


def test_cut_sequences_equal_whole_ones() -> None:
    _all_equal(FAST)


@pytest.mark.slow
def test_more_families_over_cut_sequences() -> None:
    _all_equal(SLOW)


def _changed(family: str, **changes: Any) -> Any:
    config, values = FAMILIES[family]
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**values, **changes}))


_THETA = {"rope_theta": 10000.0}
_ROPES = [
    ("Llama", {"rope_type": "dynamic", "factor": 2.0}, {"max_position_embeddings": 8}),
    (
        "Phi 3",
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        {"original_max_position_embeddings": 14},
    ),
    (
        "Llama",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"max_position_embeddings": 64},
    ),
]
"""Frequencies that follow from the longest position, of which the first two change between 12 and 16 tokens."""


def _long(rank: int, world_size: int) -> list[float]:
    """Rank 1 of two has positions 4 to 11 of 16."""
    errors = []
    for family, rope, changes in _ROPES:
        rope = rope | _THETA | {key: n for key, n in changes.items() if key.startswith("original")}
        torch.manual_seed(5)
        reference = _changed(family, **changes, rope_parameters=rope).train()
        smp.state.reset()
        smp.init({"context_parallel_degree": 2})
        model = fully_shard(smp.transform(copy.deepcopy(reference)), mesh=smp.state.data_mesh)
        _, gradients = _whole_batch(reference)
        model(**{key: smp.cut_sequence(value) for key, value in _batch().items()}).loss.backward()
        errors.append(worst({name: whole(p.grad) for name, p in model.named_parameters()}, gradients)[0])
    return errors


def test_frequencies_that_follow_from_the_length_of_whole_sequences() -> None:
    for errors in run_distributed(_long, 2):
        assert len(errors) == 3 and max(errors) <= 1e-5, errors


def _refused(rank: int, world_size: int) -> None:
    smp.init({"context_parallel_degree": 2})
    for family, message in (("Gemma 2", "not for Gemma2ForCausalLM"), ("GPT-2", "not for GPT2LMHeadModel")):
        with pytest.raises(ConfigError, match=message):
            smp.transform(build(family))
    for family, changes, message in (
        ("Gemma 3", {"use_bidirectional_attention": True}, "layers.0.self_attn.is_causal is False"),
        ("Phi", {"resid_pdrop": 0.1}, "resid_dropout.p is 0.1: dropout under .* context parallelism"),
        ("GPT-NeoX", {"hidden_dropout": 0.1}, "dropout.p is 0.1"),
        ("Llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ):
        with pytest.raises(ConfigError, match=message):
            smp.transform(_changed(family, **changes))
    config = build("Llama").config
    for kind, loss in (("SequenceClassification", "ForSequenceClassificationLoss"), ("TokenClassification", "")):
        classifier = getattr(transformers, f"LlamaFor{kind}")(config)
        with pytest.raises(ConfigError, match=f"LlamaFor{kind} has {loss}.*train causal language models"):
            smp.transform(classifier)
    with pytest.raises(ConfigError, match=r"cp_comm_type='a2a'\): there are p2p, all_gather"):
        smp.transform(build("Llama"), cp_comm_type="a2a")
    model = smp.transform(build("Llama"))
    cut = {key: smp.cut_sequence(value) for key, value in _batch().items()}
    for more, message in (
        ({"attention_mask": batch(1, 4, 8)["attention_mask"]}, "attention_mask: cut sequences are not padded"),
        ({"position_ids": torch.arange(8)[None]}, "position_ids: of cut sequences"),
        ({"input_ids": cut["input_ids"][:, :7], "labels": None}, "7 tokens on each rank"),
        ({"input_ids": None}, "given by name, input_ids= or inputs_embeds="),
    ):
        with pytest.raises(ConfigError, match=message):
            model(**(cut | more))
    with pytest.raises(ConfigError, match="cut sequences go through the whole model"):
        model.model(input_ids=cut["input_ids"])
    with pytest.raises(ConfigError, match="generate with context_parallel_degree 1"):
        model.generate(cut["input_ids"])
    with pytest.raises(ConfigError, match="15 tokens cannot be cut into 2 x 2 chunks.*that can is 16"):
        smp.cut_sequence(torch.zeros(1, 15))
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="attention became eager after smp.transform"):
        other(**cut)
    model(**cut).loss.backward()
    with pytest.raises(ConfigError, match="is not sharded, so each of the 2 data ranks"):
        smp.clip_grad_norm_(model, 1.0)


def test_what_cannot_be_cut_is_refused() -> None:
    run_distributed(_refused, 2)


def test_ranks_of_a_sequence_share_weights() -> None:
    settings, _ = read({"context_parallel_degree": 2, "hybrid_shard_degree": 1})
    with pytest.raises(ConfigError, match="context_parallel_degree 2 does not divide hybrid_shard_degree 1"):
        layout_of(settings, 4)
    layout = layout_of(read({"context_parallel_degree": 2, "tensor_parallel_degree": 2})[0], 8)
    assert (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp) == (1, 2, 2, 2)
