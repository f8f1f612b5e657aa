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
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe
    cohere_compass_text cpmant ctrl cwm data2vec-text deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama
    doge dots1 dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
    falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj
    granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder
    jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash
    mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mixtral mllama modernbert-decoder moshi moss_transcribe_diarize mpt mvp
    nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3
    phi4_multimodal phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rembert roberta
    roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma
    whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2 zaya
"""
EQUAL = _EQUAL.split()
SLICES = [EQUAL[first : first + 8] for first in range(0, len(EQUAL), 8)]
PAGE = ROOT / architecture_table.PAGE


def test_the_documentation_names_them() -> None:
    page = (ROOT / "docs" / "transform.md").read_text()
    equal = re.findall(r"^\| equal \| (.*) \|$", page, re.MULTILINE)
    assert [line.split() for line in equal] == [EQUAL]


def test_weights_that_are_read_from_outside_of_their_module() -> None:
    """By a mixer of its convolution, and by a method beside the forward pass, which a layer calls of its child."""
    for found in run_distributed(measure, 4, ["qwen3_next", "gemma3n_text"], ["TP 2"], 1):
        for kind in ("qwen3_next", "gemma3n_text"):
            errors = found[kind]["TP 2"]
            assert isinstance(errors, dict)
            assert max(errors.values()) <= 1e-5, (kind, errors)


def test_the_table_agrees() -> None:
    """The generated page says of each type what the lists say, and holds no error above 1e-5."""
    page = PAGE.read_text(encoding="utf-8")
    rows, reasons = rows_in(page)
    table = page.partition("| type |")[2].partition("\n\n")[0]
    assert list(rows) == re.findall(r"^\| ([\w-]+) \| ", table, re.MULTILINE), "also those whose last cells are empty"
    assert all(list(cells) == list(architecture_table.ALL) for cells in rows.values())
    for kind, cells in rows.items():
        numbers = [float(text.rstrip("*")) for text in cells.values() if text[:1].isdigit() and text[-1] != "%"]
        assert all(number <= 1e-5 for number in numbers), (kind, cells)
        assert (cells["TP 2"][:1].isdigit()) == (kind in EQUAL), (kind, cells)
        unsaid = {column for column, text in cells.items() if text in ("refused", "not run")}
        assert unsaid == reasons.get(kind, {}).keys(), (kind, cells)


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
            cells = architecture_table.lines_of(kind, layouts)[0]
            known = {layout: rows[kind][layout] for layout in layouts if rows[kind][layout]}
            assert {layout: _numbers_as_one(cells[layout]) for layout in known} == {
                layout: _numbers_as_one(text) for layout, text in known.items()
            }


def _numbers_as_one(row: str) -> str:
    return re.sub(r"\d+e-\d+\*?", "equal", row)
