"""Models of transformers in which a token sees those after it are refused: by numbers, those that do and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import ConfigError
from smp.hf.run.causality import refuse_two_sided
from tests.distributed import run_distributed
from tests.hf import architectures
from tests.training.any_model_lab import tune_types, write_type

transformers = pytest.importorskip("transformers")
CONFIG_MAPPING = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING

TWO_SIDED: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"is_decoder": False}) for kind in ("bert", "big_bird", "rembert", "roformer", "megatron-bert")),
    *((kind, {"use_bidirectional_attention": True}) for kind in ("gemma", "gemma3_text")),
    ("gemma4_text", {"use_bidirectional_attention": "all"}),
    ("cpmant", {}),
    ("xlm", {}),
    ("xlnet", {}),
]
CAUSAL: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"is_decoder": True}) for kind in ("bert", "big_bird", "rembert")),
    *((kind, {"is_decoder": False}) for kind in ("gpt_neox", "gpt_neox_japanese")),
    ("gemma3_text", {}),
    ("gemma4_text", {"use_bidirectional_attention": "vision"}),
    ("llama", {}),
]


def looks_ahead(model: Any) -> bool:
    """Whether another last token changes the logits of those before it."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(5, 17)[None] % vocabulary
    other = ids.clone()
    other[0, -1] = 3
    with torch.no_grad():
        a, b = (model(input_ids=x, use_cache=False).logits[:, :-1] for x in (ids, other))
    return bool((a - b).abs().max() > 1e-5)


@pytest.mark.parametrize(("kind", "changes"), [*TWO_SIDED, *CAUSAL])
def test_what_looks_ahead_is_refused(kind: str, changes: dict[str, Any]) -> None:
    config = architectures.tiny(CONFIG_MAPPING[kind])
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert looks_ahead(model) == ((kind, changes) in TWO_SIDED)
    if (kind, changes) in TWO_SIDED:
        with pytest.raises(ConfigError, match="a token sees those after it"):
            refuse_two_sided(model)
    else:
        refuse_two_sided(model)


def test_a_prefix_that_is_read_both_ways_is_refused() -> None:
    """PaliGemma's mask follows from token_type_ids, by which its processor calls a whole sample a prefix."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **small, "vocab_size": 64, "head_dim": 8},
        vision_config={"model_type": "siglip_vision_model", **small, "image_size": 28, "patch_size": 14},
        projection_dim=32,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    with pytest.raises(ConfigError, match=r"self_attn\.is_causal is False"):
        refuse_two_sided(model)


def test_a_run_on_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = write_type(tmp_path / "bert", "bert", is_decoder=False)
    words = f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {folder}/logs --seq-length 48 --packing off"
    ((run,),) = run_distributed(tune_types, 1, [f"{words} --micro-batch-size 2 --global-batch-size 8 --train-iters 1"])
    assert "config.json does not set is_decoder to true" in run["refused"]
