"""A line of Megatron's trains; every run says first what model it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp.config import ModelConfig, resolve_model
from smp.models.in_words import in_words
from tests.config.test_megatron_experts import DEEPSEEK_V3
from tests.config.test_megatron_lines import GPT_345M, LLAMA_8B, PIPELINE
from tests.training.flag_runs import run_here


def shrunk(line: str, **values: str) -> str:
    """The line with other values of some flags, and without a data path."""
    words = line.split()
    for name, value in values.items():
        words[words.index("--" + name.replace("_", "-")) + 1] = value
    return " ".join(words)


def test_the_345m_line_trains_megatrons_gpt(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({str(i): i for i in range(97)}))
    line = GPT_345M.replace("--data-path text_document ", "").format(vocab="vocab.json", run="run")
    line = shrunk(line, train_iters="2", lr_decay_iters="200", log_interval="1", eval_iters="1", num_layers="1")
    run = run_here(tmp_path, line, base="--from-megatron")
    assert run.code == 0, run.err
    assert "in this project's flags: --num-layers 1" in run.err and "--fp16 becomes --bf16" in run.err
    assert run.shapes["positions.weight"] == (64, 64) and "head.weight" not in run.shapes
    assert {"layers.0.mlp.up.bias", "layers.0.attention_norm.bias", "final_norm.bias"} <= run.shapes.keys()
    assert run.out.splitlines()[0].startswith(
        "model: 1 blocks of width 64, 4 heads of 16, LayerNorm, 64 learned positions, tanh-GELU MLP of 256, biases, "
        "tied embeddings of 97 token ids, dropout 0.1: "
    )
    total = sum(p.numel() for name, p in run.initial.items() if name != "embedding.weight") + 97 * 64  # without padding
    assert f": {total:,} parameters" in run.out.splitlines()[0]
    assert "run/iter_0000002/manifest.json" in run.files


def test_the_8b_line_trains_on_one_process(tmp_path: Path) -> None:
    line = LLAMA_8B.replace(PIPELINE, "").replace("--train-samples 1953125000", "--train-samples 4").format(run="run")
    schedule = {"lr_decay_samples": "4", "lr_warmup_samples": "0", "global_batch_size": "2", "vocab_size": "97"}
    sizes = {"tensor_model_parallel_size": "1", "profile_step_start": "8", "profile_step_end": "9", "num_layers": "1"}
    line = shrunk(line, **schedule, **sizes, eval_iters="1").replace("--profile ", "")
    run = run_here(tmp_path, line, base="--from-megatron")
    assert run.code == 0, run.err
    assert "4 heads of 16 on 2 of keys and values, RMSNorm, RoPE (base 1e+06), SwiGLU MLP of 128, no biases" in run.out
    assert "logs/metrics.jsonl" in run.files  # --tensorboard-dir


def test_deepseek_v3s_line_trains_on_one_process(tmp_path: Path) -> None:
    one = {"pipeline_model_parallel_size": "1", "expert_model_parallel_size": "1", "global_batch_size": "2"}
    schedule = {"train_samples": "4", "lr_decay_samples": "4", "lr_warmup_samples": "0", "eval_iters": "1"}
    layers = {"num_layers": "2", "moe_layer_freq": "([0]*1+[1]*1)"}
    line = shrunk(DEEPSEEK_V3, **one, **schedule, **layers).replace("--pipeline-model-parallel-layout Et|t|t|tmL", "")
    run = run_here(tmp_path, f"{line} --tensorboard-dir logs", base="--from-megatron")
    assert run.code == 0, run.err
    logged = [json.loads(row) for row in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    assert {"lm loss", "mtp loss", "load balancing loss"} <= set().union(*logged)
    assert run.shapes["layers.1.mlp.experts.gate.weight"] == (16, 32, 64)


def test_a_line_that_cannot_run_writes_nothing(tmp_path: Path) -> None:
    run = run_here(tmp_path, "--num-layers 2 --use-mup", base="--from-megatron")
    assert run.code == 2 and len(run.errors) == 1 and "--use-mup: this architecture does not exist" in run.errors[0]
    assert run.files == set()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"position_embedding_type": "none", "squared_relu": True, "swiglu": False}, "no positions, squared-ReLU"),
        ({"swiglu": False}, "GELU MLP of 512, no biases"),
        ({"add_qkv_bias": True, "window_size": 9}, "heads of 32 that see 9 tokens"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "each with a norm"),
        ({"add_qkv_bias": True}, "biases on queries, keys and values, untied embeddings"),
        ({"rotary_percent": 0.5, "use_rope_scaling": True}, "RoPE on 16 channels (base 10000, llama3 scaling by 8)"),
        ({"parallel_residual": True}, "4 parallel blocks"),
    ],
)
def test_architectures_in_words(settings: dict[str, object], words: str) -> None:
    assert words in in_words(resolve_model(ModelConfig(vocab_size=97, **settings)))  # type: ignore[arg-type]


def test_a_first_start_that_loads_from_where_it_saves_says_what_to_do(tmp_path: Path) -> None:
    for number in (1, 2):  # there is no folder, then an empty one
        run = run_here(tmp_path, "--save run --load run")
        assert run.code == 2 and "--load auto goes on from --save and also makes the first start" in run.errors[0], (
            number
        )
        (tmp_path / "run").mkdir(exist_ok=True)
    other = run_here(tmp_path, "--save other --load run")
    assert other.code == 2 and "--load auto" not in other.errors[0]


def test_a_checkpoint_of_megatrons_names_the_converter(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    run = run_here(tmp_path, "--load megatron")
    assert run.code == 2
    assert "tools/convert_checkpoint.py --load megatron --save FOLDER, then --load FOLDER --finetune" in run.errors[0]
