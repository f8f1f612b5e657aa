"""Megatron's flags of training, optimizer, data, tokenizer, checkpoints and logs, and those of other programs."""

from __future__ import annotations

from smp.config.megatron.rows import Row, becomes, chosen, derived, left_out, refused, same

_OPTIMIZERS = "--optimizer takes adam, apex-adam, sgd and muon"
_LOGS = "log lines and --log-dir's records always hold what there is"
_CHECKPOINTS = "checkpoints have one format, which every layout reads: docs/checkpoints.md"
_ORDER = "the order of samples has one definition, and indices are built once per node: --data-cache-path"
_RESTARTS = "a run ends at a failure and --load auto continues from its last checkpoint; main.py starts it again"
_SERVING = "it belongs to Megatron's inference: tools/generate.py writes text here"
_OTHER = "it belongs to another of Megatron's programs; finetune.py does SFT, LoRA, DPO, GRPO and distillation here"

TRAINING: tuple[Row, ...] = (
    same(
        "--micro-batch-size:1 --global-batch-size:1 --rampup-batch-size:+ --train-iters:1 --train-samples:1 --seed:1 "
        "--eval-interval:1 --eval-iters:1 --exit-interval:1 --exit-duration-in-mins:1 --profile --profile-step-start:1 "
        "--profile-step-end:1 --lr:1 --min-lr:1 --decoupled-lr:1 --decoupled-min-lr:1 "
        "--step-batch-size-schedule:+ --lr-decay-samples:1 --lr-warmup-samples:1 --lr-wsd-decay-samples:1 "
        "--lr-decay-iters:1 --lr-warmup-iters:1 --lr-warmup-init:1 --lr-warmup-fraction:1 "
        "--lr-wsd-decay-iters:1 --lr-wsd-decay-style:1 --apply-wd-to-qk-layernorm "
        "--weight-decay:1 --adam-beta1:1 --adam-beta2:1 --adam-eps:1 --sgd-momentum:1 "
        "--clip-grad:1 --exp-avg-dtype:1 --exp-avg-sq-dtype:1 --muon-momentum:1 "
        "--muon-scale-mode:1 --muon-num-ns-steps:1 --muon-extra-scale-factor:1"
    ),
    becomes("--batch-size:1", "--micro-batch-size {}"),
    becomes("--warmup:1", "--lr-warmup-fraction {}"),
    chosen(
        "--lr-decay-style:1",
        {style: f"--lr-decay-style {style}" for style in ("cosine", "linear", "WSD", "constant")},
        "--lr-decay-style takes cosine, linear, WSD and constant",
    ),
    chosen(
        "--optimizer:1",
        {"adam": "--optimizer adam", "sgd": "--optimizer sgd", "muon": "--optimizer muon"},
        _OPTIMIZERS,
    ),
    left_out("--muon-split-qkv", "query, key and value are matrices of their own"),
    refused("--no-muon-split-qkv --muon-no-split-qkv", "query, key and value are matrices of their own"),
    left_out("--muon-fp32-matmul-prec:1", "Muon orthogonalizes in fp32, on CUDA with products in TF32"),
    refused(
        "--muon-tp-mode:1",
        "Muon orthogonalizes whole matrices, whatever the layout, as Megatron does with duplicated and distributed",
        {"duplicated": "", "distributed": ""},
    ),
    left_out("--use-precision-aware-optimizer", "--exp-avg-dtype and --exp-avg-sq-dtype need nothing else"),
    refused(
        "--embedding-lr:1 --output-lr:1",
        "--decoupled-lr is for both, the embedding and the output matrix",
    ),
    refused(
        "--start-weight-decay:1 --end-weight-decay:1 --weight-decay-incr-style:1",
        "--weight-decay is constant",
        {"constant": ""},
    ),
    chosen(
        "--no-weight-decay-cond-type:1",
        dict.fromkeys(("apply_wd_to_qk_layernorm", "qwen3_next"), "--apply-wd-to-qk-layernorm"),
        "--no-weight-decay-cond-type takes apply_wd_to_qk_layernorm (qwen3_next)",
    ),
    refused(
        "--lion-beta1:1 --lion-beta2:1 --soap-beta1:1 --soap-beta2:1 --use-emerging-optimizers",
        _OPTIMIZERS,
    ),
    refused(
        "--decoupled-weight-decay --no-decoupled-weight-decay", "weight decay is decoupled with Adam: leave it out"
    ),
    left_out("--override-lr-scheduler --use-checkpoint-lr-scheduler", "the schedule is the command's"),
    left_out("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", "the schedule is the command's"),
    left_out("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "the schedule is the command's"),
    left_out("--calculate-per-token-loss", "the loss is always a sum over tokens / valid tokens of the global batch"),
    left_out(
        "--check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad --check-for-spiky-loss "
        "--check-for-large-grads",
        "steps that are not finite are skipped, see --max-skipped-steps",
    ),
    refused(
        "--grad-norm-skip-threshold:1 --num-zeros-in-grad-skip-threshold:1",
        "--spike-policy skip drops steps whose loss or gradient norm is far above the last ones",
        {"inf": ""},
    ),
    refused("--iterations-to-skip:+", "no iterations are skipped"),
    refused("--data-parallel-random-init", "initial weights are a function of --seed, the same in every layout"),
    refused("--decrease-batch-size-if-needed", "the batch does not change on its own"),
    left_out(
        "--exit-signal-handler --exit-signal:1 --exit-signal-handler-for-dataloader --manual-gc --manual-gc-interval:1 "
        "--no-manual-gc-eval --empty-unused-memory-level:1 "
        "--train-sync-interval:1 --disable-bf16-reduced-precision-matmul "
        "--adlr-autoresume --adlr-autoresume-interval:1 --reset-tokens-seen --config-logger-dir:1 "
        "--result-rejected-tracker-filename:1 --use-pytorch-profiler "
        "--use-persistent-ckpt-worker --enable-experimental --profile-ranks:+ --record-memory-history "
        "--memory-snapshot-path:1 --nvtx-ranges --no-nvtx-ranges --pytorch-profiler-collect-shapes "
        "--pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra",
        "nothing to switch on: signals save and stop, one profiler records (--profile)",
    ),
    refused(
        "--eval-only --skip-train --test-mode", "a run trains; --eval-interval and --test-data-path evaluate on the way"
    ),
    refused(
        "--full-validation --multiple-validation-sets --eval-micro-batch-size:1 --eval-global-batch-size:1",
        "--eval-iters",
    ),
    refused("--freeze-LM --freeze-ViT --phase-transition-iterations:1 --per-token-loss-threshold:1", _OTHER),
    refused("--yaml-cfg:1", "--config: the same names, types and checks as flags"),
    refused(
        "--error-injection-rate:1 --error-injection-type:1 --enable-ft-package --ft-num-warmup-iters:1 "
        "--calc-ft-timeouts --simulated-fault:1 --enable-straggler-detector --straggler-ctrlr-port:1 "
        "--run-workload-inspector-server",
        _RESTARTS,
    ),
    left_out("--disable-straggler-on-startup", "--log-straggler measures, and stops nothing"),
    chosen(
        "--rerun-mode:1",
        {"disabled": "", "validate_results": "--rerun-mode validate_results"},
        "--rerun-mode validate_results names ranks whose bits differ; statistics of differences there are none",
    ),
    becomes("--check-weight-hash-across-dp-replicas-interval:1", "--check-replicas-interval {}"),
)

DATA: tuple[Row, ...] = (
    same(
        "--data-path:+ --train-data-path:+ --valid-data-path:+ --test-data-path:+ --data-args-path:1 --split:1 "
        "--mock-data "
        "--data-cache-path:1 --num-workers:1 --reset-position-ids --reset-attention-mask --eod-mask-loss"
    ),
    derived(
        "--tokenizer-type:1 --tokenizer-model:1 --vocab-file:1 --merge-file:1 --vocab-size:1",
        "--tokenizer-model FILE (a file shows its kind) or --vocab-size: the number of entries of --vocab-file",
    ),
    refused(
        "--per-split-data-args-path:1 --per-dataset-sequences-path:1",
        "--train-data-path, --valid-data-path, --test-data-path",
    ),
    chosen("--dataloader-type:1", {"single": ""}, _ORDER),
    left_out(
        "--mid-level-dataset-surplus:1 --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--no-mmap-bin-files "
        "--no-create-attention-mask-in-dataloader --create-attention-mask-in-dataloader --mmap-bin-files "
        "--data-sharding --num-dataset-builder-threads:1 --object-storage-cache-path:1 --s3-cache-path:1 "
        "--dataloader-save:1 --data-impl:1 --mmap-warmup --use-cached-dataset-index",
        _ORDER,
    ),
    left_out(
        "--allow-ambiguous-pad-tokens --tiktoken-num-special-tokens:1 --tiktoken-special-tokens:+",
        "for --tokenizer-type TikTokenizer only",
    ),
    left_out("--tiktoken-pattern:1", "for --tokenizer-type TikTokenizer only; here gpt2, cl100k, o200k or llama3"),
    left_out(
        "--tokenizer-metadata:1 --tokenizer-special-tokens:+ --tokenizer-prompt-format:1 --special-tokens:+ "
        "--tokenizer-hf-include-special-tokens --tokenizer-hf-use-fast --tokenizer-hf-no-use-fast --legacy-tokenizer "
        "--trust-remote-code --vocab-extra-ids:1 --use-gigatoken --tokenizer-sentencepiece-legacy "
        "--no-legacy-tokenizer "
        "--tokenizer-hf-no-include-special-tokens --null-tokenizer-eod-id:1 --null-tokenizer-pad-id:1",
        "a tokenizer's file says it",
    ),
    refused(
        "--fim-data --fim-rate:1 --fim-spm-rate:1 --fim-split-sample:1 --fim-fragment-rate:1 --fim-no-prefix:1 "
        "--fim-prefix-token:1 --fim-middle-token:1 --fim-suffix-token:1 --fim-pad-token:1 --fim-eod-token:1 --sft "
        "--sft-tokenizer-prompt-format:1 --sft-mock-dataset-config-json:1 --dataloader-inter-document-masking "
        "--mock-dataset-config:1 --varlen-mock-dataset-config:1",
        "fill-in-the-middle does not exist; finetune.py does SFT, --reset-attention-mask separates documents",
    ),
    refused(
        "--retro-project-dir:1 --retro-add-retriever --retro-cyclic-train-iters:1 --retro-encoder-layers:1 "
        "--retro-encoder-hidden-dropout:1 --retro-encoder-attention-dropout:1 --retro-num-neighbors:1 "
        "--retro-num-retrieved-chunks:1 --retro-attention-gate:1 --retro-no-verify-neighbor-count",
        _OTHER,
    ),
)

CHECKPOINTS: tuple[Row, ...] = (
    same("--save-interval:1 --async-save --ckpt-step:1 --no-load-optim --finetune --save-retain-interval:1"),
    derived(
        "--exit-on-missing-checkpoint",
        "the default here; --no-exit-on-missing-checkpoint starts from nothing where --load has none, as Megatron does",
    ),
    derived(
        "--save:1 --load:1 --pretrained-checkpoint:1",
        "--save and --load; where both are one folder --load auto, which also makes the first start",
    ),
    derived("--use-checkpoint-args", "the architecture comes from --load, where no flag says it"),
    left_out("--no-load-rng --no-save-rng", "there is no random state to save: numbers are functions of the seed"),
    refused(
        "--no-save-optim --save-params-only",
        "a run's checkpoints are to resume from; tools/convert_checkpoint.py writes weights alone",
    ),
    chosen(
        "--ckpt-format:1",
        {"torch_dist": "", "torch": "", "torch_dcp": "", "fsdp_dtensor": "", "zarr": ""},
        _CHECKPOINTS,
    ),
    left_out(
        "--use-dist-ckpt --dist-ckpt-format:1 --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save "
        "--ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo:1 --ckpt-assume-constant-structure "
        "--dist-ckpt-strictness:1 --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient "
        "--dist-ckpt-save-pre-mcore-014 --use-dist-ckpt-deprecated --dist-ckpt-workers:1 --async-strategy:1 "
        "--auto-detect-ckpt-format --ckpt-convert-format:1 --ckpt-convert-save:1 "
        "--ckpt-convert-update-legacy-dist-opt-format "
        "--use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args --strict-fsdp-dtensor-load "
        "--no-strict-fsdp-dtensor-load --save-tokenizer-assets --no-save-tokenizer-assets "
        "--ckpt-load-validate-sharding-integrity "
        "--load-model-opt-format --log-progress --async-ckpt-cpu-priority:1 --async-ckpt-io-priority:1 "
        "--verify-integrity --load-main-params-from-ckpt --use-persistent-async-worker --dist-ckpt-use-cached-metadata",
        _CHECKPOINTS,
    ),
    refused(
        "--non-persistent-save-interval:1 --non-persistent-ckpt-type:1 --non-persistent-global-ckpt-dir:1 "
        "--non-persistent-local-ckpt-dir:1 --non-persistent-local-ckpt-algo:1",
        "--async-save writes while training continues; local copies do not exist",
    ),
)

LOGS: tuple[Row, ...] = (
    same("--log-interval:1 --wandb-project:1 --wandb-exp-name:1 --log-straggler --straggler-minmax-count:1"),
    becomes(
        "--tensorboard-dir:1", "--log-dir {}", "--log-dir: one folder for all that a run writes besides checkpoints"
    ),
    left_out(
        "--log-throughput --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-memory-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard "
        "--log-world-size-to-tensorboard --no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --tensorboard-log-interval:1 --tensorboard-queue-size:1 "
        "--log-params-norm --log-num-zeros-in-grad --log-energy --log-device-memory-used --log-memory-interval:1 "
        "--log-params-norm-per-param --log-l2-norm-grad-to-tensorboard --timing-log-level:1 --timing-log-option:1 "
        "--barrier-with-L1-time --no-barrier-with-level-1-timing --barrier-with-level-1-timing --logging-level:1 "
        "--log-loss-scale --log-overall-metrics --log-checkpoint-timing --disable-log-throughput --logging-summary",
        _LOGS,
    ),
    left_out(
        "--wandb-save-dir:1 --wandb-entity:1 --wandb-resume", "W&B reads WANDB_ENTITY, and its files are in --log-dir"
    ),
    left_out(
        "--one-logger-project:1 --one-logger-run-name:1 --one-logger-async --no-one-logger --enable-one-logger "
        "--app-tag-run-name:1 --app-tag-run-version:1",
        "there is no such logger to switch off",
    ),
    refused("--otel-endpoint:1", "TensorBoard, W&B and MLflow"),
)

OTHERS: tuple[Row, ...] = (
    refused(
        "--inference-batch-times-seqlen-threshold:1 --max-tokens-to-oom:1 --output-bert-embeddings "
        "--bert-embedder-type:1 "
        "--inference-max-requests:1 --inference-max-seq-length:1 --inference-dynamic-batching --inference-rng-tracker "
        "--inference-dynamic-batching-buffer-size-gb:1 --inference-dynamic-batching-block-size:1 "
        "--inference-dynamic-batching-max-tokens:1 --inference-dynamic-batching-max-requests:1 --symmetric-ar-type:1 "
        "--inference-dynamic-batching-num-cuda-graphs:1 --mlp-chunks-for-prefill:1 --nccl-all-reduce-for-prefill "
        "--flash-decode --use-legacy-static-engine --enable-chunked-prefill --inference-logging-step-interval:1 "
        "--max-batch-size:1 --temperature:1 --top-k:1 --top-p:1 --num-tokens-to-generate:1 --prompts:+",
        _SERVING,
    ),
    refused(
        "--perform-rl-step --grpo-group-size:1 --grpo-prompts-per-step:1 --grpo-iterations:1 --grpo-clamp-eps-lower:1 "
        "--grpo-clamp-eps-upper:1 --grpo-kl-beta:1 --grpo-entropy-term-weight:1 --grpo-default-temperature:1 "
        "--grpo-default-top-p:1 --langrl-env-config:1 --langrl-inference-server-type:1 --rl-use-sequence-packing "
        "--rl-partial-rollouts --rl-offload-optimizer-during-inference --export-kd-teacher-load:1 --export-kd-cfg:1 "
        "--export-quant-cfg:1 --export-model-type:1 --export-te-mcore-model --modelopt-enabled "
        "--teacher-model-config:1",
        _OTHER,
    ),
    left_out("--enable-gpt-oss --export-force-local-attention", "it is about the export to ModelOpt"),
    left_out(
        "--deepspeed --deepspeed_config:1 --deepspeed-config:1 --no-pipeline-parallel --pp-partition-method:1",
        "it is DeepSpeed's, whose file of settings is not read: the flags say it all",
    ),
)
