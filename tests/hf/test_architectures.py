"""Causal language models of transformers 5.23 with a plan of transformers', tiny: equal to themselves before at TP 2 x
shard 2, or refused. Not among them: those that transform accepts and that then fail in their forward pass."""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.hf.matrix import measure

pytest.importorskip("transformers")
_EQUAL = """
    afmoe arcee aria_text axk1 cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v3 diffllama dots1
    emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3 gemma3_text glm glm4
    glm4_moe got_ocr2 gpt_neox gpt_oss granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna lfm2 llama mellum minimax
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral moss_transcribe_diarize nanochat
    nemotron olmo olmo2 olmo3 olmoe phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 solar_open vaultgemma youtu
"""
_REFUSED = """
    apertus axk2 beam deepseek_v2 deepseek_v32 doge glm4_moe_lite glm_moe_dsa granite_swa granitemoe_swa hy_v4
    inkling_text llama4 llama4_text longcat_flash mimo_v2_flash minicpm3
"""
EQUAL, REFUSED = _EQUAL.split(), _REFUSED.split()
SLICES = [EQUAL[first : first + 8] for first in range(0, len(EQUAL), 8)]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", SLICES, ids=lambda kinds: kinds[0])
def test_equal_at_tp_2(kinds: list[str]) -> None:
    for found in run_distributed(measure, 4, kinds, ["TP 2"], 1):
        assert list(found) == kinds
        for kind, layouts in found.items():
            errors = layouts["TP 2"]
            assert isinstance(errors, dict), (kind, errors)
            assert max(errors.values()) <= 1e-5, (kind, errors)


@pytest.mark.slow
def test_refused_at_tp_2() -> None:
    for found in run_distributed(measure, 4, REFUSED, ["TP 2"], 1):
        for kind, layouts in found.items():
            assert isinstance(layouts["TP 2"], str), (kind, layouts)
            assert "\n" not in layouts["TP 2"]
