"""Checks of mixtures of experts."""

from __future__ import annotations

from smp.config.command_line.fields import given, require
from smp.config.layer_pattern import with_experts
from smp.config.layout import Layout
from smp.config.model import ModelConfig
from smp.config.schema import Config


def aux_losses(model: ModelConfig) -> dict[str, float]:
    """Router losses that are added to the model's own, with their coefficients."""
    if model.num_experts is None:
        return {}
    found = {"load balancing loss": model.moe_aux_loss_coeff, "z loss": model.moe_z_loss_coeff or 0.0}
    return {name: coefficient for name, coefficient in found.items() if coefficient > 0}


def check_moe_model(model: ModelConfig) -> None:
    """Check a model with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    experts, k = model.num_experts, model.moe_router_topk
    if experts is None:
        return
    require(k <= experts, f"--moe-router-topk {k} is above --num-experts {experts}; change one of them")
    sigmoid = model.moe_router_score_function == "sigmoid"
    require(
        not (sigmoid and model.moe_router_pre_softmax),
        "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid; leave it out",
    )
    require(
        # d softmax / d logit of a single chosen expert is 0.
        k > 1 or sigmoid or model.moe_router_pre_softmax,
        "--moe-router-topk 1: the softmax over one expert is 1, so the router gets no gradient; give "
        "--moe-router-pre-softmax or --moe-router-score-function sigmoid",
    )
    require(
        k == 1 or not model.moe_apply_probs_on_input,
        f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {k}: a token has one input",
    )
    _check_groups(model)
    _check_balancing(model)
    with_experts(model)


def _check_groups(model: ModelConfig) -> None:
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    experts, k = model.num_experts, model.moe_router_topk
    if groups is None:
        return
    assert experts is not None, "it has no effect without"
    require(
        best is not None, f"--moe-router-num-groups {groups}: give --moe-router-group-topk, how many of them are used"
    )
    assert best is not None
    require(experts % groups == 0, f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}")
    require(best <= groups, f"--moe-router-group-topk {best} is above --moe-router-num-groups {groups}")
    # DeepSeek-V3's score of a group is the sum of its best topk / group_topk experts.
    summed = model.moe_router_group_score == "sum"
    require(k % best == 0 or not summed, f"--moe-router-topk {k} is not divisible by --moe-router-group-topk {best}")
    size = experts // groups
    require(
        k <= best * size,
        f"--moe-router-topk {k}: {best} groups (--moe-router-group-topk) have {size} experts each; give at most "
        f"{best * size}",
    )


def _check_balancing(model: ModelConfig) -> None:
    # Sinkhorn balances the choice itself (as in Megatron), so there is no loss for a coefficient.
    kind, coefficient = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    require(
        kind not in ("none", "sinkhorn") or coefficient == 0,
        f"--moe-aux-loss-coeff {coefficient} has no effect with --moe-router-load-balancing-type {kind}; leave it out",
    )
    flags = given(model, "moe_router_enable_expert_bias", "moe_router_num_groups")
    require(
        kind != "sinkhorn" or not flags,
        f"--moe-router-load-balancing-type sinkhorn and {', '.join(flags)} exclude each other: each says which experts "
        "are chosen; leave out one",
    )
    require(
        kind in ("aux_loss", "sinkhorn", "none") or coefficient > 0,
        f"--moe-router-load-balancing-type {kind} has no effect without --moe-aux-loss-coeff; give it",
    )


def check_moe(config: Config, layout: Layout) -> None:
    """Check the settings of a run with its defaults filled in; raises as :func:`check_moe_model`."""
    model, parallel = config.model, config.parallel
    if model.num_experts is None:
        return
    ep, etp = layout.ep, layout.expert_tp
    require(
        model.num_experts % ep == 0,
        f"--num-experts {model.num_experts} is not divisible by --expert-model-parallel-size {ep}; change one of them",
    )
    tensor = f"--tensor-model-parallel-size {layout.tp}"
    among = tensor if layout.etp is None else f"--expert-tensor-parallel-size {etp}"
    for flag, size, tp, its in (
        ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size, etp, among),
        ("--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size, layout.tp, tensor),
    ):
        require((size or 0) % tp == 0, f"{flag} {size} is not divisible by {its}; change one of them")
    # Biases are cut over the expert-tensor-parallel ranks, as the outputs.
    biased = (
        "--add-mlp-bias" if model.add_mlp_bias else None if model.disable_bias_linear else "--no-disable-bias-linear"
    )
    require(
        biased is None or model.hidden_size % etp == 0,
        f"--hidden-size {model.hidden_size} is not divisible by {among}, over which biases "
        f"of experts are cut; change one of them, or leave out {biased}",
    )
    uneven = model.moe_expert_capacity_factor is not None and not model.moe_pad_expert_input_to_capacity
    require(
        # With a capacity the number of rows depends on the routing of each step.
        not (parallel.compile and uneven),
        f"--compile cannot trace --moe-expert-capacity-factor {model.moe_expert_capacity_factor}, which gives each "
        "step a different number of rows; leave one of them out, or give --moe-pad-expert-input-to-capacity",
    )
    _check_finetuning(config)


def _check_finetuning(config: Config) -> None:
    """Check fine-tuning: losses of answers are no sums over tokens, so routers are not measured with them."""
    losses = given(config.model, "moe_aux_loss_coeff", "moe_z_loss_coeff")
    moves = given(config.model, "moe_router_bias_update_rate")
    if config.objective is None:
        return
    capacity = given(config.model, "moe_expert_capacity_factor")
    require(
        not capacity,
        f"{''.join(capacity)}: rows of fine-tuning are padded, and padding would use up the capacity; leave it out",
    )
    require(
        config.model.moe_router_load_balancing_type != "sinkhorn",
        "--moe-router-load-balancing-type sinkhorn: rows of fine-tuning are padded, and padding would be balanced with "
        "their tokens; leave it out",
    )
    require(
        not (config.objective_facts.of_answers and losses + moves),
        f"{', '.join(losses + moves)}: pairs of answers (--objective {config.objective.objective}) train without "
        "balancing experts; leave it out",
    )
    require(
        not (config.has_adapters and moves),
        f"{', '.join(moves)} has no effect with adapters: the rest of the model stays as it is; leave it out",
    )
