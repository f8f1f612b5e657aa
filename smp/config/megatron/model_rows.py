"""Megatron's flags of the model: sizes, positions, norms, MLP, attention, mixtures of experts, other architectures."""

from __future__ import annotations

from smp.config.megatron.rows import Row, becomes, chosen, derived, left_out, refused, same

_KERNELS = "how operations are fused is --kernels' choice, printed at the start"
_MOE = "mixtures of experts have what --help lists under --moe-..."
_NO = "this architecture does not exist; the decoder is --help's group model"

MODEL: tuple[Row, ...] = (
    same(
        "--num-layers:1 --hidden-size:1 --ffn-hidden-size:1 --num-attention-heads:1 --kv-channels:1 --seq-length:1 "
        "--max-position-embeddings:1 --make-vocab-size-divisible-by:1 --rotary-base:1 --rotary-percent:1 "
        "--rope-scaling-factor:1 --use-rope-scaling --normalization:1 --norm-epsilon:1 --swiglu --squared-relu "
        "--untie-embeddings-and-output-weights --disable-bias-linear --add-qkv-bias --init-method-std:1 "
        "--hidden-dropout:1 --attention-dropout:1 --apply-layernorm-1p --rotary-interleaved --no-rope-freq:1 "
        "--window-attn-skip-freq:1"
    ),
    becomes("--encoder-seq-length:1", "--seq-length {}"),
    becomes("--encoder-num-layers:1", "--num-layers {}"),
    chosen(
        "--position-embedding-type:1",
        {
            "learned_absolute": "--position-embedding-type learned_absolute",
            "rope": "--position-embedding-type rope",
            "alibi": "--position-embedding-type alibi",
            "none": "--position-embedding-type none",
        },
        "--position-embedding-type takes rope, learned_absolute, alibi and none; YaRN is --rope-scaling-type yarn "
        "with rope",
    ),
    becomes("--embed-layernorm", "--embedding-layernorm"),
    becomes("--use-rotary-position-embeddings", "--position-embedding-type rope"),
    derived("--no-position-embedding", "--position-embedding-type none, unless the line says rope"),
    becomes(
        "--rotary-seq-len-interpolation-factor:1",
        "--use-rope-scaling --rope-scaling-type linear --rope-scaling-factor {}",
    ),
    derived(
        "--group-query-attention --num-query-groups:1",
        "--num-query-groups; Megatron reads it with --group-query-attention only",
    ),
    derived(
        "--qk-layernorm", "--qk-layernorm, with --normalization RMSNorm: the norm of queries and keys is that kind"
    ),
    derived("--window-size:+", "--window-size with one number, the tokens that one sees: Megatron's (n-1,0) is n"),
    derived(
        "--openai-gelu --no-bias-gelu-fusion",
        "--tanh-gelu: Megatron's fused GELU, which is its default with biases, is tanh's; --no-tanh-gelu is erf's",
    ),
    left_out("--use-mcore-models --use-te --enable-flash-attn --use-flash-attn --spec:+", "there is one decoder"),
    chosen(
        "--transformer-impl:1",
        {"local": "", "transformer_engine": ""},
        "there is one decoder, for training; leave it out",
    ),
    left_out(
        "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-rope-fusion "
        "--use-fused-rmsnorm "
        "--cross-entropy-loss-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --apply-rope-fusion "
        "--cross-entropy-fusion-impl:1 --disable-jit-fuser --use-fused-weighted-squared-relu "
        "--use-te-activation-func --fused-residual-rmsnorm --gradient-accumulation-fusion --bias-gelu-fusion "
        "--masked-softmax-fusion --bias-swiglu-fusion --bias-dropout-fusion --use-transformer-engine-op-fuser",
        _KERNELS,
    ),
    left_out("--te-rng-tracker", "random numbers are functions of the seed, and need no tracker"),
    chosen(
        "--attention-backend:1",
        {
            "auto": "--attention-backend auto",
            "flash": "--attention-backend flash",
            "fused": "--attention-backend auto",
            "unfused": "--attention-backend math",
            "local": "--attention-backend math",
        },
        "--attention-backend takes auto, flash, cudnn (Megatron's fused), efficient and math (unfused)",
    ),
    left_out("--attention-softmax-in-fp32 --apply-query-key-layer-scaling", "the softmax is always in fp32"),
    left_out(
        "--use-cpu-initialization --no-initialization --perform-initialization",
        "initial weights are the same in every layout, and each rank draws its own",
    ),
    left_out("--padded-vocab-size:1 --no-pad-vocab-size --pad-vocab-size", "checkpoints hold no padding"),
    refused("--init-method-xavier-uniform --embedding-init-method-std:1", "--init-method-std is the one choice"),
    same("--yarn-beta-fast:1 --yarn-beta-slow:1"),
    derived(
        "--rope-type:1 --rotary-scaling-factor:1 --mscale:1 --mscale-all-dim:1",
        "YaRN with --multi-latent-attention: --use-rope-scaling --rope-scaling-type yarn with --rope-scaling-factor, "
        "--yarn-mscale and --yarn-mscale-all-dim; without latent attention Megatron does not read them",
    ),
    refused(
        "--original-max-position-embeddings:1 --beta-fast:1 --beta-slow:1 --yarn-rotary-scaling-factor:1 "
        "--yarn-original-max-position-embeddings:1 "
        "--yarn-correction-range-round-to-int",
        "YaRN here is --use-rope-scaling --rope-scaling-type yarn with --rope-scaling-factor, "
        "--rope-original-max-position, --yarn-beta-fast, --yarn-beta-slow and --yarn-mscale",
    ),
    refused("--mrope-section:+", "positions are numbers, not coordinates of images"),
    refused("--no-rope-freq-per-layer:1", "--no-rope-freq says which layers have no RoPE"),
    refused("--relative-attention-num-buckets:1 --relative-attention-max-distance:1", _NO),
    same("--quick-geglu --glu-linear-offset:1 --activation-func-clamp-value:1"),
    chosen(
        "--softmax-type:1",
        {"vanilla": "", "learnable": "--softmax-type learnable"},
        "take vanilla or learnable: a sink whose score is always 0 does not exist",
    ),
    refused(
        "--fp32-residual-connection --qk-clip --qk-clip-alpha:1 --qk-clip-threshold:1 --log-max-attention-logit",
        _NO,
    ),
    becomes("--export-moe-apply-probs-on-input", "--moe-apply-probs-on-input"),
    refused(
        "--qk-l2-norm --export-qk-l2-norm",
        "--qk-l2-norm here is Llama 4's, after RoPE and in layers with it only, where Megatron's is in all layers",
    ),
    refused(
        "--apply-residual-connection-post-layernorm",
        "the residual stream itself is not normalized; --norm-placement says where norms stand",
    ),
    same(
        "--multi-latent-attention --q-lora-rank:1 --kv-lora-rank:1 --qk-head-dim:1 --qk-pos-emb-head-dim:1 "
        "--v-head-dim:1"
    ),
    same(
        "--attention-output-gate --linear-attention-freq:1 --linear-conv-kernel-dim:1 --linear-key-head-dim:1 "
        "--linear-value-head-dim:1 --linear-num-key-heads:1 --linear-num-value-heads:1"
    ),
    chosen(
        "--linear-attention-type:1",
        {kind: f"--linear-attention-type {kind}" for kind in ("gated_delta_net", "kda")},
        "--linear-attention-type takes gated_delta_net and kda",
    ),
    chosen(
        "--experimental-attention-variant:1",
        {
            "gated_delta_net": "--linear-attention-type gated_delta_net",
            "gdn": "--linear-attention-type gated_delta_net",
            "kda": "--linear-attention-type kda",
            "dsa": "--experimental-attention-variant dsa",
        },
        "--experimental-attention-variant takes gdn (gated_delta_net), kda and dsa",
    ),
    same(
        "--dsa-indexer-n-heads:1 --dsa-indexer-head-dim:1 --dsa-indexer-topk:1 --dsa-indexer-loss-coeff:1 "
        "--dsa-indexer-use-sparse-loss --dsa-indexer-rope-interleaved"
    ),
    chosen(
        "--dsa-indexer-k-norm-epsilon:1",
        {"1e-6": "", "1e-06": "", "0.000001": ""},
        "the indexer's norm has the epsilon of DeepSeek's and GLM's files, 1e-6",
    ),
    chosen(
        "--dsa-indexer-topk-freq:1",
        {"1": ""},
        "every layer has an indexer of its own: --dsa-indexer-topk-freq takes 1",
    ),
    left_out(
        "--dsa-kernel-backend:1 --dsa-indexer-k-norm-fp32 --dsa-indexer-skip-topk-offset:1",
        "the indexer's norm and scores are in fp32, every layer has one; " + _KERNELS,
    ),
    left_out(
        "--disable-dsa-indexer-rotate-activation --no-dsa-indexer-rotate-activation",
        "the Hadamard rotation in front of FP8 changes no score without FP8, and is not there",
    ),
    same("--mamba-state-dim:1 --mamba-head-dim:1 --mamba-num-groups:1 --mamba-num-heads:1"),
    derived("--hybrid-layer-pattern:1", "--hybrid-layer-pattern; where there is no --num-layers, one for each letter"),
    derived("--hybrid-override-pattern:1", "--hybrid-layer-pattern, as its name was"),
    left_out("--is-hybrid-model --disable-mamba-mem-eff-path", "--hybrid-layer-pattern says it; " + _KERNELS),
    refused("--hybrid-attention-ratio:1 --hybrid-mlp-ratio:1", "--hybrid-layer-pattern says what each layer is"),
    left_out("--cache-mla-latents --mla-down-proj-fusion", "latents are kept while text is generated; " + _KERNELS),
    Row("--mtp-num-layers:1", "same", "the same", values={"0": ""}),
    same("--mtp-loss-scaling-factor:1"),
    refused("--mtp-use-repeated-layer --mtp-standalone", "each layer of --mtp-num-layers has weights of its own"),
    refused(
        "--heterogeneous-layers-config-path:1 "
        "--heterogeneous-layers-config-encoded-json:1 --use-mup --mup-width-mult:1 --mup-base-hidden-size:1 "
        "--enable-mhc-connections --num-residual-streams:1 --decoder-num-layers:1 --decoder-seq-length:1 "
        "--retriever-seq-length:1 --bert-no-binary-head --bert-load:1 --biencoder-projection-dim:1 "
        "--biencoder-shared-query-context-model --encoder-tensor-model-parallel-size:1 "
        "--encoder-pipeline-model-parallel-size:1 --onnx-safe:1 --vision-pretraining --vision-pretraining-type:1 "
        "--num-classes:1 --img-h:1 --img-w:1 --num-channels:1 --patch-dim:1 --classes-fraction:1 "
        "--data-per-class-fraction:1 --vision-backbone-type:1 --swin-backbone-type:1 --iter-per-epoch:1 "
        "--dino-local-img-size:1 --dino-local-crops-number:1 --dino-head-hidden-size:1 --dino-bottleneck-size:1 "
        "--dino-freeze-last-layer:1 --dino-norm-last-layer --dino-warmup-teacher-temp:1 --dino-teacher-temp:1 "
        "--dino-warmup-teacher-temp-epochs:1 --no-data-sharding --mask-type:1 --mask-factor:1 --mask-prob:1 "
        "--short-seq-prob:1 --titles-data-path:1 --query-in-block-prob:1 --use-one-sent-docs --evidence-data-path:1 "
        "--ict-head-size:1 --ict-load:1 --retriever-report-topk-accuracies:+ --retriever-score-scaling "
        "--block-data-path:1 --embedding-path:1 --indexer-batch-size:1 --indexer-log-interval:1 --sample-rate:1",
        _NO,
    ),
    same(
        "--num-experts:1 --moe-router-topk:1 --moe-ffn-hidden-size:1 --moe-layer-freq:1 --moe-aux-loss-coeff:1 "
        "--moe-z-loss-coeff:1 --moe-shared-expert-intermediate-size:1 --moe-router-score-function:1 "
        "--moe-router-topk-scaling-factor:1 --moe-router-pre-softmax --expert-model-parallel-size:1 "
        "--moe-router-num-groups:1 --moe-router-group-topk:1 --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate:1 --moe-shared-expert-gate --moe-token-drop-policy:1 "
        "--moe-pad-expert-input-to-capacity --moe-apply-probs-on-input --expert-tensor-parallel-size:1"
    ),
    becomes(
        "--moe-expert-capacity-factor:1",
        "--moe-expert-capacity-factor {}",
        "counted over each sequence, not over what a process computes at a time, and in training only",
    ),
    chosen(
        "--moe-router-load-balancing-type:1",
        {
            "aux_loss": "",
            "seq_aux_loss": "--moe-router-load-balancing-type seq_aux_loss",
            "global_aux_loss": "--moe-router-load-balancing-type global_aux_loss",
            "none": "--moe-router-load-balancing-type none",
        },
        "take aux_loss, seq_aux_loss, global_aux_loss or none; several at once do not exist, and what sinkhorn needs "
        "in addition says --help: weights are those of the router's other flags here",
    ),
    refused("--moe-router-dtype:1", "the router computes in fp32", {"fp32": ""}),
    chosen(
        "--moe-token-dispatcher-type:1",
        {"allgather": "", "alltoall": "", "alltoall_seq": "", "flex": ""},
        "give allgather, alltoall or flex; tokens are sent in one way here",
    ),
    left_out(
        "--moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-router-fusion "
        "--moe-shared-expert-overlap --moe-per-layer-logging --overlap-moe-expert-parallel-comm --delay-wgrad-compute "
        "--moe-enable-deepep --moe-deepep-num-sms:1 --moe-flex-dispatcher-backend:1 --moe-hybridep-num-sms:1 "
        "--moe-router-padding-for-fp8 --moe-router-padding-for-quantization",
        "how experts are computed and tokens sent has one way here",
    ),
    refused(
        "--moe-use-upcycling --moe-upcycling-granularity:1",
        "tools/convert_checkpoint.py --upcycle makes experts of a dense checkpoint",
    ),
    refused(
        "--moe-router-force-load-balancing --moe-router-force-biased:1",
        "it routes tokens at random, to measure speed; --dry-run measures a step with even loads",
    ),
    refused(
        "--moe-pad-experts-for-cuda-graph-inference --moe-token-dropping --moe-router-topk-limited-devices:1 "
        "--moe-input-jitter-eps:1 --moe-extended-tp --moe-mlp-glu-interleave-size:1 --moe-latent-size:1 "
        "--moe-paged-stash --enable-routing-replay --disable-moe-aux-loss-in-first-layers "
        "--use-tokens-per-expert-balance",
        _MOE,
    ),
)
