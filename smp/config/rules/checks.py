"""Checks of a config: ranges of single values, then combinations."""

from __future__ import annotations

from functools import cache

from smp.config.batch import BatchSizes
from smp.config.blend import parse_split
from smp.config.command_line.entry_points import EntryPoint
from smp.config.command_line.fields import (
    Setting,
    entry_point_of,
    given,
    require,
    said_without_effect,
    settings,
    without_effect,
)
from smp.config.layer_pattern import attends, has_mlp
from smp.config.layout import Layout
from smp.config.lr_schedule import lengths
from smp.config.model import ModelConfig
from smp.config.parallel import ParallelConfig
from smp.config.rules.context_parallel import check_context_parallel
from smp.config.rules.dsa import check_dsa, check_dsa_model
from smp.config.rules.foreign import check_foreign
from smp.config.rules.fp8 import check_fp8
from smp.config.rules.latent import check_latent
from smp.config.rules.linear import check_linear, check_pattern
from smp.config.rules.moe import check_moe, check_moe_model
from smp.config.rules.mtp import check_mtp, check_mtp_model
from smp.config.rules.multipliers import check_multipliers
from smp.config.rules.offload import check_offload
from smp.config.rules.positions import check_positions
from smp.config.rules.qlora import check_qlora
from smp.config.rules.vision import check_vision
from smp.config.schema import CheckpointConfig, Config, ConfigError, DataConfig, OptimizerConfig, TrainingConfig

# Every number is above zero, except these: at least 0 and below 1 ...
_FRACTIONS = {
    *("hidden_dropout", "attention_dropout"),
    *("lr_warmup_fraction", "adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"),
    "lora_dropout",
}
# ... and these: at least 0.
_FROM_ZERO = {
    *("beta", "top_k", "eval_temperature", "overlong_buffer_len", "importance_sampling_clip_min", "log_completions"),
    *("num_workers", "preview", "reward_center_coefficient", "hybrid_shard_degree", "inprocess_max_iterations"),
    *(
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_init",
        "min_lr",
        "decoupled_min_lr",
        "weight_decay",
        "clip_grad",
        "seed",
    ),
    "moe_aux_loss_coeff",
    "dsa_indexer_loss_coeff",
    "moe_router_bias_update_rate",
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("position_embedding_offset", "glu_linear_offset", "mamba_dt_min"),
}
_SHARES = ("bad_sample_threshold", "lmbda", "kd_loss_alpha")
_ANY = ("off_policy_mask_threshold", "reward_model_weight")
# Limits of tables of layers and experts, and of timers. No integer is wider than 64 bits.
_BELOW = {"num_layers": 2**16, "num_experts": 2**16, "distributed_timeout_minutes": 10**6}


@cache
def _numbers(entry: EntryPoint) -> tuple[Setting, ...]:
    # train_iters first: recipes derive others from it.
    table = sorted(settings(entry).values(), key=lambda setting: setting.name != "train_iters")
    return tuple(setting for setting in table if setting.type in (int, float))


def check_ranges(config: Config, group: str | None = None) -> None:
    """Check each number by itself, of all groups or of one."""
    for setting in _numbers(entry_point_of(config)):
        if group not in (None, setting.group):
            continue
        name = setting.name
        value = getattr(getattr(config, setting.group), name, None)  # None: the run has no such group
        if value is None:
            continue
        if name in _FRACTIONS:
            require(0 <= value < 1, f"{setting.flag} {value} must be at least 0 and below 1")
        elif name in _SHARES:
            require(0 <= value <= 1, f"{setting.flag} {value} is not between 0 and 1")
        elif name == "dpo_label_smoothing":
            require(0 <= value < 0.5, f"{setting.flag} {value} must be at least 0 and below 0.5")
        elif name in _ANY:
            pass
        elif name in _FROM_ZERO:
            require(value >= 0, f"{setting.flag} {value} must not be negative")
        else:
            require(value > 0, f"{setting.flag} {value} must be above 0")
        limit = _BELOW.get(name, 2**63 if setting.type is int else None)
        require(limit is None or value < limit, f"{setting.flag} {value} must be below {limit}")


def check_combinations(config: Config, layout: Layout) -> None:
    """Check a config with its defaults filled in, as a whole."""
    check_vision(config)
    _check_inprocess(config.parallel)
    if config.model.is_foreign:
        check_foreign(config)
    else:
        _check_heads_and_widths(config.model, layout.tp)
        check_linear(config.model, layout.tp)
    _check_pipeline(config.parallel, config.training)
    _check_data_source(config.data, config.model, config.training, tuning=config.objective is not None)
    _check_batch(config)
    check_context_parallel(config, layout)
    check_moe(config, layout)
    check_mtp(config)
    check_dsa(config)
    check_fp8(config, layout)
    check_offload(config)
    check_qlora(config, layout)
    _check_rerun(config)
    _check_kernels(config)
    require(
        # auto measures links: another run may choose another order of sums.
        not (config.training.deterministic_mode and config.parallel.data_parallel_collectives == "auto"),
        "--deterministic-mode and --data-parallel-collectives auto exclude each other: measurements at the start "
        "decide in which order gradients are summed; flat and hierarchical work",
    )
    _check_rounded_between_nodes(config.parallel, layout)
    _check_secondary_shards(config.parallel, layout)
    _check_schedule(config.optim)
    _check_training(config.training)
    # Fine-tuning's --load means another thing, and is checked in its own rules.
    if config.objective is None:
        _check_loading(config.checkpoint)
    _check_saving(config, config.checkpoint, config.training)


def _check_inprocess(parallel: ParallelConfig) -> None:
    silence = parallel.inprocess_heartbeat_timeout
    require(silence > 2, f"--inprocess-heartbeat-timeout {silence} must be above 2: heartbeats are one second apart")


def _check_rounded_between_nodes(parallel: ParallelConfig, layout: Layout) -> None:
    """Refuse ZeRO++ rounding with tensor parallelism. Blocks that share a scale run over a unit's flat buffer: a tensor
    that every TP rank has a copy of (norms, routers, some biases) would be rounded with neighbours that differ from
    rank to rank, and the copies would drift apart."""
    flags = given(parallel, "zero_quantized_weights", "zero_quantized_gradients")
    require(
        not (flags and layout.tp > 1),
        f"{' and '.join(flags)} and --tensor-model-parallel-size {layout.tp} exclude each other: copies of norms would "
        "be rounded differently on each tensor-parallel process; leave out one",
    )


def _check_secondary_shards(parallel: ParallelConfig, layout: Layout) -> None:
    """Check what is known before process groups exist; that the neighbours are on one node is checked at the start."""
    size, shards, ep = parallel.zero_hpz_partition_size, layout.dp_shard * layout.cp, layout.ep
    expert_ranks = size * (layout.tp // layout.expert_tp)  # of the neighbours' processes those among which experts lie
    if size == 1:
        return
    require(
        layout.pp == 1,
        f"--zero-hpz-partition-size {size} and a pipeline exclude each other: it gathers weights once per step",
    )
    require(
        # Equal to all shards it would hold nothing new.
        size < shards and shards % size == 0,
        f"--zero-hpz-partition-size {size} has to divide, and be below, the {shards} processes that shard weights "
        "(--hybrid-shard-degree x --context-parallel-size)",
    )
    require(
        expert_ranks % ep == 0 or ep % expert_ranks == 0,
        f"--zero-hpz-partition-size {expert_ranks} and --expert-model-parallel-size {ep}: one has to divide the other"
        if layout.etp is None
        else f"--zero-hpz-partition-size {size} x {expert_ranks // size} of --expert-tensor-parallel-size "
        f"{layout.etp} and --expert-model-parallel-size {ep}: one has to divide the other",
    )


def check_effects(config: Config, *groups: str) -> None:
    """Refuse settings that have no effect with the others (``only_with`` in the schema), in all groups or some.
    ``config``: without derived defaults."""
    idle = [setting for setting in without_effect(config, *groups) if not setting.noted]
    if idle:
        raise ConfigError(f"{said_without_effect(config, idle)}; leave it out")


def notes_on_effects(config: Config, layout: Layout | None = None) -> list[str]:
    """Notes on settings that have no effect, some in this ``layout``, and are not refused."""
    notes = [f"note: {said_without_effect(config, [s])}" for s in without_effect(config) if s.noted]
    # Notes and no errors: the same recipe may run on more processes, where these settings do something.
    if layout is not None and layout.dp_replicate * layout.tp == 1 and config.training.rerun_mode == "disabled":
        for flag in given(config.training, "check_replicas_interval"):
            notes.append(f"note: {flag} has no effect: in this layout no weight is on two processes")
    if layout is not None and layout.data_parallel * layout.cp == 1:
        for flag in given(config.parallel, "data_parallel_sharding_strategy"):
            notes.append(f"note: {flag} has no effect with one data-parallel process: there is nothing to shard over")
        rounded = "zero_quantized_weights", "zero_quantized_gradients"
        for flag in given(config.parallel, "data_parallel_collectives", "network_topology", *rounded):
            notes.append(
                f"note: {flag} has no effect with one data-parallel process: there is no other process to exchange with"
            )
    return notes


def _check_rerun(config: Config) -> None:
    """Refuse settings with which a repeated pass would not find what the first one found."""
    # A rerun compares bits, so everything that a pass reads must still be there after it.
    mode = config.training.rerun_mode
    if mode == "disabled":
        return
    require(
        not config.optim.optimizer_cpu_offload,
        f"--rerun-mode {mode} and --optimizer-cpu-offload exclude each other: the "
        "backward pass moves gradients to the host",
    )
    parallel = config.parallel
    require(
        parallel.fp8_format is None or parallel.fp8_recipe != "delayed",
        f"--rerun-mode {mode} and --fp8-recipe delayed exclude each other: maxima of a step are exchanged once; "
        "tensorwise works",
    )


def _check_kernels(config: Config) -> None:
    require(
        not (config.parallel.kernels == "apex" and config.model.apply_layernorm_1p),
        "--kernels apex and --apply-layernorm-1p exclude each other: apex takes a norm's weight in the precision of "
        "its input, which rounds 1 + w; take --kernels triton or torch",
    )


def check_model(model: ModelConfig) -> None:
    """Check a model with its defaults filled in, as a whole."""
    check_effects(Config(model=model), "model")
    check_pattern(model)
    # tp=1: by itself a model has no layout; a run checks it again with its own.
    _check_heads_and_widths(model, tp=1)
    check_latent(model)
    check_dsa_model(model)
    check_linear(model, tp=1)
    check_multipliers(model)
    _check_activation(model)
    _check_norms(model)
    check_positions(model)
    check_moe_model(model)
    check_mtp_model(model)


def _check_activation(model: ModelConfig) -> None:
    for one, other in (("squared_relu", "tanh_gelu"), ("relu", "tanh_gelu"), ("relu", "squared_relu")):
        flags = given(model, one, other)
        require(len(flags) < 2, f"{' and '.join(flags)} exclude each other; give one")
    flags = given(model, "relu", "squared_relu")
    require(not (model.geglu and flags), f"--geglu and {''.join(flags)} exclude each other; give one")
    flags = given(model, "geglu", "tanh_gelu", "relu", "squared_relu")
    require(not (model.quick_geglu and flags), f"--quick-geglu and {', '.join(flags)} exclude each other; give one")


def _check_norms(model: ModelConfig) -> None:
    require(
        not (model.parallel_residual and {model.norm_placement, model.linear_norm_placement or "pre"} != {"pre"}),
        f"--norm-placement {model.norm_placement} and --parallel-residual exclude each other: the sum of attention "
        "and MLP has no norm of its own; leave out one",
    )
    require(
        not (model.qk_layernorm_across_heads and model.apply_layernorm_1p),
        "--qk-layernorm-across-heads and --apply-layernorm-1p exclude each other: norms over all heads multiply by "
        "their weight; leave out one",
    )


def _check_heads_and_widths(model: ModelConfig, tp: int) -> None:
    heads, groups, ffn = model.num_attention_heads, model.num_query_groups, model.ffn_hidden_size
    assert groups is not None and ffn is not None, "filled in before"
    if any(attends(model)):
        _check_attention_heads(heads, groups, tp, across_heads=model.qk_layernorm_across_heads)
    require(
        ffn % tp == 0 or not any(has_mlp(model)),
        f"--ffn-hidden-size {ffn} is not divisible by --tensor-model-parallel-size {tp}; change one of them",
    )


def _check_attention_heads(heads: int, groups: int, tp: int, *, across_heads: bool) -> None:
    require(
        heads % groups == 0,
        f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; change one of them",
    )
    require(
        groups % tp == 0 or not across_heads,
        f"--qk-layernorm-across-heads: --num-query-groups {groups} is not divisible by --tensor-model-parallel-size "
        f"{tp}; change one of them",
    )
    require(
        heads % tp == 0,
        f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp}; change one of them",
    )
    # More processes than key/value heads share one; fewer must have whole ones.
    require(
        groups % tp == 0 or tp % groups == 0,
        f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the other; change one",
    )


def _check_pipeline(parallel: ParallelConfig, training: TrainingConfig) -> None:
    names = (
        "pipeline_schedule",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
        "pipeline_reshard",
    )
    if parallel.pipeline_model_parallel_size == 1:
        alone = given(parallel, *names) + given(training, "trace_pipeline")
        require(not alone, f"{', '.join(alone)}: there is no pipeline; give --pipeline-model-parallel-size above 1")
        return
    require(
        parallel.data_parallel_sharding_strategy == "optim_grads_params",
        f"--data-parallel-sharding-strategy {parallel.data_parallel_sharding_strategy} and a pipeline exclude each "
        "other: a pipeline gathers weights and reduces gradients once per step, see --pipeline-reshard; leave it out",
    )
    name = parallel.pipeline_schedule
    # Measured: Inductor drops the calls that keep weight gradients for later (Qi et al. 2023, arXiv 2401.10241), and
    # says nothing.
    require(
        not (parallel.compile and name in ("zb-h1", "zb-v")),
        f"--pipeline-schedule {name} and --compile exclude each other: a compiled graph drops the weight gradients "
        "that the schedule leaves for later; leave out --compile or take --pipeline-schedule 1f1b or interleaved",
    )
    start, iters = training.profile_step_start, training.train_iters
    require(
        not training.trace_pipeline or iters is None or start <= iters,
        f"--trace-pipeline records iteration --profile-step-start {start}, which is after the last one, {iters}",
    )


def _check_data_source(data: DataConfig, model: ModelConfig, training: TrainingConfig, *, tuning: bool) -> None:
    """``tuning``: samples are read, whose files ``smp.config.rules.finetune`` checks."""
    sources = {
        "--data-path": data.data_path,
        "--data-args-path": data.data_args_path,
        "--train-data-path": data.train_data_path,
        "--mock-data": data.mock_data,
    }
    named = [flag if value is True else f"{flag} {value}" for flag, value in sources.items() if value]
    require(len(named) < 2, f"{' and '.join(named)}: give one")
    require(
        bool(named) or training.dry_run, "what to train on is missing: give --data-path or --mock-data (or --dry-run)"
    )
    if not tuning:
        _check_separate_paths(data, training)
    _check_packing(data)
    # Random tokens have no tokenizer whose size could be taken.
    require(model.vocab_size is not None or not data.mock_data, "--mock-data needs --vocab-size")
    require((model.vocab_size or 2) > 1 or not data.mock_data, "--mock-data needs a --vocab-size of at least 2")
    require(
        model.vocab_size is not None or data.tokenizer_model is not None,
        "the number of token ids is unknown: give --tokenizer-model or --vocab-size",
    )
    # Separate files for training are used whole: --split is about the one file that all parts come from.
    train, validation, _ = parse_split(data.split)
    if data.train_data_path is not None:
        return
    require(train > 0, f"--split {data.split} leaves nothing to train on; its first number is the training part")
    require(
        validation > 0 or not training.evaluates or data.valid_data_path is not None,
        f"{(given(training, 'eval_interval', 'eval_epochs') or [''])[0]} needs a validation part, the second number of "
        f"--split {data.split}",
    )


def _check_separate_paths(data: DataConfig, training: TrainingConfig) -> None:
    for flag, path in (("--valid-data-path", data.valid_data_path), ("--test-data-path", data.test_data_path)):
        require(path is None or data.train_data_path is not None, f"{flag} {path} needs --train-data-path")
    if data.train_data_path is None:
        return
    require(data.split == DataConfig.split, f"--split {data.split} divides --data-path, not --train-data-path")
    require(
        (training.eval_interval is None) == (data.valid_data_path is None),
        "--eval-interval and --valid-data-path go together: give both or none with --train-data-path",
    )


def _check_packing(data: DataConfig) -> None:
    flags = ("packing", "reset_attention_mask", "reset_position_ids", "eod_mask_loss", "data_cache_path")
    named = given(data, *flags)
    require(not (data.mock_data and named), f"--mock-data has no documents: leave out {', '.join(named)}")
    require(
        not (data.packing == "best-fit" and data.eod_mask_loss),
        "--eod-mask-loss: with --packing best-fit no document predicts the next; leave it out",
    )


def _check_batch(config: Config) -> None:
    data, model = config.data, config.model
    length, batch = data.seq_length, data.global_batch_size
    assert length is not None and batch is not None, "filled in before"
    require(
        length <= model.max_position_embeddings,
        f"--seq-length {length} is above --max-position-embeddings {model.max_position_embeddings}; change one of them",
    )
    BatchSizes.of(data)  # raises for sizes that do not lead to --global-batch-size


def _check_schedule(optim: OptimizerConfig) -> None:
    require(optim.min_lr <= optim.lr, f"--min-lr {optim.min_lr} is above --lr {optim.lr}")
    # The decoupled rate is that of embedding and output matrix; warm-up begins below both.
    lowest = min(optim.lr, optim.decoupled_lr or optim.lr)
    require(optim.lr_warmup_init <= lowest, f"--lr-warmup-init {optim.lr_warmup_init} is above the peak {lowest}")
    least = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
    require(
        optim.decoupled_lr is None or least <= optim.decoupled_lr,
        f"--decoupled-lr {optim.decoupled_lr} is below --decoupled-min-lr {least}",
    )
    require(
        optim.decoupled_min_lr is None or optim.lr_decay_style != "constant",
        "--decoupled-min-lr has no effect with --lr-decay-style constant; leave it out",
    )
    # Warm-up and final decay must fit into the schedule, or the rate would jump.
    parts = lengths(optim)
    if parts.decay is None:
        return
    warmup, end = f"{parts.flag('lr_warmup')} {parts.warmup}", f"{parts.flag('lr_decay')} {parts.decay} (the run)"
    require(parts.warmup < parts.decay, f"{warmup} must be below {end}")
    require(
        parts.final is None or parts.warmup + parts.final <= parts.decay,
        f"{warmup} + {parts.flag('lr_wsd_decay')} {parts.final} is above {end}",
    )


def _check_training(training: TrainingConfig) -> None:
    start, end, iters = training.profile_step_start, training.profile_step_end, training.train_iters
    if not training.profile:
        return
    require(start < end, f"--profile-step-start {start} must be below --profile-step-end {end}")
    require(iters is None or start <= iters, f"--profile-step-start {start} is after the last iteration, {iters}")


def check_paths(load: str | None, save: str | None) -> None:
    """Refuse file:// URLs: files have paths."""
    for flag, path in (("--load", load), ("--save", save)):
        require(not (path or "").startswith("file:"), f"{flag} {path}: give the path alone, without file://")


def _check_loading(checkpoint: CheckpointConfig) -> None:
    check_paths(checkpoint.load, checkpoint.save)
    load = checkpoint.load
    require(load != "auto" or checkpoint.save is not None, "--load auto resumes from --save: give --save")
    require(
        load != "auto" or checkpoint.exit_on_missing_checkpoint,
        "--no-exit-on-missing-checkpoint has no effect with --load auto, which makes the first start anyway; leave it "
        "out",
    )
    for flag in given(checkpoint, "ckpt_step", "finetune", "load_optim"):
        require(load is not None, f"{flag} says how to load: give --load")
        require(
            load != "auto",
            # Each restart would load the same step, or drop the optimizer's state, again.
            f"{flag} would undo the progress at every restart with --load auto: give --load a folder",
        )
    require(
        not (checkpoint.finetune and load == checkpoint.save),
        f"--finetune starts at iteration 0: give it a --save other than --load {load}",
    )


def _check_saving(config: Config, checkpoint: CheckpointConfig, training: TrainingConfig) -> None:
    names = (
        "save_interval",
        "save_epochs",
        "save_mtbf_hours",
        "async_save",
        "keep_last_k",
        "save_retain_interval",
        "keep_best_k",
    )
    for flag in given(checkpoint, *names, "save_hf"):
        require(checkpoint.save is not None, f"{flag} needs --save, the folder to save under")
    require(
        not (checkpoint.save_hf and "://" in (checkpoint.save or "")),
        f"--save-hf writes to a file system, not to --save {checkpoint.save}: leave it out, and convert when the run "
        "has ended (tools/convert_checkpoint.py, tools/merge_lora.py)",
    )
    for flag in given(training, "exit_interval", "exit_duration_in_mins"):
        saves = checkpoint.save is not None or (config.distillation is not None and config.distillation.logits_save_dir)
        require(bool(saves), f"{flag} saves and stops: give --save, the folder to save under")
    interval, mtbf, last = checkpoint.save_interval, checkpoint.save_mtbf_hours, checkpoint.keep_last_k
    require(interval is None or mtbf is None, f"--save-interval {interval} and --save-mtbf-hours {mtbf} are both given")
    require(
        last is None or last >= 2,
        # The newest one may be the damaged one: a crash during its write.
        f"--keep-last-k {last} leaves nothing to fall back to when the newest checkpoint is damaged: give at least 2",
    )
    require(
        checkpoint.keep_best_k is None or training.evaluates,
        f"--keep-best-k {checkpoint.keep_best_k} needs --eval-interval, which measures the validation loss",
    )
