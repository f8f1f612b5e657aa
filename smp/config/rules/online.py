"""Checks and defaults of reinforcement learning."""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
from dataclasses import fields, replace

from smp.config.command_line.commands import pip_install
from smp.config.command_line.fields import require
from smp.config.rollouts import DEFAULTS, RolloutConfig
from smp.config.schema import Config

BUILT_IN = ("exact_match", "number", "math", "json_schema", "regex")
"""Reward functions that need no file."""


def fill_rollouts(config: Config) -> RolloutConfig | None:
    """The group with the objective's defaults filled in.

    Raises:
        ConfigError: values outside of their range, or settings that do not go together.
    """
    rollouts = config.rollouts
    if rollouts is None or not config.is_online:
        return rollouts
    assert config.objective is not None
    name = config.objective.objective
    given = {f.name: getattr(rollouts, f.name) for f in fields(rollouts) if getattr(rollouts, f.name) is not None}
    # A value that the user gave wins over the objective's.
    filled = replace(rollouts, **{key: value for key, value in DEFAULTS[name].items() if key not in given})
    _check_given(config, rollouts, filled, name)
    # --loss-type cispo with another objective: its clip is an upper bound of a weight, not 1 +
    # epsilon.
    if filled.loss_type == "cispo" and filled.epsilon_high is None:
        filled = replace(filled, epsilon_high=DEFAULTS["cispo"]["epsilon_high"])
    # Sampled by another policy or engine: log-probabilities differ from the trainer's.
    differs = filled.one_step_off_policy or filled.rollout_engine != "smp"
    mode = filled.importance_sampling_mode or ("token_truncate" if differs else None)
    filled = replace(
        filled,
        epsilon_high=filled.epsilon if filled.epsilon_high is None else filled.epsilon_high,
        num_generations_eval=filled.num_generations_eval or filled.num_generations,
        eval_temperature=filled.temperature if filled.eval_temperature is None else filled.eval_temperature,
        # k1 in the reward as in RLOO and REINFORCE++, k3 in the loss as in GRPO.
        kl_estimator=filled.kl_estimator or ("k1" if filled.kl_placement == "reward" else "k3"),
        importance_sampling_mode=mode,
        overlong_buffer_len=filled.max_completion_length // 5
        if filled.overlong_buffer_len is None
        else filled.overlong_buffer_len,
    )
    _check(config, filled, name)
    return filled


def check_reward_names(said: str | None) -> None:
    """Raise ConfigError unless each is built in or FILE.py:NAME. A launcher knows no more: files are where runs are."""
    for spec in shlex.split(said or ""):
        file, _, function = spec.partition(":")
        require(
            spec in BUILT_IN or (file.endswith(".py") and function.isidentifier()),
            f"--reward-funcs {spec}: neither FILE.py:NAME nor one of {', '.join(BUILT_IN)}",
        )


def _check(config: Config, rollouts: RolloutConfig, name: str) -> None:
    rewarding = (rollouts.reward_funcs, rollouts.reward_model, rollouts.environment)
    require(
        any(source is not None for source in rewarding),
        f"--objective {name}: there is no reward: give --reward-funcs, --reward-model or --environment",
    )
    _check_environment(rollouts.environment)
    _check_following(config, rollouts)
    _check_engine(config, rollouts)
    names = reward_names(rollouts)
    require(len(set(names)) == len(names), f"--reward-funcs: {_twice(names)} is named twice")
    check_reward_names(rollouts.reward_funcs)
    for spec in shlex.split(rollouts.reward_funcs or ""):
        file = spec.partition(":")[0]
        require(spec in BUILT_IN or os.path.isfile(file), f"--reward-funcs {spec}: there is no file {file}")
    given = len(shlex.split(rollouts.reward_weights or ""))
    wanted = len(shlex.split(rollouts.reward_funcs or ""))
    require(given in (0, wanted), f"--reward-weights needs {wanted} numbers, one for each")
    # These estimators compare completions of one prompt: one alone has no baseline.
    few = {"rloo": 2, "grpo": 2, "reinforce++-baseline": 2}.get(rollouts.advantage_estimator or "", 1)
    require(
        (rollouts.num_generations or 0) >= few,
        f"--num-generations {rollouts.num_generations}: --advantage-estimator {rollouts.advantage_estimator} compares "
        f"the completions of a prompt: give {few} or more",
    )
    require(
        rollouts.temperature >= 0.01,
        f"--temperature {rollouts.temperature}: log-probabilities of so small a temperature are infinite; give 0.01 or "
        "more",
    )
    require(0 < rollouts.top_p <= 1, f"--top-p {rollouts.top_p} must be above 0 and at most 1")
    require(
        rollouts.scale_rewards in ("group", "off") or rollouts.advantage_estimator == "grpo",
        f"--scale-rewards {rollouts.scale_rewards} has no effect without --advantage-estimator grpo; leave it out",
    )
    highest = rollouts.epsilon_high or 0.0
    require(
        rollouts.loss_type != "cispo" or highest >= 1,
        f"--epsilon-high {highest}: with --loss-type cispo it is the largest weight itself; give 1 or more",
    )
    # Two-sided clipping acts above the usual clip only.
    require(
        rollouts.delta is None or rollouts.delta >= 1 + highest,
        f"--delta {rollouts.delta} is below 1 + --epsilon-high {highest}, where the ratio is clipped already",
    )
    low, high = rollouts.importance_sampling_clip_min, rollouts.importance_sampling_clip_max
    require(low < high, f"--importance-sampling-clip-min {low} must be below --importance-sampling-clip-max {high}")
    require(
        (rollouts.overlong_buffer_len or 0) < rollouts.max_completion_length,
        f"--overlong-buffer-len {rollouts.overlong_buffer_len} must be below --max-completion-length "
        f"{rollouts.max_completion_length}",
    )
    level, loss = rollouts.importance_sampling_level, rollouts.loss_type
    require(
        level == "token" or loss != "sapo",
        f"--importance-sampling-level {level}: the gate of --loss-type sapo is one of tokens; leave it out",
    )


def _check_following(config: Config, rollouts: RolloutConfig) -> None:
    """Check the settings of a reference model that follows the policy."""
    if not rollouts.sync_ref_model:
        return
    require(bool(rollouts.beta), "--sync-ref-model has no effect without --beta: there is no reference; leave it out")
    require(
        not config.has_adapters,
        "--sync-ref-model: with adapters the reference is the model without them, which stays as it is; leave it out",
    )
    alpha, steps = rollouts.ref_model_mixup_alpha, rollouts.ref_model_sync_steps
    require(0 < alpha <= 1, f"--ref-model-mixup-alpha {alpha} must be above 0 and at most 1")
    require(steps >= 1, f"--ref-model-sync-steps {steps} must be at least 1")
    # TR-DPO's reference (arXiv 2404.09656) is a second state; what goes back to memory must hold it as well.
    keeps = "it keeps the model, and not the reference of --sync-ref-model; leave one out"
    require(config.training.spike_policy != "rewind", f"--spike-policy rewind: {keeps}")
    interval = config.checkpoint.peer_snapshot_interval
    require(interval is None, f"--peer-snapshot-interval {interval}: {keeps}")


def _check_engine(config: Config, rollouts: RolloutConfig) -> None:
    """Check a sampler that is another library."""
    name = rollouts.rollout_engine
    if name == "smp":
        return
    require(
        name != "vllm" or not config.parallel.inprocess_restart,
        "--rollout-engine vllm and --inprocess-restart exclude each other: its groups of processes last as long as the "
        "process; leave one out",
    )
    require(
        importlib.util.find_spec(name) is not None,
        f"--rollout-engine {name}: {name} is not installed: {pip_install(name)}",
    )
    require(
        config.lora is None or not config.lora.load_in_4bit,
        f"--rollout-engine {name}: weights in 4 bits are not sent to another engine: leave out --load-in-4bit, or take "
        "--rollout-engine smp",
    )
    if name == "transformers":
        return
    memory, ranks = rollouts.vllm_gpu_memory_utilization, rollouts.vllm_tensor_parallel_size
    require(0 < memory <= 1, f"--vllm-gpu-memory-utilization {memory} must be above 0 and at most 1")
    require(ranks >= 1, f"--vllm-tensor-parallel-size {ranks} must be at least 1")
    # vLLM renormalizes over the tokens left by top-k and top-p.
    cut = rollouts.top_k > 0 or rollouts.top_p < 1
    require(
        not cut or rollouts.temperature == 1,
        f"--temperature {rollouts.temperature} with --top-k or --top-p: vLLM says log-probabilities of the tokens that "
        "are left, which are not the trainer's; leave one out, or take --rollout-engine smp",
    )


def _check_environment(spec: str | None) -> None:
    if spec is None:
        return
    file, _, name = spec.partition(":")
    require(file.endswith(".py") and name.isidentifier(), f"--environment {spec}: give FILE.py:CLASS")
    require(os.path.isfile(file), f"--environment {spec}: there is no file {file}")


def _check_given(config: Config, given: RolloutConfig, filled: RolloutConfig, name: str) -> None:
    """Refuse given settings that have no effect with the others."""
    usual = DEFAULTS[name]["epsilon"]  # a resolved config has it filled in
    idle = {
        "--delta": given.delta is not None and filled.loss_type in ("cispo", "sapo"),
        "--epsilon": given.epsilon not in (None, usual) and filled.loss_type in ("cispo", "sapo"),
        "--epsilon-high": given.epsilon_high not in (None, usual) and filled.loss_type == "sapo",
    }
    for flag, refused in idle.items():
        require(not refused, f"{flag} has no effect with --loss-type {filled.loss_type}; leave it out")
    without = {"--kl-estimator": given.kl_estimator, "--kl-placement": given.kl_placement}
    for flag, value in without.items():
        default = DEFAULTS[name]["kl_placement"] if flag == "--kl-placement" else None
        # Resolved configs have the estimator filled in.
        resolved = value in (None, default) or (flag == "--kl-estimator" and value in ("k1", "k3"))
        require(bool(filled.beta) or resolved, f"{flag} {value} has no effect without --beta; leave it out")
    cut = RolloutConfig.importance_sampling_clip_max, RolloutConfig.importance_sampling_clip_min
    changed = (given.importance_sampling_clip_max, given.importance_sampling_clip_min) != cut
    corrects = filled.importance_sampling_mode is not None or given.one_step_off_policy
    corrects |= given.rollout_engine != "smp"
    require(not changed or corrects, "--importance-sampling-clip-max and -min have no effect without a mode; leave out")


def _twice(names: list[str]) -> str:
    return next((name for name in names if names.count(name) > 1), "")


def _check_fit_of_vllm(config: Config, rollouts: RolloutConfig, world_size: int) -> None:
    """Check vLLM with the model in --load and the number of processes."""
    if rollouts.rollout_engine != "vllm":
        return
    # vLLM issue 42821: load_weights on a model that runs writes experts into a layout that
    # process_weights_after_loading has changed, and says nothing.
    require(
        config.model.num_experts is None,
        "--rollout-engine vllm: models with experts are refused: vLLM rearranges experts' weights when it starts, and "
        "new ones would be read wrongly; take --rollout-engine smp or transformers",
    )
    ranks = rollouts.vllm_tensor_parallel_size
    require(
        world_size % ranks == 0,
        f"--vllm-tensor-parallel-size {ranks} does not divide the {world_size} processes of this run; change it or "
        "--nproc-per-node",
    )


def check_generation(config: Config, world_size: int) -> None:
    """Check generation when the model, batch and sequence sizes are known.

    Raises:
        ConfigError: they do not fit to completions and their groups, or to what writes them.
    """
    rollouts, data = config.rollouts, config.data
    if rollouts is None or not config.is_online:
        return
    _check_fit_of_vllm(config, rollouts, world_size)
    assert data.global_batch_size is not None and data.seq_length is not None and rollouts.num_generations is not None
    written = data.global_batch_size * rollouts.steps_per_generation
    require(
        # Groups are compared as a whole: no prompt may be cut between two generations.
        written % rollouts.num_generations == 0,
        f"--global-batch-size {data.global_batch_size} x --steps-per-generation {rollouts.steps_per_generation} "
        f"completions are no whole number of prompts with --num-generations {rollouts.num_generations}: change one",
    )
    require(
        rollouts.max_completion_length < data.seq_length,
        f"--max-completion-length {rollouts.max_completion_length} leaves no room for prompts in --seq-length "
        f"{data.seq_length}: change one",
    )
    dropouts = {
        "--hidden-dropout": config.model.hidden_dropout,
        "--attention-dropout": config.model.attention_dropout,
        "--lora-dropout": 0.0 if config.lora is None else config.lora.lora_dropout or 0.0,
    }
    for flag, share in dropouts.items():
        # The same tokens must have the same probability in sampling and in training.
        require(share == 0, f"{flag} {share}: with dropout the ratio of two policies is noise; give 0")


def reward_names(rollouts: RolloutConfig) -> list[str]:
    """Names of the reward functions as in metrics, then those of environment and reward model."""
    names = [spec.rpartition(":")[2] for spec in shlex.split(rollouts.reward_funcs or "")]
    names += [] if rollouts.environment is None else ["environment"]
    return names if rollouts.reward_model is None else [*names, "reward model"]


def reward_weights(rollouts: RolloutConfig) -> list[float]:
    """Weights in the order of :func:`reward_names`.

    Raises:
        ConfigError: one is no number.
    """
    words = shlex.split(rollouts.reward_weights or "")
    try:
        weights = [float(word) for word in words]
    except ValueError:
        # NaN takes the same error as infinities.
        weights = [math.nan]
    require(all(map(math.isfinite, weights)), f"--reward-weights {rollouts.reward_weights} are no numbers")
    weights = weights or [1.0] * len(shlex.split(rollouts.reward_funcs or ""))
    weights += [] if rollouts.environment is None else [1.0]
    return weights if rollouts.reward_model is None else [*weights, rollouts.reward_model_weight]
