"""--from-megatron: public lines of models with experts, and the flags that they take beside them."""

from __future__ import annotations

import pytest

from smp.config.megatron.translate import translate
from tests.config.test_megatron_lines import BASE, refusal, resolved

COMMON = (
    "--distributed-timeout-minutes 60 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear --micro-batch-size 1 "
    "--global-batch-size 16 --train-samples 640000 --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl te --manual-gc --manual-gc-interval 10 --transformer-impl transformer_engine "
    "--seq-length 64 --vocab-size 100 --mock-data --no-mmap-bin-files --no-create-attention-mask-in-dataloader "
    "--position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --qk-layernorm "
    "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 "
    "--weight-decay 0.1 --lr-decay-samples 584765624 --lr-warmup-samples 1536000 --lr 3.9e-6 --min-lr 3.9e-7 "
    "--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --eval-iters 32 --eval-interval 200 "
    "--init-method-std 0.02 --log-throughput --log-interval 1 --logging-level 40 --bf16 --enable-experimental "
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16 "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --context-parallel-size 1 "
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion "
    "--moe-router-dtype fp32 "
)
DEEPSEEK_V3 = COMMON + (
    "--tensor-model-parallel-size 1 --max-position-embeddings 4096 --make-vocab-size-divisible-by 32 "
    "--multi-latent-attention --num-experts 16 --moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 32 "
    "--moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 4 "
    "--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 2 --moe-router-num-groups 4 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-3 --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 "
    "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --pipeline-model-parallel-layout Et|t|t|tmL "
)
QWEN3 = COMMON + (
    "--tensor-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --rotary-base 1000000 "
    "--group-query-attention --num-query-groups 2 --max-position-embeddings 40960 --num-experts 8 "
    "--moe-ffn-hidden-size 32 --moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-3 "
)
"""Those of NVIDIA's public runs of these models, but for sizes, tokenizer, data and folders."""


def test_deepseek_v3s_line() -> None:
    model = resolved(DEEPSEEK_V3, 8).model
    assert (model.kv_lora_rank, model.qk_head_dim, model.v_head_dim, model.mtp_num_layers) == (16, 16, 16, 1)
    assert (model.num_experts, model.moe_router_num_groups, model.moe_router_bias_update_rate) == (16, 4, 1e-3)
    note = translate(DEEPSEEK_V3.split(), 8).notes[0]
    assert "--kv-channels 16 (--multi-latent-attention has widths of its own)" in note


def test_qwen3s_line() -> None:
    config = resolved(QWEN3, 8)
    assert (config.model.kv_channels, config.model.moe_router_topk, config.model.moe_ffn_hidden_size) == (16, 2, 32)
    parallel = config.parallel
    assert (parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size) == (4, 1)
    assert parallel.num_virtual_stages_per_pipeline_rank == 2


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-token-dispatcher-type allgather",
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-overlap",
        "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-deepep-num-sms 20",
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 16",
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        "--moe-router-padding-for-fp8",
        "--moe-expert-capacity-factor -1",
    ],
)
def test_how_tokens_are_sent_and_experts_computed_changes_nothing(flags: str) -> None:
    plain, found = (translate(f"{QWEN3} {more}".split(), 8) for more in ("", flags))
    assert found.argv == plain.argv and flags.split(" --")[-1] in found.notes[0]


def test_a_coefficient_of_no_loss_is_passed_over() -> None:
    line = f"{QWEN3} --moe-router-load-balancing-type none"
    assert resolved(line, 8).model.moe_aux_loss_coeff == 0
    assert "--moe-aux-loss-coeff 1e-3 (without a loss of balance)" in translate(line.split(), 8).notes[0]


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--moe-token-dispatcher-type alltoal", "give allgather, alltoall or flex"),
        ("--moe-use-upcycling", "tools/convert_checkpoint.py --upcycle"),
        ("--moe-router-force-load-balancing", "it routes tokens at random, to measure speed"),
        ("--moe-router-dtype fp64", "the router computes in fp32"),
    ],
)
def test_what_does_not_exist_says_what_does(flags: str, answer: str) -> None:
    assert answer in refusal(f"{BASE} {flags}")
