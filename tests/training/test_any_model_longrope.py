"""LongRoPE by the length of each text: transformers takes the longest of a micro-batch, or its padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from smp.hf.run.longrope import TextLengths, choose_by_text
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE
from tests.training.any_model_lab import LR, largest_error, plain_loop, tune_types, write_type
from tests.training.tuning_lab import together

transformers = pytest.importorskip("transformers")

LIMIT = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 6.0, 9.0],
    "original_max_position_embeddings": LIMIT,
}
COMMON = (
    f"--seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd --weight-decay 0 "
    "--train-iters 3 --model-implementation transformers"
)


def test_short_texts_beside_long_ones_are_as_they_are_alone() -> None:
    config = transformers.Phi3Config(
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0, "max_position_embeddings": 96},
        **{"original_max_position_embeddings": LIMIT, "rope_parameters": LONGROPE},
    )
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config)
    short, long = torch.arange(5, 5 + LIMIT)[None], torch.arange(5, 35)[None]
    alone = [model(input_ids=ids, use_cache=False).logits[0] for ids in (short, long)]
    lengths = TextLengths()
    choose_by_text(model, lengths)
    lengths.of_tokens = torch.tensor([[LIMIT] * LIMIT + [30] * 30])
    positions = torch.cat((torch.arange(LIMIT), torch.arange(30)))[None]
    packed = model(input_ids=torch.cat((short, long), 1), position_ids=positions, use_cache=False).logits[0]
    torch.testing.assert_close(packed, torch.cat(alone))
    padded = torch.nn.functional.pad(short, (0, 30 - LIMIT))
    for of_padding in (1, LIMIT):
        lengths.of_tokens = torch.tensor([[LIMIT] * LIMIT + [of_padding] * (30 - LIMIT), [30] * 30])
        rows = model(input_ids=torch.cat((padded, long)), use_cache=False).logits
        torch.testing.assert_close(rows[0, :LIMIT], alone[0])
        torch.testing.assert_close(rows[1], alone[1])
    lengths.of_tokens = None
    torch.testing.assert_close(model(input_ids=long, use_cache=False).logits[0], alone[1])


@pytest.mark.parametrize("pack", ["off", "best-fit"])
def test_a_run_equals_a_plain_loop_of_each_text(pack: str, tmp_path: Path) -> None:
    folder = write_type(tmp_path / "phi3", "phi3")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    head = content["hidden_size"] // content["num_attention_heads"]
    factors = {name: LONGROPE[name][:1] * (head // 2) for name in ("short_factor", "long_factor")}
    content |= {"original_max_position_embeddings": LIMIT, "rope_parameters": {**LONGROPE, **factors}}
    file.write_text(json.dumps(content))
    words = f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {folder}/logs {COMMON} --packing {pack}"
    ((alone,),) = run_distributed(tune_types, 1, [words])
    cut = together([rank[0] for rank in run_distributed(tune_types, 2, [f"{words} --tensor-model-parallel-size 2"])])
    columns = [batch.sequence_lengths for step in alone["batches"] for batch in step]
    assert any((of > LIMIT).any() and ((of > 1) & (of <= LIMIT)).any() for of in columns), "of both kinds"
    want = plain_loop(folder, alone["batches"])
    for run in (alone, cut):
        errors = largest_error(run, want)
        assert max(errors.values()) <= TOLERANCE, errors
