"""Megatron's flags of parallelism, overlap, precision, recompute and memory."""

from __future__ import annotations

from smp.config.megatron.rows import Row, becomes, chosen, derived, left_out, refused, same

_OVERLAP = "communication overlaps computation wherever it can"
_FSDP = "hybrid FSDP has one implementation: --hybrid-shard-degree and --data-parallel-sharding-strategy"
_FP8 = "of 8-bit and 4-bit arithmetic there is --fp8-format, in the linear layers of blocks, and no more"
_FP16 = "there is no fp16, so there is no loss scale: --bf16 needs none"
_GRAPHS = "CUDA graphs do not exist; --compile fuses operations"
_OFFLOAD = "--offload-activations offloads what all modules of a block save, those of --min-offloaded-tensor-size"

PARALLEL: tuple[Row, ...] = (
    same(
        "--tensor-model-parallel-size:1 --sequence-parallel --pipeline-model-parallel-size:1 --context-parallel-size:1 "
        "--pipeline-model-parallel-layout:1 --num-virtual-stages-per-pipeline-rank:1 --distributed-timeout-minutes:1 "
        "--bf16 --deterministic-mode"
    ),
    derived(
        "--num-layers-per-virtual-pipeline-stage:1", "--num-virtual-stages-per-pipeline-rank: layers / ranks / this"
    ),
    refused(
        "--decoder-first-pipeline-num-layers:1 --decoder-last-pipeline-num-layers:1 "
        "--pipeline-model-parallel-split-rank:1",
        "layers are balanced by what they cost; --pipeline-model-parallel-layout places them by hand",
    ),
    left_out(
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        "layers are balanced by what they cost, the ends of the model included",
    ),
    left_out(
        "--microbatch-group-size-per-virtual-pipeline-stage:1 --defer-embedding-wgrad-compute "
        "--wgrad-deferral-limit:1 --no-align-grad-reduce --no-align-param-gather --align-grad-reduce "
        "--align-param-gather --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush "
        "--no-scatter-gather-tensors-in-pipeline --use-ring-exchange-p2p --batch-p2p-communication "
        "--pipeline-model-parallel-comm-backend:1",
        "the order of passes and messages is --pipeline-schedule's",
    ),
    derived("--cp-comm-type:+", "--cp-comm-type, one value for all layers"),
    becomes(
        "--hierarchical-context-parallel-sizes:+",
        "--hierarchical-context-parallel-sizes {}",
        "the same, with a2a+p2p",
    ),
    refused(
        "--hybrid-context-parallel --dynamic-context-parallel --min-hybrid-context-parallel-size:1 "
        "--max-seqlen-per-dp-cp-rank:1 --sequence-packing-scheduler:1 --context-parallel-ulysses-degree:1",
        "--context-parallel-size is one for all sequences",
    ),
    derived(
        "--use-distributed-optimizer --use-torch-fsdp2 --use-megatron-fsdp --use-custom-fsdp "
        "--data-parallel-sharding-strategy:1 --num-distributed-optimizer-instances:1 "
        "--outer-dp-sharding-strategy:1 --zero-stage:1",
        "--hybrid-shard-degree (1: replicas) and --data-parallel-sharding-strategy, of which "
        "--use-distributed-optimizer is optim",
    ),
    refused(
        "--torch-fsdp2-no-reshard-after-forward --megatron-fsdp-version:1 "
        "--use-layer-wise-distributed-optimizer --tensor-parallel-num-weight-shards:1 "
        "--optimizer-params-dtype:1",
        _FSDP,
    ),
    left_out(
        "--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step "
        "--no-overlap-grad-reduce --no-overlap-param-gather --tp-comm-overlap --tp-comm-overlap-cfg:1 "
        "--disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad "
        "--disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --disable-tp-comm-split-ag "
        "--disable-tp-comm-split-rs --tp-comm-bootstrap-backend:1 --delay-grad-reduce --no-delay-grad-reduce "
        "--ddp-bucket-size:1 --ddp-num-buckets:1 --ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw "
        "--ddp-reduce-scatter-with-fp32-accumulation --suggested-communication-unit-size:1 "
        "--fsdp-double-buffer --keep-fp8-transpose-cache --enable-full-sharding-in-hsdp "
        "--gradient-reduce-div-fusion --no-gradient-reduce-div-fusion --no-scatter-gather "
        "--no-async-tensor-model-parallel-allreduce --async-tensor-model-parallel-allreduce "
        "--disable-symmetric-registration --nccl-ub --use-nccl-ub --use-sharp --sharp-enabled-group:1 "
        "--fsdp-manual-registration "
        "--high-priority-stream-groups:+ "
        "--nccl-communicator-config-path:1 --use-tp-pp-dp-mapping --create-all-gather-group "
        "--use-nonuniform-tp --replication --replication-jump:1 --replication-factor:1",
        _OVERLAP,
    ),
    chosen(
        "--distributed-backend:1",
        {"nccl": "", "gloo": ""},
        "the device decides: gloo on a CPU, NCCL on CUDA",
    ),
    left_out(
        "--init-model-with-meta-device --local-rank:1 --lazy-mpu-init --no-use-gloo-process-groups "
        "--enable-gloo-process-groups "
        "--disable-gloo-process-groups --standalone-embedding-stage --flight-recorder-dump-path:1 "
        "--distributed-timeout-seconds-after-init:1",
        "the launcher says who is who, and --distributed-timeout-minutes is the one time-out",
    ),
    refused("--fake-process-group", "--dry-run tries a step of each rank on tensors without data"),
    becomes(
        "--inprocess-restart",
        "--inprocess-restart --peer-snapshot-interval 10",
        "--inprocess-restart, from copies in memory: --peer-snapshot-interval 10",
    ),
    becomes("--fp16", "--bf16", "--bf16: there is no fp16 with a loss scale"),
    left_out("--loss-scale:1 --initial-loss-scale:1 --min-loss-scale:1 --loss-scale-window:1 --hysteresis:1", _FP16),
    left_out("--fp16-lm-cross-entropy --fp32-lm-head", "logits and loss are in fp32 in chunks that fit a cache"),
    left_out(
        "--accumulate-allreduce-grads-in-fp32 --no-accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 "
        "--megatron-fsdp-main-params-dtype:1 --megatron-fsdp-main-grads-dtype:1 --megatron-fsdp-grad-comm-dtype:1 "
        "--accumulate-bf16 --main-grads-dtype:1 --main-params-dtype:1 --reuse-grad-buf-for-mxfp8-param-ag",
        "gradients are always reduced in fp32, and master weights are fp32",
    ),
    same(
        "--fp8-format:1 --fp8-amax-history-len:1 --fp8-amax-compute-algo:1 --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16:1 --num-layers-at-end-in-bf16:1 --fp8-param-gather"
    ),
    chosen(
        "--fp8-recipe:1",
        {name: f"--fp8-recipe {name}" for name in ("delayed", "tensorwise", "blockwise", "mxfp8")},
        "--fp8-recipe takes delayed, tensorwise, rowwise, blockwise and mxfp8",
    ),
    chosen("--fp4-format:1", {"e2m1": "--fp8-format e2m1 --fp8-recipe nvfp4"}, "--fp8-format e2m1 is FP4"),
    refused("--fp4-recipe:1", "--fp8-recipe nvfp4 is the recipe of FP4", {"nvfp4": ""}),
    becomes("--fp8-hybrid", "--fp8-format hybrid"),
    becomes("--fp8-e4m3", "--fp8-format e4m3"),
    refused("--fp8-margin:1", "scales are the powers of two that fit, without a margin", {"0": ""}),
    left_out("--fp8-interval:1", "scales are those of every step"),
    refused("--no-fp8-wgrad", "--fp8-recipe rowwise keeps gradients of weights out of FP8"),
    becomes("--fp8-param", "--fp8-param-gather"),
    refused(
        "--fp8-quantizer-factory:1 --fp8-output-proj --fp8-dot-product-attention --fp8-multi-head-attention "
        "--fp4-param-gather --fp4-param --fp4-quantizer-factory:1 --te-precision-config-file:1 "
        "--kitchen-config-file:1 --kitchen-recipe-number:1 --use-kitchen-attention --kitchen-attention-backend:1 "
        "--quant-recipe:1",
        _FP8,
    ),
    chosen(
        "--recompute-granularity:1",
        {"full": "--recompute-granularity full", "selective": "--recompute-granularity selective"},
        "--recompute-granularity takes none, selective and full",
    ),
    becomes("--recompute-activations --moe-layer-recompute", "--recompute-granularity selective"),
    becomes("--checkpoint-activations --deepspeed-activation-checkpointing", "--recompute-granularity full"),
    left_out(
        "--recompute-method:1 --recompute-num-layers:1 --recompute-modules:+ --distribute-saved-activations "
        "--checkpoint-num-layers:1",
        "--recompute-granularity covers them: it repeats all blocks alike",
    ),
    same("--optimizer-cpu-offload --min-offloaded-tensor-size:1"),
    becomes("--cpu-offloading", "--offload-activations", "--offload-activations: of all layers but the last ones"),
    becomes("--fine-grained-activation-offloading", "--offload-activations"),
    left_out(
        "--cpu-offloading-num-layers:1", "--activation-loading-horizon says how many layers' activations stay instead"
    ),
    refused("--offload-modules:+", _OFFLOAD),
    refused("--optimizer-offload-fraction:1", "--optimizer-cpu-offload is for all parameters", {"1": "", "1.0": ""}),
    left_out(
        "--use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params "
        "--pin-cpu-grads --pin-cpu-params",
        "--optimizer-cpu-offload copies during the backward pass and the host's steps, in pinned memory",
    ),
    refused("--offload-optimizer-states", "--optimizer-cpu-offload keeps them on the host, where steps are computed"),
    refused(
        "--enable-cuda-graph --external-cuda-graph --cuda-graph-impl:1 --cuda-graph-scope:+ "
        "--cuda-graph-warmup-steps:1 "
        "--cuda-graph-modules:+ --optimizer-cuda-graph",
        _GRAPHS,
        {"none": ""},
    ),
)
