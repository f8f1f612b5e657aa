"""Megatron's flags added in 2026, by what they become."""

from __future__ import annotations

from smp.config.megatron.rows import Row, becomes, left_out, refused, same

_CHECKPOINTS = "checkpoints have one format, which every layout reads: docs/checkpoints.md"
_MOE = "mixtures of experts have what --help lists under --moe-..."
_NO = "this architecture does not exist; the decoder is --help's group model"
_OTHER = "it belongs to another of Megatron's programs; finetune.py does SFT, LoRA, DPO, GRPO and distillation here"
_SERVING = "it belongs to Megatron's inference: tools/generate.py writes text here"

NEWER: tuple[Row, ...] = (
    becomes("--muon-nesterov", "--muon-use-nesterov"),
    becomes("--model-parallel-size:1", "--tensor-model-parallel-size {}"),
    refused(
        "--muon-coefficient-type:1",
        "Muon's iteration has one set of coefficients, which is quintic",
        {"quintic": ""},
    ),
    refused(
        "--muon-scalar-optimizer:1",
        "what Muon does not take is Adam's",
        {"adam": ""},
    ),
    left_out(
        "--flash-attention-version:1 --high-priority-a2a-comm-stream --moe-shared-expert-glu-interleave-size:1 "
        "--moe-single-grouped-bias --moe-single-grouped-weight --moe-use-grouped-tensor --muon-use-syrk "
        "--use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert",
        "how products are computed is the library's choice",
    ),
    left_out(
        "--disable-align-grad-reduce --disable-clone-scatter-output-in-embedding "
        "--ep-overlap-early-attn-memory-release --fsdp-db-use-persist-buf-on-alloc-fail "
        "--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer "
        "--no-clone-scatter-output-in-embedding --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad "
        "--no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-split-ag --no-tp-comm-split-rs "
        "--no-use-layer-wise-param-layout --overlap-dispatch-backward-with-experts-wgrad",
        "it changes how communication overlaps computation, and here it does wherever it can",
    ),
    left_out(
        "--moe-flex-dispatcher-num-sms:1 --moe-hybridep-num-blocks-permute:1 "
        "--moe-hybridep-num-blocks-unpermute:1 --moe-hybridep-num-sms-preprocessing:1 "
        "--moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy --moe-permute-fusion-into-hybridep",
        "experts' tokens are exchanged by all-to-all, without settings of kernels",
    ),
    refused(
        "--moe-combine-bwd-dtype:1 --moe-dispatch-fwd-dtype:1",
        "experts' tokens are exchanged in the dtype of activations",
        {"bf16": ""},
    ),
    refused(
        "--moe-enable-routing-replay --moe-expert-rank-capacity-factor:1 --moe-router-quantile-balancing-ema:1 "
        "--moe-routing-trace-capture-hidden-states --moe-routing-trace-capture-logits "
        "--moe-routing-trace-dump-weights --moe-routing-trace-max-training-iters:1 --moe-routing-trace-path:1",
        _MOE,
    ),
    refused(
        "--expert-tensor-parallel-num-weight-shards:1 --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub "
        "--gtp-remat-opt-in-modules:+ --gtp-remat-reduce-scatter-with-fp32-accumulation",
        "--expert-tensor-parallel-size says how experts are cut",
    ),
    left_out(
        "--cpu-offloading-retain-pinned-cpu-buffers --delay-offload-until-cuda-graph "
        "--delta-offload-bytes-across-pp-ranks:1 --fine-grained-offloading-max-inflight-offloads:1 "
        "--moe-paged-stash-buffer-size-factor-cpu:1 --moe-paged-stash-buffer-size-factor-cuda:1 "
        "--moe-paged-stash-page-size:1",
        "--offload-activations needs no tuning",
    ),
    refused(
        "--activation-offload-fraction:1",
        "--offload-activations offloads all that a block saves",
        {"1": "", "1.0": ""},
    ),
    refused(
        "--disable-dsa-indexer-scoring-relu --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute:1 "
        "--gdp-num-householder:1 --mamba-inference-conv-states-dtype:1 --mamba-inference-ssm-states-dtype:1 "
        "--mamba-training-ssm-states-dtype:1 --mhc-init-gating-factor:1 --mhc-num-residual-streams:1 "
        "--mhc-recompute-layer-num:1 --mhc-sinkhorn-iterations:1 --mtp-hsm --mtp-hybrid-override-pattern:1 "
        "--mup-attn-scale-power:1 --mup-base-head-dim:1 --mup-embedding-mult:1 --mup-output-mult:1 "
        "--no-dsa-indexer-scoring-relu",
        _NO,
    ),
    refused(
        "--mtp-detach-heads",
        "gradients of multi-token prediction reach the whole model",
    ),
    refused(
        "--no-yarn-correction-range-round-to-int",
        "YaRN here is --rope-scaling-type yarn with --no-yarn-truncate",
    ),
    refused(
        "--disable-fp8-wgrad",
        "--fp8-recipe rowwise keeps gradients of weights out of FP8",
    ),
    refused(
        "--batch-invariant-backend:1 --batch-invariant-mode",
        "--deterministic-mode gives the same numbers again; not for other batches",
    ),
    refused(
        "--mlp-chunks-for-training:1",
        "MLPs are not computed in chunks; --recompute-granularity saves memory",
    ),
    refused(
        "--ddp-param-name-patterns-for-fp32-local-accumulation:+",
        "gradients are summed in fp32 for all weights",
    ),
    left_out(
        "--output-logit-dtype:1",
        "logits and loss are in fp32 in chunks that fit a cache",
    ),
    refused(
        "--dump-param-to-param-group-map:1 --freeze-all-layers --head-lr-mult:1",
        "--lr and --weight-decay are for all parameters, and all are trained; finetune.py --lora-rank freezes a model",
    ),
    refused(
        "--grpo-filter-groups-with-same-reward --logits-load-decode-threads:1 --logits-load-dir:1 "
        "--logits-load-ignore-errors --logits-load-kd-loss-alpha:1 --logits-load-msc-prefetch-depth:1 "
        "--logits-load-prefetch-factor:1 --logits-save-dir:1 --logits-save-dtype:1 --logits-save-top-k:1 "
        "--logits-save-top-p:1 --logits-save-top-p-min-k:1 --no-rl-inference-logprobs-is-correction "
        "--no-rl-offload-inference-model-weights-when-idle --no-rl-partial-rollouts --no-rl-persist-cuda-graphs "
        "--no-rl-skip-bos-token --no-rl-training-cuda-graphs --no-rl-use-sequence-packing "
        "--no-rl-verify-model-weights-swap --refit-method:1 --rl-consumption-granularity:1 "
        "--rl-default-temperature:1 --rl-default-top-k:1 --rl-default-top-p:1 --rl-durable-rollout-bank "
        "--rl-generation-lag:1 --rl-importance-sampling-truncation-coef:1 "
        "--rl-inference-expert-model-parallel-size:1 --rl-inference-expert-tensor-model-parallel-size:1 "
        "--rl-inference-logprobs-is-correction --rl-inference-model-unified-memory-level:1 "
        "--rl-inference-parsers:+ --rl-inference-pipeline-model-parallel-size:1 "
        "--rl-inference-tensor-model-parallel-size:1 --rl-kv-cache-management-mode:1 --rl-max-inflight-requests:1 "
        "--rl-offload-inference-model-weights-when-idle --rl-persist-cuda-graphs --rl-profile --rl-profile-dir:1 "
        "--rl-prompts-per-eval:1 --rl-rollout-bank-dir:1 --rl-rollout-bank-max-bytes:1 "
        "--rl-sequence-packing-algo:1 --rl-sequence-packing-max-sequences-per-bin:1 --rl-skip-bos-token "
        "--rl-submission-granularity:1 --rl-training-cuda-graphs --rl-verify-model-weights-swap",
        _OTHER,
    ),
    refused(
        "--decode-only-cuda-graphs --inference-coordinator-port:1 --inference-cuda-graph-all-prefills "
        "--inference-cuda-graph-max-tokens:1 --inference-cuda-graph-scope:1 --inference-disable-ep-consensus "
        "--inference-disable-triton-nvls-kernels --inference-dynamic-batching-async-sched-mode:1 "
        "--inference-dynamic-batching-cuda-graph-mixed-prefill-count:1 "
        "--inference-dynamic-batching-cuda-graph-sizing-distribution:1 "
        "--inference-dynamic-batching-logprobs-mode:1 --inference-dynamic-batching-mamba-memory-ratio:1 "
        "--inference-dynamic-batching-paused-buffer-size-gb:1 --inference-dynamic-batching-prefix-caching "
        "--inference-dynamic-batching-prefix-caching-coordinator-policy:1 "
        "--inference-dynamic-batching-prefix-caching-eviction-policy:1 "
        "--inference-dynamic-batching-prefix-caching-mamba-gb:1 "
        "--inference-dynamic-batching-prefix-caching-routing-alpha:1 "
        "--inference-dynamic-batching-sampling-backend:1 "
        "--inference-dynamic-batching-track-generated-token-events "
        "--inference-dynamic-batching-track-paused-request-events "
        "--inference-dynamic-batching-unified-memory-level:1 --inference-fuse-tp-communication "
        "--inference-grouped-gemm-backend:1 --inference-moe-disable-fused-quant-kernels "
        "--inference-moe-token-dispatcher-type:1 --inference-shards:1 --inference-text-gen-server-logging "
        "--inference-use-synchronous-zmq-collectives --inference-wandb-logging "
        "--no-inference-disable-ep-consensus --no-inference-dynamic-batching-prefix-caching "
        "--no-inference-text-gen-server-logging --no-inference-use-synchronous-zmq-collectives "
        "--no-inference-wandb-logging --num-speculative-tokens:1 --use-same-sampling-seed-across-dp-ranks",
        _SERVING,
    ),
    refused(
        "--chat-template:1",
        "finetune.py --chat-template",
    ),
    refused(
        "--start-eval-at-iter:1 --validation-set-names:+",
        "a run evaluates every --eval-interval iterations, on one validation set",
    ),
    refused(
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        "the tokenizer's own file says how text is read",
    ),
    left_out(
        "--disable-pad-vocab-size",
        "checkpoints hold no padding",
    ),
    left_out(
        "--disable-save-tokenizer-assets --disable-use-tokenizer-model-from-checkpoint-args",
        "a tokenizer is what --tokenizer-model says",
    ),
    left_out(
        "--async-ckpt-use-cpu-shm --ckpt-drop-redundant-extra-state --ckpt-fully-parallel-load-per-rank-objects "
        "--ckpt-fully-parallel-load-process-group:1 --ckpt-fully-parallel-save-process-group:1 "
        "--ckpt-pg-tensors-cache-create --ckpt-pg-tensors-cache-path:1 "
        "--disable-ckpt-load-validate-sharding-integrity --disable-msc --disable-strict-fsdp-dtensor-load "
        "--enable-msc --no-ckpt-load-validate-sharding-integrity",
        _CHECKPOINTS,
    ),
    refused(
        "--persistent-save-interval:1 --save-activations-interval:1 --save-dgrads-interval:1 "
        "--save-params-interval:1 --save-tokens-per-expert-interval:1 --save-wgrads-interval:1",
        "--save-interval and --save-retain-interval say what stays; single tensors are not written",
    ),
    refused(
        "--override-ckpt-iteration:1",
        "a checkpoint's iteration is its own; --finetune begins at 0",
    ),
    same("--inprocess-barrier-timeout:1 --inprocess-heartbeat-timeout:1 --inprocess-max-iterations:1"),
    left_out(
        "--inprocess-completion-timeout:1 --inprocess-empty-cuda-cache --inprocess-hard-timeout:1 "
        "--inprocess-heartbeat-interval:1 --inprocess-last-call-wait:1 --inprocess-monitor-process-interval:1 "
        "--inprocess-monitor-thread-interval:1 --inprocess-progress-watchdog-interval:1 "
        "--inprocess-soft-timeout:1 --inprocess-termination-grace-time:1",
        "the process next to each one that trains sees it end; --inprocess-heartbeat-timeout and "
        "--inprocess-barrier-timeout are the two limits",
    ),
    refused("--inprocess-active-world-size:1", "nodes beyond --max-nodes are spare, docs/elastic.md"),
    refused(
        "--inprocess-granularity:1",
        "a process that is lost is replaced alone, on its own machine",
        values={"rank": ""},
    ),
    refused(
        "--fault-injector-delay-start-iteration:1 --fault-injector-fault-delay:1 "
        "--fault-injector-fault-probabilities:1 --fault-injector-fault-types:1 --fault-injector-mtti-seconds:1 "
        "--fault-injector-num-ranks:1 --fault-injector-offset-seconds:1 --fault-injector-ranks:1 "
        "--fault-injector-seed:1",
        "faults are not injected into runs",
    ),
    left_out(
        "--disable-flight-recorder-dump-on-timeout --disable-flight-recorder-extra-dump-on-exec "
        "--disable-flight-recorder-include-only-active --flight-recorder-include-stack-trace "
        "--flight-recorder-trace-buffer-size:1 --no-flight-recorder-dump-on-timeout "
        "--no-flight-recorder-extra-dump-on-exec --no-flight-recorder-include-only-active",
        "NCCL's recorder has TORCH_NCCL_... in the environment",
    ),
    left_out(
        "--disable-log-loss-scale-to-tensorboard --disable-manual-gc-eval --exit-signal-handler-for-training "
        "--gpu-sniff-test-interval:1 --record-shapes",
        "it tells more of a run, or ends it alike: signals save and end it",
    ),
    refused(
        "--otel-enabled --otel-service-name:1 --otel-span-groups:1",
        "TensorBoard, W&B and MLflow",
    ),
)
