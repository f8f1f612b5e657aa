"""Keys of ``config.json`` that any family may have, beside those of its usual models: biases, scaling of RoPE, ties.
What transformers builds of them is read with the same logits, or refused."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert import tiny
from tests.distributed import run_distributed

pytest.importorskip("transformers")
ORIGINAL = {"original_max_position_embeddings": 16}
KEYS: dict[str, dict[str, Any]] = {
    "attention_bias": {"attention_bias": True},
    "no attention_bias": {"attention_bias": False},
    "mlp_bias": {"mlp_bias": True},
    "no mlp_bias": {"mlp_bias": False},
    "both biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "activation": {"hidden_act": "gelu_pytorch_tanh"},
    "partial": {"partial_rotary_factor": 0.5},
    "one key head": {"num_key_value_heads": 1},
    "short": {"max_position_embeddings": 24},
}
SCALING: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "dynamic with a length": {"rope_type": "dynamic", "factor": 3.0, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn with a factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **ORIGINAL},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
}


def varied(kind: str) -> dict[str, dict[str, Any]]:
    """Settings of a family's tiny model, each with something else in them."""
    given = tiny.TINY[kind][1]
    found = {name: given | keys for name, keys in KEYS.items()}
    rope = given.get("rope_parameters", {})
    if "rope_theta" not in rope:  # no RoPE, or several
        return found
    kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    for name, scaling in SCALING.items():
        length = {"max_position_embeddings": 24 if scaling["rope_type"] == "dynamic" else 128}
        found[name] = given | {"rope_parameters": kept | scaling} | length
    return found


@torch.no_grad()
def outcomes(rank: int, world: int, kinds: list[str], folder: str) -> dict[str, str]:
    """By family and variation: ``equal``, ``refused``, ``theirs`` where transformers has no such model, or how far
    logits are apart."""
    from smp.config import ConfigError, Layout
    from smp.convert.describe import read_architecture
    from smp.convert.huggingface.config import resolved
    from smp.convert.load import load_hf
    from smp.models.gpt import GPT
    from smp.models.micro_batch import MicroBatch
    from smp.parallel.context import build_context

    context, found = build_context(Layout(), "cpu"), {}
    inputs = torch.randint(0, tiny.VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    for kind in kinds:
        for name, settings in varied(kind).items():
            tiny.TINY["varied"] = (tiny.TINY[kind][0], deepcopy(settings))
            try:
                path = tiny.save_theirs("varied", Path(folder) / str(len(found)))
                want = tiny.their_model("varied")(inputs).logits
            except Exception:  # models raise what they like
                found[f"{kind}: {name}"] = "theirs"
                continue
            try:
                ours = GPT(resolved(**(read_architecture(str(path)) or {})), context, device="cpu").eval()
            except ConfigError:
                found[f"{kind}: {name}"] = "refused"
                continue
            load_hf(ours, str(path))
            off = (ours(MicroBatch(inputs)).logits - want).norm(dim=-1) / want.norm(dim=-1)
            # With experts, rounding may send a token to another one.
            most = off.median() if ours.config.num_experts else off.max()
            found[f"{kind}: {name}"] = "equal" if most < 1e-5 else f"{most:.0e}"
    return found


ALL = list(tiny.TINY)


@pytest.mark.parametrize(
    ("kinds", "equal"),
    [
        (["llama3", "olmo2", "qwen3-moe"], 40),
        pytest.param(ALL, 770, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="all"),
    ],
)
def test_what_a_family_may_have_is_read_or_refused(kinds: list[str], equal: int, tmp_path: Path) -> None:
    [found] = run_distributed(outcomes, 1, kinds, str(tmp_path), timeout=1700.0)
    counts = Counter(found.values())
    assert counts.keys() <= {"equal", "refused", "theirs"}, {n: how for n, how in found.items() if how[0].isdigit()}
    assert counts["equal"] >= equal, counts
