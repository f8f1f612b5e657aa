"""mp_rank_TT_PPP/model_optim_rng.pt: made here from the documented layout, since no program writes them any more."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp.checkpoint import CheckpointError
from smp.config import ConfigError, ModelConfig
from smp.convert.formats import open_checkpoint
from smp.convert.hf_config import architecture, resolved, to_hf
from smp.convert.megatron_table import COLUMN_PARALLEL, ROW_PARALLEL, to_args
from smp.models.inventory import inventory

LLAMA = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8}
LLAMA |= {"ffn_hidden_size": 64, "max_position_embeddings": 64, "vocab_size": 99, "make_vocab_size_divisible_by": 4}
GPT = LLAMA | {"num_query_groups": 4, "normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False}
GPT |= {"position_embedding_type": "learned_absolute", "tanh_gelu": True, "untie_embeddings_and_output_weights": False}
MODELS: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt": GPT}
OLD = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {p.name: torch.randn(p.shape, generator=generator) for p in inventory(config)}


def whole_megatron(config: ModelConfig, ours: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Megatron's whole tensors, written down here a second time by what is known of the layout."""
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    assert groups and width
    pad = torch.full((rows - 99, 32), 7.0)
    out = {"embedding.word_embeddings.weight": torch.cat((ours["embedding.weight"], pad))}
    if "positions.weight" in ours:
        out["embedding.position_embeddings.weight"] = ours["positions.weight"]
    if "head.weight" in ours:
        out["output_layer.weight"] = torch.cat((ours["head.weight"], pad))
    for i in range(config.num_layers):
        mine, theirs = f"layers.{i}.", f"decoder.layers.{i}."
        for part in ("weight", "bias"):
            if f"{mine}attention.query.{part}" in ours:
                q, k, v = (ours[f"{mine}attention.{n}.{part}"] for n in ("query", "key", "value"))
                rows_of = []
                for g in range(groups):
                    per = heads // groups
                    rows_of += [q[g * per * width : (g + 1) * per * width]]
                    rows_of += [k[g * width : (g + 1) * width], v[g * width : (g + 1) * width]]
                out[f"{theirs}self_attention.linear_qkv.{part}"] = torch.cat(rows_of)
            pairs = {"attention.output": "self_attention.linear_proj", "mlp.down": "mlp.linear_fc2"}
            pairs |= {"attention_norm": "input_layernorm", "mlp_norm": "pre_mlp_layernorm"}
            if not config.swiglu:
                pairs["mlp.up"] = "mlp.linear_fc1"
            out |= {
                f"{theirs}{b}.{part}": ours[f"{mine}{a}.{part}"]
                for a, b in pairs.items()
                if f"{mine}{a}.{part}" in ours
            }
        if config.swiglu:
            out[f"{theirs}mlp.linear_fc1.weight"] = torch.cat(
                (ours[f"{mine}mlp.gate.weight"], ours[f"{mine}mlp.up.weight"])
            )
    for part in ("weight", "bias"):
        if f"final_norm.{part}" in ours:
            out[f"decoder.final_layernorm.{part}"] = ours[f"final_norm.{part}"]
    return out


def cut(name: str, tensor: torch.Tensor, tp: int, rank: int, gated: bool) -> torch.Tensor:
    """A tensor-parallel rank's part; with SwiGLU it has its part of the gate and its part of up."""
    module, part = name.rsplit(".", 1)
    if module.endswith("mlp.linear_fc1") and gated:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    if module.endswith(COLUMN_PARALLEL):
        return tensor.chunk(tp)[rank].clone()
    if module.endswith(ROW_PARALLEL) and part == "weight":
        return tensor.chunk(tp, dim=1)[rank].contiguous()
    return tensor.clone()


def write_legacy(
    folder: Path, config: ModelConfig, tp: int, pp: int, chunks: int = 1, old: bool = False, **changes: Any
) -> None:
    """All ranks' files, with what else lies in them; ``changes`` to that, None or False leaves out."""
    whole = whole_megatron(config, random_weights(config), 100 + 4 * tp)
    args = to_args(config, tp)
    args.signal, args.iteration = argparse.Namespace(a=1), 5
    per = config.num_layers // (pp * chunks)
    for t in range(tp):
        for p in range(pp):
            content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
            content["rng_state"] = [
                {"random_rng_state": (3, (1, 2), None), "np_rng_state": np.random.RandomState(0).get_state()}
            ]
            content["optimizer"] = {"state": {0: {"exp_avg": torch.ones(3)}}}
            for v in range(chunks):
                first = (v * pp + p) * per
                model: dict[str, Any] = {}
                for name, tensor in whole.items():
                    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
                    if match is None:
                        last = name.startswith(("output_layer", "decoder.final"))
                        if (p, v) == ((pp - 1, chunks - 1) if last else (0, 0)):
                            model[name] = cut(name, tensor, tp, t, config.swiglu)
                    elif first <= int(match[1]) < first + per:
                        local = f"decoder.layers.{int(match[1]) - first}.{match[2]}"
                        model[local] = cut(name, tensor, tp, t, config.swiglu)
                model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
                content["model" if chunks == 1 else f"model{v}"] = nested(model) if old else model
            content = {n: v for n, v in {**content, **changes}.items() if v is not None and v is not False}
            place = folder / (f"mp_rank_{t:02d}_{p:03d}" if pp > 1 else f"mp_rank_{t:02d}")
            place.mkdir(parents=True)
            torch.save(content, place / "model_optim_rng.pt")


def nested(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As models before megatron-core were saved."""
    embedding: dict[str, Any] = {}
    encoder: dict[str, Any] = {}
    language: dict[str, Any] = {"embedding": embedding, "encoder": encoder}
    for name, tensor in model.items():
        first, rest = name.split(".", 1)
        if first == "embedding":
            module, part = rest.split(".")
            embedding[module] = {part: tensor}
        elif first == "output_layer":
            language["output_layer"] = {rest: tensor}
        elif not name.endswith("_extra_state"):
            for new, old in OLD.items():
                rest = rest.replace(f".{new}.", f".{old}.")
            encoder[rest] = tensor
    return {"language_model": language}


@pytest.mark.parametrize("old", [False, True], ids=["core", "before core"])
@pytest.mark.parametrize(("tp", "pp", "chunks"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 4, 1)])
@pytest.mark.parametrize("kind", MODELS)
def test_parts_of_all_ranks_make_the_model(kind: str, tp: int, pp: int, chunks: int, old: bool, tmp_path: Path) -> None:
    config = resolved(**MODELS[kind])
    write_legacy(tmp_path / "iter_0000005", config, tp, pp, chunks, old)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    wanted = random_weights(config)
    with open_checkpoint(tmp_path).weights as weights:
        assert architecture(weights.config) == architecture(config)
        assert set(weights.tensors) == set(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(weights.read(name), tensor), name
        box = torch.empty(7, 5)
        weights.read_into("layers.1.mlp.down.weight", (3, 29), box)  # across the ranks' parts
        assert torch.equal(box, wanted["layers.1.mlp.down.weight"][3:10, 29:34])


def test_a_rank_that_is_missing_and_a_part_that_does_not_fit(tmp_path: Path) -> None:
    config = resolved(**LLAMA)
    write_legacy(tmp_path, config, 2, 2)
    path = tmp_path / "mp_rank_01_001" / "model_optim_rng.pt"
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng.pt is missing"):
        open_checkpoint(tmp_path)
    path.write_bytes(data[:5000])
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/model_optim_rng.pt is damaged or cut off"):
        open_checkpoint(tmp_path)
    content = torch.load(tmp_path / "mp_rank_00_001" / "model_optim_rng.pt", weights_only=False)
    content["model"]["decoder.layers.1.mlp.linear_fc2.weight"] = torch.ones(32, 5)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="linear_fc2.weight is not on all tensor-parallel ranks alike"):
        open_checkpoint(tmp_path)


def test_without_arguments_a_reference_says_how_ranks_cut_the_mlp(tmp_path: Path) -> None:
    """Each rank has [its gate; its up]: taken for one matrix, the rows of the whole are in another order."""
    config = resolved(**LLAMA)
    write_legacy(tmp_path / "bare", config, 2, 1, args=False)
    wanted = random_weights(config)
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps(to_hf(config, "float32")))
    with pytest.raises(ConfigError, match="holds no arguments of Megatron's: --reference FOLDER"):
        open_checkpoint(tmp_path / "bare")
    with pytest.raises(ConfigError, match="--vocab-size 90: --reference .*like has 99 token ids"):
        open_checkpoint(tmp_path / "bare", reference=like, vocab_size=90)
    with open_checkpoint(tmp_path / "bare", reference=like).weights as weights:
        for name, tensor in wanted.items():
            assert torch.equal(weights.read(name), tensor), name


@pytest.mark.parametrize("version", [None, 0, 1.0, "3"])
def test_another_order_of_query_key_and_value_is_refused(version: Any, tmp_path: Path) -> None:
    """Megatron's files before checkpoint_version 2.0; one without it is of version 0."""
    write_legacy(tmp_path, resolved(**LLAMA), 1, 1, checkpoint_version=version)
    with pytest.raises(CheckpointError, match="model_optim_rng.pt has checkpoint_version .* another order"):
        open_checkpoint(tmp_path)


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    config = resolved(**LLAMA)
    write_legacy(tmp_path / "args", config, 1, 1, args=[1, 2])
    with pytest.raises(CheckpointError, match="its args are a list, not arguments of a command line"):
        open_checkpoint(tmp_path / "args")
    scalar = {"embedding.word_embeddings.weight": torch.tensor(1.0)}
    write_legacy(tmp_path / "scalar", config, 1, 1, model=scalar)
    with pytest.raises(CheckpointError, match="scalar: not what Megatron writes"):
        open_checkpoint(tmp_path / "scalar")


def test_the_last_stages_copy_of_a_tied_embedding_must_be_one(tmp_path: Path) -> None:
    config = resolved(**GPT)
    write_legacy(tmp_path, config, 1, 2)
    path = tmp_path / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    first = torch.load(tmp_path / "mp_rank_00_000" / "model_optim_rng.pt", weights_only=False)
    copy = first["model"]["embedding.word_embeddings.weight"].clone()
    content["model"]["output_layer.weight"] = copy
    torch.save(content, path)
    with open_checkpoint(tmp_path).weights as weights:
        assert "head.weight" not in weights.tensors
    copy[3, 5] += 1
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"output_layer.weight differs from embedding.word_embeddings.weight"):
        open_checkpoint(tmp_path)
    del content["model"]["output_layer.weight"]
    content["model"]["decoder.layers.-1.x"] = content["model"]["decoder.layers.0.mlp.linear_fc2.bias"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"decoder.layers.-1.x belongs to nothing"):
        open_checkpoint(tmp_path)
