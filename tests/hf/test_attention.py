"""16-bit models on a CPU attend in 32 bits; fp32 models keep their bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import smp
from tests.distributed import run_distributed
from tests.hf.families import batch, build, whole

pytest.importorskip("transformers")


def _gradients(model: Any) -> torch.Tensor:
    model(**batch(1)).loss.backward()
    return torch.cat([whole(p.grad).float().flatten() for p in model.parameters()])


def _compare(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    smp.init({})
    alone = build("Qwen3")
    exact = _gradients(copy.deepcopy(alone).double())
    kept = torch.equal(_gradients(smp.transform(copy.deepcopy(alone))), _gradients(copy.deepcopy(alone)))
    alone = alone.bfloat16()
    model = smp.transform(copy.deepcopy(alone))
    seen = set()
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.add(query.dtype)
        return attention(query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        found = _gradients(model)
    wanted = _gradients(alone)
    ids = batch(1)["input_ids"]
    lower = torch.full((1, 1, ids.shape[1], ids.shape[1]), torch.finfo(torch.bfloat16).min).triu(1).bfloat16()
    with torch.no_grad():
        causal = [model(ids, attention_mask=mask).logits for mask in (None, lower.expand(len(ids), -1, -1, -1))]
    double = copy.deepcopy(build("Qwen3")).double()
    with torch.no_grad():
        kept &= torch.equal(smp.transform(copy.deepcopy(double))(ids).logits, double(ids).logits)
    texts = [m.eval().generate(batch(1)["input_ids"][1:], max_new_tokens=4, do_sample=False) for m in (alone, model)]
    alone.save_pretrained(f"{folder}/alone")
    model.save_pretrained(f"{folder}/smp")
    eager = build("Qwen3")
    eager.set_attn_implementation("eager")
    smp.transform(eager)
    return {
        "kept": kept,
        "mask": float((causal[0] - causal[1]).abs().max()),
        "seen": seen,
        "errors": [float((g - exact).norm() / exact.norm()) for g in (found, wanted)],
        "shapes": [text.shape for text in texts],
        "report": str(model.smp_report[-1]),
        "eager": eager.config._attn_implementation,
    }


def test_16_bits_on_a_cpu(tmp_path: Path) -> None:
    (found,) = run_distributed(_compare, 1, str(tmp_path))
    assert found["kept"] and found["seen"] == {torch.float32} and found["eager"] == "eager"
    assert found["mask"] <= 1e-2, found  # a floating mask of the model's dtype
    assert found["errors"][0] <= found["errors"][1], found  # no coarser than 16 bits all through
    assert found["shapes"][0] == found["shapes"][1]
    assert "attention in 32 bits" in found["report"]
    configs = [(tmp_path / name / "config.json").read_bytes() for name in ("alone", "smp")]
    assert configs[0] == configs[1]
