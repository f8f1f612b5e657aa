"""Every setting of the model changes a real run, in the way its name says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from smp.models.micro_batch import MicroBatch
from tests.training.flag_runs import Run, Runs, Watched, proves

Check = Callable[[Run, Run], object]
DELTA_NET = "--linear-attention-type gated_delta_net --linear-num-key-heads 2 --linear-num-value-heads 4 "
DELTA_NET += "--linear-key-head-dim 6 --linear-value-head-dim 5 --num-query-groups 4 "
KIMI = "--linear-attention-type kda --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 6 "
KIMI += "--linear-value-head-dim 6 --num-query-groups 4"
MAMBA = "--linear-attention-type mamba2 --mamba-num-heads 4 --mamba-num-groups 2 --mamba-head-dim 6 "
MAMBA += "--mamba-state-dim 5 --num-query-groups 4 "
BOTH = MAMBA + "--linear-attention-parallel "
FURTHER = "--mtp-num-layers 1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("model"))


def with_suffix(expected: dict[str, tuple[int, ...]]) -> Check:
    """Shapes by the end of a parameter's name; ``()`` means that it is not there. The training is another one.

    (Not its first loss: biases start at zero.)
    """

    def check(got: Run, base: Run) -> None:
        assert got.losses[-1] != base.losses[-1]
        for end, shape in expected.items():
            have = {name: s for name, s in got.shapes.items() if name.endswith(end)}
            had = {name: s for name, s in base.shapes.items() if name.endswith(end)}
            assert set(have.values()) == ({shape} if shape else set()), end
            assert have != had, end

    return check


def other_math(got: Run, base: Run) -> None:
    """The same parameters, bit for bit, but another function of them from the first step on."""
    assert got.shapes == base.shapes
    assert all(torch.equal(p, base.initial[name]) for name, p in got.initial.items())
    assert got.losses[0] != base.losses[0]


def same_run(got: Run, base: Run) -> None:
    assert got.losses == pytest.approx(base.losses, rel=1e-6)


def no_signal(got: Run, base: Run) -> None:
    """Normalized by something enormous, every logit is zero and every token equally likely."""
    other_math(got, base)
    assert got.losses[0] == pytest.approx(math.log(97), rel=1e-6)


def predicts_further(got: Run, base: Run) -> None:
    """The model's own loss is the same at first; the other one is as large as one of tokens nobody knows."""
    losses = got.records("mtp loss")
    assert got.losses[0] == base.losses[0] and got.losses[-1] != base.losses[-1] and not base.records("mtp loss")
    assert len(losses) == 3 and 0.8 * math.log(97) < losses[0] / 0.1 < 1.2 * math.log(97)
    added = got.shapes.keys() - base.shapes.keys()
    assert {name.partition(".")[0] for name in added} == {"layers", "predictions"}
    assert not torch.equal(got.grads[0]["embedding.weight"], base.grads[0]["embedding.weight"])


def twice_the_share(got: Run, base: Run) -> None:
    assert got.losses[0] == base.losses[0] and got.losses[-1] != base.losses[-1]
    assert got.records("mtp loss")[0] == pytest.approx(2 * base.records("mtp loss")[0], rel=1e-5)


def learns_twice_as_much(got: Run, base: Run) -> None:
    """The indexers' loss is reported as it is added; its mean over tokens and layers, apart, is the same at first."""
    assert got.losses[0] == base.losses[0] and got.losses[-1] != base.losses[-1]
    assert got.records("indexer loss")[0] == pytest.approx(2 * base.records("indexer loss")[0], rel=1e-5)
    assert got.records("indexer KL")[0] == base.records("indexer KL")[0] > 1e-3
    assert base.records("indexer loss")[0] == pytest.approx(0.5 * 2 * base.records("indexer KL")[0], rel=1e-5)


def other_divergence(got: Run, base: Run) -> None:
    assert got.losses[0] == base.losses[0] and got.records("indexer KL")[0] != base.records("indexer KL")[0]


def only_indexers_learn(got: Run, base: Run) -> None:
    """And attention is dense: the loss is that of a model without indexers, whose weights are the same."""
    moved = {name for name, p in got.final.items() if not torch.equal(p, got.initial[name])}
    assert moved == {name for name in got.initial if ".indexer." in name}
    assert got.losses[0] == base.losses[0] and got.records("indexer KL")[-1] < got.records("indexer KL")[0]


def indexers_stay(got: Run, base: Run) -> None:
    moved = {name for name, p in got.final.items() if not torch.equal(p, got.initial[name])}
    assert moved == {name for name in got.initial if ".indexer." not in name}
    assert got.losses[0] == base.losses[0] and not got.records("indexer loss")


def more_blocks(got: Run, base: Run) -> None:
    blocks = {name.split(".")[1] for name in got.shapes if name.startswith("layers.")}
    assert blocks == {"0", "1", "2"} and got.losses != base.losses


def tied(got: Run, base: Run) -> None:
    assert set(base.shapes) - set(got.shapes) == {"head.weight"}
    assert got.losses[0] != base.losses[0]


def padded_rows(got: Run, base: Run) -> None:
    """100 rows instead of 128 in memory, and not a bit of the training is another."""
    assert (got.shapes["embedding.weight"], base.shapes["embedding.weight"]) == ((100, 32), (128, 32))
    assert got.losses == pytest.approx(base.losses, rel=1e-6)


def shorter_table(got: Run, base: Run) -> None:
    """Rows that no sample reaches: the table is another, the training is not."""
    assert (got.shapes["positions.weight"], base.shapes["positions.weight"]) == ((20, 32), (2048, 32))
    assert got.losses == base.losses


def larger_weights(got: Run, base: Run) -> None:
    """Every weight is the baseline's x 2: the numbers are the same, only their deviation is not."""
    for name, p in got.initial.items():
        factor = 1 if "norm" in name else 2
        assert torch.allclose(p, factor * base.initial[name], rtol=1e-6), name
    assert got.losses != base.losses


def counted_from_one(got: Run, base: Run) -> None:
    """The same function at first, of weights that start at 0, and the same training but for rounding."""
    assert {p.abs().max().item() for name, p in got.initial.items() if "norm" in name} == {0.0}
    assert {p.max().item() for name, p in base.initial.items() if "norm" in name} == {1.0}
    assert got.losses == pytest.approx(base.losses, rel=1e-5)


def no_norm_bias(got: Run, base: Run) -> None:
    assert set(base.shapes) - set(got.shapes) == {name for name in base.shapes if name.endswith("norm.bias")}
    assert got.losses[-1] != base.losses[-1]


ROPE = "--rotary-base 10 --use-rope-scaling --rope-original-max-position 16 "
"""Wavelengths 6.3, 11.2, 19.9 and 35.3 tokens: two of them below the original context, two above."""
LINEAR = "--rotary-base 10 --use-rope-scaling --rope-scaling-type linear "
LATENT = "--multi-latent-attention --num-query-groups 4 --qk-head-dim 2 --qk-pos-emb-head-dim 4 --v-head-dim 4 "
LATENTS = LATENT + "--qk-layernorm --q-lora-rank 8 "
DSA = LATENTS + "--experimental-attention-variant dsa --dsa-indexer-n-heads 6 --dsa-indexer-head-dim 8 "
DSA += "--dsa-indexer-topk 5 --dsa-indexer-loss-coeff 0.5 "
YARN = ROPE + "--rope-scaling-type yarn "
TUNED = "--no-rope-freq 2 --attn-temperature-tuning --floor-scale 4"
ALONE = "--yarn-attention-factor 1"
LONG = "--rotary-base 10 --use-rope-scaling --rope-scaling-type longrope --rope-original-max-position"
DYNAMIC = "--rotary-base 10 --use-rope-scaling --rope-scaling-type dynamic --rope-original-max-position"
FACTORS = "--longrope-attention-factor 1 --longrope-short-factor 1 1 1 1 --longrope-long-factor 1 2 3 4"
PLAIN_MLP = "--no-swiglu "
QUICK = PLAIN_MLP + "--quick-geglu "
QKV_BIAS = dict.fromkeys(("query.bias",), (32,)) | dict.fromkeys(("key.bias", "value.bias"), (16,))
MLP_BIAS = {"gate.bias": (64,), "up.bias": (64,), "down.bias": (32,)}
ALL_BIASES = QKV_BIAS | {"output.bias": (32,)} | MLP_BIAS

# setting, flags, flags of what it is compared with, check
TABLE: list[tuple[str, str, str, Check]] = [
    ("num_layers", "--num-layers 3", "", more_blocks),
    ("hidden_size", "--hidden-size 48", "", with_suffix({"up.weight": (64, 48), "query.weight": (48, 48)})),
    ("ffn_hidden_size", "--ffn-hidden-size 96", "", with_suffix({"up.weight": (96, 32), "down.weight": (32, 96)})),
    ("num_attention_heads", "--num-attention-heads 2 --num-query-groups 1", "", other_math),
    ("num_query_groups", "--num-query-groups 4", "", with_suffix({"key.weight": (32, 32), "value.weight": (32, 32)})),
    ("num_query_groups", "--num-query-groups 1", "", with_suffix({"key.weight": (8, 32), "value.weight": (8, 32)})),
    ("kv_channels", "--kv-channels 4", "", with_suffix({"query.weight": (16, 32), "output.weight": (32, 16)})),
    (
        "max_position_embeddings",
        "--position-embedding-type learned_absolute --max-position-embeddings 20",
        "--position-embedding-type learned_absolute",
        shorter_table,
    ),
    ("make_vocab_size_divisible_by", "--make-vocab-size-divisible-by 10", "", padded_rows),
    (
        "position_embedding_type",
        "--position-embedding-type learned_absolute",
        "",
        with_suffix({"positions.weight": (2048, 32)}),
    ),
    ("position_embedding_type", "--position-embedding-type none", "", other_math),
    ("rotary_base", "--rotary-base 10", "", other_math),
    ("rotary_percent", "--rotary-percent 0.5", "", other_math),
    ("use_rope_scaling", ROPE, "--rotary-base 10", other_math),
    ("rope_scaling_factor", ROPE + "--rope-scaling-factor 2", ROPE, other_math),
    ("rope_scaling_factor", ROPE + "--rope-scaling-factor 1", "--rotary-base 10", same_run),
    ("rope_low_freq_factor", ROPE + "--rope-low-freq-factor 2", ROPE, other_math),
    ("rope_high_freq_factor", ROPE + "--rope-high-freq-factor 2", ROPE, other_math),
    (
        "rope_high_freq_factor",  # 16 / 0.2 = 80: all wavelengths are below, so all are left alone
        ROPE + "--rope-low-freq-factor 0.1 --rope-high-freq-factor 0.2",
        "--rotary-base 10",
        same_run,
    ),
    ("rope_original_max_position", ROPE + "--rope-original-max-position 32", ROPE, other_math),
    ("rope_scaling_type", LINEAR, ROPE, other_math),
    ("rope_scaling_type", LINEAR + "--rope-scaling-factor 1", "--rotary-base 10", same_run),
    ("rope_scaling_type", YARN, ROPE, other_math),
    ("yarn_beta_fast", YARN + "--yarn-beta-fast 1.2", YARN, other_math),
    ("yarn_beta_slow", YARN + "--yarn-beta-slow 0.1", YARN, other_math),
    ("yarn_truncate", YARN + "--no-yarn-truncate", YARN, other_math),
    ("yarn_attention_factor", YARN + "--yarn-attention-factor 2", YARN, other_math),
    ("yarn_attention_factor", YARN + f"--yarn-attention-factor {0.1 * math.log(8.0) + 1}", YARN, same_run),
    ("yarn_mscale", YARN + "--yarn-mscale 1 --yarn-mscale-all-dim 0.5", YARN, other_math),
    ("yarn_mscale_all_dim", f"{YARN} --yarn-mscale 1 --yarn-mscale-all-dim 1", f"{YARN} {ALONE}", same_run),
    ("rope_original_max_position", ROPE + "--rope-original-max-position 8192", "--rotary-base 10", same_run),
    ("rope_scaling_type", f"{LONG} 16 {FACTORS}", "--rotary-base 10", other_math),
    ("rope_scaling_type", f"{LONG} 17 {FACTORS}", "--rotary-base 10", same_run),
    ("longrope_long_factor", f"{LONG} 16 {FACTORS} --longrope-long-factor 1 1 1 1", "--rotary-base 10", same_run),
    ("longrope_short_factor", f"{LONG} 17 {FACTORS} --longrope-short-factor 1 1 2 1", "--rotary-base 10", other_math),
    ("longrope_attention_factor", f"{LONG} 17 {FACTORS} --longrope-attention-factor 2", "--rotary-base 10", other_math),
    ("rope_scaling_type", f"{DYNAMIC} 16", "--rotary-base 10", other_math),
    ("rope_scaling_type", f"{DYNAMIC} 17", "--rotary-base 10", same_run),
    ("rope_scaling_type", f"{DYNAMIC} 16 --rope-scaling-factor 1", "--rotary-base 10", other_math),
    ("normalization", "--normalization LayerNorm", "", with_suffix({"norm.bias": (32,)})),
    ("norm_epsilon", "--norm-epsilon 1e30", "", no_signal),
    ("swiglu", PLAIN_MLP, "", with_suffix({"gate.weight": ()})),
    ("squared_relu", PLAIN_MLP + "--squared-relu", PLAIN_MLP, other_math),
    ("tanh_gelu", PLAIN_MLP + "--tanh-gelu", PLAIN_MLP, other_math),
    ("untie_embeddings_and_output_weights", "--no-untie-embeddings-and-output-weights", "", tied),
    ("disable_bias_linear", "--no-disable-bias-linear", "", with_suffix(ALL_BIASES)),
    ("add_qkv_bias", "--add-qkv-bias", "", with_suffix(QKV_BIAS)),
    ("add_attention_output_bias", "--add-attention-output-bias", "", with_suffix({"output.bias": (32,)})),
    ("add_mlp_bias", "--add-mlp-bias", "", with_suffix(MLP_BIAS)),
    ("add_mlp_bias", "--add-mlp-bias --add-attention-output-bias --add-qkv-bias", "--no-disable-bias-linear", same_run),
    ("qk_layernorm", "--qk-layernorm", "", with_suffix({"query_norm.weight": (8,), "key_norm.weight": (8,)})),
    (
        "qk_layernorm_across_heads",
        "--qk-layernorm --qk-layernorm-across-heads --num-query-groups 2",
        "--qk-layernorm --num-query-groups 2",
        with_suffix({"query_norm.weight": (32,), "key_norm.weight": (16,)}),
    ),
    (
        "multi_latent_attention",
        LATENT,
        "",
        with_suffix({"attention.query.weight": (24, 32), "key_value_down.weight": (36, 32)}),
    ),
    ("q_lora_rank", LATENT + "--q-lora-rank 8", LATENT, with_suffix({"query_down.weight": (8, 32)})),
    ("kv_lora_rank", LATENT + "--kv-lora-rank 8", LATENT, with_suffix({"key_value_down.weight": (12, 32)})),
    ("qk_head_dim", LATENT + "--qk-head-dim 6", LATENT, with_suffix({"key_value_up.weight": (40, 32)})),
    (
        "qk_pos_emb_head_dim",
        LATENT + "--qk-pos-emb-head-dim 2",
        LATENT,
        with_suffix({"key_value_down.weight": (34, 32)}),
    ),
    ("experimental_attention_variant", DSA, LATENTS, with_suffix({"indexer.keys.weight": (8, 32)})),
    ("dsa_indexer_n_heads", DSA + "--dsa-indexer-n-heads 3", DSA, with_suffix({"indexer.weights.weight": (3, 32)})),
    ("dsa_indexer_head_dim", DSA + "--dsa-indexer-head-dim 6", DSA, with_suffix({"indexer.keys.weight": (6, 32)})),
    ("dsa_indexer_topk", DSA + "--dsa-indexer-topk 3", DSA, other_math),
    ("dsa_indexer_rope_interleaved", DSA + "--dsa-indexer-rope-interleaved", DSA, other_math),
    ("dsa_indexer_loss_coeff", DSA + "--dsa-indexer-loss-coeff 1", DSA, learns_twice_as_much),
    ("dsa_indexer_loss_coeff", DSA + "--dsa-indexer-loss-coeff 0", DSA, indexers_stay),
    ("dsa_indexer_use_sparse_loss", DSA + "--dsa-indexer-use-sparse-loss", DSA, other_divergence),
    ("dsa_indexer_warmup", DSA + "--dsa-indexer-warmup", LATENTS, only_indexers_learn),
    ("v_head_dim", LATENT + "--v-head-dim 10", LATENT, with_suffix({"output.weight": (32, 40)})),
    (
        "latent_norm_epsilon",
        LATENT + "--qk-layernorm --latent-norm-epsilon 0.1",
        LATENT + "--qk-layernorm",
        other_math,
    ),
    ("position_embedding_type", LATENT + "--position-embedding-type none", LATENT, other_math),
    (
        "yarn_mscale_all_dim",
        f"{LATENT} {YARN} --yarn-mscale 1 --yarn-mscale-all-dim 1",
        f"{LATENT} {YARN} {ALONE}",
        other_math,
    ),
    ("attention_output_gate", "--attention-output-gate", "", with_suffix({"attention.gate.weight": (32, 32)})),
    ("linear_attention_type", DELTA_NET, "", with_suffix({"decay_log": (4,)})),
    (
        "linear_attention_freq",
        DELTA_NET + "--linear-attention-freq 2",
        DELTA_NET,
        with_suffix({"1.attention.beta.weight": ()}),
    ),
    ("linear_attention_freq", DELTA_NET + "--linear-attention-freq [1,1]", DELTA_NET, same_run),
    ("linear_conv_kernel_dim", DELTA_NET + "--linear-conv-kernel-dim 2", DELTA_NET, with_suffix({"key_conv": (12, 2)})),
    ("linear_key_head_dim", DELTA_NET + "--linear-key-head-dim 8", DELTA_NET, with_suffix({"key_conv": (16, 4)})),
    ("linear_value_head_dim", DELTA_NET + "--linear-value-head-dim 8", DELTA_NET, with_suffix({"value_conv": (32, 4)})),
    ("linear_num_key_heads", DELTA_NET + "--linear-num-key-heads 4", DELTA_NET, with_suffix({"key_conv": (24, 4)})),
    ("linear_num_value_heads", DELTA_NET + "--linear-num-value-heads 8", DELTA_NET, with_suffix({"decay_log": (8,)})),
    ("linear_attention_type", MAMBA, "", with_suffix({"attention.skip": (4,)})),
    ("linear_allow_neg_eigval", DELTA_NET + "--linear-allow-neg-eigval", DELTA_NET, other_math),
    ("linear_norm_epsilon", DELTA_NET + "--linear-norm-epsilon 0.1", DELTA_NET, other_math),
    (
        "linear_norm_placement",
        DELTA_NET + "--linear-norm-placement post",
        DELTA_NET,
        with_suffix({"attention_post_norm.weight": (32,)}),
    ),
    ("linear_attention_type", KIMI, "", with_suffix({"decay_bias": (24,)})),
    ("hybrid_layer_pattern", "--hybrid-layer-pattern *-", "", with_suffix({"0.mlp.up.weight": ()})),
    ("mamba_state_dim", MAMBA + "--mamba-state-dim 8", MAMBA, with_suffix({"key_conv": (16, 4)})),
    ("mamba_head_dim", MAMBA + "--mamba-head-dim 8", MAMBA, with_suffix({"value_conv": (32, 4)})),
    ("mamba_num_groups", MAMBA + "--mamba-num-groups 4", MAMBA, with_suffix({"key_conv": (20, 4)})),
    ("mamba_num_heads", MAMBA + "--mamba-num-heads 8", MAMBA, with_suffix({"decay_log": (8,)})),
    ("mamba_dt_min", MAMBA + "--mamba-dt-min 0.5", MAMBA, other_math),
    ("mamba_dt_max", MAMBA + "--mamba-dt-max 0.001", MAMBA, other_math),
    ("mamba_rms_norm", MAMBA + "--no-mamba-rms-norm", MAMBA, with_suffix({"attention.norm.weight": ()})),
    ("ssm_multipliers", MAMBA + "--ssm-multipliers 1 1 2 1 1", MAMBA, other_math),
    ("ssm_multipliers", MAMBA + "--ssm-multipliers 1 1 1 1 1", MAMBA, same_run),
    ("mlp_multipliers", "--mlp-multipliers 2 1", "", other_math),
    ("mlp_multipliers", "--mlp-multipliers 1 2", "", other_math),
    (
        "linear_attention_parallel",
        MAMBA + "--linear-attention-parallel",
        MAMBA,
        with_suffix({"attention.attention.query.weight": (32, 32), "attention.recurrence.skip": (4,)}),
    ),
    ("attention_out_multiplier", BOTH + "--attention-out-multiplier 2", BOTH, other_math),
    ("ssm_out_multiplier", BOTH + "--ssm-out-multiplier 2", BOTH, other_math),
    ("window_size", "--window-size 4", "", other_math),
    ("window_attn_skip_freq", "--window-size 4 --window-attn-skip-freq 2", "--window-size 4", other_math),
    ("window_attn_skip_freq", "--window-size 4 --window-attn-skip-freq [1,1]", "--window-size 4", same_run),
    ("rotary_base_local", "--window-size 4 --rotary-base-local 10", "--window-size 4", other_math),
    ("no_rope_freq", "--no-rope-freq 2", "", other_math),
    ("attention_chunk_size", "--attention-chunk-size 4", "", other_math),
    ("attention_chunk_size", "--attention-chunk-size 17", "", same_run),
    ("qk_l2_norm", "--qk-l2-norm", "", other_math),
    ("attn_temperature_tuning", TUNED, "--no-rope-freq 2", other_math),
    ("attn_temperature_tuning", "--no-rope-freq 2 --attn-temperature-tuning", "--no-rope-freq 2", same_run),
    ("attn_scale", f"{TUNED} --attn-scale 0.5", TUNED, other_math),
    ("floor_scale", TUNED, "--no-rope-freq 2 --attn-temperature-tuning", other_math),
    ("rotary_interleaved", "--rotary-interleaved", "", other_math),
    ("softmax_scale", "--softmax-scale 0.1", "", other_math),
    ("softmax_scale", f"--softmax-scale {8**-0.5}", "", same_run),
    ("attn_logit_softcapping", "--attn-logit-softcapping 0.1", "", other_math),
    ("final_logit_softcapping", "--final-logit-softcapping 0.5", "", other_math),
    ("logit_scale", "--logit-scale 0.5", "", other_math),
    ("embedding_multiplier", "--embedding-multiplier 4", "", other_math),
    ("residual_multiplier", "--residual-multiplier 0.5", "", other_math),
    ("apply_layernorm_1p", "--apply-layernorm-1p", "", counted_from_one),
    ("layernorm_bias", "--normalization LayerNorm --no-layernorm-bias", "--normalization LayerNorm", no_norm_bias),
    (
        "norm_placement",
        "--norm-placement post",
        "",
        with_suffix({"attention_norm.weight": (), "mlp_post_norm.weight": (32,)}),
    ),
    ("norm_placement", "--norm-placement sandwich", "", with_suffix({"attention_post_norm.weight": (32,)})),
    ("embedding_layernorm", "--embedding-layernorm", "", with_suffix({"embedding_norm.weight": (32,)})),
    ("geglu", PLAIN_MLP + "--geglu", "", other_math),
    ("geglu", PLAIN_MLP + "--geglu --tanh-gelu", PLAIN_MLP + "--geglu", other_math),
    ("quick_geglu", QUICK, "", other_math),
    ("activation_func_clamp_value", QUICK + "--activation-func-clamp-value 1e-3", QUICK, other_math),
    ("activation_func_clamp_value", QUICK + "--activation-func-clamp-value 1e3", QUICK, same_run),
    ("glu_linear_offset", QUICK + "--glu-linear-offset 1", QUICK, other_math),
    ("softmax_type", "--softmax-type learnable", "", with_suffix({"attention.sinks": (4,)})),
    ("relu", PLAIN_MLP + "--relu", PLAIN_MLP, other_math),
    ("position_embedding_type", "--position-embedding-type alibi", "", other_math),
    (
        "position_embedding_offset",
        "--position-embedding-type learned_absolute --position-embedding-offset 2",
        "--position-embedding-type learned_absolute",
        with_suffix({"positions.weight": (2050, 32)}),
    ),
    (
        "parallel_residual_shared_norm",
        "--parallel-residual --parallel-residual-shared-norm",
        "--parallel-residual",
        with_suffix({"mlp_norm.weight": ()}),
    ),
    ("window_size", "--window-size 17", "", same_run),
    ("mtp_num_layers", FURTHER, "", predicts_further),
    ("mtp_loss_scaling_factor", FURTHER + " --mtp-loss-scaling-factor 0.2", FURTHER, twice_the_share),
    ("parallel_residual", "--parallel-residual", "", other_math),
    ("init_method_std", "--init-method-std 0.4", "", larger_weights),
]


@proves(*{row[0] for row in TABLE})
@pytest.mark.parametrize(("name", "flags", "base", "check"), TABLE, ids=[f"{r[0]}: {r[1]}"[:60] for r in TABLE])
def test_a_setting_of_the_model(runs: Runs, name: str, flags: str, base: str, check: Check) -> None:
    check(runs(flags), runs(base))


@proves("model")
def test_a_named_size_is_its_settings(runs: Runs) -> None:
    """GPT-2 written out by hand gives the same numbers; the flags beside --model override it."""
    by_hand = (
        "--position-embedding-type learned_absolute --max-position-embeddings 1024 --normalization LayerNorm "
        "--no-swiglu --tanh-gelu --no-disable-bias-linear --no-untie-embeddings-and-output-weights "
        "--num-query-groups 4"
    )
    named, written = runs("--model gpt2 --num-query-groups 4"), runs(by_hand)
    assert named.losses == written.losses != runs().losses
    assert named.shapes["positions.weight"] == (1024, 32)


def test_a_sequence_beyond_the_longest_is_refused(runs: Runs) -> None:
    run = runs.fresh("--max-position-embeddings 16")
    assert run.code == 2 and "--max-position-embeddings 16" in run.errors[0]


@proves("vocab_size")
def test_the_vocabulary(runs: Runs) -> None:
    """More token ids: they come in the data, in the checkpoint, and in the loss of knowing nothing."""
    run = runs("--vocab-size 211 --norm-epsilon 1e30")
    assert run.losses[0] == pytest.approx(math.log(211), rel=1e-6)
    assert run.shapes["embedding.weight"] == (256, 32)
    assert max(t.max().item() for t in run.tokens) > 97 > max(t.max().item() for t in runs().tokens)


@proves("hidden_dropout", "attention_dropout")
@pytest.mark.parametrize("flag", ["--hidden-dropout", "--attention-dropout"])
def test_dropout_is_in_training_alone(runs: Runs, flag: str) -> None:
    """At a learning rate of next to nothing the weights stay, so validation shows that only training drops."""
    still = "--optimizer sgd --lr 1e-30 --weight-decay 0 --eval-interval 3 --eval-iters 1 "
    base, low, high = runs(still), runs(still + f"{flag} 0.01"), runs(still + f"{flag} 0.9")
    assert len({base.losses[0], low.losses[0], high.losses[0]}) == 3
    assert base.records("validation loss") == low.records("validation loss") == high.records("validation loss")
    change = [abs(run.losses[0] - base.losses[0]) for run in (low, high)]
    assert change[0] < change[1]
    said = "attention: in training probabilities are materialised instead, for --attention-dropout"
    assert (said in low.out) == (flag == "--attention-dropout") and said not in base.out


@torch.no_grad()
def logits(run: Watched, input_ids: torch.Tensor) -> torch.Tensor:
    return run.trainer.model.eval()(MicroBatch(input_ids)).logits


def last_logits_after_reversing_the_rest(run: Watched) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last token, and again when the tokens before it come in reverse."""
    tokens = torch.arange(17)[None]
    straight, turned = (logits(run, x) for x in (tokens, torch.cat((tokens[:, :-1].flip(1), tokens[:, -1:]), dim=1)))
    return straight[0, -1], turned[0, -1]


@pytest.mark.parametrize(
    ("flags", "sees_order"),
    [("--position-embedding-type none", False), ("", True), ("--position-embedding-type learned_absolute", True)],
)
def test_without_positions_one_block_sees_a_set(runs: Runs, flags: str, sees_order: bool) -> None:
    run = runs.fresh("--num-layers 1 " + flags, probe=last_logits_after_reversing_the_rest)
    straight, turned = run.probed
    assert (not torch.allclose(straight, turned, atol=1e-5)) == sees_order


def reach(run: Watched) -> list[int]:
    """Positions whose logits change with the first token."""
    tokens = torch.arange(17)[None]
    other = tokens.clone()
    other[0, 0] = 50
    change = (logits(run, tokens) - logits(run, other)).abs().amax(dim=-1)[0]
    return (change > 0).nonzero().flatten().tolist()


def test_a_window_of_w_sees_itself_and_the_w_minus_1_before(runs: Runs) -> None:
    one = "--num-layers 1 --window-size "
    assert runs.fresh(one + "1", probe=reach).probed == [0]
    assert runs.fresh(one + "4", probe=reach).probed == [0, 1, 2, 3]
    assert runs.fresh(one + "none", probe=reach).probed == list(range(17))
    assert runs.fresh("--num-layers 2 --window-size 4", probe=reach).probed == list(range(7))  # two blocks look twice


@proves("layer_types")
def test_layer_types_say_what_lets_tokens_of_a_layer_see_each_other(runs: Runs) -> None:
    import examples.own_mixer  # noqa: F401 (it registers one)

    plain, mixed = runs(), runs("--layer-types ema attention")
    assert "layers.0.attention.decay" in mixed.final and "layers.1.attention.query.weight" in mixed.final
    assert "layers.0.attention.query.weight" in plain.final and mixed.losses != plain.losses
    assert runs("--layer-types attention").losses == plain.losses
