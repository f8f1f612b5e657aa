"""Models on the meta device get their weights part by part: the same bits in every layout, and little memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import smp
from smp.checkpoint import CheckpointError
from smp.config import ConfigError
from smp.convert.store import PieceStore
from smp.hf.loading.first_values import FirstValues
from smp.parallel.dtensor_region import local_part
from tests.distributed import run_distributed
from tests.hf.architectures import architectures, tiny
from tests.hf.architectures import build as build_architecture
from tests.hf.families import FAMILIES, batch, build, whole
from tests.hf.first_value_distance import ENOUGH, beyond_chance, bound, distance
from tests.hf.live_memory import Live

transformers = pytest.importorskip("transformers")
LAYOUTS = [(1, 1), (4, 0), (2, 2), (1, 4)]
CASES = ["Qwen3", "Qwen2", "Gemma 3"]  # q/k norms; tied; scaled embeddings, which are a buffer
RENAMED = "mixtral qwen3_moe gpt_oss deepseek_v3 gemma3 falcon_h1 granitemoe jamba"
"""Experts that the folder has one by one, renamed and whole ones; a buffer that a rule of another module computes."""


def _config(family: str) -> Any:
    name, values = FAMILIES[family]
    return getattr(transformers, name)(**values)


def _on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _transformed(config: Any, tp: int, shard: int) -> Any:
    smp.state.reset()
    smp.init({"tensor_parallel_degree": tp, "hybrid_shard_degree": shard})
    model = smp.transform(_on_meta(config), device="cpu")
    assert all(p.is_meta for p in model.parameters())
    if shard != 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=smp.state.data_mesh)
        fully_shard(model, mesh=smp.state.data_mesh)
    return model


def _layouts(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    results = []
    for family in CASES:
        reference = build(family).eval()
        if rank == 0:
            reference.save_pretrained(f"{folder}/{family}", max_shard_size="20KB")
        torch.distributed.barrier()
        wanted = {name: p.detach() for name, p in reference.named_parameters()}
        first: dict[str, torch.Tensor] = {}
        for tp, shard in LAYOUTS:
            model = _transformed(_config(family), tp, shard)
            smp.load_weights(model, f"{folder}/{family}")
            logits = model.eval()(**batch(1)).logits
            torch.testing.assert_close(logits, reference(**batch(1)).logits, rtol=1e-5, atol=1e-6)
            found = {name: whole(p) for name, p in model.named_parameters()}
            assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted), (tp, shard)
            drawn = _drawn(_transformed(_config(family), tp, shard))
            first = first or drawn
            assert all(torch.equal(first[n], drawn[n]) for n in first), (family, tp, shard)
        results.append({name: (float(p.std()), float(p.mean())) for name, p in first.items()})
    return results


def _drawn(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    initer = smp.delayed_param.DelayedParamIniter(model)
    with initer.validate_params_and_buffers_inited():
        model.apply(initer.get_param_init_fn())
        initer.get_post_param_init_fn()(model)
    loss = model(**batch(1)).loss
    assert 4.0 < float(loss.detach()) < 5.2  # log 96 = 4.6
    return {name: whole(p) for name, p in model.named_parameters()}


def test_weights_are_the_same_bits_in_every_layout(tmp_path: Path) -> None:
    for results in run_distributed(_layouts, 4, str(tmp_path)):
        for values in results:
            embedding, norm = values["model.embed_tokens.weight"], values["model.norm.weight"]
            assert embedding[0] == pytest.approx(0.02, rel=0.1) and norm[0] == 0 and norm[1] in (0.0, 1.0)


def _memory(rank: int, world_size: int, folder: str) -> list[tuple[int, int, int]]:
    config = transformers.LlamaConfig(**{**FAMILIES["Llama"][1], "hidden_size": 64, "num_hidden_layers": 8})
    config.num_key_value_heads = 4
    if rank == 0:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    torch.distributed.barrier()
    results = []
    for tp, shard in ((4, 0), (2, 2)):
        for fill in (lambda m: smp.load_weights(m, folder), lambda m: smp.delayed_param.DelayedParamIniter(m).init()):
            model = _transformed(config, tp, shard)
            sizes = [p.numel() * p.element_size() for p in model.parameters()]
            with Live() as mode:
                fill(model)
            own = sum(local_part(p).nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
            results.append((mode.peak, own, max(sizes)))
            norms = 8 * 2 * 64 * 4 + 64 * 4  # which every rank of a tensor-parallel group has whole
            assert own <= sum(sizes) / 4 + norms + 64
    return results


def test_a_rank_holds_its_parts_and_one_tensor(tmp_path: Path) -> None:
    for results in run_distributed(_memory, 4, str(tmp_path)):
        for number, (peak, own, tensor) in enumerate(results):
            flag = number % 2  # drawing: one bool
            assert own < peak <= own + tensor + flag, (peak, own, tensor)


FIRST_VALUES = """
    gpt2 llama modernbert-decoder mamba2 nanochat olmo_hybrid qwen3_5 qwen3_moe qwen3_next vaultgemma youtu
"""
"""Rules that write parameters of other modules, tied tables, decays of gated delta nets and Mamba, experts."""


@pytest.mark.parametrize("kind", FIRST_VALUES.split())
def test_first_values_have_the_distributions_of_from_config(kind: str) -> None:
    model_class = getattr(transformers, architectures()[kind])
    assert beyond_chance(model_class, tiny(model_class.config_class)) == []


def test_the_distance_sees_another_decay() -> None:
    """The logarithms of numbers from 0 to 16 beside those from 0.01: what Qwen 3.5's gated delta nets got before."""
    torch.manual_seed(0)
    wide, right = torch.randn(ENOUGH) * 2.9 + 0.64, torch.empty(ENOUGH).uniform_(0.01, 16).log()
    assert distance(wide, right) > bound(ENOUGH) > distance(right, torch.empty(ENOUGH).uniform_(0.01, 16).log())


def test_what_no_rule_gives_a_value_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(ConfigError, match=r"c_attn.weight: transformers' rules give OpenAIGPTLMHeadModel no first"):
        FirstValues(model).draw("transformer.h.0.attn.c_attn.weight", 1)


def _refused(rank: int, world_size: int, folder: str) -> None:
    smp.init({"tensor_parallel_degree": 2})
    model = smp.transform(_on_meta(_config("Llama")))
    build("Qwen2").save_pretrained(f"{folder}/{rank}")
    with pytest.raises(CheckpointError, match="model.safetensors has no tensor|has no tensor"):
        smp.load_weights(model, f"{folder}/0")
    with pytest.raises(ConfigError, match="no parameter is on the meta device"):
        smp.delayed_param.DelayedParamIniter(build("Llama"))
    initer = smp.delayed_param.DelayedParamIniter(smp.transform(_on_meta(_config("Llama"))))
    with (
        pytest.raises(AssertionError, match="is still on the meta device"),
        initer.validate_params_and_buffers_inited(),
    ):
        pass
    with pytest.raises(ConfigError, match="verify needs the weights"):
        smp.transform(_on_meta(_config("Llama")), verify=True)


def _filled_from_rank_zero(rank: int, world_size: int) -> None:
    """SMP v2's scripts for fine-tuning call DelayedParamIniter on the ranks that had no weights, and not on rank 0."""
    smp.init({"tensor_parallel_degree": 2})
    for family in ("Llama", "GPT-2"):
        wanted = build(family).eval()(**batch(1)).logits
        model = _on_meta(_config(family)) if rank else build(family)
        smp.transform(model, load_state_dict_from_rank0=True)
        if rank:
            initer = smp.delayed_param.DelayedParamIniter(model)
            with initer.validate_params_and_buffers_inited():
                model.apply(initer.get_param_init_fn())
                initer.get_post_param_init_fn()(model)
        torch.testing.assert_close(model.eval()(**batch(1)).logits, wanted, rtol=1e-5, atol=1e-6)


def test_weights_of_rank_zero_stay() -> None:
    run_distributed(_filled_from_rank_zero, 2)


def test_what_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    run_distributed(_refused, 2, str(tmp_path))


def _renamed(rank: int, world_size: int, folder: str) -> None:
    """Also after ``fully_shard``, which gives modules other classes; and what is saved has the names of the folder."""
    for kind in RENAMED.split():
        reference = build_architecture(kind)
        config, wanted = copy.deepcopy(reference.config), reference.state_dict()
        if rank == 0:
            reference.save_pretrained(f"{folder}/{kind}")
        torch.distributed.barrier()
        for tp in (2, 1):
            smp.state.reset()
            smp.init({"tensor_parallel_degree": tp, "hybrid_shard_degree": 2 // tp})
            with torch.device("meta"):
                model = type(reference)(copy.deepcopy(config))
            smp.transform(model)
            fully_shard(model, mesh=smp.state.data_mesh)
            smp.load_weights(model, f"{folder}/{kind}")
            found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
            assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted), (kind, tp)
            model.save_pretrained(f"{folder}/{kind}-{tp}")
            if rank == 0:
                first, again = (load_file(f"{folder}/{name}/model.safetensors") for name in (kind, f"{kind}-{tp}"))
                assert first.keys() == again.keys() and all(torch.equal(first[n], again[n]) for n in first), (kind, tp)


def test_names_that_transformers_changes(tmp_path: Path) -> None:
    run_distributed(_renamed, 2, str(tmp_path))


def _experts_read(rank: int, world_size: int, folder: str) -> int:
    """Bytes of the largest experts' stack, and those that a rank reads of it: its own."""
    reference = build_architecture("mixtral")
    config = copy.deepcopy(reference.config)
    if rank == 0:
        reference.save_pretrained(folder)
    torch.distributed.barrier()
    smp.init({"tensor_parallel_degree": 2})
    with torch.device("meta"):
        model = smp.transform(type(reference)(config))
    read: list[str] = []
    plain = PieceStore.read_into

    def counting(self: PieceStore, name: str, *args: Any) -> None:
        read.append(name)
        plain(self, name, *args)

    PieceStore.read_into = counting  # type: ignore[method-assign]
    smp.load_weights(model, folder)
    return len([name for name in read if ".experts." in name])


def test_a_rank_reads_its_own_experts(tmp_path: Path) -> None:
    layers, experts, matrices = 2, 4, 3
    assert run_distributed(_experts_read, 2, str(tmp_path)) == [layers * experts * matrices // 2] * 2
