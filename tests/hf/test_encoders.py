"""Encoder and vision models by rows of this project: outputs and all gradients equal those of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import smp
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf.families import whole, worst

transformers = pytest.importorskip("transformers")
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"vocab_size": 96, "max_position_embeddings": 32, **_SIZES, **_NO_DROPOUT}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
WHISPER = {
    **{"vocab_size": 96, "num_mel_bins": 8, "d_model": 32, "max_source_positions": 12, "max_target_positions": 16},
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    **{"dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
BART = {
    **{"vocab_size": 96, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0},
    **{name: value for name, value in WHISPER.items() if name.startswith(("encoder_", "decoder_"))},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
SHARDED = ("ViT", "CLIP vision", "SigLIP vision", "SigLIP 2 vision", "MAE", "DINOv2", "DINOv3")
"""Vision models whose loss is a mean over rows: also at TP 2 with FSDP2 over two data ranks."""
VIT = {"image_size": 16, "patch_size": 8, "num_labels": 5, **_SIZES, **_NO_DROPOUT}


def _bert(kind: str, **values: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < torch.tensor([[10], [7]])).long()
    labels = torch.tensor([1, 0]) if "Sequence" in kind else ids.masked_fill(mask == 0, -100)
    model = getattr(transformers, kind)(transformers.BertConfig(**BERT, **values))
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _vit() -> tuple[Any, dict[str, torch.Tensor]]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    return model, {"pixel_values": pixels, "labels": torch.tensor([1, 4])}


def _clip() -> tuple[Any, dict[str, torch.Tensor]]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    config = transformers.CLIPVisionConfig(image_size=16, patch_size=8, **_SIZES)
    return transformers.CLIPVisionModel(config), {"pixel_values": pixels}


def _siglip() -> tuple[Any, dict[str, torch.Tensor]]:
    """Its head is torch's attention, which reads the weights of its last layer by itself."""
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    config = transformers.SiglipVisionConfig(image_size=16, patch_size=8, **_SIZES)
    return transformers.SiglipVisionModel(config), {"pixel_values": pixels}


def _siglip2() -> tuple[Any, dict[str, torch.Tensor]]:
    """It takes patches, of images of their own shapes."""
    patches = torch.randn(2, 4, 192, generator=torch.Generator().manual_seed(0))
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(patch_size=8, num_patches=4, **_SIZES))
    shapes, mask = torch.tensor([[2, 2], [1, 3]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    return model, {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _dino(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    sizes = {"image_size": 16, "patch_size": 8, **_SIZES}
    if kind == "3, by default":
        return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes)), {}
    if kind == "3":  # the gated MLP of the large ones
        sizes |= {"num_register_tokens": 2, "use_gated_mlp": True, "pos_embed_rescale": None}
        config = transformers.DINOv3ViTConfig(**sizes)
        return transformers.DINOv3ViTModel(config), {"pixel_values": pixels}
    config = transformers.Dinov2Config(**sizes, mlp_ratio=2, num_labels=5, use_swiglu_ffn=kind == "giant")
    return transformers.Dinov2ForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([1, 4])}


def _two_towers(kind: str) -> tuple[Any, dict[str, Any]]:
    """Texts and images, by the loss between all of them."""
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    text = _SIZES | {"vocab_size": 96, "max_position_embeddings": 16, "projection_size": 32}
    vision = _SIZES | {"image_size": 16, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, projection_dim=16)
    ids = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    model = getattr(transformers, f"{kind}Model")(config)
    return model, {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


def _mae() -> tuple[Any, dict[str, torch.Tensor]]:
    """Which patches it leaves out follows from the noise."""
    of_decoder = {f"decoder_{name}": value for name, value in _SIZES.items()}
    sizes = {"image_size": 16, "patch_size": 8, "mask_ratio": 0.5, **_SIZES, **_NO_DROPOUT, **of_decoder}
    generator = torch.Generator().manual_seed(0)
    pixels, noise = torch.randn(2, 3, 16, 16, generator=generator), torch.rand(2, 4, generator=generator)
    return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes)), {
        "pixel_values": pixels,
        "noise": noise,
    }


def _t5(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < torch.tensor([[10], [7]])).long()
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if kind == "gated" else {}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **gated, decoder_start_token_id=0))
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :6].contiguous()}


def _bart() -> tuple[Any, dict[str, torch.Tensor]]:
    """With a bias of logits, which is a buffer."""
    ids = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < torch.tensor([[10], [7]])).long()
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
    model.final_logits_bias.copy_(torch.linspace(-1, 1, 96))
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :6].contiguous()}


def _whisper() -> tuple[Any, dict[str, torch.Tensor]]:
    sound = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(1))
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
    return model, {"input_features": sound, "labels": labels}


def _observe(model: Any, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = model.train()(**data)
    logits = out.logits if "logits" in out else out.image_embeds if "image_embeds" in out else out.pooler_output
    loss = out.loss if "loss" in out else (logits * torch.linspace(-1, 1, logits.shape[-1])).sum(-1).mean()
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"the loss": loss.detach().view(1), "the logits": logits.detach(), **gradients}


def _compare(rank: int, world_size: int) -> list[tuple[str, int, float, str]]:
    makers = {
        "BERT, masked": lambda: _bert("BertForMaskedLM"),
        "BERT, classes": lambda: _bert("BertForSequenceClassification"),
        "ViT": _vit,
        "CLIP vision": _clip,
        "SigLIP vision": _siglip,
        "SigLIP 2 vision": _siglip2,
        "CLIP": lambda: _two_towers("CLIP"),
        "SigLIP": lambda: _two_towers("Siglip"),
        "MAE": _mae,
        "DINOv2": lambda: _dino("2"),
        "DINOv2, giant": lambda: _dino("giant"),
        "DINOv3": lambda: _dino("3"),
        "T5": lambda: _t5("relu"),
        "T5, gated, head of its own": lambda: _t5("gated"),
        "BART": _bart,
        "Whisper": _whisper,
    }
    results = []
    for name, make in makers.items():
        torch.manual_seed(2)
        reference, data = make()
        fresh = copy.deepcopy(reference)
        wanted = _observe(reference, data)
        for tp in (2, 4):
            smp.state.reset()
            smp.init({"tensor_parallel_degree": tp})
            model = smp.transform(copy.deepcopy(fresh))
            assert any(done.style == "colwise" for done in model.smp_report)
            results.append((name, tp, *worst(_observe(model, data), wanted)))
            if name in SHARDED and tp == 2:
                fully_shard(model.zero_grad() or model, mesh=smp.state.data_mesh)
                rows = {key: value.chunk(2)[smp.state.dp_rank] for key, value in data.items()}
                found = _observe(model, rows)
                found["the loss"] = smp.state.mean_over_data(found["the loss"])
                found["the logits"] = wanted["the logits"]  # a rank has those of its rows
                results.append((name, 0, *worst(found, wanted)))
    with pytest.raises(ConfigError, match="config.pos_embed_rescale is 2.0: noise .* to None"):
        smp.transform(_dino("3, by default")[0].train())
    with pytest.raises(ConfigError, match="the loss of BertForMaskedLM is ForMaskedLMLoss"):
        smp.transform(_bert("BertForMaskedLM", tie_word_embeddings=False)[0], loss="vocab_parallel")
    return results


def test_encoders_equal_one_process() -> None:
    for results in run_distributed(_compare, 4):
        assert len(results) == 32 + len(SHARDED)
        assert not [result for result in results if not result[2] <= 1e-5]


def _texts(model: Any, data: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """By the likeliest token, beams, drawing, and without a cache."""
    texts = []
    for way in ({}, {"num_beams": 3}, {"do_sample": True}, {"use_cache": False}):
        torch.manual_seed(4)
        prompt = {name: value for name, value in data.items() if name != "labels"}
        texts.append(model.eval().generate(**prompt, max_new_tokens=8, **{"do_sample": False, **way}))
    return texts


def _steps(model: Any, data: dict[str, torch.Tensor], rows: Any) -> list[float]:
    """Norms of four steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    norms = []
    for _ in range(4):
        model.train()(**{name: rows(value) for name, value in data.items()}).loss.backward()
        norms.append(float(smp.clip_grad_norm_(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _encoder_decoders(rank: int, world_size: int, folder: str) -> list[tuple[str, int, float, str]]:
    results = []
    makers = {"T5": lambda: _t5("relu"), "T5, gated": lambda: _t5("gated"), "BART": _bart, "Whisper": _whisper}
    for name, make in makers.items():
        torch.manual_seed(2)
        reference, data = make()
        fresh = copy.deepcopy(reference)
        smp.state.reset()
        smp.init({"tensor_parallel_degree": 4})  # every rank has all rows
        texts, norms = _texts(reference, data), _steps(reference, data, lambda rows: rows)
        weights = {n: p.detach() for n, p in reference.named_parameters()}
        for tp in (2, 4):
            smp.state.reset()
            smp.init({"tensor_parallel_degree": tp})
            model = smp.transform(copy.deepcopy(fresh))
            assert all(torch.equal(a, b) for a, b in zip(_texts(model, data), texts, strict=True)), (name, tp)
            if smp.state.dp_size > 1:
                fully_shard(model, mesh=smp.state.data_mesh)
            found = _steps(model, data, lambda rows: rows.chunk(smp.state.dp_size)[smp.state.dp_rank])
            assert found == pytest.approx(norms, rel=1e-5), (name, tp)
            trained = {n: whole(p) for n, p in model.named_parameters()}
            results.append((name, tp, *worst(trained, weights)))
            model.save_pretrained(f"{folder}/{name} {tp}")
            torch.distributed.barrier()
            loaded = type(reference).from_pretrained(f"{folder}/{name} {tp}")
            assert all(torch.equal(trained[n], p) for n, p in loaded.named_parameters())
    return results


@pytest.mark.slow
def test_encoder_decoders_write_train_and_are_saved(tmp_path: Path) -> None:
    for results in run_distributed(_encoder_decoders, 4, str(tmp_path)):
        assert len(results) == 8 and all(error <= 1e-5 for *_, error, _ in results), results
