"""Hugging Face folders to our checkpoints and back."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from smp.checkpoint import CheckpointError
from smp.convert.convert import write
from smp.convert.huggingface.config import read_hf_config
from smp.convert.huggingface.folder import HFTarget, open_hf
from smp.convert.load import load_hf
from smp.convert.smp_format import SmpTarget, SmpWeights
from smp.models.gpt import GPT
from tests.convert.tiny import EXPERTS, TINY, save_theirs, their_model
from tests.fake_group import lone_context

pytest.importorskip("transformers")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(one: Path, other: Path) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name


def assert_same_files(one: Path, other: Path) -> None:
    """As ``assert_same_tensors``, a tensor at a time."""
    from safetensors import safe_open

    def places(folder: Path) -> dict[str, Path]:
        paths = folder.glob("*.safetensors")
        return {name: path for path in paths for name in safe_open(path, "pt").keys()}  # noqa: SIM118

    a, b = places(one), places(other)
    assert a.keys() == b.keys()
    for name in a:
        tensors = [safe_open(place[name], "pt").get_tensor(name) for place in (a, b)]
        assert tensors[0].dtype == tensors[1].dtype and torch.equal(*(t.view(torch.uint8) for t in tensors)), name


def to_smp(source: Path, target: Path, **options: Any) -> Path:
    with open_hf(source, predictions=True) as weights:
        write(weights, SmpTarget(weights, None, source, **options), target, options={}, workers=2)
    return target


def to_hf(source: Path, target: Path, reference: Path | None, **options: Any) -> Path:
    weights = SmpWeights(source)
    write(weights, HFTarget(weights, None, reference, **options), target, options={}, workers=2)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", TINY)
def test_there_and_back_keeps_every_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = save_theirs(kind, tmp_path / "theirs", dtype, shard="20KB")
    ours = to_smp(theirs, tmp_path / "ours", shard_size=30_000)
    back = to_hf(ours, tmp_path / "back", ours / "hf", shard_size=20_000)
    assert len(list(back.glob("model-*.safetensors"))) > 1
    assert_same_tensors(theirs, back)
    assert read_hf_config(back) == read_hf_config(theirs)
    assert (back / "generation_config.json").read_bytes() == (theirs / "generation_config.json").read_bytes()


def test_an_architecture_is_enough_to_know_a_family(tmp_path: Path) -> None:
    theirs = save_theirs("llama3", tmp_path / "theirs")
    content = read_hf_config(theirs)
    del content["model_type"]
    (theirs / "config.json").write_text(json.dumps(content))
    ours = to_smp(theirs, tmp_path / "ours")
    back = to_hf(ours, tmp_path / "back", ours / "hf")
    assert_same_tensors(theirs, back)
    assert read_hf_config(back) == content


SAID_BY = {"qwen3.5-moe": {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}}
"""Of families that compute nothing of their own: the first that computes the same."""


@pytest.mark.parametrize("kind", TINY)
def test_without_their_configuration_an_equivalent_one_is_written(kind: str, tmp_path: Path) -> None:
    import transformers

    theirs = save_theirs(kind, tmp_path / "theirs")
    back = to_hf(to_smp(theirs, tmp_path / "ours"), tmp_path / "back", None)
    inputs = torch.arange(50)[None]
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (theirs, back)]
    for parameter in itertools.chain(*(model.parameters() for model in models)):
        # weights lie where they are in the file, and how a CPU sums depends on where that begins
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        a, b = (model(inputs).logits for model in models)
    assert torch.equal(a, b)
    index = json.loads((theirs / "config.json").read_text()) | SAID_BY.get(kind, {})
    assert (index["model_type"], index["architectures"]) == tuple(
        read_hf_config(back)[key] for key in ("model_type", "architectures")
    )


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_that_lie_in_one_tensor_are_the_same(kind: str, tmp_path: Path) -> None:
    """Transformers 5 can save its own layout, all experts of a layer in one tensor. (Llama 4 has no other.)"""
    theirs = save_theirs(kind, tmp_path / "theirs")
    their_model(kind).save_pretrained(tmp_path / "stacked", save_original_format=False)
    together = ".experts.up_proj" if kind == "nemotron-h-moe" else ".experts.gate_up_proj"
    assert any(name.endswith(together) for name in tensors_of(tmp_path / "stacked"))
    ours = [to_smp(folder, tmp_path / f"{folder.name}-ours") for folder in (theirs, tmp_path / "stacked")]
    a, b = (SmpWeights(folder) for folder in ours)
    assert a.tensors == b.tensors
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name


@pytest.mark.parametrize(
    ("kind", "name"),
    [("kimi-linear-moe", "block_sparse_moe.up_proj"), ("olmo-hybrid", "attention_layer_norm")],
)
def test_names_that_transformers_writes_are_read_as_well(kind: str, name: str, tmp_path: Path) -> None:
    theirs = save_theirs(kind, tmp_path / "theirs")
    their_model(kind).save_pretrained(tmp_path / "saved")
    assert f"model.layers.0.{name}.weight" in tensors_of(tmp_path / "saved")
    a, b = (SmpWeights(to_smp(folder, tmp_path / f"{folder.name}-ours")) for folder in (theirs, tmp_path / "saved"))
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name


def test_layers_that_predict_further_tokens_are_left_out_and_said(tmp_path: Path) -> None:
    theirs = save_theirs("glm4-moe", tmp_path / "theirs")
    tensors = load_file(theirs / "model.safetensors") | {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors, theirs / "model.safetensors")
    with open_hf(theirs) as weights:
        assert "1 tensors of layers of multi-token prediction are left out" in weights.notes


def with_predictions(folder: Path, number: int) -> Path:
    """With so many layers behind the last two, of other numbers than these, and what they have beside their blocks."""
    tensors, content = load_file(folder / "model.safetensors"), read_hf_config(folder)
    hidden, last = content["hidden_size"], "model.layers.1."
    block = {name.removeprefix(last): t for name, t in tensors.items() if name.startswith(last)}
    for layer in range(2, 2 + number):
        made = {name: t + 0.01 * layer for name, t in block.items()}
        made |= {f"{name}.weight": torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        made |= {"eh_proj.weight": torch.randn(hidden, 2 * hidden)}
        made |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        made |= {"shared_head.head.weight": tensors["lm_head.weight"].clone()}
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content | {"num_nextn_predict_layers": number}))
    return folder


@pytest.mark.parametrize(("kind", "number"), [("glm4-moe", 1), ("deepseek-v3", 2)])
def test_layers_that_predict_further_tokens_keep_every_bit(kind: str, number: int, tmp_path: Path) -> None:
    theirs = with_predictions(save_theirs(kind, tmp_path / "theirs"), number)
    ours = to_smp(theirs, tmp_path / "ours")
    weights = SmpWeights(ours)
    assert weights.config.mtp_num_layers == number and "predictions.0.projection.weight" in weights.tensors
    for reference in (ours / "hf", None):
        back = to_hf(ours, tmp_path / f"back-{reference is None}", reference)
        assert_same_tensors(theirs, back)
        assert read_hf_config(back)["num_nextn_predict_layers"] == number
    with open_hf(theirs) as left_out:
        assert left_out.config.mtp_num_layers is None and left_out.notes == [
            f"{sum(name.startswith(('model.layers.2.', 'model.layers.3.')) for name in tensors_of(theirs))} tensors of "
            "layers of multi-token prediction are left out"
        ]


def test_a_model_with_such_layers_is_filled_with_them(tmp_path: Path) -> None:
    theirs = with_predictions(save_theirs("deepseek-v3", tmp_path / "theirs"), 1)
    with lone_context() as context, open_hf(theirs, predictions=True) as weights:
        model = GPT(weights.config, context, device="cpu")
        assert load_hf(model, theirs) == []
        for name in ("predictions.0.projection.weight", "layers.2.mlp.experts.up.weight"):
            filled = model.get_parameter(name)
            assert isinstance(filled, DTensor) and torch.equal(filled.to_local(), weights.read(name))
        more = GPT(replace(weights.config, mtp_num_layers=2), context, device="cpu")
        with pytest.raises(CheckpointError, match="--mtp-num-layers 2: .* has 1 such layers"):
            load_hf(more, theirs)


def test_layers_that_predict_further_tokens_may_be_missing_or_wrong(tmp_path: Path) -> None:
    theirs = save_theirs("glm4-moe", tmp_path / "theirs")
    content = read_hf_config(theirs)
    (theirs / "config.json").write_text(json.dumps(content | {"num_nextn_predict_layers": 1}))
    with open_hf(theirs, predictions=True) as weights:
        assert weights.notes == ["num_nextn_predict_layers is 1, and the files have no such layer"]
    name = "model.layers.2.embed_tokens.weight"
    tensors = load_file(with_predictions(theirs, 1) / "model.safetensors")
    save_file(tensors | {name: tensors[name] + 1}, theirs / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} differs from model.embed_tokens.weight"):
        open_hf(theirs, predictions=True)


def test_of_several_dtypes_the_configuration_names_the_one_it_named(tmp_path: Path) -> None:
    """As files of Qwen 3.5: bf16, but for the decays."""
    theirs = save_theirs("qwen3.5", tmp_path / "theirs", torch.bfloat16)
    tensors = tensors_of(theirs)
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if name.endswith(".A_log")}
    assert len({tensor.dtype for tensor in tensors.values()}) == 2
    save_file(tensors, theirs / "model.safetensors", {"format": "pt"})
    ours = to_smp(theirs, tmp_path / "ours")
    back = to_hf(ours, tmp_path / "back", ours / "hf")
    assert_same_tensors(theirs, back)
    assert read_hf_config(back) == read_hf_config(theirs) and read_hf_config(back)["dtype"] == "bfloat16"
    assert read_hf_config(to_hf(ours, tmp_path / "alone", None))["dtype"] == "float32"


def test_an_expert_bias_keeps_its_dtype(tmp_path: Path) -> None:
    theirs = save_theirs("glm4-moe", tmp_path / "theirs")
    weights = SmpWeights(to_smp(theirs, tmp_path / "ours"))
    write(weights, HFTarget(weights, torch.bfloat16, theirs), tmp_path / "back", options={}, workers=1)
    kinds = {name: tensor.dtype for name, tensor in tensors_of(tmp_path / "back").items()}
    assert kinds.pop("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}
    assert read_hf_config(tmp_path / "back")["dtype"] == "bfloat16"


IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4-scout": (
        "Llama4",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "image_size": 28},
    ),
    "gemma3": (
        "Gemma3",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        | {"image_size": 28, "patch_size": 14},
    ),
}
"""Kind of the text part -> the class that also sees images, and its vision model's configuration."""


@pytest.mark.parametrize("kind", IMAGES)
def test_of_a_model_that_sees_images_the_text_part_is_read(kind: str, tmp_path: Path) -> None:
    import transformers

    name, vision = IMAGES[kind]
    text = their_model(kind)
    config = getattr(transformers, f"{name}Config")(text_config=text.config.to_dict(), vision_config=vision)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    whole.save_pretrained(tmp_path / "whole")
    ours = to_smp(tmp_path / "whole", tmp_path / "ours")
    with open_hf(tmp_path / "whole") as weights:
        (note,) = (note for note in weights.notes if "left out" in note)
    assert "of multi_modal_projector and" in note and "smp trains the text part" in note
    back = tensors_of(to_hf(ours, tmp_path / "back", ours / "hf"))
    saved, front = tensors_of(tmp_path / "whole"), "language_model."
    assert back.keys() == {key.removeprefix(front) for key in saved if key.startswith(front)} and len(saved) > len(back)
    assert all(torch.equal(tensor, saved[front + key]) for key, tensor in back.items())
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(loaded) is type(text) and not any(info.values())


def in_mxfp4(theirs: Path, folder: Path, scales_of: tuple[int, int] = (110, 130)) -> dict[str, torch.Tensor]:
    """A folder like ``theirs`` whose experts are drawn in MXFP4; and what transformers makes of them, by name. The
    range ``scales_of`` is that of the scales; 127 stands for 1."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, generator, exact = tensors_of(theirs), torch.Generator().manual_seed(0), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(*scales_of, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        exact[name] = convert_moe_packed_tensors(blocks, scales)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    content = read_hf_config(theirs) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(content))
    return exact


def test_experts_in_mxfp4_are_read_and_written_as_bf16(tmp_path: Path) -> None:
    theirs = save_theirs("gpt-oss", tmp_path / "theirs", torch.bfloat16)
    exact = in_mxfp4(theirs, tmp_path / "mxfp4")
    with open_hf(tmp_path / "mxfp4") as weights:
        assert "experts in MXFP4 are read as bf16" in weights.notes
        up = torch.empty(2, 9, 21, dtype=torch.bfloat16)
        weights.read_into("layers.1.mlp.experts.up.weight", (3, 5, 7), up)
    wanted = exact["model.layers.1.mlp.experts.gate_up_proj"][3:5, 7:28, 11:29:2]  # (experts, in, every other of out)
    assert torch.equal(up, wanted.transpose(1, 2))
    back = to_hf(to_smp(tmp_path / "mxfp4", tmp_path / "ours"), tmp_path / "back", tmp_path / "mxfp4")
    written = tensors_of(back)
    assert written.keys() == tensors_of(theirs).keys() and "quantization_config" not in read_hf_config(back)
    for name, tensor in exact.items():
        assert written[name].dtype == torch.bfloat16 and torch.equal(written[name], tensor.contiguous()), name


def in_fp8(theirs: Path, folder: Path, block: int) -> dict[str, torch.Tensor]:
    """A folder like ``theirs`` whose matrices but embedding and head are in FP8; and what they stand for, by name."""
    tensors, generator, exact = tensors_of(theirs), torch.Generator().manual_seed(0), {}
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2 and ".layers." in name]:
        weight = tensors[name].float().to(torch.float8_e4m3fn)
        sizes = [-(-n // block) for n in weight.shape]
        scales = 0.1 + torch.rand(*sizes, generator=generator)
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: len(weight), : weight.shape[1]]
        exact[name] = (weight.float() * spread).to(torch.bfloat16)
        tensors |= {name: weight, f"{name}_scale_inv": scales}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    content = read_hf_config(theirs) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(content))
    return exact


@pytest.mark.parametrize("kind", ["deepseek-v3", "llama2"])
def test_weights_in_fp8_are_read_and_written_as_bf16(kind: str, tmp_path: Path) -> None:
    """Blocks of 12 do not divide the matrices, as 128 does not divide DeepSeek's key/value projection of 576 rows."""
    theirs = save_theirs(kind, tmp_path / "theirs", torch.bfloat16)
    exact = in_fp8(theirs, tmp_path / "fp8", 12)
    assert len(exact) > 4
    with open_hf(tmp_path / "fp8") as weights:
        assert "weights in FP8 are read as bf16" in weights.notes
        part = torch.empty(9, 7, dtype=torch.bfloat16)
        weights.read_into("layers.0.attention.output.weight", (5, 6), part)
    assert torch.equal(part, exact["model.layers.0.self_attn.o_proj.weight"][5:14, 6:13])
    back = to_hf(to_smp(tmp_path / "fp8", tmp_path / "ours"), tmp_path / "back", tmp_path / "fp8")
    written = tensors_of(back)
    assert written.keys() == tensors_of(theirs).keys() and "quantization_config" not in read_hf_config(back)
    for name, tensor in exact.items():
        assert written[name].dtype == torch.bfloat16 and torch.equal(written[name], tensor), name


@pytest.mark.parametrize("spoil", ["scales are missing", "weight is missing", "scales of another shape"])
def test_fp8_without_its_scales_is_refused(spoil: str, tmp_path: Path) -> None:
    folder, name = tmp_path / "fp8", "model.layers.0.self_attn.o_proj.weight"
    in_fp8(save_theirs("llama2", tmp_path / "theirs", torch.bfloat16), folder, 12)
    tensors = tensors_of(folder)
    if spoil == "weight is missing":
        del tensors[name]
    elif spoil == "scales are missing":
        del tensors[f"{name}_scale_inv"]
    else:
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}.* and its scales are no matrix in FP8"):
        open_hf(folder)
