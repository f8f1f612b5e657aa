"""Flags of Megatron-LM's that say the model and depend on other flags.

Each function takes a :class:`Line`, reads what was given, and puts this project's flags into the result.
"""

from __future__ import annotations

import math
import re

from smp.config.layer_pattern import ATTENTION, EXPERTS, MAMBA, MLP, OF_ATTENTION, OF_FEED_FORWARD
from smp.config.megatron.line import Line, leave
from smp.config.rules.linear import OF_MAMBA


def positions(line: Line) -> None:
    if "--no-position-embedding" in line.given and not line.says("position_embedding_type", "rope"):
        line.put("--position-embedding-type", "none")


def layer_pattern(line: Line) -> None:
    """--hybrid-layer-pattern; its letters give --num-layers where no flag does, as in Megatron."""
    letters = line.one("--hybrid-layer-pattern") or line.one("--hybrid-override-pattern")
    if letters is not None:
        line.put("--hybrid-layer-pattern", letters)
        if "--num-layers" not in line.given and "num_layers" not in line.words:
            line.put("--num-layers", str(len(letters)))


def heads(line: Line) -> None:
    if "--multi-latent-attention" in line.given:
        leave(line, ("kv_channels",), "--multi-latent-attention has widths of its own")
    if line.says("moe_router_score_function", "sigmoid"):
        leave(line, ("moe_router_pre_softmax",), "sigmoid scores have no softmax")
    groups = line.one("--num-query-groups")
    # Megatron's default with --group-query-attention is one group.
    if "--group-query-attention" in line.given:
        line.put("--num-query-groups", groups or "1")
    elif groups is not None:
        line.left_out.append(f"--num-query-groups {groups} (without --group-query-attention)")


def window(line: Line) -> None:
    if "--window-size" not in line.given:
        return
    text = " ".join(line.given["--window-size"])
    sides = [int(number) for number in re.findall(r"-?\d+", text)]
    # Megatron's window is (left, right) distances; a causal model looks right by 0 (or -1, which
    # means no limit).
    if len(sides) != 2 or sides[1] not in (0, -1):
        line.problems.append(f"--window-size {text}: a token sees itself and tokens before it: give Megatron's (n-1,0)")
    # Megatron counts the tokens before, here the token itself is counted, too.
    elif sides[0] >= 0:
        line.put("--window-size", str(sides[0] + 1))


def gelu(line: Line) -> None:
    """--tanh-gelu for Megatron's GELU with a fused bias, its default, which is the tanh approximation."""
    plain = line.says("swiglu") is False and not line.says("squared_relu")
    fused = "--no-bias-gelu-fusion" not in line.given and not line.says("disable_bias_linear")
    if plain and (fused or "--openai-gelu" in line.given) and "tanh_gelu" not in line.words:
        line.put("--tanh-gelu")


def unused_parts(line: Line) -> None:
    """Leave out settings of parts for which no letter of a pattern asks: scripts give them all the same."""
    words = line.words.get("hybrid_layer_pattern")
    letters = set() if words is None else set(words[-1])
    if not letters:
        return
    if MAMBA not in letters:
        leave(line, OF_MAMBA, "no layer has Mamba-2")
    if ATTENTION not in letters:
        leave(line, (*OF_ATTENTION, "num_query_groups", "kv_channels"), "no layer has attention")
    if not letters & {MLP, EXPERTS}:
        biases = ("disable_bias_linear",) if ATTENTION in letters else ()
        names = [name for name in ("ffn_hidden_size", *OF_FEED_FORWARD) if name not in biases]
        # Biases are attention's, too: --disable-bias-linear must stay for it.
        leave(line, names, "no layer has an MLP or experts")


def query_norm(line: Line) -> None:
    if "--qk-layernorm" not in line.given:
        return
    line.put("--qk-layernorm")
    if not line.says("normalization", "RMSNorm"):
        line.problems.append("--qk-layernorm: here it is RMSNorm; give --normalization RMSNorm")


def latent_yarn(line: Line) -> None:
    """--rope-scaling-type yarn: Megatron's RoPE with latent attention is YaRN; its default factor of 1 changes
    nothing."""
    flags = ("--rope-type", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim")
    given = [f"{flag} {line.one(flag)}" for flag in flags if flag in line.given]
    latent, kind = "--multi-latent-attention" in line.given, line.one("--rope-type")
    factor = line.one("--rotary-scaling-factor") or "1.0"
    if kind not in (None, "rope", "yarn"):
        line.problems.append(f"--rope-type {kind}: give rope or yarn")
    elif not all(_is_number(line.one(flag) or "1") for flag in flags[1:]):
        line.problems.append(f"{', '.join(given)}: numbers")
    elif latent and kind == "rope" and float(factor) > 1 and float(line.one("--mscale-all-dim") or 0):
        line.problems.append(
            "--rope-type rope with --rotary-scaling-factor and --mscale-all-dim: Megatron scales attention by them "
            "although RoPE is not scaled; give --softmax-scale"
        )
    elif not latent or kind == "rope" or float(factor) == 1:
        # The reason differs: with latent attention YaRN is there and does nothing; without it
        # Megatron reads none of these.
        why = "YaRN by a factor of 1 changes nothing" if latent and kind != "rope" else "there is no YaRN to set up"
        line.left_out += [f"{words} ({why})" for words in given]
    else:
        line.put("--use-rope-scaling", "--rope-scaling-type", "yarn", "--rope-scaling-factor", factor)
        line.put("--rope-original-max-position", "4096")  # a constant of Megatron's
        weight, of_all = (float(line.one(flag) or other) for flag, other in (("--mscale", 1), ("--mscale-all-dim", 0)))
        # DeepSeek's two scales: YaRN's attention factor is mscale(weight) / mscale(of_all).
        if weight and of_all:
            line.put("--yarn-mscale", str(weight), "--yarn-mscale-all-dim", str(of_all))
        elif of_all:
            line.problems.append(f"--mscale 0 with --mscale-all-dim {of_all}: give both or none")
        else:
            # Without mscale_all_dim the factor is 0.1 mscale ln(factor) + 1 (arXiv 2309.00071,
            # 3.4).
            line.put("--yarn-attention-factor", repr(0.1 * weight * math.log(max(1.0, float(factor))) + 1.0))


def experts(line: Line) -> None:
    """Megatron takes a negative capacity for none, and ignores the coefficient of a loss that is off."""
    if (line.one("--moe-expert-capacity-factor") or "").startswith("-"):
        leave(line, ("moe_expert_capacity_factor",), "no capacity")
    if line.says("moe_router_load_balancing_type", "none"):
        leave(line, ("moe_aux_loss_coeff",), "without a loss of balance")


def recompute(line: Line) -> None:
    if "--moe-layer-recompute" in line.given and line.given.get("--recompute-granularity") == ["full"]:
        line.problems.append("--moe-layer-recompute with --recompute-granularity full, which repeats experts too")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


BEFORE_DEFAULTS = (positions, layer_pattern, heads, window, latent_yarn, experts)
AFTER_DEFAULTS = (gelu, query_norm, unused_parts, recompute)
"""These read settings that a line may leave to Megatron's defaults."""
