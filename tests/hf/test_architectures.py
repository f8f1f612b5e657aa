"""Causal language models of transformers 5.23, tiny: equal to themselves before in every layout, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.hf import architecture_table
from tests.hf.architecture_table import rows_in
from tests.hf.matrix import LAYOUTS, measure

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
_EQUAL = """
    afmoe arcee aria_text axk1 bailing_hybrid bamba cohere cohere2 cohere2_moe cohere_compass_text cwm
    deepseek_v3 deepseek_v4 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo
    flint gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe got_ocr2 gpt-sw3 gpt_neox gpt_oss granite granitemoe
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    inkling2_text internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama mellum
    minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral moss_transcribe_diarize nanochat
    nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text seed_oss
    smollm3 solar_open starcoder2 vaultgemma youtu
"""
_REFUSED = """
    apertus axk2 beam deepseek_v2 deepseek_v32 doge dots3_note dots3_note_text gemma3n_text gemma4 glm4_moe_lite
    glm_moe_dsa granite_swa granitemoe_swa hy_v4 inkling_text llama4 llama4_text longcat_flash mimo_v2_flash
    minicpm3
"""
EQUAL, REFUSED = _EQUAL.split(), _REFUSED.split()
SLICES = [EQUAL[first : first + 8] for first in range(0, len(EQUAL), 8)]
PAGE = ROOT / architecture_table.PAGE


def test_the_documentation_names_them() -> None:
    page = (ROOT / "docs" / "transform.md").read_text()
    equal, refused = re.findall(r"^\| (?:equal|refused) \| (.*) \|$", page, re.MULTILINE)
    assert (equal.split(), refused.split()) == (EQUAL, REFUSED)


def test_a_mixer_that_reads_the_weight_of_its_convolution() -> None:
    """And a module with a method beside its forward pass that reads weights is refused, by name."""
    for found in run_distributed(measure, 4, ["qwen3_next", "gemma3n_text"], ["TP 2"], 1):
        errors = found["qwen3_next"]["TP 2"]
        assert isinstance(errors, dict)
        assert max(errors.values()) <= 1e-5, errors
        assert "model.layers.0.altup: Gemma3nTextDecoderLayer calls its " in str(found["gemma3n_text"]["TP 2"])


def test_the_table_agrees() -> None:
    """The generated page says of each type what the lists say, and holds no error above 1e-5."""
    page = PAGE.read_text(encoding="utf-8")
    rows, reasons = rows_in(page)
    assert len(rows) >= 100
    for kind, row in rows.items():
        cells = row.strip("| ").split(" | ")[1:]
        numbers = [float(text) for text in cells if text[:1].isdigit()]
        assert all(number <= 1e-5 for number in numbers), row
        at_tp_2 = "equal" if cells[1][:1].isdigit() else cells[1]
        listed = "equal" if kind in EQUAL else "refused" if kind in REFUSED else None
        assert listed in (None, at_tp_2) and (listed or at_tp_2 != "refused"), row
        assert ("refused" in row or "not run" in row) == bool(reasons.get(kind)), row


@pytest.mark.slow
@pytest.mark.parametrize("kinds", SLICES, ids=lambda kinds: kinds[0])
def test_as_the_table_says(kinds: list[str]) -> None:
    """In all layouts, with ten steps of training."""
    rows, _ = rows_in(PAGE.read_text(encoding="utf-8"))
    for found in run_distributed(measure, 4, kinds, list(LAYOUTS), 10, timeout=3600.0):
        assert list(found) == kinds
        for kind, layouts in found.items():
            assert isinstance(layouts["TP 2"], dict), (kind, layouts)
            errors = [error for value in layouts.values() if isinstance(value, dict) for error in value.values()]
            assert max(errors) <= 1e-5, (kind, layouts)
            row = architecture_table.lines_of(kind, layouts)[0]
            assert _numbers_as_one(row) == _numbers_as_one(rows[kind])


def _numbers_as_one(row: str) -> str:
    return re.sub(r"\d+e-\d+", "equal", row)


@pytest.mark.slow
def test_refused_at_tp_2() -> None:
    for found in run_distributed(measure, 4, REFUSED, ["TP 2"], 1):
        for kind, layouts in found.items():
            assert isinstance(layouts["TP 2"], str), (kind, layouts)
            assert "\n" not in layouts["TP 2"]
