"""Models on the meta device get their weights part by part: the same bits in every layout, and little memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.checkpoint import CheckpointError
from smp.config import ConfigError
from smp.hf.delayed import _check_rules
from tests.distributed import run_distributed
from tests.hf.families import FAMILIES, batch, build, whole

transformers = pytest.importorskip("transformers")
LAYOUTS = [(1, 1), (4, 0), (2, 2), (1, 4)]
CASES = ["Qwen3", "Qwen2", "Gemma 3"]  # q/k norms; tied; scaled embeddings, which are a buffer


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


class _Live(TorchDispatchMode):
    """Bytes of tensors on the CPU that were made while it is entered, at most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and out.device.type == "cpu":
            storage = out.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.seen:
                self.seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


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
            with _Live() as mode:
                fill(model)
            results.append((mode.peak, sum(sizes), max(sizes)))
    return results


def test_a_rank_holds_its_parts_and_one_tensor(tmp_path: Path) -> None:
    for results in run_distributed(_memory, 4, str(tmp_path)):
        for peak, model, tensor in results:
            norms = 0.03 * model  # whole on every rank of a tensor-parallel group
            assert model / 4 <= peak <= model / 4 + tensor + norms, (peak, model, tensor)


def test_rules_that_reach_into_children_are_found() -> None:
    for config, reaches in (("NanoChatConfig", True), ("GPT2Config", True), ("Qwen3Config", False)):
        model = _on_meta(getattr(transformers, config)(**({"num_hidden_layers": 1} | {"vocab_size": 96})))
        if reaches:
            with pytest.raises(ConfigError, match="PreTrainedModel gives first values from outside"):
                _check_rules(model)
        else:
            _check_rules(model)


def _refused(rank: int, world_size: int, folder: str) -> None:
    smp.init({"tensor_parallel_degree": 2})
    model = smp.transform(_on_meta(_config("Llama")))
    build("Qwen2").save_pretrained(f"{folder}/{rank}")
    with pytest.raises(CheckpointError, match="model.safetensors has no tensor|has no tensor"):
        smp.load_weights(model, f"{folder}/0")
    with pytest.raises(ConfigError, match="no parameter is on the meta device"):
        smp.delayed_param.DelayedParamIniter(build("Llama"))
    with pytest.raises(ConfigError, match="GPT2PreTrainedModel gives first values from outside"):
        smp.delayed_param.DelayedParamIniter(smp.transform(_on_meta(_config("GPT-2"))))
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
    for family in ("Llama", "GPT-2"):  # the second's rules are refused where they are needed
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
