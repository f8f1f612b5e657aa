"""Derived defaults. The order is: layout, ranges of single values, defaults, combinations.

No torch and no file is touched, so a bad run ends within a second on a login node.
"""

from __future__ import annotations

import os
from dataclasses import replace

from smp.config.batch import BatchSizes, scheduled
from smp.config.blend import BlendPart, data_parts, is_remote, is_text
from smp.config.command_line.commands import tool
from smp.config.layout import Layout
from smp.config.lr_schedule import resolve_schedule
from smp.config.model import ModelConfig
from smp.config.parallel import ParallelConfig
from smp.config.rules.checks import check_combinations, check_effects, check_model, check_ranges
from smp.config.rules.latent import head_width
from smp.config.schema import Config, ConfigError, DataConfig, TrainingConfig


def resolve(config: Config, world_size: int) -> Config:
    """A copy of ``config`` with every derived default filled in and every check passed.

    ``lr_warmup_fraction`` becomes ``lr_warmup_iters`` or ``lr_warmup_samples``, and is then ``None``. Beside
    ``train_samples`` stand the ``train_iters`` of a run that begins now, so a resolved config resolves to itself; of a
    run that continues from a checkpoint they are those of :func:`with_rest`.

    Args:
        config: what ``load_config`` returned; left as it is.
        world_size: number of processes of the run.

    Raises:
        ConfigError: settings that cannot work; one line that names the flags to change.
    """
    layout = Layout.from_config(config.parallel, world_size)
    check_ranges(config)
    # Order: the batch needs seq_length, the number of steps the batch, the schedule the number of
    # steps.
    data = _data(config.data, config.model, layout)
    sizes = BatchSizes.of(data)
    training = _training(config.training, sizes)
    optim = resolve_schedule(config.optim, sizes, training.train_iters, config.training.train_samples)
    parallel = _parallel(config.parallel)
    model = resolve_model(config.model)
    resolved = replace(config, model=model, parallel=parallel, data=data, training=training, optim=optim)
    # Combinations are checked on resolved values.
    check_combinations(resolved, layout)
    check_effects(config)  # of what was given: some of it has become something else
    return resolved


def resolve_model(model: ModelConfig) -> ModelConfig:
    """``model`` with its derived defaults filled in, checked on its own: without a run that trains it.

    Raises:
        ConfigError: its sizes do not fit together.
    """
    check_ranges(Config(model=model), "model")
    # transformers has the architecture: nothing is derived here.
    if model.is_foreign:
        return model
    hidden, heads = model.hidden_size, model.num_attention_heads
    # Before kv_channels' default: latent heads have three widths.
    if model.multi_latent_attention:
        model = replace(model, kv_channels=head_width(model))
    if model.mamba_num_heads is None and (model.linear_attention_type == "mamba2" or model.hybrid_layer_pattern):
        model = replace(model, mamba_num_heads=_mamba_heads(model))
    if model.kv_channels is None and hidden % heads:
        raise ConfigError(
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; "
            "change one of them or give --kv-channels"
        )
    # Megatron's rule for the width, see ModelConfig.default_ffn.
    ffn = model.ffn_hidden_size or model.default_ffn
    filled = replace(
        model,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=None if model.num_experts is None else model.moe_ffn_hidden_size or ffn,
        kv_channels=model.kv_channels or hidden // heads,
        num_query_groups=model.num_query_groups or heads,
    )
    check_model(filled)
    return filled


def _mamba_heads(model: ModelConfig) -> int | None:
    """2 x hidden size / head width, Mamba-2's and Megatron's default; None where no layer has Mamba-2."""
    if "M" not in (model.hybrid_layer_pattern or "M"):
        return None
    if 2 * model.hidden_size % model.mamba_head_dim:
        raise ConfigError(
            f"2 x --hidden-size {model.hidden_size} is not divisible by --mamba-head-dim {model.mamba_head_dim}; "
            "change one of them or give --mamba-num-heads"
        )
    return 2 * model.hidden_size // model.mamba_head_dim


def _parallel(parallel: ParallelConfig) -> ParallelConfig:
    name, chunks = parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank
    # Without a pipeline these settings stay None, so that giving them is an error.
    if parallel.pipeline_model_parallel_size == 1:
        return parallel
    # zb-v has two stages per process by its shape.
    name = name or ("interleaved" if (chunks or 1) > 1 else "1f1b")
    default = 2 if name in ("interleaved", "zb-v") else 1
    return replace(parallel, pipeline_schedule=name, num_virtual_stages_per_pipeline_rank=chunks or default)


def _data(data: DataConfig, model: ModelConfig, layout: Layout) -> DataConfig:
    data = replace(data, seq_length=data.seq_length or min(model.max_position_embeddings, 8192))
    batch = data.global_batch_size
    if batch is None and data.step_batch_size_schedule is not None:
        batch = scheduled(data).largest
    return replace(data, global_batch_size=batch or data.micro_batch_size * layout.data_parallel)


def _training(training: TrainingConfig, sizes: BatchSizes) -> TrainingConfig:
    iters, samples = training.train_iters, training.train_samples
    if iters is not None and samples is not None and iters != sizes.steps(samples):
        raise ConfigError(f"--train-iters {iters} and --train-samples {samples} are both given; give one")
    if iters is None and samples is None and not training.dry_run:
        raise ConfigError("how long to train is missing: give --train-iters or --train-samples (or --dry-run)")
    if samples is not None:
        # Recomputed also when train_iters is given too: a resolved config resolves to itself.
        iters = sizes.steps(samples)
    return replace(training, train_iters=iters)


def with_rest(config: Config, iteration: int, consumed: int) -> Config:
    """A resolved config with the ``train_iters`` that remain correct for a run that has done ``iteration`` steps on
    ``consumed`` samples: earlier steps may have had other batch sizes."""
    training, optim = config.training, config.optim
    if training.train_samples is None:
        return config
    iters = iteration + BatchSizes.of(config.data).steps(training.train_samples, consumed)
    # A decay in iterations that ended with the run still does.
    # Equal means derived: lr_decay_iters was filled in with the run's length.
    ends = optim.lr_decay_iters is not None and optim.lr_decay_iters == training.train_iters
    optim = replace(optim, lr_decay_iters=iters) if ends else optim
    return replace(config, training=replace(training, train_iters=iters), optim=optim)


def check_files(config: Config, *, load_is_past: bool = False) -> None:
    """Check that files which the run reads exist, without reading them; not --load when it ``load_is_past``.

    Raises:
        ConfigError: one is missing; one line with its flag and path.
    """
    data, load = config.data, config.checkpoint.load
    for flag, parts in data_parts(data).items():
        for part in parts:
            if not is_remote(part.path):
                _check_data_files(flag, part)
            # Remote data have no folder next to them for an index.
            elif data.data_cache_path is None:
                raise ConfigError(f"{flag} {part.path} needs --data-cache-path FOLDER, on this machine, for its index")
    if data.tokenizer_model is not None and not os.path.exists(data.tokenizer_model):
        raise ConfigError(f"--tokenizer-model {data.tokenizer_model}: there is no such file or folder")
    # A missing --load may be the first start of a restarted run.
    must_exist = load not in (None, "auto") and not load_is_past and config.checkpoint.exit_on_missing_checkpoint
    if must_exist and "://" not in str(load) and not os.path.isdir(str(load)):
        raise ConfigError(f"--load {load}: there is no such folder{first_start(config)}")
    if load is not None:
        refuse_megatron(load, "--load FOLDER --finetune")


def refuse_megatron(load: str, then: str) -> None:
    """Raise ConfigError when --load is a Megatron run or checkpoint; the message says how to convert it, and ``then``
    what to do."""
    # Marks of Megatron's checkpoints: the tracker file, and torch's distributed format.
    if any(os.path.isfile(os.path.join(load, name)) for name in ("latest_checkpointed_iteration.txt", ".metadata")):
        raise ConfigError(
            f"--load {load} is a checkpoint of Megatron's: {tool('convert')} --load {load} --save FOLDER, then {then}"
        )


def first_start(config: Config) -> str:
    """A hint for a --load without a checkpoint: where it is also --save, as in Megatron's scripts, a run that resumes
    itself is meant."""
    load, save = config.checkpoint.load, config.checkpoint.save
    same = load is not None and save is not None and os.path.realpath(load) == os.path.realpath(save)
    return "; --load auto continues from --save and also makes the first start" if same else ""


def _check_data_files(flag: str, part: BlendPart) -> None:
    # A prefix stands for two files: tokens and their index.
    names = [part.path] if is_text(part.path) else [part.path + suffix for suffix in (".bin", ".idx")]
    for name in names:
        if not os.path.isfile(name):
            hint = " (give the prefix, without .bin or .idx)" if part.path.endswith((".bin", ".idx")) else ""
            # Megatron's preprocess_data appends this to the output prefix.
            if os.path.isfile(f"{part.path}_text_document.idx"):
                hint = f": did you mean {part.path}_text_document?"
            raise ConfigError(f"{flag} {part.path}: there is no file {name}{hint}")
