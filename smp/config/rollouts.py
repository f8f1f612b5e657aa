"""Reinforcement learning: defaults of each objective, and the settings of all of them.

The names are those of TRL's ``GRPOConfig`` where it has them. An objective is a row of :data:`DEFAULTS`: values for the
settings that are not given. So ``--objective dapo`` and ``--objective grpo --epsilon-high 0.28 ...`` are one thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from smp.config.declare import GIVEN, Words, only_with

ONLINE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++")
"""Objectives that train on what the model writes during the run and on rewards of it."""
SAMPLED: Any = {"objective": ONLINE, "lmbda": GIVEN}
"""Needed by settings of sampling: such an objective, or distillation on what the model writes."""
DIVIDED = (*ONLINE, "distill")
"""Objectives with --beta and --temperature."""

_GRPO: dict[str, Any] = {
    # TRL's defaults of GRPO.
    "num_generations": 8,
    "advantage_estimator": "grpo",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "beta": 0.0,
    "kl_placement": "loss",
    "max_sampling_rounds": 1,
    "overlong_buffer_len": 0,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _GRPO,
    "dr_grpo": {**_GRPO, "loss_type": "dr_grpo", "scale_rewards": "off"},
    "dapo": {**_GRPO, "epsilon_high": 0.28, "max_sampling_rounds": 10, "overlong_buffer_len": None},
    "gspo": {
        **_GRPO,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {**_GRPO, "loss_type": "cispo", "epsilon_high": 5.0},
    "rloo": {
        **_GRPO,
        "num_generations": 2,
        "advantage_estimator": "rloo",
        "loss_type": "grpo",
        "importance_sampling_level": "sequence_sum",
        "beta": 0.05,
        "kl_placement": "reward",
    },
    "reinforce++": {**_GRPO, "advantage_estimator": "reinforce++", "kl_placement": "reward"},
}
"""What an objective says of settings that are not given; ``overlong_buffer_len`` None: a fifth of the completion."""


@dataclass
class RolloutConfig:
    """Reinforcement learning: what the model writes, how it is rewarded, and what is trained on it."""

    reward_funcs: Words | None = only_with(None, objective=ONLINE)  # noqa: RUF009 (text)
    """What rewards completions: FILE.py:NAME of functions with TRL's signature (prompts, completions, completion_ids
    and the columns of the data as keywords, each a list; they return a list of numbers, None where one does not apply),
    or built-in ones: exact_match, number, math, json_schema, regex. They are called with the completions of one
    prompt."""
    reward_weights: Words | None = only_with(None, reward_funcs=GIVEN)  # noqa: RUF009 (text)
    """A weight for each of --reward-funcs. Default: 1 each."""
    environment: str | None = only_with(None, objective=ONLINE)
    """FILE.py:CLASS of an environment of several turns: an instance for each completion, whose reset() gets the prompt
    and columns, whose step() answers each turn of the model with messages, or ends it with None, and whose reward(), if
    there is one, is one more reward. Prompts are messages."""
    max_turns: int = only_with(8, environment=GIVEN)
    """Most turns of the model in a completion; all of them and the answers share --max-completion-length."""
    reward_model: str | None = only_with(None, objective=ONLINE)
    """Folder of a reward model (of --objective reward, or a Hugging Face ...ForSequenceClassification with one label):
    its score of prompt and completion, by its own tokenizer and template, is one more reward. It has the layout of the
    run and stays as it is."""
    reward_model_weight: float = only_with(1.0, reward_model=GIVEN)
    """Factor of its score in the sum of rewards."""
    reward_workers: int = only_with(1, reward_funcs=GIVEN, environment=GIVEN)
    """Processes that call reward functions, and as many with episodes, for each data-parallel process; they work
    while others still write."""
    reward_timeout: float = only_with(60.0, reward_funcs=GIVEN, environment=GIVEN)
    """Seconds that one call of a reward function, or of an environment, may take."""
    reward_errors: Literal["fail", "skip"] = only_with("fail", reward_funcs=GIVEN, environment=GIVEN)
    """What becomes of a call that raises, returns something else than numbers, or takes too long. fail: the run ends
    and names the function; skip: it does not apply to these completions (an episode ends there), and the log counts
    it."""
    rollout_engine: Literal["smp", "transformers", "vllm"] = only_with("smp", objective=ONLINE)
    """Who writes completions (verl's rollout.name). smp: the layers that train, where they are; transformers: its
    generate; vllm: vLLM in the processes of the run. The other two get the weights before each generation, tensor by
    tensor without files; their log-probabilities are not the trainer's: the log says by how much they differ, and
    --importance-sampling-mode corrects for it."""
    vllm_gpu_memory_utilization: float = only_with(0.3, rollout_engine="vllm")
    """Share of a device's memory that vLLM takes for its weights and its cache."""
    vllm_tensor_parallel_size: int = only_with(1, rollout_engine="vllm")
    """Neighbouring processes that share an engine of vLLM, each with a part of its weights."""
    num_generations: int | None = only_with(None, objective=ONLINE)
    """Completions of each prompt. Default: 8; 2 for rloo."""
    num_generations_eval: int | None = only_with(None, objective=ONLINE)
    """The same in evaluations. Default: --num-generations."""
    max_completion_length: int = only_with(512, **SAMPLED)
    """Most tokens of a completion."""
    temperature: float = only_with(1.0, objective=DIVIDED)
    """Logits are divided by it, in sampling and in every log-probability; in distillation also the teacher's."""
    eval_temperature: float | None = only_with(None, objective=ONLINE)
    """Temperature of completions in evaluations; 0 takes the likeliest token. Default: --temperature."""
    top_k: int = only_with(0, **SAMPLED)
    """Sample from so many likeliest tokens; 0: from all. Log-probabilities stay those of all tokens."""
    top_p: float = only_with(1.0, **SAMPLED)
    """Sample from the fewest likeliest tokens whose probabilities add up to this."""
    generation_batch_size: int = only_with(32, **SAMPLED)
    """Completions that each data-parallel process writes at once. It changes no text."""
    steps_per_generation: int = only_with(1, objective=ONLINE)
    """Optimizer steps into which the completions of one generation are divided: it writes this x --global-batch-size
    of them."""
    num_iterations: int = only_with(1, objective=ONLINE)
    """How often each completion is trained on (mu)."""
    one_step_off_policy: bool = only_with(False, objective=ONLINE)
    """Write the completions of a generation before the updates on those of the one before, and reward them while these
    updates run; see --importance-sampling-mode."""
    advantage_estimator: Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline"] | None = only_with(
        None, objective=ONLINE
    )
    """grpo: reward minus the mean of the prompt's completions, scaled by --scale-rewards; rloo: minus the mean of the
    others; reinforce++: all rewards of a generation with mean 0 and deviation 1; reinforce++-baseline: the same after
    the prompt's mean is subtracted. Default: that of the objective."""
    scale_rewards: Literal["group", "batch", "off"] | None = only_with(None, objective=ONLINE)
    """Divide by the standard deviation (+ 1e-4) of the prompt's completions, of all of a generation, or not (TRL's
    none). Only for the estimator grpo. Default: group; off for dr_grpo."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "luspo", "cispo", "sapo"] | None = only_with(None, objective=ONLINE)
    """How losses of tokens become one. dapo: mean over all tokens of the batch; grpo: mean over completions of the mean
    over tokens; dr_grpo: sum / (completions x --max-completion-length); luspo: mean over completions of the sum. Losses
    of their own are cispo (clipped weight x log-probability), averaged as dapo, and sapo (a smooth gate), averaged as
    grpo. Default: dapo, as in TRL; dr_grpo, gspo, cispo and rloo have theirs."""
    importance_sampling_level: Literal["token", "sequence", "sequence_sum"] | None = only_with(None, objective=ONLINE)
    """Ratio of policies: of each token; sequence: exp of the mean log-ratio of a completion (GSPO); sequence_sum: exp
    of the sum (RLOO). Default: token; gspo and rloo have theirs."""
    epsilon: float | None = only_with(None, objective=ONLINE)
    """The ratio is clipped below 1 - this. Default: 0.2; 3e-4 for gspo."""
    epsilon_high: float | None = only_with(None, objective=ONLINE)
    """And above 1 + this; for cispo it is the largest weight itself. Default: --epsilon; 0.28 for dapo, 4e-4 for gspo,
    5 for cispo."""
    delta: float | None = only_with(None, objective=ONLINE)
    """Largest ratio where the advantage is negative (two-sided clipping; verl's clip_ratio_c). Default: none."""
    beta: float | None = only_with(None, objective=DIVIDED)
    """Weight of the KL divergence from the reference model; 0: there is no reference. Default: 0; 0.05 for rloo.
    distill: which divergence from the teacher, from 0, KL(teacher | model), over Jensen-Shannon's to 1, KL(model |
    teacher); default 0.5."""
    sync_ref_model: bool = only_with(False, objective=ONLINE)
    """The reference follows the model: every --ref-model-sync-steps steps it becomes --ref-model-mixup-alpha x the
    model's weights + the rest of its own (TR-DPO, arXiv 2404.09656). Checkpoints keep it."""
    ref_model_mixup_alpha: float = only_with(0.6, sync_ref_model=True)
    """The model's share, above 0 and at most 1; 1 replaces the reference."""
    ref_model_sync_steps: int = only_with(512, sync_ref_model=True)
    """Optimizer steps from one to the next."""
    kl_placement: Literal["loss", "reward"] | None = only_with(None, objective=ONLINE)
    """Where it is added: to the loss of each token, or taken from the reward of a completion. Default: loss; reward for
    rloo and reinforce++."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = only_with(None, objective=ONLINE)
    """With d = log-probability of the reference - that of the policy: k1: -d; k2: d^2 / 2; k3: exp(d) - d - 1. Default:
    k3 in the loss, k1 in the reward."""
    use_bias_correction_kl: bool = only_with(True, objective=ONLINE)
    """Multiply the KL term of the loss by the ratio of policies, which makes its gradient that of the divergence."""
    mask_truncated_completions: bool = only_with(False, objective=ONLINE)
    """Completions that --max-completion-length ended are not trained on; they stay in the means of their prompt."""
    overlong_buffer_len: int | None = only_with(None, objective=ONLINE)
    """Soft punishment of long completions (DAPO): none up to --max-completion-length minus this, then falling to -1.
    Default: 0, none; a fifth of --max-completion-length for dapo."""
    max_sampling_rounds: int | None = only_with(None, objective=ONLINE)
    """Dynamic sampling (DAPO): prompts whose completions all have one reward are replaced by others, in so many
    rounds at most. Default: 1, prompts are taken as they come; 10 for dapo."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        only_with(None, objective=ONLINE)
    )
    """Weight exp(log-probability before the update - that of sampling) of each token or completion, cut at
    --importance-sampling-clip-max or 0 beyond it. Default: none; token_truncate with --one-step-off-policy, or
    with a --rollout-engine that is not smp."""
    importance_sampling_clip_max: float = only_with(3.0, objective=ONLINE)
    """The largest such weight."""
    importance_sampling_clip_min: float = only_with(0.0, objective=ONLINE)
    """The smallest; below it truncate takes this, mask takes 0."""
    off_policy_mask_threshold: float | None = only_with(None, objective=ONLINE)
    """Leave out completions with a negative advantage whose tokens were on average this much likelier when they were
    sampled, in nats (DeepSeek V3.2). Default: none are left out."""
    sapo_temperature_pos: float = only_with(1.0, loss_type="sapo")
    """Steepness of the gate for positive advantages."""
    sapo_temperature_neg: float = only_with(1.05, loss_type="sapo")
    """And for negative ones."""
    log_completions: int = only_with(4, objective=ONLINE)
    """Completions of each generation that are written to <log-dir>/completions.jsonl, with their rewards."""
