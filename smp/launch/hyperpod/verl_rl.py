"""HyperPod's recipes of ``verl`` with an actor: GRPO on rewards of functions (RLVR) or of a judge (RLAIF).

The policy writes its completions itself, so all that is said of inference engines, Ray, critics and reward models on
GPUs has no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping

from smp.launch.hyperpod import tuning, verl
from smp.launch.hyperpod import verl_rl_values as values
from smp.launch.hyperpod.form import Form
from smp.launch.hyperpod.key import (
    FLAG,
    INTEGER,
    LIST,
    NUMBER,
    STEPS,
    TEXT,
    Key,
    nothing,
    only,
    read_with,
    switch,
    to,
)

_T, _A, _ALG, _ENGINES = values.SECTION, values.POLICY, values.ALGORITHM, values.ENGINES
_ESTIMATORS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
_REFERENCE = "the reference is the model without its adapters, or a copy; it is computed as the policy is"
_SAMPLING = "completions are sampled by the layers that train, which need no engine"
_JUDGE = "the function in recipes.reward_funcs asks the judge"


def _offloaded(keys: dict[str, Key]) -> dict[str, Key]:
    """Keys by which verl moves a policy's weights out of another engine's way, of which there is none."""
    stays = nothing("there is no other engine that the weights would be in the way of")
    return keys | {"param_offload": stays, "grad_offload": stays}


_ACTOR = {
    "strategy": only(("fsdp", "fsdp2", "megatron"), "weights are sharded by FSDP2"),
    "ppo_mini_batch_size": Key(
        "`global_batch_size`: this x rollout.n; `steps_per_generation`", values.batches, kind=INTEGER
    ),
    "ppo_micro_batch_size": only((), "ppo_micro_batch_size_per_gpu says it"),
    "ppo_micro_batch_size_per_gpu": Key(
        "`micro_batch_size`, without use_dynamic_bsz", values.fixed_micro_batch, kind=INTEGER
    ),
    "ppo_max_token_len_per_gpu": Key(
        "`micro_batch_size`, with use_dynamic_bsz", values.micro_batch_of_tokens, kind=INTEGER
    ),
    "use_dynamic_bsz": read_with("ppo_max_token_len_per_gpu", kind=FLAG),
    "ppo_epochs": to("num_iterations"),
    "clip_ratio": Key(
        "`epsilon`, `epsilon_high`, without clip_ratio_low or clip_ratio_high", values.clip_ratio, kind=NUMBER
    ),
    "clip_ratio_low": to("epsilon"),
    "clip_ratio_high": to("epsilon_high"),
    "clip_ratio_c": Key("`delta`", values.delta, kind=NUMBER),
    "loss_agg_mode": Key("`loss_type`; changes nothing with gspo", values.aggregation, kind=TEXT),
    "loss_scale_factor": only((), "dr_grpo divides by max_completion_length"),
    "use_kl_loss": Key("`beta`: kl_loss_coef, or 0; with use_kl_in_reward as that says", values.kl, kind=FLAG),
    "kl_loss_coef": read_with("use_kl_loss", _A + "actor.use_kl_loss", kind=NUMBER),
    "kl_loss_type": Key("`kl_estimator`, of a KL in the loss", values.kl_of_loss, kind=TEXT),
    "entropy_coeff": only((0, 0.0), "entropy is logged and not rewarded"),
    "entropy_advantage": only((False,), "advantages are those of rewards"),
    "entropy_advantage_alpha": nothing("it goes with entropy_advantage"),
    "entropy_advantage_kappa": nothing("it goes with entropy_advantage"),
    "calculate_entropy": nothing("entropy is logged"),
    "policy_loss.loss_mode": Key("`objective`: gspo; refused unless gspo or vanilla", values.loss_mode, kind=TEXT),
    "policy_loss.*": nothing("it goes with another loss_mode"),
    "tau_pos": nothing("it goes with another loss_mode"),
    "tau_neg": nothing("it goes with another loss_mode"),
    "shuffle": only((False,), "completions are trained on in the order of their prompts"),
    "data_loader_seed": nothing("seed draws the order of prompts"),
    "grad_clip": to("clip_grad"),
    "ulysses_sequence_parallel_size": Key("`context_parallel_size`, `cp_comm_type: a2a`", values.ulysses, kind=INTEGER),
    "entropy_checkpointing": nothing("the loss takes the vocabulary in chunks"),
    "entropy_from_logits_with_chunking": nothing("the loss takes the vocabulary in chunks"),
    "use_fused_kernels": nothing("the device says which kernels run"),
    "use_remove_padding": nothing("padding is no input of any product that it could change"),
    "use_torch_compile": nothing("recipes.compile=true compiles blocks"),
    "freeze_vision_tower": nothing("models are read without their towers"),
    "load_weight": only((True,), "the model is read from its folder"),
    "rollout_n": Key("refused unless rollout.n", values.same_generations, kind=INTEGER),
    "checkpoint.save_contents": verl.SAVED,
    "checkpoint.load_contents": nothing("checkpoints are whole"),
    "checkpoint.async_save": switch("async_save"),
    "router_replay.mode": only(("disabled",), "completions are sampled by the layers that train: routers agree"),
    "router_replay.*": nothing("it goes with router_replay.mode"),
    "profiler.*": nothing("recipes.profile=true profiles steps"),
}
_ROLLOUT = {
    "n": to("num_generations"),
    "temperature": to("temperature"),
    "top_p": to("top_p"),
    "top_k": Key("`top_k`; -1: all", lambda value, get: {"top_k": max(0, value)}, kind=INTEGER),
    "do_sample": only((True,), "completions are sampled"),
    "ignore_eos": only((False,), "a completion ends where the model ends it"),
    "response_length": Key("`max_completion_length`, `seq_length` with the prompt's", values.lengths, kind=INTEGER),
    "prompt_length": Key(
        "with response_length, without data.max_prompt_length",
        lambda value, get: {} if get(_T + "data.max_prompt_length") is None else "data.max_prompt_length says it",
        kind=INTEGER,
    ),
    "val_kwargs.n": to("num_generations_eval"),
    "val_kwargs.temperature": Key("`eval_temperature`; 0 without do_sample", values.evaluation, kind=NUMBER),
    "val_kwargs.do_sample": read_with("val_kwargs.temperature", kind=FLAG),
    "val_kwargs.top_p": nothing("evaluations take top_p"),
    "val_kwargs.top_k": nothing("evaluations take top_k"),
    "multi_turn.enable": only((False,), "a completion is one turn"),
    "multi_turn.*": nothing("it goes with multi_turn.enable"),
    "agent.*": nothing("a completion is one turn"),
    **{
        name: only((), "the policy samples in the precision that it is trained in")
        for name in ("quantization", "quantization_config_file")
    },
    "skip_rollout": only((False,), "completions are sampled"),
    "over_sample_rate": only((0,), "take recipes.max_sampling_rounds"),
    # vLLM's, which verl passes on
    **{
        name: only(neutral, "completions are sampled by temperature, top_p and top_k")
        for name, neutral in (
            *((name, (1, 1.0)) for name in ("repetition_penalty", "length_penalty")),
            *((name, (0, 0.0)) for name in ("presence_penalty", "frequency_penalty", "min_p", "min_tokens")),
            *((name, ()) for name in ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")),
        )
    },
    **{
        name: nothing(_SAMPLING)
        for name in (
            *("name", "mode", "dtype", "load_format", "engine_kwargs.*", "max_model_len", "max_num_seqs"),
            *("max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "free_cache_engine"),
            *("enable_chunked_prefill", "enable_prefix_caching", "cudagraph_capture_sizes", "disable_log_stats"),
            *("tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size"),
            *("pipeline_model_parallel_size", "calculate_log_probs", "logprobs_mode", "log_prob_micro_batch_size"),
            *("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
            *("update_weights_bucket_megabytes", "multi_stage_wake_up", "layered_summon", "layer_name_map.*"),
            *("merge_lora_for_inference", "skip_tokenizer_init", "skip_dump_dir", "enable_rollout_routing_replay"),
            *("profiler.*", "prometheus.*", "trace.*", "limit_images", "checkpoint_engine.*"),
        )
    },
}
_MODEL = {
    **verl.model_keys(_A + "model.", _ENGINES[1]),
    "attn_implementation": nothing("the device says which kernels run"),
    "is_saving_checkpoint_in_lora": nothing("checkpoints with adapters have adapters only"),
    "patch_full_model": only((False,), "the model is that of its folder"),
    "patched_model_path": only((), "model.path says the folder"),
    "override_config.model_config.*": only((), "the model's folder says its architecture"),
    "override_config.moe_config.freeze_moe_router": only((False,), "adapters leave routers as they are"),
    **{
        f"lora.{name}": nothing(why)
        for name, why in (
            ("type", "adapters are LoRA"),
            ("lora_A_init_method", "A and B begin as peft's"),
            ("lora_B_init_method", "A and B begin as peft's"),
            ("dropout_position", "it goes with dropout"),
            ("dtype", "adapters are fp32"),
            ("a2a_experimental", "it is a matter of speed"),
            ("freeze_language_model", "with adapters all else is frozen"),
            ("freeze_vision_model", "with adapters all else is frozen"),
            ("freeze_vision_projection", "with adapters all else is frozen"),
        )
    },
    "lora.adapter_path": only((), "recipes.load_adapter=FOLDER says it"),
    "lora.exclude_modules": nothing("lora.target_modules says what gets adapters"),
}
_ALGORITHM = {
    "adv_estimator": values.one_of("advantage_estimator", _ESTIMATORS),
    "norm_adv_by_std_in_grpo": Key(
        "`scale_rewards` group or off", lambda value, get: {"scale_rewards": "group" if value else "off"}, kind=FLAG
    ),
    "gamma": only((1.0, 1), "a completion has one reward"),
    "lam": only((1.0, 1), "a completion has one reward"),
    "use_kl_in_reward": Key(
        "`kl_placement: reward`, `beta`: kl_ctrl.kl_coef, `kl_estimator`: kl_penalty", values.kl, kind=FLAG
    ),
    "kl_penalty": read_with("use_kl_in_reward", _ALG + "use_kl_in_reward", kind=TEXT),
    "kl_ctrl.kl_coef": read_with("use_kl_in_reward", _ALG + "use_kl_in_reward", kind=NUMBER),
    "kl_ctrl.type": Key("refused unless `fixed`, with use_kl_in_reward", values.kl_controller, kind=TEXT),
    "kl_ctrl.*": nothing("it goes with kl_ctrl.type adaptive"),
    "use_pf_ppo": only((False,), "completions are not sampled again by their rewards"),
    "pf_ppo.*": nothing("it goes with use_pf_ppo"),
    "rollout_correction.rollout_is": Key(
        "`importance_sampling_mode`, `importance_sampling_clip_max`", values.correction, kind=TEXT
    ),
    "rollout_correction.rollout_is_threshold": read_with(
        "rollout_is", _ALG + "rollout_correction.rollout_is", kind=NUMBER
    ),
    "rollout_correction.rollout_is_batch_normalize": only((False,), "weights are not normalised"),
    "rollout_correction.rollout_rs": only((), "take recipes.importance_sampling_mode=sequence_mask"),
    "rollout_correction.rollout_rs_threshold": only((), "it goes with rollout_rs"),
    "rollout_correction.rollout_rs_threshold_lower": only((), "it goes with rollout_rs"),
    "rollout_correction.rollout_token_veto_threshold": only((), "take recipes.importance_sampling_mode=token_mask"),
    "rollout_correction.bypass_mode": only((False,), "log-probabilities before the update are the trainer's"),
    "rollout_correction.loss_type": only(("ppo_clip",), "recipes.loss_type says another"),
}
_DATA = {
    **verl.DATA,
    "val_files": Key("`valid_data_path`, with trainer.test_freq", values.val_files, is_text=True, is_list=True),
    "train_batch_size": Key(
        "`global_batch_size`, `steps_per_generation`, with actor.ppo_mini_batch_size", values.batches, kind=INTEGER
    ),
    "val_batch_size": nothing("all validation prompts are answered, however many at once"),
    "max_prompt_length": Key("`seq_length`, with rollout.response_length", values.lengths, kind=INTEGER),
    "max_response_length": Key(
        "with max_prompt_length, without rollout.response_length",
        lambda value, get: {} if get(_A + "rollout.response_length") is None else "rollout.response_length says it",
        kind=INTEGER,
    ),
    "filter_overlong_prompts": only((True,), "prompts that are too long are left out and counted"),
    "truncation": nothing("prompts that are too long are left out and counted, never cut"),
    "split_seed": nothing("seed draws the split as well"),
    "validation_shuffle": nothing("evaluations take prompts in order"),
    "prompt_key": only(("prompt",), "finetune.py reads prompt; other columns go to the reward function"),
    "apply_chat_template_kwargs.enable_thinking": Key(
        "refused unless it is the template's default", values.thinking, kind=FLAG
    ),
    "chat_template_kwargs.enable_thinking": Key(
        "refused unless it is the template's default", values.thinking, kind=FLAG
    ),
    **{
        f"{section}.{name}": only(("medium",), "recipes.chat_template=FILE says another template")
        for section in ("apply_chat_template_kwargs", "chat_template_kwargs")
        for name in ("reasoning_effort", "reasoning_effot")  # as one recipe spells it
    },
    "apply_chat_template_kwargs.*": only((), "recipes.chat_template=FILE says another template"),
    "chat_template_kwargs.*": only((), "recipes.chat_template=FILE says another template"),
    "datagen.*": only((), "prompts are those of files"),
    "sampler.*": only((), "prompts are drawn by seed"),
    "tokenizer": only((), "recipes.tokenizer_model says it"),
    "tool_config_path": only((), "a completion is one turn"),
    "auto_convert_format": only((False,), "samples are those of docs/finetuning.md"),
    "trust_remote_code": nothing("no code of a model's folder is run"),
    "seed": nothing("the order of prompts is drawn by seed"),
    **{
        name: nothing("rows are what docs/finetuning.md names; all their columns go to the reward function")
        for name in (
            *("image_key", "video_key", "image_patch_size", "reward_fn_key", "return_full_prompt", "return_raw_chat"),
            *("return_multi_modal_inputs", "return_raw_input_ids", "filter_overlong_prompts_workers"),
        )
    },
}
_TRAINER = {
    **verl.TRAINER,
    "test_freq": Key(
        "`eval_interval`, or for after_each_epoch `eval_epochs: 1`; -1: never; `full_validation`; where samples are "
        "kept for it",
        values.test_freq,
        kind=STEPS,
    ),
    "val_before_train": nothing("a run is evaluated before its first step"),
    "val_only": only((False,), "tools/evaluate.py evaluates a model"),
    "use_custom_rollouts": only((False,), "completions are sampled by the layers that train"),
    "custom_rollout.*": only(("", "None"), "completions are sampled by the layers that train"),
    "early_stopping.enable": only((False,), "a run ends where train_epochs or train_iters says"),
    "early_stopping.*": nothing("it goes with early_stopping.enable"),
    "max_actor_ckpt_to_keep": tuning.KEPT,
    "rollout_data_dir": only((), "recipes.log_completions writes completions"),
    "validation_data_dir": only((), "recipes.log_completions writes completions"),
    "critic_warmup": only((0,), "there is no critic"),
    "log_val_generations": nothing("recipes.log_completions writes completions"),
    **{
        name: nothing("there is no Ray and no critic, and a job continues by itself")
        for name in (
            *("max_critic_ckpt_to_keep", "del_local_ckpt_after_load", "esi_redundant_time", "balance_batch"),
            *("ray_wait_register_center_timeout", "use_legacy_worker_impl", "profile_steps"),
            *("controller_nsight_options.*", "worker_nsight_options.*", "npu_profile.*"),
        )
    },
}


def _under(prefix: str, keys: Mapping[str, Key]) -> dict[str, Key]:
    return {f"{prefix}.{name}": key for name, key in keys.items()}


KEYS: dict[str, Key] = {
    **tuning.COMMON,
    "run.model_type": only(("verl",), "it is the form of the recipe"),
    "*._target_": nothing("a class of verl's"),
    "ray_cluster.*": nothing("there is no Ray: torchrun starts all processes"),
    f"{_T}mlflow.run_id": tuning.MLFLOW["mlflow.run_id"],
    f"{_T}mlflow.tracking_uri": verl.TRACKED,
    **_under(f"{_A}actor", _ACTOR),
    **{f"{section}{name}": key for section in _ENGINES for name, key in _offloaded(verl.engine_keys(section)).items()},
    **_under(f"{_A}actor.optim", verl.optimizer_keys(_A + "actor.optim.")),
    **_under(f"{_A}model", _MODEL),
    f"{_A}ref.*": nothing(_REFERENCE),
    **_under(f"{_A}rollout", _ROLLOUT),
    f"{_A}hybrid_engine": nothing(_SAMPLING),
    f"{_A}merge_lora_for_inference": nothing(_SAMPLING),
    f"{_A}nccl_timeout": nothing("recipes.distributed_timeout_minutes says it"),
    f"{_A}profiler.*": nothing("recipes.profile=true profiles steps"),
    **_under(f"{_T}algorithm", _ALGORITHM),
    f"{_T}critic.enable": only((False,), "there is no critic"),
    f"{_T}critic.*": nothing("there is no critic"),
    f"{_T}custom_reward_function.path": Key("`reward_funcs`, with name", values.reward, is_text=True),
    f"{_T}custom_reward_function.name": read_with("path", _T + "custom_reward_function.path", kind=TEXT),
    f"{_T}custom_reward_function.lambda_arn": only((), "recipes.reward_funcs=FILE.py:NAME says a function"),
    f"{_T}reward_manager.*": nothing("recipes.reward_funcs says the functions"),
    f"{_T}reward_model.enable": only((False,), "recipes.reward_funcs says what rewards completions"),
    f"{_T}reward_model.use_reward_loop": only((False,), "recipes.reward_funcs says what rewards completions"),
    f"{_T}reward_model.reward_kwargs.*": nothing(_JUDGE),
    f"{_T}reward_model.*": nothing("recipes.reward_funcs says what rewards completions"),
    **_under(f"{_T}data", _DATA),
    **_under(f"{_T}trainer", _TRAINER),
    f"{_T}trainer_callbacks": Key("refused but for AWS's metering", tuning.callbacks, kind=LIST),
    f"{_T}transfer_queue.enable": only((False,), "rows go through no queue"),
    **{f"{_T}{name}.*": nothing("there is no Ray") for name in ("ray_init", "ray_kwargs")},
    f"{_T}global_profiler.*": nothing("recipes.profile=true profiles steps"),
}
ALWAYS = {
    **{"objective": "grpo", "bf16": True, "use_bias_correction_kl": False, "lr_decay_style": "constant"},
    "adam_beta2": 0.999,
}
"""verl's defaults: its KL term is not multiplied by the ratio of policies, and optimizer and schedule are torch's."""
VERL_RL = Form("verl with an actor", KEYS, lambda get: True, ALWAYS, verl.SIZES)
