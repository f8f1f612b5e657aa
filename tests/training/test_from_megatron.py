"""A line of Megatron's trains; every run says first what model it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp.config import ModelConfig, resolve_model
from smp.models.description import describe_model
from tests.config.test_megatron_experts import DEEPSEEK_V3 as WITH_MTP
from tests.config.test_megatron_lines import DEEPSEEK_V3, GPT_175B, GPT_345M, GPT_OSS, LLAMA_8B, MIXTRAL, PIPELINE
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


def test_the_175b_line_steps_through_its_schedule_of_batches(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({str(i): i for i in range(97)}))
    line = GPT_175B.replace("--data-path text_document ", "").format(vocab="vocab.json", run="run")
    line = line.replace("'0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536'", "0:2,0.128k:4,256:8")
    sizes = {"num_layers": "2", "hidden_size": "64", "num_attention_heads": "4", "seq_length": "32"}
    run = {"global_batch_size": "8", "train_iters": "5", "lr_decay_iters": "5", "lr_warmup_fraction": "0.1"}
    ranks = {"tensor_model_parallel_size": "1", "pipeline_model_parallel_size": "1", "max_position_embeddings": "32"}
    found = run_here(tmp_path, shrunk(line, **sizes, **run, **ranks, log_interval="1"), base="--from-megatron")
    assert found.code == 0, found.err
    assert found.records("global batch size") == [2, 2, 4, 8, 8]
    assert found.rates[:3] == pytest.approx([0, 3e-5, 6e-5]) and found.rates[2] > found.rates[3] > found.rates[4]


SMALL = {"hidden_size": "64", "num_attention_heads": "4", "seq_length": "32", "max_position_embeddings": "64"}
ALONE = {"pipeline_model_parallel_size": "1", "num_layers": "2", "global_batch_size": "4", "train_samples": "8"}
PUBLIC = {
    "gpt-oss": (
        GPT_OSS + " --fp8-emulate",  # a CPU has no FP8 products
        {**ALONE, "ffn_hidden_size": "64", "num_query_groups": "2", "moe_ffn_hidden_size": "32", "vocab_size": "97"},
        {"layers.0.attention.sinks": (4,), "layers.1.mlp.router.weight": (4, 64)},
    ),
    "deepseek-v3": (
        DEEPSEEK_V3.replace("--data-path text_document", "--mock-data --vocab-size 97")
        .replace("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {vocab} ", "")
        .replace("[0]*3+[1]*58", "[0]*1+[1]*1"),
        {"num_layers": "2", "global_batch_size": "4", "train_samples": "8", "micro_batch_size": "2"}
        | {"expert_model_parallel_size": "1", "num_experts": "16", "ffn_hidden_size": "64", "moe_router_topk": "4"}
        | {"moe_ffn_hidden_size": "32", "moe_shared_expert_intermediate_size": "32", "q_lora_rank": "24"}
        | {"kv_lora_rank": "16", "qk_head_dim": "8", "qk_pos_emb_head_dim": "8", "v_head_dim": "8"}
        | {"lr_warmup_samples": "4", "eval_iters": "1"},
        {"layers.1.mlp.router.weight": (16, 64), "layers.0.mlp.up.weight": (64, 64)},
    ),
    "mixtral": (
        MIXTRAL,
        {"pipeline_model_parallel_size": "1", "expert_model_parallel_size": "1", "num_layers": "2", "train_iters": "2"}
        | {"global_batch_size": "2", "lr_warmup_iters": "1", "eval_iters": "1", "ffn_hidden_size": "64"},
        {"layers.0.mlp.router.weight": (8, 64), "layers.0.attention.key.weight": (32, 64)},
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_lines_of_mixtures_train_on_one_process(tmp_path: Path, name: str) -> None:
    line, values, shapes = PUBLIC[name]
    run = run_here(tmp_path, shrunk(line.format(run="run"), **SMALL, **values), base="--from-megatron")
    assert run.code == 0, run.err
    assert run.err.count("in this project's flags: ") == 1 and len(run.losses) == 2
    assert {key: run.shapes.get(key) for key in shapes} == shapes


def test_deepseek_v3s_line_with_multi_token_prediction(tmp_path: Path) -> None:
    one = {"pipeline_model_parallel_size": "1", "expert_model_parallel_size": "1", "global_batch_size": "2"}
    schedule = {"train_samples": "4", "lr_decay_samples": "4", "lr_warmup_samples": "0", "eval_iters": "1"}
    layers = {"num_layers": "2", "moe_layer_freq": "([0]*1+[1]*1)"}
    line = shrunk(WITH_MTP, **one, **schedule, **layers).replace("--pipeline-model-parallel-layout Et|t|t|tmL", "")
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
        ({"add_attention_output_bias": True, "add_mlp_bias": True}, "biases on attention's output and on MLPs, untied"),
        ({"rotary_percent": 0.5, "use_rope_scaling": True}, "RoPE on 16 channels (base 10000, llama3 scaling by 8)"),
        ({"parallel_residual": True}, "4 parallel blocks"),
    ],
)
def test_architectures_in_words(settings: dict[str, object], words: str) -> None:
    assert words in describe_model(resolve_model(ModelConfig(vocab_size=97, **settings)))  # type: ignore[arg-type]


def test_a_first_start_that_loads_from_where_it_saves_says_what_to_do(tmp_path: Path) -> None:
    for number in (1, 2):  # there is no folder, then an empty one
        run = run_here(tmp_path, "--save run --load run")
        assert run.code == 2 and "--load auto continues from --save and also makes the first start" in run.errors[0], (
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
