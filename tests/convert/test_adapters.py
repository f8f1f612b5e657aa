"""Adapters in peft's format and merged ones: what is read, what is refused, and to which precision. No peft needed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.local import LocalFolder
from smp.config import ConfigError, ModelConfig
from smp.config.command_line.command import DamageError, exit_code
from smp.convert.huggingface.config import resolved
from smp.convert.huggingface.more_families import FAMILIES
from smp.convert.peft.adapters import CONFIG, TENSORS, Adapter, MergedWeights, linear_modules
from smp.convert.peft.read import read_adapters
from smp.convert.peft.write import write_adapters
from smp.convert.store import Stored
from smp.convert.weights import Weights
from smp.models.inventory import inventory
from tests.layers.whole import draw

MODEL = resolved(
    num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=9
)
LLAMA = FAMILIES["llama"]


def drawn(names: Sequence[str], rank: int = 3, scale: float = 2.0, model: ModelConfig = MODEL) -> dict[str, Adapter]:
    shapes = {p.name: p.shape for p in inventory(model)}
    out = {}
    for seed, name in enumerate(names):
        rows, columns = shapes[f"{name}.weight"]
        out[name] = Adapter(draw(rank, columns, seed=seed), draw(rows, rank, seed=100 + seed), scale)
    return out


ADAPTERS = drawn(["layers.0.attention.query", "layers.1.attention.query", "layers.1.mlp.down"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapters(LocalFolder(tmp_path), ADAPTERS, MODEL, LLAMA, dropout=0.1, base="base")
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


def test_what_was_written_is_read(folder: Path) -> None:
    found, dropout = read_adapters(folder, MODEL, LLAMA)
    assert found.keys() == ADAPTERS.keys() and dropout == 0.1
    for name, adapter in ADAPTERS.items():
        assert torch.equal(found[name].a, adapter.a) and torch.equal(found[name].b, adapter.b)
        assert found[name].scale == adapter.scale


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lora_alpha": "absent"}, "lora_alpha is null, not a number"),
        ({"lora_alpha": "6"}, 'lora_alpha is "6", not a number'),
        ({"lora_dropout": None}, "lora_dropout is null, not a number"),
        ({"lora_dropout": 1.5}, "lora_dropout 1.5 must be at least 0 and below 1"),
        ({"alpha_pattern": [3]}, "alpha_pattern is no object"),
        ({"alpha_pattern": {"(q": 3}}, 'alpha_pattern "(q": '),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern is null, not a number"),
        ({"use_dora": True}, "has no magnitude, and use_dora is true"),
        (
            {"modules_to_save": ["lm_head"]},
            'modules_to_save is ["lm_head"], and the only module that is trained whole here is a reward',
        ),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is [1, 2], and only LoRA and DoRA"),
        ({"of_tomorrow": {"x": 1}}, "of_tomorrow is"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights too"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"peft_type": "LOHA"}, "is not of a LoRA adapter"),
    ],
)
def test_what_an_adapter_does_beside_plain_lora_is_refused(folder: Path, changes: dict[str, Any], why: str) -> None:
    edit(folder, **changes)
    with pytest.raises((ConfigError, CheckpointError)) as error:
        read_adapters(folder, MODEL, LLAMA)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_row_norms_are_written_read_and_merged(tmp_path: Path) -> None:
    """DoRA: what was written is read; a file without use_dora, or with norms of another matrix, is refused; and merged
    rows have the norms, of whole rows whatever region is read."""
    norms = {name: 1 + draw(len(m.b), seed=9).abs() for name, m in ADAPTERS.items()}
    adapters = {name: replace(m, magnitude=norms[name]) for name, m in ADAPTERS.items()}
    write_adapters(LocalFolder(tmp_path), adapters, MODEL, LLAMA, dropout=0.0, base="base")
    found, _ = read_adapters(tmp_path, MODEL, LLAMA)
    for name, adapter in found.items():
        assert adapter.magnitude is not None and torch.equal(adapter.magnitude, norms[name])
    base = Given({p.name: draw(*p.shape, seed=7) for p in inventory(MODEL)})
    merged, part = MergedWeights(base, found), torch.empty(3, 5)
    for name, norm in norms.items():
        whole = merged.read(f"{name}.weight")
        torch.testing.assert_close(whole.norm(dim=1), norm)
        merged.read_into(f"{name}.weight", (2, 4), part)
        torch.testing.assert_close(part, whole[2:5, 4:9])
    edit(tmp_path, use_dora=False)
    with pytest.raises(CheckpointError, match="has a magnitude, and use_dora is false"):
        read_adapters(tmp_path, MODEL, LLAMA)
    edit(tmp_path, use_dora=True)
    tensors = load_file(tmp_path / TENSORS)
    first = next(key for key in tensors if "magnitude" in key)
    save_file({**tensors, first: torch.ones(3)}, tmp_path / TENSORS)
    with pytest.raises(CheckpointError, match=r"has shape \[3\], the matrix has 16 rows"):
        read_adapters(tmp_path, MODEL, LLAMA)


def test_settings_that_change_nothing_are_taken(folder: Path) -> None:
    more = {"use_dora": False, "layer_replication": None, "loftq_config": {}, "init_lora_weights": "gaussian"}
    edit(folder, megatron_core="megatron.core", qalora_group_size=16, eva_config={"rho": 2}, **more)
    assert read_adapters(folder, MODEL, LLAMA)[0].keys() == ADAPTERS.keys()


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 7},
        {r"layers\.1\..*": 5},
        {r"layers\.(0|7)\.self_attn\.q_proj": 5, "q_proj": 8},
        {"model.layers.1.mlp.down_proj": 9},
        {"proj": 4, "down_proj": 8},
    ],
)
def test_patterns_of_alpha_choose_as_peft_does(folder: Path, patterns: dict[str, float]) -> None:
    theirs = pytest.importorskip("peft.utils.other").get_pattern_key
    edit(folder, lora_alpha=1, alpha_pattern=patterns)
    for name, adapter in read_adapters(folder, MODEL, LLAMA)[0].items():
        module = next(module for module, found in linear_modules(MODEL, LLAMA).items() if name in found)
        assert adapter.alpha == pytest.approx(patterns.get(theirs(patterns, module), 1)), module


def test_damage_is_told_from_a_disk_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(why: str) -> int:
        with pytest.raises((CheckpointError, DamageError), match=why) as met:
            read_adapters(folder, MODEL, LLAMA)
        return exit_code(met.value)

    def fail(self: Any, name: str) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "reader", fail)
        assert code(f"{TENSORS} cannot be read: Input/output error") == 1
    os.truncate(folder / TENSORS, (folder / TENSORS).stat().st_size - 9)
    assert code(f"{TENSORS} is damaged or cut off") == 1
    (folder / TENSORS).unlink()
    assert code(f"{TENSORS} is missing") == 2
    os.truncate(folder / CONFIG, 30)
    assert code(f"{CONFIG} is damaged or cut off") == 1


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({FIRST.format("A"): None}, "layers.0.self_attn.q_proj has no A"),
        ({FIRST.format("B"): None}, "layers.0.self_attn.q_proj has no B"),
        ({FIRST.format("A"): torch.ones(16)}, "shapes [16] and [16, 3], the matrix is [16, 16]: it belongs to another"),
        ({FIRST.format("B"): torch.ones(16, 2)}, "shapes [3, 16] and [16, 2]"),
        ({FIRST.format("A"): torch.ones(0, 16), FIRST.format("B"): torch.ones(16, 0)}, "shapes [0, 16]"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.weight": torch.ones(2)}, "is neither A nor B"),
    ],
)
def test_tensors_of_another_form_are_named(folder: Path, changes: dict[str, Any], why: str) -> None:
    tensors = load_file(folder / TENSORS) | changes
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / TENSORS)
    with pytest.raises(CheckpointError) as error:
        read_adapters(folder, MODEL, LLAMA)
    assert why in str(error.value)


@pytest.mark.parametrize("form", ["lora_A.weight", "base_layer.weight", "weight", "lora_embedding_A"])
@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_what_changes_the_output_matrix_or_the_embedding_is_refused_in_words(
    folder: Path, module: str, form: str
) -> None:
    save_file(load_file(folder / TENSORS) | {f"base_model.model.{module}.{form}": torch.ones(2, 2)}, folder / TENSORS)
    with pytest.raises(ConfigError, match=rf"it changes {module}, .* of blocks only: merge it .* \(merge_and_unload\)"):
        read_adapters(folder, MODEL, LLAMA)


def test_an_adapter_of_a_deeper_model_is_refused(folder: Path) -> None:
    shallow = resolved(
        num_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=9
    )
    with pytest.raises(CheckpointError, match=r"model.layers.1.* is no linear layer of this model"):
        read_adapters(folder, shallow, LLAMA)


def test_an_object_store_takes_an_adapter() -> None:
    pytest.importorskip("fsspec")
    store = open_folder("memory://adapters/run/adapter")
    for _ in range(2):  # the second replaces the first
        write_adapters(store, ADAPTERS, MODEL, LLAMA, dropout=0.0, base="base")
    assert sorted(store.names()) == [CONFIG, TENSORS]
    assert json.loads(store.read(CONFIG))["r"] == 3


class Given(Weights):
    """Weights that are there already."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.config, self.notes, self.values = MODEL, [], values
        self.tensors = {name: Stored(tuple(value.shape), value.dtype) for name, value in values.items()}

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        part = tuple(slice(o, o + n) for o, n in zip(offsets, out.shape, strict=True))
        out.copy_(self.values[name][part])

    def fingerprint(self) -> Any:
        return "given"


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_a_merge_rounds_once_and_any_region_of_it_is_the_same(dtype: torch.dtype | None) -> None:
    base = {p.name: draw(*p.shape, seed=7).bfloat16() for p in inventory(MODEL)}
    merged = MergedWeights(Given(base), ADAPTERS, dtype)
    kind = dtype or torch.bfloat16
    for name, value in base.items():
        adapter = ADAPTERS.get(name.removesuffix(".weight"))
        exact = value.double()
        if adapter is not None:
            exact = exact + adapter.scale * adapter.b.double() @ adapter.a.double()
        got = merged.read(name)
        assert got.dtype == merged.tensors[name].dtype == kind
        nearest = exact.to(kind)
        close = (got.double() - exact).abs() <= (nearest.double() - exact).abs() + 1e-5 * exact.abs().max()
        assert close.all(), name
        if value.ndim == 2:
            part = torch.empty(3, 5, dtype=kind)
            merged.read_into(name, (2, 4), part)
            torch.testing.assert_close(part, got[2:5, 4:9])


def test_a_merge_is_of_one_model_and_one_adapter() -> None:
    base = Given({p.name: torch.ones(p.shape) for p in inventory(MODEL)})
    with pytest.raises(CheckpointError, match=r"layers.5.mlp.up.weight belongs to another model"):
        MergedWeights(base, {"layers.5.mlp.up": ADAPTERS["layers.1.mlp.down"]})
    with pytest.raises(CheckpointError, match=r"of layers.0.mlp.up.weight has shapes .* the matrix is \[32, 16\]"):
        MergedWeights(base, {"layers.0.mlp.up": ADAPTERS["layers.1.mlp.down"]})
    swapped = {n: Adapter(m.a.flip(0), m.b.flip(1), m.scale) for n, m in ADAPTERS.items()}  # the same sums
    prints = [MergedWeights(base, adapters).fingerprint() for adapters in (ADAPTERS, ADAPTERS, swapped)]
    assert prints[0] == prints[1] != prints[2], "an interrupted merge does not go on with another adapter"
