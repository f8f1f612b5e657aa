"""peft's LoRA on a transformed model equals LoRA in one process, and leaves in peft's own file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import smp
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf.architectures import build as build_architecture
from tests.hf.families import batch, build, whole, worst

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]


def _adapted(family: str, **options: Any) -> Any:
    """A model with adapters that are not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=8, **{"target_modules": TARGETS, **options})
    torch.manual_seed(3)
    model = peft.get_peft_model(build(family), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def _train(model: Any, rows: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    losses = []
    for step in range(5):
        data = {key: rows(value) for key, value in batch(step, rows=4).items() if key != "attention_mask"}
        loss = model(**data, num_items_in_batch=32).loss * smp.state.dp_size
        loss.backward()
        losses.append(float(smp.state.mean_over_data(loss.detach())))
        smp.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _layouts(rank: int, world_size: int, folder: str) -> list[tuple[Any, ...]]:
    results = []
    for family, layouts in (("Qwen3", [(2, 2), (4, 1)]), ("Llama, one key/value head, tied", [(2, 1)])):
        options = {"target_modules": TARGETS[:-1]} if "tied" in family else {}
        reference = _adapted(family, **options)
        fresh = copy.deepcopy(reference)
        smp.state.reset()
        smp.init({"hybrid_shard_degree": 4})
        whole_batch = _all_rows(reference)
        for tp, shard in layouts:
            smp.state.reset()
            smp.init({"tensor_parallel_degree": tp, "hybrid_shard_degree": shard})
            model = smp.transform(copy.deepcopy(fresh))
            assert type(model) is type(reference)
            if smp.state.dp_size > 1:
                for layer in model.get_base_model().model.layers:
                    fully_shard(layer, mesh=smp.state.data_mesh)
                fully_shard(model, mesh=smp.state.data_mesh)
            losses = _train(model, lambda x: x.chunk(smp.state.dp_size)[smp.state.dp_rank])
            found = {name: whole(p) for name, p in model.named_parameters()}
            error, where = worst(found, {name: p.detach() for name, p in reference.named_parameters()})
            results.append(
                (family, tp, max(abs(a - b) for a, b in zip(losses, whole_batch, strict=True)), error, where)
            )
            saved = f"{folder}/{family[:5]}-{tp}"
            model.save_pretrained(saved)
            if rank == 0:
                reference.save_pretrained(f"{saved}-alone")
            _file_equal(saved, found, rank)
    return results


def _all_rows(model: Any) -> list[float]:
    """The same training on every rank for itself."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    losses = []
    for step in range(5):
        data = {key: value for key, value in batch(step, rows=4).items() if key != "attention_mask"}
        loss = model(**data, num_items_in_batch=32).loss
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _file_equal(folder: str, found: dict[str, torch.Tensor], rank: int) -> None:
    from safetensors.torch import load_file

    saved = load_file(f"{folder}/adapter_model.safetensors")
    names = {n: n.replace(".weight", ".default.weight") if ".lora_" in n else n for n in saved}
    assert saved and all(torch.equal(found[names[n]], tensor) for n, tensor in saved.items())
    assert sum(".lora_" in name for name in saved) == sum(".lora_" in name for name in found)
    if rank == 0:
        alone = load_file(f"{folder}-alone/adapter_model.safetensors")
        assert {n: t.shape for n, t in alone.items()} == {n: t.shape for n, t in saved.items()}
        files = [sorted(path.name for path in Path(f).iterdir()) for f in (folder, f"{folder}-alone")]
        assert files[0] == files[1]


def test_lora_equals_one_process(tmp_path: Path) -> None:
    for results in run_distributed(_layouts, 4, str(tmp_path)):
        assert len(results) == 3
        assert all(loss <= 1e-5 and weights <= 1e-5 for _, _, loss, weights, _ in results), results


def _refused(rank: int, world_size: int) -> None:
    smp.init({"tensor_parallel_degree": 2})
    for options, message in (
        ({"use_dora": True}, "plain LoRA, without variants such as use_dora"),
        ({"lora_dropout": 0.1}, "dropout under tensor parallelism"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"Embedding\): of peft, smp.transform takes LoRA on linear"),
        ({"bias": "all"}, r"adapter default: bias is 'all': smp.transform takes LoraConfig\(bias='none'\)"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper.*: of peft"),
    ):
        with pytest.raises(ConfigError, match=message):
            smp.transform(_adapted("Qwen3", **options))
    late = peft.get_peft_model(smp.transform(build("Qwen3")), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"q_proj became Linear after smp.transform.*get_peft_model first"):
        late(**batch(1))
    smp.state.reset()
    smp.init({"tensor_parallel_degree": 1})
    with pytest.raises(ConfigError, match="bias is 'all'"):  # its file would lack the biases
        smp.transform(_adapted("Qwen3", bias="all"))


def test_what_would_be_wrong_is_refused() -> None:
    run_distributed(_refused, 2)


def _merged(rank: int, world_size: int, folder: str) -> tuple[float, float]:
    smp.init({"tensor_parallel_degree": 2})
    reference = _adapted("Qwen3")
    reference.get_base_model().set_attn_implementation("eager")
    model = smp.transform(copy.deepcopy(reference))
    data = batch(1)
    scores, wanted = (one(**data, output_attentions=True).attentions for one in (model, reference))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(scores, wanted, strict=True))  # of all heads
    with pytest.raises(ConfigError, match="merge without it"):  # peft would assign to .data: no error, no change
        model.merge_and_unload(safe_merge=True)
    sharded = fully_shard(copy.deepcopy(model), mesh=smp.state.data_mesh)
    with pytest.raises(ConfigError, match="save_pretrained writes them"):  # its root may hold whole copies
        sharded.merge_adapter()
    model, reference = model.merge_and_unload(), reference.merge_and_unload()
    error, _ = worst(_weights(model), _weights(reference))
    with pytest.raises(ConfigError, match=r"resize the model before smp.transform"):
        model.resize_token_embeddings(100)
    model.save_pretrained(folder)
    loaded = type(reference).from_pretrained(folder)
    assert _weights(loaded).keys() == _weights(reference).keys() and worst(_weights(loaded), _weights(model))[0] == 0
    return error, float((model(**data).logits - reference(**data).logits).abs().max())


def _merged_inside_fsdp1(rank: int, world_size: int) -> None:
    smp.compat.install()
    smp.init({"tensor_parallel_degree": 1, "hybrid_shard_degree": 2})
    model = smp.transform(_adapted("Qwen3", target_modules=["up_proj", "q_proj"]))
    FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ConfigError, match="save_pretrained writes them"):
        model.merge_adapter()
    alone = smp.transform(_adapted("Qwen3"))
    before = alone(**batch(1)).logits
    after = alone.merge_and_unload(safe_merge=True)(**batch(1)).logits  # nothing is cut, so peft's way works
    assert float((after - before).abs().max()) <= 1e-5 < float((after - build("Qwen3")(**batch(1)).logits).abs().max())


def test_adapters_that_fsdp1_has_flattened_are_not_merged() -> None:
    run_distributed(_merged_inside_fsdp1, 2)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def test_adapters_merge_into_the_cut_weights(tmp_path: Path) -> None:
    for weights, logits in run_distributed(_merged, 2, str(tmp_path)):
        assert weights <= 1e-6 and logits <= 1e-5


def _on_mixers(rank: int, world_size: int) -> dict[str, tuple[float, str]]:
    """Adapters on all linear layers, also those whose mixer reads a parameter of the layer under the adapter."""
    found = {}
    for kind in ("jamba", "qwen3_5", "bamba", "bloom"):
        smp.state.reset()
        smp.init({"tensor_parallel_degree": 2})
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.0, r=4, init_lora_weights=False)
        reference = peft.get_peft_model(build_architecture(kind), config)
        model = smp.transform(copy.deepcopy(reference))
        for one in (reference, model):
            one(**batch(1), use_cache=False).loss.backward()
        wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        found[kind] = worst({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}, wanted)
    return found


def test_adapters_on_all_linear_layers_of_mixers() -> None:
    for found in run_distributed(_on_mixers, 2):
        assert max(error for error, _ in found.values()) <= 1e-5, found
