"""Translations of keys of ``verl``'s recipes with an actor that are not copied: what they become, or why they are
refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError
from smp.launch.hyperpod import tuning, verl
from smp.launch.hyperpod.key import TEXT, Get, Key

SECTION = "training_config."
POLICY = SECTION + "actor_rollout_ref."
ALGORITHM = SECTION + "algorithm."
ENGINES = (POLICY + "actor.fsdp_config.", POLICY + "actor.megatron.")
_LOSSES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
_KL_COEFFICIENT = 0.001
"""verl's default, of either placement."""
_NAMED = ("gemma", "qwen", "llama", "deepseek", "gpt", "nemotron", "mistral")
"""Families that the name of a model's folder may contain."""


def one_of(name: str, names: Mapping[str, str]) -> Key:
    def convert(value: Any, get: Get) -> Mapping[str, Any]:
        if value not in names:
            raise ConfigError(f"{value} cannot be had: take one of {', '.join(names)}")
        return {name: names[value]}

    return Key(f"`{name}`", convert, kind=TEXT)


def _generations(get: Get) -> int:
    return int(get(POLICY + "rollout.n") or 1)


def same_generations(value: Any, get: Get) -> Mapping[str, Any]:
    if value != _generations(get):
        raise ConfigError(f"{value} cannot be had: rollout.n is {_generations(get)}")
    return {}


def batches(value: Any, get: Get) -> Mapping[str, Any]:
    """--global-batch-size and --steps-per-generation. verl counts prompts; here a step has a number of completions."""
    prompts, step = get(SECTION + "data.train_batch_size"), get(POLICY + "actor.ppo_mini_batch_size")
    if not prompts or not step:
        raise ConfigError("data.train_batch_size and actor.ppo_mini_batch_size go together")
    if prompts % step:
        raise ConfigError(f"actor.ppo_mini_batch_size {step} does not divide data.train_batch_size {prompts}")
    return {"global_batch_size": step * _generations(get), "steps_per_generation": prompts // step}


def _longest(get: Get) -> tuple[int, int]:
    """Most tokens of a prompt and of a completion."""
    prompt = get(SECTION + "data.max_prompt_length") or get(POLICY + "rollout.prompt_length")
    completion = get(POLICY + "rollout.response_length") or get(SECTION + "data.max_response_length")
    if not prompt or not completion:
        raise ConfigError("data.max_prompt_length and rollout.response_length go together")
    return prompt, completion


def lengths(value: Any, get: Get) -> Mapping[str, Any]:
    prompt, completion = _longest(get)
    return {"seq_length": prompt + completion, "max_completion_length": completion}


def fixed_micro_batch(value: Any, get: Get) -> Mapping[str, Any] | str:
    return verl.BY_TOKENS if get(POLICY + "actor.use_dynamic_bsz") else _micro_batch(value, get)


def micro_batch_of_tokens(value: Any, get: Get) -> Mapping[str, Any] | str:
    return _micro_batch(value, get) if get(POLICY + "actor.use_dynamic_bsz") else verl.NOT_BY_TOKENS


def _micro_batch(value: Any, get: Get) -> Mapping[str, Any]:
    """--micro-batch-size: as many full-length completions as verl's micro-batches have tokens for, or verl's own
    number."""
    # A recipe has the sections of both engines; the one with settings is used.
    engine = next((section for section in ENGINES if get(section + "strategy") or get(section + "dtype")), ENGINES[0])
    parallel = verl.model_parallel(get, engine.rstrip(".")) * (
        get(POLICY + "actor.ulysses_sequence_parallel_size") or 1
    )
    processes = tuning.data_processes(get, parallel)
    most = get(POLICY + "actor.ppo_micro_batch_size_per_gpu") or 1
    if get(POLICY + "actor.use_dynamic_bsz"):
        most = tuning.micro_batch_of_tokens(get(POLICY + "actor.ppo_max_token_len_per_gpu"), sum(_longest(get)))
    # verl counts prompts, and each has rollout.n completions.
    step = (get(POLICY + "actor.ppo_mini_batch_size") or 1) * _generations(get)
    return {"micro_batch_size": tuning.micro_batch(most, step, processes)}


def ulysses(value: Any, get: Get) -> Mapping[str, Any]:
    return {} if value == 1 else {"context_parallel_size": value, "cp_comm_type": "a2a"}


def kl(value: Any, get: Get) -> Mapping[str, Any]:
    """Settings of the KL term, from either key; only one of them can be on."""
    in_loss, in_reward = get(POLICY + "actor.use_kl_loss"), get(ALGORITHM + "use_kl_in_reward")
    if in_loss and in_reward:
        raise ConfigError("use_kl_loss and use_kl_in_reward cannot be had together: take one")
    if not in_reward:
        given = get(POLICY + "actor.kl_loss_coef")
        return {"beta": (_KL_COEFFICIENT if given is None else given) if in_loss else 0.0}
    if get(ALGORITHM + "adv_estimator") == "reinforce_plus_plus":
        raise ConfigError("with reinforce_plus_plus it cannot be had: all tokens of a completion have one advantage")
    coefficient, penalty = get(ALGORITHM + "kl_ctrl.kl_coef"), get(ALGORITHM + "kl_penalty") or "kl"
    if penalty not in _KL:
        raise ConfigError(f"kl_penalty {penalty} cannot be had: take one of {', '.join(_KL)}")
    # Without a KL term there is no reference, so its placement and estimator have no effect.
    if coefficient == 0:
        return {"beta": 0.0}
    beta = _KL_COEFFICIENT if coefficient is None else coefficient
    return {"beta": beta, "kl_placement": "reward", "kl_estimator": _KL[penalty]}


def kl_of_loss(value: Any, get: Get) -> Mapping[str, Any] | str:
    if get(ALGORITHM + "use_kl_in_reward"):
        return "kl_penalty says it of a KL in the reward"
    return one_of("kl_estimator", _KL).convert(value, get)


def kl_controller(value: Any, get: Get) -> Mapping[str, Any] | str:
    if get(ALGORITHM + "use_kl_in_reward") and value != "fixed":
        raise ConfigError(f"{value} cannot be had: the coefficient is fixed")
    return {} if value == "fixed" else "it goes with use_kl_in_reward"


def clip_ratio(value: Any, get: Get) -> Mapping[str, Any] | str:
    """--epsilon and --epsilon-high, each unless it has its own key."""
    sides = {"epsilon": "clip_ratio_low", "epsilon_high": "clip_ratio_high"}
    found = {name: value for name, key in sides.items() if get(f"{POLICY}actor.{key}") is None}
    return found or "clip_ratio_low and clip_ratio_high say it"


def _is_gspo(get: Get) -> bool:
    return bool(get(POLICY + "actor.policy_loss.loss_mode") == "gspo")


def loss_mode(value: Any, get: Get) -> Mapping[str, Any]:
    if value not in ("vanilla", "gspo"):
        raise ConfigError(f"{value} cannot be had: take vanilla, gspo, or recipes.objective=cispo")
    return {"objective": "gspo"} if value == "gspo" else {}


def aggregation(value: Any, get: Get) -> Mapping[str, Any] | str:
    """--loss-type. verl's GSPO averages over completions whatever this key says; its KL in the loss follows the key."""
    if not _is_gspo(get):
        return one_of("loss_type", _LOSSES).convert(value, get)
    if value != "seq-mean-token-mean" and get(POLICY + "actor.use_kl_loss") and get(POLICY + "actor.kl_loss_coef"):
        raise ConfigError(f"{value} of the KL term alone cannot be had with loss_mode gspo: take seq-mean-token-mean")
    return "gspo averages over completions"


def delta(value: Any, get: Get) -> Mapping[str, Any] | str:
    """--delta. verl's third clip acts on negative advantages, like TRL's second side."""
    if _is_gspo(get):
        return "gspo has two clips"
    # verl's default of clip_ratio is 0.2.
    high = get(POLICY + "actor.clip_ratio_high") or get(POLICY + "actor.clip_ratio") or 0.2
    if value < 1 + high:
        raise ConfigError(f"{value} is below 1 + clip_ratio_high, {1 + high:g}")
    return {"delta": float(value)}


def correction(value: Any, get: Get) -> Mapping[str, Any]:
    if value not in ("token", "sequence"):
        raise ConfigError(f"{value} cannot be had: take token or sequence")
    # verl's default threshold is 2.
    limit = get(SECTION + "algorithm.rollout_correction.rollout_is_threshold") or 2.0
    return {"importance_sampling_mode": f"{value}_truncate", "importance_sampling_clip_max": float(limit)}


def val_files(value: Any, get: Get) -> Mapping[str, Any] | str:
    """--valid-data-path. Without a frequency verl's actor trainer never evaluates, not even at the end."""
    freq = get(SECTION + "trainer.test_freq")
    if freq is None or (isinstance(freq, int) and freq <= 0):
        return "trainer.test_freq says that a run does not evaluate"
    return {"valid_data_path": verl.words(value)}


def test_freq(value: Any, get: Get) -> Mapping[str, Any] | str:
    if value != "after_each_epoch" and value <= 0:
        return "a run does not evaluate"
    return verl.TRAINER["test_freq"].convert(value, get)


def evaluation(value: Any, get: Get) -> Mapping[str, Any]:
    return {"eval_temperature": float(value) if get(POLICY + "rollout.val_kwargs.do_sample") else 0.0}


def reward(value: Any, get: Get) -> Mapping[str, Any]:
    name = get(SECTION + "custom_reward_function.name") or "compute_score"
    return {"reward_funcs": f"{value}:{name}"}


def thinking(value: Any, get: Get) -> Mapping[str, Any] | str:
    """Accept the template's default. Templates enable thinking unless told otherwise, except Gemma's. Where the
    folder's name does not tell the family, the recipe's title does."""
    path, title = (str(get(name)).lower() for name in (POLICY + "model.path", "display_name"))
    name = path if any(family in path for family in _NAMED) else title
    if bool(value) == ("gemma" not in name):
        return "it is what the model's template does by itself"
    raise ConfigError(f"{str(value).lower()} cannot be had: recipes.chat_template=FILE says another template")
