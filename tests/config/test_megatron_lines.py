"""--from-megatron: each flag of the table has an answer, and public lines become the model that Megatron trains."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from smp.config import Config, ConfigError, ModelConfig, load_config, resolve, resolve_model
from smp.config.batch import BatchSizes
from smp.config.command_line.cli import read_values
from smp.config.command_line.entry_points import PRETRAIN
from smp.config.command_line.fields import settings
from smp.config.megatron.table import DEFAULTS, REQUIRED, ROWS, TABLE, answer_of, fate_of
from smp.config.megatron.translate import translate
from smp.convert.huggingface.config import architecture
from smp.convert.megatron.table import from_args
from smp.models.presets import PRESETS

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64"
BASE = f"{SIZES} --micro-batch-size 2 --lr 1e-4 --train-iters 10 --vocab-size 100 --mock-data"
FLAGS = {setting.flag for setting in settings().values()}
PARSER: dict[str, tuple[str, str, list[str], str]] = json.loads(
    Path(__file__).with_name("megatron_parser.json").read_text()
)
"""See ``record_megatron_parser``."""
OTHER_ARITIES = {
    "--moe-aux-loss-coeff": ("1", "+"),
    "--moe-router-load-balancing-type": ("1", "+"),
    "--window-size": ("+", "1"),
    "--step-batch-size-schedule": ("+", "1"),
}
"""One for all layers and kinds; a window as older versions took it, too; and pairs with or without quotes."""
OTHER_DEFAULTS = {
    "--split": "None",  # becomes 969, 30, 1 where there is --data-path, as here
    "--yarn-beta-fast": "None",  # read beside Megatron's own YaRN, which is refused
    "--yarn-beta-slow": "None",
    "--lr-warmup-samples": "0",  # read beside --train-samples only
    # asked for beside --experimental-attention-variant dsa
    **dict.fromkeys(("--dsa-indexer-n-heads", "--dsa-indexer-head-dim", "--dsa-indexer-topk"), "None"),
    "--dsa-indexer-loss-coeff": "None",
}
"""Defaults of Megatron's parser that are not what it trains with."""
LACKING = {
    "--moe-router-score-function": {"sqrtsoftplus"},
    "--exp-avg-dtype": {"fp16"},
    "--exp-avg-sq-dtype": {"fp16"},
}
"""Choices that are refused."""
SWITCHES = {setting.flag for setting in settings().values() if setting.type is bool}


def resolved(line: str, processes: int = 1) -> Config:
    return resolve(load_config(translate(shlex.split(line), processes).argv, PRESETS), processes)


def refusal(line: str, processes: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        translate(shlex.split(line), processes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_a_value(flag: str, value: str = "2") -> str:
    return f"{flag} {value}" if ROWS[flag].arities[flag] else flag


def test_every_flag_of_the_table_has_one_row_and_an_answer() -> None:
    flags = [flag for row in TABLE for flag in row.arities]
    assert len(flags) == len(set(flags)) > 700
    assert all(answer_of(flag) for flag in flags if ROWS[flag].fate != "same")
    assert answer_of("--hidden-size") is None and answer_of("--hiden-size") is None


def test_every_flag_of_megatrons_parser_is_in_the_table_with_its_number_of_values() -> None:
    assert len(PARSER) > 850 and sorted(PARSER.keys() - ROWS.keys()) == []
    others = {flag: (ROWS[flag].arities[flag], arity) for flag, (arity, *_) in PARSER.items()}
    others = {flag: pair for flag, pair in others.items() if pair[0] != pair[1]}
    assert others == OTHER_ARITIES


@pytest.mark.parametrize("flag", [flag for flag in ROWS if fate_of(flag) == "same"])
def test_what_is_the_same_is_taken_as_by_megatrons_parser(flag: str) -> None:
    """Number and type of its values, each of its choices but those that are named here; and it is in our parser."""
    arity, kind, choices, _ = PARSER[flag]
    negated = flag not in FLAGS
    setting = settings()[flag.removeprefix("--no-" if negated else "--").replace("-", "_")]
    if setting.type is bool:
        assert arity == ""
    elif flag not in OTHER_ARITIES:
        assert arity == ("+" if setting.many else "1")
    if kind in ("int", "float") and flag != "--rampup-batch-size":  # words here, three numbers in both
        assert setting.type in ({"int": (int, float), "float": (float,)}[kind])
    if choices:
        assert set(choices) - set(setting.choices) == LACKING.get(flag, set())
    value = (choices or list(setting.choices) or [{int: "2", float: "0.5"}.get(setting.type, "x")])[0]
    words = [flag, *([] if setting.type is bool else [value])]
    assert read_values(words, PRETRAIN, "").keys() == {setting.name}


@pytest.mark.parametrize("flag", [flag for flag in ROWS if fate_of(flag) == "same"])
def test_what_is_the_same_has_megatrons_default_or_the_translation_spells_it_out(flag: str) -> None:
    negated = flag not in FLAGS
    setting = settings()[flag.removeprefix("--no-" if negated else "--").replace("-", "_")]
    default = PARSER[flag][3]
    if setting.name in (*REQUIRED, "micro_batch_size", "lr"):
        assert default == "None" and setting.flag in refusal("--mock-data")
    elif flag in OTHER_DEFAULTS:
        assert default == OTHER_DEFAULTS[flag]
    elif setting.type is bool:
        ours = DEFAULTS.get(setting.name, str(setting.default).lower()) == "true"
        assert (ours is not negated) == (default == "True")
    else:
        ours = DEFAULTS.get(setting.name, str(setting.default))
        numbers = setting.type in (int, float) and "None" not in (ours, default)
        assert (float(ours) == float(default)) if numbers else ours == default


def test_a_load_without_a_checkpoint_is_told_to_be_an_error() -> None:
    line = f"{BASE} --load a --save b"
    assert "it is an error when --load a has no checkpoint" in translate(line.split(), 1).notes[0]
    for flag in ("--exit-on-missing-checkpoint", "--no-exit-on-missing-checkpoint"):
        found = translate(f"{line} {flag}".split(), 1)
        assert flag in found.argv and len(found.notes) == 1
    assert len(translate(f"{BASE} --load a --save a".split(), 1).notes) == 1


def test_a_flag_whose_name_is_here_with_another_meaning_is_refused() -> None:
    assert "where Megatron's is in all layers" in refusal(f"{BASE} --qk-l2-norm")


def test_what_flags_become_are_flags_of_this_project() -> None:
    words = [word for row in TABLE for text in (row.words, *row.values.values()) for word in text.split()]
    assert {word for word in words if word.startswith("--")} <= FLAGS
    same = {flag for flag in ROWS if fate_of(flag) == "same"}
    assert {flag for flag in same if flag not in FLAGS and "--" + flag.removeprefix("--no-") not in SWITCHES} == set()


def test_all_that_is_refused_is_refused_at_once_with_its_answer() -> None:
    flags = [flag for flag in ROWS if fate_of(flag) == "refused"]
    message = refusal(f"{BASE} {' '.join(with_a_value(flag, 'strange') for flag in flags)}")
    assert [flag for flag in flags if flag not in message or ROWS[flag].answer not in message] == []
    assert len(flags) > 300


def test_all_that_changes_nothing_is_left_out_with_one_note() -> None:
    flags = [flag for flag in ROWS if fate_of(flag) == "left out"]
    plain, line = translate(BASE.split(), 1), f"{BASE} {' '.join(map(with_a_value, flags))}"
    translation = translate(line.split(), 1)
    assert translation.argv == plain.argv
    note, _ = translation.notes
    assert note.startswith(f"note: {len(flags)} flags of Megatron's change nothing here and are left out: ")
    assert all(flag in note for flag in flags)


def values_of(flag: str) -> list[str]:
    """Values to try: each that a row names, or some of the setting's type."""
    row, setting = ROWS[flag], settings().get(flag.removeprefix("--").replace("-", "_"))
    if not row.arities[flag] or row.values:
        return list(row.values) or [""]
    return [] if setting is None else [{int: "2", float: "0.5"}.get(setting.type, "".join(setting.choices[:1]) or "x")]


@pytest.mark.parametrize(
    "flag", [f for f, row in ROWS.items() if row.values or fate_of(f) in ("same", "becomes", "derived")]
)
def test_what_is_translated_or_kept_shows_in_the_line(flag: str, tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.json"
    vocab.write_text(json.dumps({"a": 0, "b": 1}))
    special = {
        "--vocab-file": str(vocab),
        "--tokenizer-type": "NullTokenizer",
        "--window-size": "7,0",
        "--batch-size": "4",
    }
    base = [*BASE.split(), *(["--position-embedding-type", "rope"] if flag.startswith("--rotary") else [])]
    base += ["--qk-layernorm", "--normalization", "RMSNorm"] if flag == "--no-weight-decay-cond-type" else []
    plain = translate(base, 1)
    for value in [special[flag]] if flag in special else values_of(flag) or ["2"]:
        try:
            translation = translate([*base, flag, *([value] if value else [])], 1)
        except ConfigError as error:
            assert flag in str(error)  # it lacks something, such as --save
            continue
        names = flag, ROWS[flag].words or flag  # what it becomes may be without effect
        left = any(name in note for note in translation.notes[:-1] for name in names)
        changed = translation.argv != plain.argv
        default = {"adam", "none", "auto", "linear", "learned_absolute", "no_shard"}
        kept = flag in base or value in default or fate_of(flag) == "derived"
        assert left or changed or kept, f"{flag} {value} is taken in silence"


GPT_345M = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 "
    "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 "
    "--data-path text_document --vocab-file {vocab} --merge-file merges.txt --split 949,50,1 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --distributed-backend nccl --save {run} --load {run}"
)
"""Megatron's public example of 345 million parameters, but for its sizes and paths."""

PIPELINE = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
LLAMA_8B = (
    "--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --kv-channels 16 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 "
    "--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 "
    "--min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc "
    "--empty-unused-memory-level 1 --tensor-model-parallel-size 2 "
    + PIPELINE
    + "--context-parallel-size 1 --sequence-parallel "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 --split 99,1,0 "
    "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 "
    "--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6 "
    "--ckpt-format torch_dist --distributed-timeout-minutes 60 --save {run} --load {run} --tensorboard-dir logs "
)
HYBRID = (
    "--use-mcore-models --hybrid-layer-pattern MMM*MMM*MMM*MMM* --spec megatron.core.models.hybrid.hybrid_layer_specs "
    "hybrid_stack_spec --hidden-size 1024 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--ffn-hidden-size 4096 --kv-channels 128 --squared-relu --untie-embeddings-and-output-weights --init-method-std "
    "0.02 --position-embedding-type none --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear "
    "--normalization RMSNorm --bf16 --seq-length 64 --max-position-embeddings 64 --train-samples 8000 "
    "--lr-decay-style WSD --lr-decay-samples 8000 --lr-warmup-samples 400 --lr-wsd-decay-style minus_sqrt "
    "--lr-wsd-decay-samples 1600 --micro-batch-size 1 --global-batch-size 8 --lr 8e-4 --min-lr 8e-6 --weight-decay "
    "0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --eval-interval 400 --eval-iters 5 --mock-data "
    "--vocab-size 1000 --no-mmap-bin-files --num-workers 2 --no-create-attention-mask-in-dataloader "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 1 --ddp-num-buckets 1 --attention-backend flash --ckpt-format torch_dist --load "
    "ck --save ck --save-interval 1000 --log-interval 5 --log-params-norm --log-num-zeros-in-grad --log-throughput "
    "--log-progress --tensorboard-dir tb --distributed-timeout-minutes 10 --exit-duration-in-mins 55 "
    "--disable-gloo-process-groups "
)
"""examples/training_scripts/train_hybrid.sh, but for its data and paths."""
NANO = (
    "--moe-router-score-function sigmoid --moe-grouped-gemm --num-experts 128 --moe-router-topk 6 "
    "--moe-aux-loss-coeff 1e-4 --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias "
    "--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-shared-expert-intermediate-size 3712 "
    "--moe-permute-fusion --moe-flex-dispatcher-backend hybridep --moe-token-dispatcher-type flex "
    "--moe-hybridep-num-sms 32 --moe-router-fusion --num-workers 1 --disable-gloo-process-groups --ckpt-format "
    "torch_dist --load ck --save ck --save-interval 500 --save-retain-interval 2000 --ckpt-fully-parallel-save "
    "--ckpt-fully-parallel-load --async-save --use-persistent-ckpt-worker --ckpt-assume-constant-structure "
    "--squared-relu --no-mmap-bin-files --distributed-timeout-minutes 10 --exit-duration-in-mins 1430 "
    "--no-create-attention-mask-in-dataloader --overlap-grad-reduce --overlap-param-gather "
    "--tensor-model-parallel-size 1 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--pipeline-model-parallel-size 1 --use-distributed-optimizer --high-priority-stream-groups ep --ddp-num-buckets "
    "24 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation --hybrid-layer-pattern "
    "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME --spec megatron.core.models.hybrid.hybrid_layer_specs "
    "hybrid_stack_spec --hidden-size 2688 --num-attention-heads 32 --group-query-attention --num-query-groups 2 "
    "--mamba-num-heads 64 --untie-embeddings-and-output-weights --init-method-std 0.0173 --position-embedding-type "
    "none --ffn-hidden-size 1856 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --train-samples "
    "122070313 --lr-decay-style WSD --lr-warmup-samples 1024000 --lr-decay-samples 122070313 --lr-wsd-decay-style "
    "minus_sqrt --lr-wsd-decay-samples 18310547 --tokenizer-type NullTokenizer --vocab-size 131072 --mock-data "
    "--distributed-backend nccl --micro-batch-size 1 --global-batch-size 768 --lr 1.2e-3 --min-lr 1.2e-5 "
    "--weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear "
    "--normalization RMSNorm --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --log-params-norm "
    "--log-num-zeros-in-grad --log-throughput --log-device-memory-used --eval-interval 1000 --eval-iters 14 --bf16 "
    "--use-mcore-models --enable-experimental --manual-gc --manual-gc-interval 100 --use-fused-weighted-squared-relu "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native --exit-interval 1000 --tensorboard-dir tb "
    "--use-transformer-engine-op-fuser --log-memory-interval 1000 --log-progress --log-energy --logging-level 20 "
    "--check-weight-hash-across-dp-replicas-interval 20000 --disable-straggler-on-startup --straggler-minmax-count 16 "
    "--timing-log-option minmax --attention-backend flash --te-rng-tracker "
)
"""Nemotron 3 Nano, without its FP8, which takes no Mamba-2, on 8 processes."""
QWEN3_NEXT = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --kv-channels 256 "
    "--group-query-attention --num-query-groups 2 --qk-layernorm --attention-output-gate --swiglu --normalization "
    "RMSNorm --apply-layernorm-1p --norm-epsilon 1e-6 --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --rotary-percent 0.25 --rotary-base 10000000 --experimental-attention-variant "
    "gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 128 "
    "--linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads 32 --num-experts 512 "
    "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate --moe-router-topk "
    "10 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --no-weight-decay-cond-type qwen3_next --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 10 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 151936 --bf16 --expert-model-parallel-size 8 --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.02 --use-distributed-optimizer "
)
"""What the change that brought the gated delta net to Megatron gives, with the sizes of the 80B."""
FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
DECOUPLED = "--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 "

TYPICAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 128 "
    "--use-rotary-position-embeddings --no-position-embedding --squared-relu --disable-bias-linear "
    "--no-bias-gelu-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion --attention-softmax-in-fp32 "
    "--accumulate-allreduce-grads-in-fp32 --transformer-impl transformer_engine --use-flash-attn --bf16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 3e-4 --lr-warmup-iters 2 --optimizer adam "
    "--lr-decay-style constant --min-lr 1e-5 --lr-decay-iters 10 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --tokenizer-type NullTokenizer --vocab-size 97 --mock-data "
    "--no-load-rng --no-save-rng --no-load-optim --exit-signal-handler --log-memory-to-tensorboard "
    "--log-validation-ppl-to-tensorboard --timing-log-level 2 --no-check-for-nan-in-loss-and-grad --window-size (31,0)"
)


def megatron_says(**said: object) -> dict[str, object]:
    """The model of a checkpoint that Megatron would save for a line with these arguments, as the converter reads it;
    what is not given is Megatron's default."""
    args = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": False,
        "add_bias_linear": True,
        "bias_gelu_fusion": True,
        "ffn_hidden_size": 256,
        "kv_channels": 16,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "norm_epsilon": 1e-5,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        **said,
    }
    return architecture(from_args(args, "args", 128256))


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "vocab.json").write_text(json.dumps({str(i): i for i in range(50257)}))
    return {"vocab": str(tmp_path / "vocab.json"), "run": str(tmp_path / "run")}


def test_the_345m_line_is_megatrons_gpt(paths: dict[str, str]) -> None:
    config = resolved(GPT_345M.format(**paths))
    wanted = megatron_says(num_layers=3, max_position_embeddings=64, vocab_size=50257)
    assert architecture(config.model) == wanted and config.model.tanh_gelu
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.1, 0.1)
    assert config.checkpoint.load == "auto" and config.optim.adam_beta2 == 0.999 and config.parallel.bf16
    notes = translate(GPT_345M.format(**paths).split(), 1).notes
    assert "--distributed-backend nccl" in notes[0] and "--fp16 becomes --bf16" in notes[1] and len(notes) == 3


def test_the_8b_line_with_tensor_and_pipeline_parallelism(paths: dict[str, str]) -> None:
    config = resolved(LLAMA_8B.format(**paths), processes=8)
    wanted = megatron_says(
        num_layers=4, max_position_embeddings=64, vocab_size=128256, position_embedding_type="rope", swiglu=True,
        normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True, ffn_hidden_size=128,
        group_query_attention=True, num_query_groups=2, rotary_base=1000000,
    )  # fmt: skip
    assert architecture(config.model) == wanted
    assert (config.parallel.num_virtual_stages_per_pipeline_rank, config.parallel.sequence_parallel) == (2, True)
    assert config.training.train_iters == -(-1953125000 // 128)
    assert (config.optim.lr_warmup_samples, config.optim.lr_decay_samples) == (3906252, 1949218748)
    assert config.logging.log_dir == "logs"
    alone = LLAMA_8B.replace(PIPELINE, "")
    assert resolved(alone.format(**paths), 8).parallel.data_parallel_sharding_strategy == "optim"


def test_the_8b_line_as_it_is_in_public(paths: dict[str, str]) -> None:
    line = LLAMA_8B.format(**paths) + FP8 + DECOUPLED + "--apply-layernorm-1p --split \"'99,1,0'\""
    config = resolved(line.replace(PIPELINE, ""), processes=8)
    assert (config.optim.decoupled_lr, config.optim.decoupled_min_lr, config.optim.lr) == (5e-4, 4.5e-5, 0.00015)
    assert config.parallel.fp8_format == "hybrid" and config.model.apply_layernorm_1p
    data = line.replace("--mock-data", "--data-path text_document")
    assert resolved(data.replace(PIPELINE, ""), processes=8).data.split == "99,1,0"


def test_fp8_has_megatrons_defaults(paths: dict[str, str]) -> None:
    line = LLAMA_8B.format(**paths) + "--fp8-format hybrid "
    found = resolved(line, 8).parallel
    assert (found.fp8_recipe, found.fp8_amax_history_len, found.fp8_amax_compute_algo) == ("delayed", 1, "most_recent")
    given = resolved(line + "--fp8-recipe tensorwise --first-last-layers-bf16 --fp8-margin 0", 8).parallel
    assert given.fp8_recipe == "tensorwise" and given.first_last_layers_bf16
    assert resolved(LLAMA_8B.format(**paths) + "--fp8-hybrid ", 8).parallel.fp8_format == "hybrid"
    assert "--fp8-margin 3: scales are the powers of two" in refusal(line + "--fp8-margin 3 ", processes=8)
    assert "--fp8-recipe custom: --fp8-recipe takes" in refusal(line + "--fp8-recipe custom ", processes=8)


def test_a_typical_list_of_flags() -> None:
    config = resolved(TYPICAL)
    wanted = megatron_says(
        num_layers=2, max_position_embeddings=128, vocab_size=97, position_embedding_type="rope", squared_relu=True,
        add_bias_linear=False, bias_gelu_fusion=False, window_size=(31, 0),
    )  # fmt: skip
    assert architecture(config.model) == wanted
    assert config.optim.lr_decay_style == "constant" and config.parallel.recompute_granularity == "full"
    note = translate(TYPICAL.split(), 1).notes[0]
    assert "--min-lr 1e-5 (without effect with the rest)" in note and "--no-load-optim (without --load)" in note


MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 64 --max-position-embeddings 128 --num-layers 4 "
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --init-method-std 0.01 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --no-masked-softmax-fusion "
    "--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --vocab-size 100 --mock-data "
    "--split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 "
    "--lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 "
    "--clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
    "--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1 "
    "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --save {run} --load {run} --tensorboard-dir logs "
    "--no-load-optim --no-load-rng"
)
"""Megatron's public example of Mixtral 8x7B, but for its sizes, tokenizer and data."""


def test_a_line_that_resumes_from_its_own_folder_without_the_optimizers_state(paths: dict[str, str]) -> None:
    line = MIXTRAL.format(**paths)
    config = resolved(line, 64)
    assert config.checkpoint.load == "auto" and config.checkpoint.load_optim and config.model.num_experts == 8
    note = translate(line.split(), 64).notes[0]
    assert "--no-load-optim (--load auto continues with the optimizer's state)" in note


GPT_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 "
    "--step-batch-size-schedule '0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536' --train-iters 500000 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 "
    "--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path text_document --vocab-file {vocab} "
    "--merge-file merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 "
    "--save {run} --load {run} --eval-iters 10 --tensorboard-dir logs"
)
"""Megatron's public example of 175 billion parameters, as of August 2026, but for its paths."""


def test_lengths_in_samples_beside_iterations() -> None:
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    line += "--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 100 --vocab-size 100 --mock-data"
    optim = resolved(f"{line} --lr-decay-iters 50 --lr-warmup-samples 0", 1).optim
    assert (optim.lr_decay_iters, optim.lr_decay_samples) == (50, None)
    for ramp in ("", " --rampup-batch-size 2 2 64"):
        for lengths in ("--lr-decay-samples 500", "--lr-warmup-samples 33 --lr-decay-iters 50"):
            flag = lengths.split()[0]
            with pytest.raises(ConfigError, match=f"{flag} with --train-iters"):
                resolved(f"{line} {lengths}{ramp}", 1)


def test_recompute_of_experts_beside_that_of_blocks() -> None:
    line = GPT_175B.format(vocab="v", run="r") + " --moe-layer-recompute --recompute-granularity full"
    with pytest.raises(ConfigError, match="--moe-layer-recompute with --recompute-granularity full"):
        translate(shlex.split(line), 128)


def test_the_175b_line_has_its_schedule_of_batches_and_a_learning_rate_that_follows_samples(
    paths: dict[str, str],
) -> None:
    line = GPT_175B.format(**paths)
    config, notes = resolved(line, 128), translate(shlex.split(line), 128).notes
    wanted = megatron_says(
        num_layers=96, max_position_embeddings=2048, vocab_size=50257, hidden_size=12288, num_attention_heads=96,
        ffn_hidden_size=49152, kv_channels=128,
    )  # fmt: skip
    assert architecture(config.model) == wanted and config.model.tanh_gelu
    sizes = BatchSizes.of(config.data)
    assert (sizes(1171874), sizes(1171875), sizes.largest, config.data.global_batch_size) == (16, 320, 1536, 1536)
    assert (config.optim.lr_decay_samples, config.optim.lr_warmup_samples) == (430000 * 1536, 430 * 1536)
    assert any("the learning rate follows samples" in note for note in notes)
    without = line.replace("--global-batch-size 1536 ", "")
    config = resolved(without, 128)  # Megatron itself asks to leave it out
    assert config.data.global_batch_size == 1536
    assert (config.optim.lr_decay_samples, config.optim.lr_warmup_samples) == (430000 * 1536, 430 * 1536)


GPT_OSS = (
    "--no-masked-softmax-fusion --transformer-impl transformer_engine --disable-bias-linear "
    "--untie-embeddings-and-output-weights --no-rope-fusion --normalization RMSNorm --num-layers 12 --hidden-size 512 "
    "--ffn-hidden-size 2048 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--max-position-embeddings 8192 --use-mcore-models --rotary-percent 1.0 --rope-type rope "
    "--position-embedding-type rope --rotary-base 10000 --no-bias-gelu-fusion --export-force-local-attention "
    "--no-bias-dropout-fusion --quick-geglu --glu-linear-offset 1.0 --softmax-type learnable "
    "--window-attn-skip-freq 2 --activation-func-clamp-value 7.0 --window-size 127,0 --enable-gpt-oss "
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce "
    "--moe-ffn-hidden-size 2048 --moe-router-dtype fp32 --moe-z-loss-coeff 1e-3 --moe-permute-fusion --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
    "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 "
    "--micro-batch-size 1 --global-batch-size 128 --lr 1.0e-5 --train-samples 1953125000 "
    "--lr-decay-samples 1949218748 --lr-decay-style cosine --min-lr 1.0e-6 --weight-decay 0.1 "
    "--lr-warmup-fraction 0.05 --clip-grad 1.0 --bf16 --use-flash-attn --attention-softmax-in-fp32 "
    "--accumulate-allreduce-grads-in-fp32 --disable-bf16-reduced-precision-matmul --recompute-activations "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --expert-model-parallel-size 1 "
    "--sequence-parallel --context-parallel-size 1 --use-distributed-optimizer --fp8-format hybrid "
    "--fp8-param-gather --fp8-amax-compute-algo max --fp8-amax-history-len 1024 --log-interval 1 "
    "--save-interval 10000 --eval-interval 50000000 --eval-iters 0 --save {run} --tensorboard-dir logs "
    "--moe-per-layer-logging --no-load-optim --no-load-rng --log-throughput"
)
"""Megatron's public example of gpt-oss."""

DEEPSEEK_V3 = (
    "--distributed-timeout-minutes 60 --tensor-model-parallel-size 1 --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1 --context-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear "
    "--micro-batch-size 4 --global-batch-size 2048 --train-samples 585937500 --exit-duration-in-mins 220 "
    "--no-check-for-nan-in-loss-and-grad --manual-gc --manual-gc-interval 10 --recompute-granularity selective "
    "--recompute-modules mlp moe mla_up_proj layernorm --transformer-impl transformer_engine --seq-length 4096 "
    "--data-cache-path cache --tokenizer-type HuggingFaceTokenizer --tokenizer-model {vocab} "
    "--data-path text_document --split 99,1,0 --no-mmap-bin-files --no-create-attention-mask-in-dataloader "
    "--num-workers 6 --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--kv-channels 128 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 "
    "--make-vocab-size-divisible-by 3232 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu "
    "--untie-embeddings-and-output-weights --multi-latent-attention --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr-decay-samples 584765624 --lr-warmup-samples 1536000 "
    "--lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine --adam-beta1 0.9 "
    "--adam-beta2 0.95 --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-pre-softmax "
    "--moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion --q-lora-rank 1536 "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 "
    "--mscale 1.0 --mscale-all-dim 1.0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --eval-iters 32 "
    "--eval-interval 100 --auto-detect-ckpt-format --load {run} --save {run} --save-interval 100 "
    "--dist-ckpt-strictness log_all --init-method-std 0.02 --log-timers-to-tensorboard "
    "--log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard "
    "--log-throughput --log-interval 1 --logging-level 40 --tensorboard-dir logs --bf16 --enable-experimental "
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
    "--calculate-per-token-loss --init-model-with-meta-device --ckpt-format fsdp_dtensor --fsdp-double-buffer "
    "--use-nccl-ub --megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype bf16"
)
"""Megatron's public example of DeepSeek-V3, but for its tokenizer and --moe-router-force-load-balancing, which only
measures speed."""


def test_the_line_of_gpt_oss(paths: dict[str, str]) -> None:
    model = resolved(GPT_OSS.format(**paths), 8).model
    wanted = {
        "quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "softmax_type": "learnable",
        "window_size": 128, "window_attn_skip_freq": "2", "num_query_groups": 8, "kv_channels": 8, "num_experts": 4,
        "moe_router_topk": 2, "moe_ffn_hidden_size": 2048, "disable_bias_linear": True, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "use_rope_scaling": False, "moe_z_loss_coeff": 1e-3, "hidden_dropout": 0.1,
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    }  # fmt: skip
    assert {name: getattr(model, name) for name in wanted} == wanted
    note = translate(shlex.split(GPT_OSS.format(**paths)), 8).notes[0]
    assert "--fp8-param-gather (no weights are sharded)" in note and "--eval-iters 100" not in note


def test_the_line_of_deepseek_v3(paths: dict[str, str]) -> None:
    line = DEEPSEEK_V3.format(**paths).replace("--data-path text_document", "--mock-data --vocab-size 129280")
    line = line.replace(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {paths['vocab']} ", "")
    config = resolved(line, 256)
    published = resolve_model(ModelConfig(**PRESETS["deepseek-v3"]))  # type: ignore[arg-type]
    trained = {"max_position_embeddings": 4096, "init_method_std": config.model.init_method_std}
    trained |= {name: getattr(config.model, name) for name in vars(published) if name.startswith("mtp_")}
    assert architecture(config.model) == architecture(replace(published, **trained))
    assert config.model.mtp_num_layers == 1 and config.optim.lr_warmup_samples == 1536000
    assert config.optim.lr_warmup_init == 3.9e-7 and config.parallel.expert_model_parallel_size == 8
    assert "at random, to measure speed" in refusal(line + " --moe-router-force-load-balancing", 256)


LATENT = "--multi-latent-attention --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (LATENT, {"use_rope_scaling": False}),
        (LATENT + "--rope-type rope --rotary-scaling-factor 40", {"use_rope_scaling": False}),
        ("--rope-type rope --position-embedding-type rope", {"use_rope_scaling": False}),
        (
            LATENT + "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0",
            {"rope_scaling_type": "yarn", "rope_scaling_factor": 40.0, "rope_original_max_position": 4096}
            | {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 1.0, "use_rope_scaling": True},
        ),
        (
            LATENT + "--rope-type yarn --rotary-scaling-factor 40 --mscale 0.707",
            {"yarn_attention_factor": 0.0707 * math.log(40) + 1, "yarn_mscale_all_dim": None, "use_rope_scaling": True},
        ),
        (
            "--position-embedding-type alibi --embed-layernorm",
            {"position_embedding_type": "alibi", "embedding_layernorm": True},
        ),
    ],
)
def test_positions_of_deepseeks_and_blooms_lines(flags: str, values: dict[str, object]) -> None:
    base = BASE.replace("--max-position-embeddings 64", "--max-position-embeddings 4096 --seq-length 64")
    model = resolved(f"{base} {flags}").model
    assert {name: getattr(model, name) for name in values} == values


def test_what_latent_attention_cannot_read_of_yarn_is_refused() -> None:
    line = f"{BASE} {LATENT} --rotary-scaling-factor"
    assert "--softmax-scale" in refusal(f"{line} 40 --rope-type rope --mscale-all-dim 1.0")
    assert "--mscale abc: numbers" in refusal(f"{line} 40 --mscale abc")
    assert "--rotary-scaling-factor nan: numbers" in refusal(f"{line} nan")


@pytest.mark.parametrize(("stage", "strategy"), [("1", "optim"), ("2", "optim_grads"), ("3", "optim_grads_params")])
def test_a_line_of_deepspeeds(stage: str, strategy: str) -> None:
    flags = f"--deepspeed --deepspeed_config=ds.json --zero-stage={stage} --deepspeed-activation-checkpointing"
    parallel = resolved(f"{BASE} {flags} --checkpoint-activations", 4).parallel
    assert (parallel.data_parallel_sharding_strategy, parallel.recompute_granularity) == (strategy, "full")
    assert resolved(f"{BASE} --deepspeed --zero-stage 0", 4).parallel.hybrid_shard_degree == 1
    assert "--zero-stage 4: give 0, 1, 2 or 3" in refusal(f"{BASE} --zero-stage 4")


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("--num-query-groups 2", {"num_query_groups": 4}),
        ("--num-query-groups 2 --group-query-attention", {"num_query_groups": 2}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--no-position-embedding", {"position_embedding_type": "none"}),
        ("--no-position-embedding --position-embedding-type rope", {"position_embedding_type": "rope"}),
        ("--no-bias-gelu-fusion", {"tanh_gelu": False}),
        ("--no-bias-gelu-fusion --openai-gelu", {"tanh_gelu": True}),
        ("--disable-bias-linear", {"tanh_gelu": False, "disable_bias_linear": True}),
        ("--swiglu", {"tanh_gelu": False, "swiglu": True}),
        ("--window-size 127 0", {"window_size": 128}),
        ("--window-size (-1,-1)", {"window_size": None}),
        ("--seq-length=32", {"max_position_embeddings": 64}),
        (
            "--position-embedding-type rope --rotary-seq-len-interpolation-factor 4",
            {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0, "use_rope_scaling": True},
        ),
    ],
)
def test_flags_that_mean_something_together(flags: str, values: dict[str, object]) -> None:
    model = resolved(f"{BASE} {flags}").model
    assert {name: getattr(model, name) for name in values} == values


@pytest.mark.parametrize(
    ("flags", "degree", "strategy"),
    [
        ("", 1, "optim_grads_params"),
        ("--use-distributed-optimizer", 0, "optim"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 2, "optim"),
        ("--use-torch-fsdp2", 0, "optim_grads_params"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 0, "optim_grads"),
        ("--use-megatron-fsdp", 1, "optim_grads_params"),
    ],
)
def test_how_far_is_sharded(flags: str, degree: int, strategy: str) -> None:
    parallel = resolved(f"{BASE} {flags}", processes=4).parallel
    assert (parallel.hybrid_shard_degree, parallel.data_parallel_sharding_strategy) == (degree, strategy)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hiden-size 3 --fp4-format e2m1", "unknown flag --hiden-size: did you mean --hidden-size?"),
        ("--bf16 true", "--bf16 takes no value, not 1"),
        ("--lr", "--lr takes one value, not 0"),
        ("--model llama3-8b", "--model: the sizes are Megatron's flags; leave it out"),
        ("--config x.yaml", "--config: the sizes are Megatron's flags; leave it out"),
        ("--optimizer lion", "--optimizer lion: --optimizer takes adam, apex-adam, sgd and muon"),
        ("--optimizer muon --muon-tp-mode blockwise", "Muon orthogonalizes whole matrices"),
        ("--qk-layernorm", "give --normalization RMSNorm"),
        ("--window-size (3,3)", "--window-size (3,3)"),
        ("--cp-comm-type p2p a2a", "one value for all layers"),
        ("--tokenizer-type BertWordPieceCase", "--tokenizer-type BertWordPieceCase"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/model", "org/model/tokenizer.json; the hub"),
        ("--vocab-file none.json", "--vocab-file none.json: No such file"),
        ("--load a --pretrained-checkpoint b", "--load b --finetune"),
        ("--use-checkpoint-args", "needs a --load other than --save"),
        ("--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2", "4 layers are not divisible"),
        ("--outer-dp-sharding-strategy optim", "--outer-dp-sharding-strategy"),
        ("--num-distributed-optimizer-instances 3", "--num-distributed-optimizer-instances 3"),
    ],
)
def test_what_cannot_be_is_one_line(flags: str, message: str) -> None:
    assert message in refusal(f"{BASE} {flags}")


def test_the_script_of_a_pasted_line_is_left_out_by_hand() -> None:
    assert "unexpected 'pretrain_gpt.py': leave out the launcher and the script" in refusal(f"pretrain_gpt.py {BASE}")


def test_what_megatron_requires_is_required_at_once() -> None:
    message = refusal("--num-layers 2")
    assert "--hidden-size, --num-attention-heads, --max-position-embeddings, --micro-batch-size, --lr" in message


def test_no_iterations_of_evaluation_are_no_evaluation() -> None:
    line = f"{BASE} --eval-interval 5 --eval-iters 0"
    assert resolved(line).training.eval_interval is None
    assert "--eval-interval 5 (no evaluation, as --eval-iters 0 says)" in translate(line.split(), 1).notes[0]
    assert resolved(line.replace("--eval-iters 0", "--eval-iters 2")).training.eval_interval == 5


def test_a_line_without_data_trains_on_mock_data_and_says_so() -> None:
    translation = translate(BASE.replace("--mock-data", "").split(), 1)
    assert "--mock-data" in translation.argv and "mock data" in translation.notes[0]


def test_flags_of_this_project_go_before_megatrons_defaults() -> None:
    config = resolved(f"{BASE} --from-megatron --log-dir here --tanh-gelu --no-progress-bar --weight-decay 0.3")
    assert (config.logging.log_dir, config.logging.progress_bar, config.optim.weight_decay) == ("here", False, 0.3)


def test_the_printed_line_alone_is_the_same_run(paths: dict[str, str]) -> None:
    line = translate(GPT_345M.format(**paths).split(), 1).notes[-1].removeprefix("in this project's flags: ")
    assert resolve(load_config(shlex.split(line), PRESETS), 1) == resolved(GPT_345M.format(**paths))


def test_the_defaults_are_other_values_of_settings() -> None:
    assert set(DEFAULTS) <= set(settings())
    assert all(settings()[name].parse(value, name) != settings()[name].default for name, value in DEFAULTS.items())
    assert ModelConfig().swiglu


def test_without_the_switch_all_unknown_flags_are_told_with_the_tables_answers() -> None:
    line = "--hiden-size 3 --no-position-embedding --fp8-output-proj --log-memory-to-tensorboard --qqqqqq"
    with pytest.raises(ConfigError) as caught:
        load_config(line.split(), PRESETS)
    message = str(caught.value)
    assert message.startswith("unknown flags --hiden-size: did you mean --hidden-size?; ")
    assert "--no-position-embedding is Megatron's: --position-embedding-type none" in message
    assert "--fp8-output-proj is Megatron's: of 8-bit" in message and "max-position-embeddings?" not in message
    assert "--log-memory-to-tensorboard is Megatron's: leave it out: log lines" in message
    assert "--qqqqqq (--help lists them all)" in message
    assert message.endswith("--from-megatron takes a whole line of Megatron's")
    with pytest.raises(ConfigError, match="--from-megatron is for pretrain_gpt.py"):
        load_config(["--from-megatron"], PRESETS)


OF_THE_RUN = ("max_position_embeddings", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "init_method_std")


def test_hybrid_lines_become_the_models_that_megatron_trains() -> None:
    def sized(name: str, got: ModelConfig) -> ModelConfig:
        wanted = resolve_model(replace(ModelConfig(), **PRESETS[name]))
        return replace(wanted, **{name: getattr(got, name) for name in OF_THE_RUN})

    model = resolved(HYBRID, 8).model
    assert (model.num_layers, model.hybrid_layer_pattern) == (16, "MMM*" * 4)
    assert (model.mamba_num_heads, model.mamba_head_dim, model.mamba_state_dim) == (32, 64, 128)
    config = resolved(NANO, 8)
    assert config.model == sized("nemotron-3-nano-30b-a3b", config.model)
    assert config.optim.lr_wsd_decay_style == "minus_sqrt"
    for flag in ("--experimental-attention-variant", "--linear-attention-type"):
        config = resolved(QWEN3_NEXT.replace("--experimental-attention-variant", flag), 8)
        assert config.model == sized("qwen3-next-80b-a3b", config.model)
        assert config.optim.apply_wd_to_qk_layernorm
    pure = resolved(HYBRID.replace("MMM*" * 4, "M" * 8), 8).model
    assert (pure.num_layers, pure.hybrid_layer_pattern) == (8, "M" * 8)
    old = HYBRID.replace("--hybrid-layer-pattern " + "MMM*" * 4, "--num-layers 48 --hybrid-attention-ratio 0.08")
    assert "--hybrid-attention-ratio 0.08: --hybrid-layer-pattern says what each layer is" in refusal(old, 8)
