"""Sequence parallelism in transformed models: between blocks a rank has some of the tokens, and nothing changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import smp
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf import architectures
from tests.hf.families import FAMILIES, batch, build, gradients, whole, worst

pytest.importorskip("transformers")
FAST = [("Qwen3", 2), ("Llama, one key/value head, tied", 4), ("OLMo 2", 2), ("Phi", 2)]
"""q/k norms; shared heads; all heads on every rank; biases of rows, attention and MLP side by side."""
REFUSED = ("OPT",)
SLOW = [(family, 2) for family in FAMILIES if family not in REFUSED]


def _compare(rank: int, world_size: int, cases: list[tuple[str, int]]) -> list[tuple[Any, ...]]:
    results = []
    for family, tp in cases:
        reference = build(family)
        model = copy.deepcopy(reference)
        smp.state.reset()
        smp.init({"tensor_parallel_degree": tp, "sequence_parallel": True, "hybrid_shard_degree": 0})
        smp.transform(model)
        lengths: list[int] = []
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        layers[1].register_forward_pre_hook(lambda _, args, lengths=lengths: lengths.append(args[0].shape[1]))
        if tp == 2:
            fully_shard(model, mesh=smp.state.data_mesh)
            model.gradient_checkpointing_enable()
        data = {key: value[:, :8] for key, value in batch(3).items()}  # the same on both data ranks
        for one in (reference, model):
            for _ in range(2):  # gradients accumulate
                one(**data).loss.backward()
        found = {name: whole(p.grad) for name, p in model.named_parameters()}
        error, where = worst(found, {name: p.grad for name, p in reference.named_parameters()})
        assert set(lengths) == {8 // tp}, lengths
        model.eval()
        prompt = data["input_ids"][1:, :5]
        texts = [
            m.eval().generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None) for m in (model, reference)
        ]
        results.append((family, tp, error, where, bool((texts[0] != texts[1]).any())))
    return results


def _all_equal(cases: list[tuple[str, int]]) -> None:
    for results in run_distributed(_compare, 4, cases):
        assert len(results) == len(cases)
        assert all(error <= 1e-5 and not differs for *_, error, _, differs in results), results


def test_gradients_and_text_are_those_of_one_process() -> None:
    _all_equal(FAST)


@pytest.mark.slow
def test_more_families_with_cut_tokens() -> None:
    _all_equal(SLOW)


ON_ALL_TOKENS = "qwen3_moe qwen3_5 deepseek_v2 deepseek_v3 jamba gpt_oss nemotron_h gemma3 llama4_text bloom ernie xglm"
"""Experts and routers, a gated delta net, latent attention, mixers, sinks, a tower beside the decoder, fused heads, a
block of blocks, matrices that are a layer's own children."""


def _blocks_on_all_tokens(rank: int, world_size: int) -> dict[str, tuple[float, str]]:
    found = {}
    for kind in ON_ALL_TOKENS.split():
        reference = architectures.build(kind)
        model = copy.deepcopy(reference)
        smp.state.reset()
        smp.init({"tensor_parallel_degree": 2, "sequence_parallel": True})
        smp.transform(model)
        model.gradient_checkpointing_enable()
        data = {name: value[:, :8] for name, value in batch(3).items()}
        for one in (reference, model):
            one(**data, use_cache=False).loss.backward()
        wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        found[kind] = worst({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}, wanted)
    return found


def test_blocks_that_compute_on_all_tokens() -> None:
    for found in run_distributed(_blocks_on_all_tokens, 2):
        assert max(error for error, _ in found.values()) <= 1e-5, found


def _others(rank: int, world_size: int) -> float:
    smp.init({"tensor_parallel_degree": 2, "sequence_parallel": True})
    with pytest.raises(ConfigError, match=r"layers.\*.fc1 \(Linear\) has columns that are cut and no rowwise layer"):
        smp.transform(untouched := build("OPT"))
    assert not hasattr(untouched, "smp_report")
    assert all(type(parameter) is torch.nn.Parameter for parameter in untouched.parameters())
    part = {"model.layers.*.mlp.down_proj": "replicate", "model.layers.*.mlp.up_proj": "colwise_gather_output"}
    with pytest.raises(ConfigError, match=r"layers.\*.mlp \(LlamaMLP\) has columns that are cut and no rowwise layer"):
        smp.transform(build("Llama"), rows=part, verify=False)
    experts = smp.transform(build("Mixtral"))
    with pytest.raises(ConfigError, match="MixtralTopKRouter is called from outside of its block"):
        experts.model.layers[0].mlp.gate(torch.zeros(4, 32))
    model = smp.transform(build("Llama"), loss="chunked")
    with pytest.raises(ConfigError, match=r"hidden states \(2, 9, 32\): 2 ranks do not divide the length"):
        model(input_ids=batch(1)["input_ids"][:, :9])
    with pytest.raises(ConfigError, match="output_hidden_states: with sequence_parallel"):
        model(input_ids=batch(1)["input_ids"], output_hidden_states=True)
    for frozen in (model.model.layers[0], model.model.layers[1].mlp):  # gathers all tokens of some: no error of torch's
        frozen.eval()
        with pytest.raises(ConfigError, match=r"sequence_parallel: layers\..* and the first layer is not: call train"):
            model(input_ids=batch(1)["input_ids"])
        model.train()
    model.zero_grad()
    return worst(gradients(model, 3), gradients(build("Llama"), 3))[0]


def test_what_is_not_as_usual_is_refused_and_the_chunked_loss_works() -> None:
    assert max(run_distributed(_others, 2)) <= 1e-5
