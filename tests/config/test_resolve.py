"""Derived defaults, and every refusal that needs neither torch nor files."""

import copy

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smp.config import Config, ConfigError, check_files, load_config, resolve, to_yaml
from smp.config.blend import parse_split

PRESETS = {"tiny": {"vocab_size": 1000}}
RUN = "--model tiny --mock-data --train-iters 100 "


def resolved(flags: str, world_size: int = 1) -> Config:
    return resolve(load_config(flags.split(), PRESETS), world_size)


def test_model_defaults():
    model = resolved(RUN + "--hidden-size 4096 --num-attention-heads 32").model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (10880, 128, 32)
    assert resolved(RUN + "--no-swiglu").model.ffn_hidden_size == 4 * 128
    assert resolved(RUN + "--hidden-size 8 --num-attention-heads 2").model.ffn_hidden_size == 64


def test_given_model_values_stay():
    flags = "--ffn-hidden-size 100 --kv-channels 6 --num-query-groups 1 --hidden-size 50"
    model = resolved(RUN + flags).model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (100, 6, 1)


@pytest.mark.parametrize(("longest", "expected"), [(512, 512), (8192, 8192), (131072, 8192)])
def test_sequence_length_default(longest, expected):
    assert resolved(f"{RUN} --max-position-embeddings {longest}").data.seq_length == expected


def test_batch_default_counts_data_parallel_processes():
    flags = RUN + "--micro-batch-size 3 --tensor-model-parallel-size 2"
    assert resolved(flags, world_size=8).data.global_batch_size == 12
    assert resolved(flags + " --global-batch-size 24", world_size=8).data.global_batch_size == 24


@pytest.mark.parametrize(("samples", "iters"), [(1, 1), (8, 1), (9, 2), (800, 100)])
def test_samples_become_iterations_rounded_up(samples, iters):
    training = resolved(f"--model tiny --mock-data --train-samples {samples} --global-batch-size 8").training
    assert (training.train_iters, training.train_samples) == (iters, samples)


def test_schedule_defaults():
    optim = resolved(RUN + "--lr-warmup-fraction 0.05").optim
    assert (optim.lr_decay_iters, optim.lr_warmup_iters, optim.lr_warmup_fraction) == (100, 5, None)
    assert optim.lr_wsd_decay_iters is None
    optim = resolved(RUN + "--lr-warmup-fraction 0.05 --lr-decay-iters 60 --lr-decay-style WSD").optim
    assert (optim.lr_decay_iters, optim.lr_warmup_iters, optim.lr_wsd_decay_iters) == (60, 3, 6)
    optim = resolved("--model tiny --mock-data --train-iters 1 --lr-decay-style WSD").optim
    assert optim.lr_wsd_decay_iters == 1


def test_a_dry_run_needs_neither_data_nor_a_length():
    config = resolved("--model tiny --dry-run --lr-warmup-fraction 0.1")
    assert config.training.train_iters is None and config.optim.lr_decay_iters is None
    assert config.data.global_batch_size == 1
    assert resolved("--model tiny --dry-run --train-samples 10").training.train_iters == 10


def test_the_input_is_left_as_it_is():
    config = load_config(RUN.split(), PRESETS)
    before = copy.deepcopy(config)
    resolve(config, 4)
    assert config == before


@hypothesis_settings(deadline=None, max_examples=20)
@given(
    flags=st.lists(
        st.sampled_from(
            [
                "--lr-warmup-fraction 0.1",
                "--lr-decay-style WSD",
                "--no-swiglu",
                "--num-query-groups 2",
                "--tensor-model-parallel-size 2",
                "--hybrid-shard-degree 2",
                "--global-batch-size 8",
            ]
        ),
        unique=True,
    ),
    length=st.sampled_from(["--train-iters 40", "--train-samples 333"]),
)
def test_a_resolved_config_resolves_to_itself(flags, length, tmp_path_factory):
    config = resolved(" ".join(["--model tiny --mock-data", length, *flags]), world_size=4)
    assert resolve(config, 4) == config
    path = tmp_path_factory.mktemp("resolved") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert resolve(load_config(["--config", str(path)], PRESETS), 4) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 3", "4 processes are not divisible by --tensor-model-parallel-size 3; change"),
        ("--hybrid-shard-degree 3", "not divisible by --hybrid-shard-degree 3; change --hybrid-shard-degree"),
        ("--hidden-size 130", "--hidden-size 130 is not divisible by --num-attention-heads 4"),
        ("--num-query-groups 3", "--num-attention-heads 4 is not divisible by --num-query-groups 3"),
        (
            "--num-attention-heads 2 --tensor-model-parallel-size 4",
            "--num-attention-heads 2 is not divisible by --tensor-model-parallel-size 4",
        ),
        (
            "--ffn-hidden-size 102 --tensor-model-parallel-size 4",
            "--ffn-hidden-size 102 is not divisible by --tensor-model-parallel-size 4",
        ),
        (
            "--num-attention-heads 12 --num-query-groups 6 --kv-channels 8 --tensor-model-parallel-size 4",
            "--num-query-groups 6 and --tensor-model-parallel-size 4: one must divide the other",
        ),
        ("--squared-relu", "--squared-relu has no effect without --no-swiglu; leave it out"),
        ("--tanh-gelu", "--tanh-gelu has no effect without --no-swiglu"),
        ("--tanh-gelu --squared-relu --no-swiglu", "--squared-relu and --tanh-gelu exclude each other"),
        ("--relu --squared-relu --no-swiglu", "--relu and --squared-relu exclude each other"),
        ("--geglu --relu --no-swiglu", "--geglu and --relu exclude each other"),
        ("--quick-geglu --geglu --no-swiglu", "--quick-geglu and --geglu exclude each other"),
        ("--quick-geglu", "--quick-geglu has no effect without --no-swiglu"),
        ("--glu-linear-offset 1", "--glu-linear-offset 1.0 has no effect without --quick-geglu"),
        (
            "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1",
            "--moe-aux-loss-coeff 1.0 has no effect with --moe-router-load-balancing-type sinkhorn",
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid "
            "--moe-router-enable-expert-bias",
            "--moe-router-load-balancing-type sinkhorn and --moe-router-enable-expert-bias exclude each other",
        ),
        ("--kernels apex --apply-layernorm-1p", "--kernels apex and --apply-layernorm-1p exclude each other"),
        ("--geglu", "--geglu has no effect without --no-swiglu"),
        (
            "--norm-placement post --parallel-residual",
            "--norm-placement post and --parallel-residual exclude each other",
        ),
        (
            "--qk-layernorm --qk-layernorm-across-heads --apply-layernorm-1p",
            "--qk-layernorm-across-heads and --apply-layernorm-1p exclude each other",
        ),
        ("--window-size 8 --window-attn-skip-freq 1", "--window-attn-skip-freq 1 leaves no layer with a window"),
        ("--window-size 8 --window-attn-skip-freq [1]", "names 1 layers of 4 (--num-layers)"),
        ("--window-size 8 --window-attn-skip-freq x", "expected a number, or a list of 0 and 1"),
        ("--no-rope-freq 1", "--no-rope-freq 1 leaves no layer with RoPE; --position-embedding-type none is that"),
        ("--no-rope-freq [0]*4", "--no-rope-freq [0]*4 has no effect: every layer has RoPE"),
        ("--rotary-base-local 5", "--rotary-base-local 5.0 has no effect without --window-size"),
        (
            "--position-embedding-type alibi --window-size 8 --rotary-base-local 5",
            "--rotary-base-local 5.0 has no effect: no layer has both a window and RoPE",
        ),
        (
            "--position-embedding-type alibi --attn-logit-softcapping 5",
            "--position-embedding-type alibi and --attn-logit-softcapping 5.0 exclude each other",
        ),
        ("--rotary-percent 0.1", "--rotary-percent 0.1 of --kv-channels 32 rotates 3 channels"),
        ("--rotary-percent 0.01", "rotates 0 channels"),
        ("--rotary-percent 1.5", "rotates 48 channels"),
        ("--kv-channels 7", "--rotary-percent 1.0 of --kv-channels 7 rotates 7 channels"),
        (
            "--use-rope-scaling --position-embedding-type none",
            "--use-rope-scaling has no effect without --position-embedding-type rope",
        ),
        ("--use-rope-scaling --rope-low-freq-factor 5", "--rope-low-freq-factor 5.0 must not be above"),
        ("--attention-chunk-size 8 --window-size 8", "--attention-chunk-size 8 and --window-size 8 exclude each other"),
        ("--qk-l2-norm --qk-layernorm", "--qk-l2-norm and --qk-layernorm exclude each other"),
        ("--qk-l2-norm --use-rope-scaling --rope-scaling-type yarn", "--qk-l2-norm and --rope-scaling-type yarn"),
        ("--attn-temperature-tuning", "--attn-temperature-tuning has no effect without --no-rope-freq"),
        (
            "--position-embedding-type none --attention-chunk-size 8",
            "--attention-chunk-size 8 has no effect without --position-embedding-type rope",
        ),
        ("--num-experts 4 --moe-apply-probs-on-input", "--moe-apply-probs-on-input needs --moe-router-topk 1, not 2"),
        ("--window-size 0", "--window-size 0 must be above 0"),
        ("--num-layers 0", "--num-layers 0 must be above 0"),
        ("--micro-batch-size -1", "--micro-batch-size -1 must be above 0"),
        ("--global-batch-size 0", "--global-batch-size 0 must be above 0"),
        ("--eval-interval 0", "--eval-interval 0 must be above 0"),
        ("--log-interval 0", "--log-interval 0 must be above 0"),
        ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes 0.0 must be above 0"),
        ("--lr 0", "--lr 0.0 must be above 0"),
        ("--seed -1", "--seed -1 must not be negative"),
        ("--seed 9223372036854775808", "--seed 9223372036854775808 must be below 9223372036854775808"),
        ("--num-layers 99999999999999999999", "--num-layers 99999999999999999999 must be below 65536"),
        ("--seq-length 9223372036854775808", "--seq-length 9223372036854775808 must be below 9223372036854775808"),
        ("--distributed-timeout-minutes 1e300", "--distributed-timeout-minutes 1e+300 must be below 1000000"),
        (
            "--inprocess-restart --peer-snapshot-interval 1 --inprocess-heartbeat-timeout 2",
            "--inprocess-heartbeat-timeout 2.0 must be above 2",
        ),
        ("--inprocess-barrier-timeout 0", "--inprocess-barrier-timeout 0.0 must be above 0"),
        ("--inprocess-max-iterations -1", "--inprocess-max-iterations -1 must not be negative"),
        ("--clip-grad -1", "--clip-grad -1.0 must not be negative"),
        ("--hidden-dropout 1", "--hidden-dropout 1.0 must be at least 0 and below 1"),
        ("--attention-dropout -0.1", "--attention-dropout -0.1 must be at least 0 and below 1"),
        ("--adam-beta2 1", "--adam-beta2 1.0 must be at least 0 and below 1"),
        ("--min-lr 1", "--min-lr 1.0 is above --lr 0.0003"),
        ("--lr-warmup-iters 100", "--lr-warmup-iters 100 must be below --lr-decay-iters 100"),
        ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", "--lr-warmup-iters 5 and --lr-warmup-fraction 0.1 are both"),
        ("--lr-wsd-decay-iters 5", "--lr-wsd-decay-iters 5 has no effect without --lr-decay-style WSD"),
        (
            "--lr-wsd-decay-iters 95 --lr-decay-style WSD --lr-warmup-iters 6",
            "--lr-warmup-iters 6 + --lr-wsd-decay-iters 95 is above --lr-decay-iters 100",
        ),
        (
            "--data-parallel-collectives hierarchical --zero-quantized-weights --tensor-model-parallel-size 2",
            "--zero-quantized-weights and --tensor-model-parallel-size 2 exclude each other",
        ),
        (
            "--data-parallel-collectives hierarchical --zero-quantized-gradients --tensor-model-parallel-size 2",
            "--zero-quantized-gradients and --tensor-model-parallel-size 2 exclude each other",
        ),
        (
            "--zero-hpz-partition-size 3",
            "--zero-hpz-partition-size 3 has to divide, and be below, the 4 processes that shard weights",
        ),
        (
            "--zero-hpz-partition-size 2 --hybrid-shard-degree 2",
            "--zero-hpz-partition-size 2 has to divide, and be below, the 2 processes that shard weights",
        ),
        ("--zero-hpz-partition-size 0", "--zero-hpz-partition-size 0 must be above 0"),
        (
            "--zero-hpz-partition-size 2 --pipeline-model-parallel-size 2",
            "--zero-hpz-partition-size 2 and a pipeline exclude each other",
        ),
        (
            "--zero-hpz-partition-size 2 --data-parallel-sharding-strategy optim_grads",
            "--zero-hpz-partition-size 2 has no effect without --data-parallel-sharding-strategy optim_grads_params",
        ),
        ("--seq-length 4096", "--seq-length 4096 is above --max-position-embeddings 2048"),
        ("--data-path x", "--data-path x and --mock-data: give one"),
        ("--no-mock-data", "what to train on is missing: give --data-path or --mock-data"),
        ("--vocab-size none --tokenizer-model t", "--mock-data needs --vocab-size"),
        ("--vocab-size none --no-mock-data --data-path x", "give --tokenizer-model or --vocab-size"),
        ("--train-samples 5", "--train-iters 100 and --train-samples 5 are both given; give one"),
        ("--train-iters none", "how long to train is missing: give --train-iters or --train-samples"),
        ("--split 1,2,3,4", "--split '1,2,3,4' is not one to three relative sizes"),
        ("--split 1,2,x", "is not one to three relative sizes"),
        ("--split 1,2,-3", "is not one to three relative sizes"),
        ("--split 1,2,nan", "is not one to three relative sizes"),
        ("--split 0,0,0", "with a sum above 0"),
        ("--split 0,1,0", "--split 0,1,0 leaves nothing to train on"),
        ("--split 1,0,0 --eval-interval 5", "--eval-interval 5 needs a validation part"),
        ("--load auto", "--load auto resumes from --save: give --save"),
        ("--save-interval 5", "--save-interval 5 needs --save"),
        ("--wandb-exp-name x", "--wandb-exp-name x has no effect without --wandb-project"),
        ("--profile-step-start 9", "--profile-step-start 9 has no effect without --profile or --trace-pipeline; leave"),
        ("--profile-step-end 9", "--profile-step-end 9 has no effect without --profile"),
        ("--eval-iters 3", "--eval-iters 3 has no effect without --eval-interval"),
        ("--optimizer sgd --adam-beta1 0.5", "--adam-beta1 0.5 has no effect without --optimizer adam"),
        ("--optimizer sgd --adam-beta1 0.5 --adam-eps 1e-6", "--adam-beta1 0.5, --adam-eps 1e-06 has no effect"),
        ("--lr-decay-iters 50 --lr-decay-style constant", "--lr-decay-iters 50 has no effect without --lr-decay-style"),
        ("--add-qkv-bias --no-disable-bias-linear", "--add-qkv-bias has no effect with --no-disable-bias-linear"),
        ("--rotary-base 5.0 --position-embedding-type none", "--rotary-base 5.0 has no effect without --position-emb"),
        ("--rope-scaling-factor 2", "--rope-scaling-factor 2.0 has no effect without --use-rope-scaling"),
        ("--tiktoken-pattern gpt2", "--tiktoken-pattern gpt2 has no effect without --tokenizer-model"),
        ("--no-exit-on-missing-checkpoint", "--no-exit-on-missing-checkpoint has no effect without --load"),
        ("--sgd-momentum 0.5", "--sgd-momentum 0.5 has no effect without --optimizer sgd"),
        (
            "--lr-decay-style constant --min-lr 1e-5",
            "--min-lr 1e-05 has no effect without --lr-decay-style cosine, linear or WSD",
        ),
        ("--split 1,0,0", "--split 1,0,0 has no effect with --mock-data"),
        ("--exit-interval 5", "--exit-interval 5 saves and stops: give --save"),
        ("--exit-duration-in-mins 5", "--exit-duration-in-mins 5.0 saves and stops: give --save"),
        ("--profile --profile-step-start 5", "--profile-step-start 5 must be below --profile-step-end 5"),
        (
            "--profile --profile-step-start 200 --profile-step-end 300",
            "--profile-step-start 200 is after the last iteration, 100",
        ),
    ],
)
def test_what_cannot_work_is_one_line(flags, message):
    with pytest.raises(ConfigError) as caught:
        resolved(RUN + flags, world_size=4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--sequence-parallel",  # with one TP process it splits nothing
        "--num-query-groups 2 --tensor-model-parallel-size 4",  # fewer groups than TP processes: replicated
        "--kv-channels 7 --position-embedding-type learned_absolute",
        "--rotary-percent 0.25",
        "--no-swiglu --tanh-gelu",
        "--adam-beta1 0 --adam-beta2 0 --clip-grad 0 --weight-decay 0",
        "--save x --load auto --save-interval 5",
        "--no-mock-data --data-path x --split 1,0,0",
        "--tokenizer-model t",
    ],
)
def test_what_can_work_passes(flags):
    assert resolved(RUN + flags, world_size=4).training.train_iters == 100


def test_split_fractions():
    assert parse_split("969,30,1") == pytest.approx((0.969, 0.03, 0.001))
    assert parse_split(" 1, .5,0.5") == (0.5, 0.25, 0.25)
    assert parse_split("7") == (1, 0, 0) and parse_split("1,1") == (0.5, 0.5, 0)  # as in Megatron


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1", "9" * 400, "1,,1"])
def test_what_is_no_split(split):
    with pytest.raises(ConfigError, match="^--parts .* is not one to three relative sizes"):
        parse_split(split, "--parts")


def test_missing_files_are_named(tmp_path):
    def check(flags: str) -> None:
        check_files(load_config(flags.split(), PRESETS))

    prefix, tokenizer = tmp_path / "corpus", tmp_path / "tokenizer.model"
    (tmp_path / "out_text_document.idx").touch()
    with pytest.raises(ConfigError, match=r"out.bin: did you mean .*out_text_document\?$"):
        check(f"--data-path {tmp_path / 'out'}")
    for suffix in (".bin", ".idx"):
        with pytest.raises(ConfigError, match=rf"--data-path .*corpus: there is no file .*corpus\{suffix}$"):
            check(f"--data-path {prefix}")
        (tmp_path / f"corpus{suffix}").touch()
    with pytest.raises(ConfigError, match=r"\.bin: there is no file .* \(give the prefix, without .bin or .idx\)$"):
        check(f"--data-path {prefix}.bin")
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*tokenizer.model: there is no such file"):
        check(f"--tokenizer-model {tokenizer}")
    tokenizer.touch()
    with pytest.raises(ConfigError, match=r"--load .*iter_5: there is no such folder"):
        check(f"--load {tmp_path}/iter_5")
    check(f"--data-path {prefix} --tokenizer-model {tokenizer} --load {tmp_path}")
    check("--load auto --save nowhere")
