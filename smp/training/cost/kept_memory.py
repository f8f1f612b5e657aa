"""Bytes that a block keeps for its backward pass, by formula, without torch but for exchanges of
context parallelism; symbols as in :mod:`smp.training.cost.memory`.

A block keeps, with h_l = h / tp under sequence parallelism, else h, and all other widths local:

- none: input and output of both norms 4 h_l; query, key, value and output of attention 2 q + 2 k; MLP 2 f, with
  SwiGLU that is not ``fused`` 4 f (gate, up, SiLU, product), fused with an adapter that reads the product 3 f; with
  qk-norm its inputs q + k, with norms before and after 2 h_l more; with hidden dropout two masks of one byte,
  2 h_l bytes; log-sum-exp, 4 bytes per head, or with attention dropout per head and position the probabilities in
  fp32, the mask in one byte and the dropped probabilities in compute precision, and where it is operators the
  probabilities, in both cases with a cap also the capped scores. Context parallelism that exchanges keys keeps no
  probabilities.
- selective: input h_l; results of matrix products q + 2 k + (2 or 1) f + 2 h_l (the last after their reduction)
  and of attention q; log-sum-exp, or with attention dropout the scores in compute precision.
- full: input h_l.

In FP8 with one scale for a tensor, inputs of linear layers are kept in one byte each: results of both norms and of
attention (which keeps its own, too).

With --attention-output-gate its sigmoid and the product, 2 q more; selective: the projection, q.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Literal

from smp.config import Config, Layout, ModelConfig
from smp.config.at_once import DROPOUT_BITS
from smp.config.layer_specs import Recurrence
from smp.config.layers import scores_flag
from smp.config.rules.dsa import chooses_keys
from smp.training.cost.exchanged_keys import of_exchange, others_keys
from smp.training.cost.recurrent_memory import in_flight_of_recurrence, kept_by_recurrence, pending_of_recurrence
from smp.training.cost.sparse_memory import in_flight_of_sparse, is_sparse, kept_by_indexer, kept_by_sparse


def is_fused(config: Config) -> bool:
    """Whether a GPU runs SwiGLU in a fused kernel, which recomputes in the backward pass instead of saving."""
    return config.parallel.kernels != "torch" and not config.parallel.compile


def kept_per_token(
    config: Config,
    layout: Layout,
    b: int,
    recompute: Literal["none", "selective", "full"],
    *,
    fused: bool,
    experts: bool = False,
    recurrence: Recurrence | None = None,
    attends: bool = True,
    feeds: bool = True,
) -> int:
    """Bytes per token that one block keeps for its backward pass on one of ``layout.tp`` processes: the table above.

    A layer with experts keeps other things instead of the MLP, see :func:`_by_experts` and :func:`_routing`; a shared
    expert is an MLP with them. Latent attention keeps other things for its 2 q + 2 k, see :func:`_latent`, and an
    indexer more, :mod:`smp.training.cost.sparse_memory`; a recurrence in its place, see :func:`kept_by_recurrence`;
    context parallelism more, see :func:`of_exchange`. A block without attention (``attends``), or without an MLP or
    experts (``feeds``), keeps nothing of it; without a mixer, or what follows it, nothing of its norms.
    """
    # Widths per process: q and k of all its heads, k never less than one head (replicated when kv
    # heads < tp).
    model, length, tp = config.model, config.data.seq_length, layout.tp
    head_dim, groups, ffn = model.kv_channels, model.num_query_groups, model.ffn_hidden_size
    assert head_dim is not None and groups is not None and ffn is not None and length is not None, "resolved before"
    # A layer with experts has an MLP only as a shared expert, none if there is no such width.
    if experts or not feeds:
        ffn = model.moe_shared_expert_intermediate_size or 0 if feeds else 0
    heads, f = model.num_attention_heads // tp, ffn // tp
    q, k = heads * head_dim, max(1, groups // tp) * head_dim
    recurs = recurrence is not None
    # Without attention its terms below vanish.
    if not attends:
        heads = q = k = 0
    # Only sequence parallelism splits the residual stream over tp.
    split = tp if config.parallel.sequence_parallel else 1
    h_l = model.hidden_size // split
    if recompute == "full":
        return b * h_l
    small = 0  # bytes, also elements of one byte
    if recompute == "selective":
        # One h_l for the block's input and one for each output projection's result.
        own = 1 + attends + recurs + (feeds and not (experts and not ffn))  # their results are counted with their rows
        elements = own * h_l + 2 * q + 2 * k + (2 if model.gated else 1) * f
    else:
        halves = (attends or recurs) + feeds
        elements = _of_norms_and_products(config, halves * h_l, q, k, f, recurs=recurs, fused=fused)
        small = _widened_operands(config, b, q, k) + halves * h_l * (model.hidden_dropout > 0)
        if _keeps_in_8_bits(config):
            # Results of norms go into linear layers: one byte instead of b. Attention keeps its own
            # output, too.
            elements -= halves * h_l
            small += halves * h_l + heads * (model.v_head_dim if model.multi_latent_attention else head_dim)
    if experts:
        of_experts, small_of_experts = _by_experts(config, layout, recompute, fused)
        elements += of_experts
        small += small_of_experts + _routing(config, layout, b, h_l, recompute)
    if model.attention_output_gate:
        elements += q if recompute == "selective" else 2 * q  # the projection, or its sigmoid and the product
    if recurrence is not None:
        small += kept_by_recurrence(recurrence, tp, b, recompute)
    if model.multi_latent_attention and attends:
        # Latent attention has its own count instead of 2 q + 2 k.
        elements += _latent(config, layout, heads, split, recompute) - (2 * q + 2 * k)
        small += kept_by_indexer(config, layout, b, split, recompute) if chooses_keys(model) else 0
    if layout.cp > 1 and attends and not is_sparse(config):
        elements += of_exchange(config, q, k, max(1, groups // tp), recompute)
    # The log-sum-exp of a fused kernel: one fp32 number for each head and token.
    return b * elements + small + heads * (_per_position(config, layout, recompute, b) * length or 4)


def _of_norms_and_products(config: Config, of_norms: int, q: int, k: int, f: int, *, recurs: bool, fused: bool) -> int:
    """Elements per token without recompute of a block's norms, attention and MLP; ``of_norms``: of the results of one
    norm in each half."""
    model = config.model
    # SwiGLU: gate, up, SiLU, product; fused gate and up, and the product for an adapter; GELU: input and output.
    mlp = (2 + _adapts_product(config) if fused and model.swiglu else 4) if model.gated else 2
    placed = model.linear_norm_placement if recurs else None
    # Sandwich norms have one more result for each half of a block.
    norms = 3 if (placed or model.norm_placement) == "sandwich" else 2
    heads_have_norms = model.qk_layernorm and not model.multi_latent_attention  # latents have them there
    return norms * of_norms + 2 * q + 2 * k + mlp * f + (q + k if heads_have_norms else 0)


def _adapts_product(config: Config) -> bool:
    """Whether an adapter is on the last layer of MLPs, of some or of all; of --load-adapter it is taken to be."""
    lora = config.lora
    if lora is None or not config.has_adapters:
        return False
    names = ["down", *(f"layers.{layer}.mlp.down" for layer in range(config.model.num_layers))]
    targets = (lora.lora_target_modules or "down").split(",")
    return any(fnmatchcase(name, target) for target in targets for name in names)


def _widened_operands(config: Config, b: int, q: int, k: int) -> int:
    """Bytes per token that attention by operators keeps in addition: query, key and value in fp32, key/value heads
    repeated for each query head, less those in compute precision."""
    return 4 * 3 * q - b * (q + 2 * k) if _is_in_fp32(config) else 0


def _is_in_fp32(config: Config) -> bool:
    """Whether attention is made of operators, and in fp32: with dropout its products stay in compute precision."""
    return _keeps_scores(config) and config.model.attention_dropout == 0


def _keeps_scores(config: Config) -> bool:
    """Whether attention is made of operators, because it was asked for or because no kernel computes such scores."""
    return config.parallel.attention_backend == "math" or bool(scores_flag(config.model))


def _keeps_in_8_bits(config: Config) -> bool:
    """Whether inputs of linear layers are kept in 8 bits for their weights' gradients."""
    return config.parallel.fp8_format is not None and config.parallel.fp8_recipe in ("delayed", "tensorwise")


def _by_experts(
    config: Config, layout: Layout, recompute: Literal["none", "selective"], fused: bool
) -> tuple[int, int]:
    """(elements, elements of one byte) per token that experts keep: for each of a token's k experts of width e its row
    and its result 2 h, and 3 e or, not ``fused``, 4 e, without a gate 2 e; selective: the result, with expert
    parallelism once more for each of both ways, and 2 e, without a gate e. Loads are taken to be even. In FP8 with one
    scale for a tensor rows and the last product's inputs are in one byte each."""
    model, tp = config.model, layout.tp
    row, inner = model.hidden_size * layout.expert_tp // tp, (model.moe_ffn_hidden_size or 0) // tp
    if recompute == "selective":
        # The results of both exchanges of expert parallelism are kept, too.
        wide, results = 2 if model.gated else 1, 1 + 2 * (layout.ep > 1)
    else:
        wide, results = (3 if fused and model.swiglu else 4) if model.gated else 2, 2
    elements = model.moe_router_topk * (results * row + wide * inner)  # of the tokens of ranks that share experts
    narrow = model.moe_router_topk * (row + inner) if recompute == "none" and _keeps_in_8_bits(config) else 0
    return elements - narrow, narrow


def _routing(config: Config, layout: Layout, b: int, h_l: int, recompute: str) -> int:
    """Bytes per token that a router of E experts keeps: its input in fp32, logits, two tables of scores and the order
    of all experts, 20 E; where each of k rows goes and comes from, with expert parallelism twice. selective: logits."""
    model = config.model
    assert model.num_experts is not None, "asked of a layer with experts"
    if recompute == "selective":
        return 4 * model.num_experts
    ways = 2 if layout.ep > 1 else 1
    # In bf16 the router's fp32 input is a copy; int64 indices take 8 bytes, both ways.
    return (4 * h_l if b < 4 else 0) + 20 * model.num_experts + 16 * ways * model.moe_router_topk


def pending_per_token(
    config: Config,
    layout: Layout,
    b: int,
    *,
    experts: bool = False,
    recurrence: Recurrence | None = None,
    attends: bool = True,
    feeds: bool = True,
) -> int:
    """Bytes per token that one block keeps between both parts of a split backward pass: inputs of its products and
    gradients of their results, 4 h_l + 2 q + 2 k + 3 f (2 f without a gate), and of an expert's rows 2 h + 3 e."""
    model, tp = config.model, layout.tp
    assert model.kv_channels is not None and model.ffn_hidden_size is not None, "resolved before"
    split, wide = tp if config.parallel.sequence_parallel else 1, 3 if model.gated else 2
    h_l, heads, groups = model.hidden_size // split, model.num_attention_heads // tp, model.num_query_groups or 1
    attention = 2 * (heads + max(1, groups // tp)) * model.kv_channels
    if model.multi_latent_attention:
        attention = _latent(config, layout, heads, split, "none")
    both = attends and recurrence is not None  # each of which has the gradient of its own result
    attention = attention * attends + (0 if recurrence is None else pending_of_recurrence(recurrence, tp))
    f = model.ffn_hidden_size if not experts else model.moe_shared_expert_intermediate_size or 0
    mixes, f = attends or recurrence is not None, f * feeds
    elements = (2 * (mixes + feeds) + both) * h_l + attention + wide * f // tp
    if not experts:
        return b * elements
    rows = 2 * model.hidden_size * layout.expert_tp // tp + wide * (model.moe_ffn_hidden_size or 0) // tp
    return b * (elements + model.moe_router_topk * rows) + 4 * (h_l * (b < 4) + (model.num_experts or 0))


def _per_position(config: Config, layout: Layout, recompute: str, b: int) -> int:
    """Bytes that attention keeps for each head and pair of positions: none, where a kernel does it."""
    model = config.model
    # Where keys are exchanged no scores are kept; auto may choose to exchange heads.
    by_heads = layout.cp == 1 or config.parallel.cp_comm_type not in ("p2p", "all_gather")
    if not by_heads or (model.attention_dropout == 0 and not _keeps_scores(config)):
        return 0
    # A softcap's tanh is kept for its derivative.
    capped = _of_a_cap(model, recompute)
    if model.attention_dropout == 0:
        return 4 + capped
    # The mask has one byte, probabilities after dropout have compute precision.
    return b if recompute == "selective" else 4 + 1 + b + capped


def _of_a_cap(model: ModelConfig, recompute: str) -> int:
    """Bytes of the capped scores for each head and pair of positions, which the cap's derivative is made of."""
    return 0 if model.attn_logit_softcapping is None or recompute == "selective" else 4


def replayed_per_token(
    config: Config,
    layout: Layout,
    b: int,
    *,
    fused: bool,
    experts: bool = False,
    recurrence: Recurrence | None = None,
    attends: bool = True,
    feeds: bool = True,
) -> int:
    """Bytes per token that a block's backward pass computes again: what it keeps without recompute, less what it keeps
    with it. Results that selective recompute keeps are freed as the replay passes them, except for the block's output,
    which it does not reach."""
    model, tp, recompute = config.model, layout.tp, config.parallel.recompute_granularity
    kind: dict[str, Any] = {"fused": fused, "experts": experts, "recurrence": recurrence}
    kind |= {"attends": attends, "feeds": feeds}
    whole, kept = (kept_per_token(config, layout, b, how, **kind) for how in ("none", recompute))
    reached = recompute != "selective" or experts
    return whole - kept + (0 if reached else b * model.hidden_size // (tp if config.parallel.sequence_parallel else 1))


def in_flight_per_token(
    config: Config,
    layout: Layout,
    b: int,
    *,
    experts: bool = False,
    recurrence: Recurrence | None = None,
    attends: bool = True,
    feeds: bool = True,
) -> int:
    """Bytes per token of gradients in a block's backward pass: h_l of its output, with sequence parallelism h of
    what it gathers, and of its wider half, 2 q + 2 k of attention or of the MLP 4 f (of the product, of gate and
    up, and the product once more), without a gate 2 f; where attention is operators, of scores and probabilities,
    values and output, in fp32; where keys are exchanged what :func:`smp.training.cost.exchanged_keys.others_keys` says,
    and the gradient of attention's output, when what the MLP keeps is freed. With experts of each of a token's k the
    row h, or 3 e when the row of the result and the product have gone, e without a gate. Of a recurrence see
    :func:`in_flight_of_recurrence`."""
    model, tp, length = config.model, layout.tp, config.data.seq_length
    assert model.ffn_hidden_size is not None and model.kv_channels is not None and length is not None, "resolved before"
    # f of the product, 2 f of gate and up, and the product once more.
    split, wide = tp if config.parallel.sequence_parallel else 1, 4 if model.gated else 2
    heads, groups = model.num_attention_heads // tp, max(1, (model.num_query_groups or 1) // tp)
    width = model.kv_channels
    if model.multi_latent_attention:
        # Keys and values are made for each head from the latent: as many as query heads.
        width, groups = max(model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim), heads
    mlp = wide * model.ffn_hidden_size // tp
    if experts:
        rows = model.hidden_size * layout.expert_tp // tp
        # The product is freed, which they keep, and the row of the result.
        inner = (2 if model.gated else 1) * (model.moe_ffn_hidden_size or 0) // tp
        each = max(rows, inner - rows)
        mlp = model.moe_router_topk * each + wide * (model.moe_shared_expert_intermediate_size or 0) // tp
    if not feeds:
        mlp = 0
    scores = heads * (_per_position(config, layout, "none", b) - _of_a_cap(model, "none")) * length
    if _keeps_in_8_bits(config):
        scores += mlp // 4  # the product in 8 bits, which the weight's gradient takes
    # Under sequence parallelism the gathered gradient has all tokens of the tp group.
    around = model.hidden_size // split + (model.hidden_size if split > 1 else 0)
    # Both halves of a block do not run at once.
    wider = max(b * mlp, 0 if recurrence is None else in_flight_of_recurrence(recurrence, tp))
    if not attends:
        return b * around + wider
    if is_sparse(config):
        return b * around + max(wider, in_flight_of_sparse(model, layout, b, heads))
    attention = 2 * (heads + groups) * width * b
    if (others := others_keys(config, layout, b, heads, groups, width)) > 0:
        attention = others + heads * width * b - b * mlp // 2
    if scores and _is_in_fp32(config):
        # Gradients of probabilities and scores, values and output. What the MLP saved is freed by then.
        attention = 4 * heads * (2 * length + 2 * width) - b * mlp // 2
        return b * around + max(wider, attention)
    return b * around + max(wider, attention) + scores


def _latent(config: Config, layout: Layout, heads: int, split: int, recompute: str) -> int:
    """Elements per token of latent attention. Heads are padded to one width: query, key, value and output; where values
    are narrower, the output once more without padding; latents, and their norms' results. selective: the results of
    attention and of the projections."""
    model = config.model
    if is_sparse(config):
        return kept_by_sparse(model, layout, heads, split, recompute)
    # (no-position part, rotated part) of a key; values have a width of their own.
    key = model.qk_head_dim + model.qk_pos_emb_head_dim
    width, low = max(key, model.v_head_dim), model.kv_lora_rank + (model.q_lora_rank or 0)
    if recompute == "selective":
        up = key + model.qk_head_dim + model.v_head_dim
        return heads * (width + up) + (low + model.qk_pos_emb_head_dim) // split
    narrow = model.v_head_dim if model.v_head_dim < width else 0
    return heads * (4 * width + narrow) + low * (2 if model.qk_layernorm else 1) // split


def masking_per_token(config: Config, layout: Layout, b: int, *, fused: bool, experts: bool = False) -> int:
    """Bytes per token of a block's replay when a dropout's mask is made, which is gone when gradients come; 0: there is
    no dropout, or no replay. Besides the gradient of the block's output, h_l:

    - hidden dropout, after the MLP: all that is replayed; what attention added and the MLP's result, 2 h_l; and three
      int64 for each element of the mask, of at most ``DROPOUT_BITS`` elements at a time.
    - attention dropout: the norm's result h_l; query, key and value, 2 q + 2 k, of which selective recompute has kept
      q + 2 k, and rotated ones; the operands of its product, 2 q; and for each head and position scores, probabilities,
      these divided and these dropped in fp32 and the mask, 17 bytes, with a cap the capped scores, 4 more, instead of
      the scores that selective recompute has kept.
    """
    model, tp, recompute = config.model, layout.tp, config.parallel.recompute_granularity
    assert model.kv_channels is not None and config.data.seq_length is not None, "resolved before"
    if recompute == "none":
        return 0
    split = tp if config.parallel.sequence_parallel else 1
    h_l = model.hidden_size // split
    q, k = (max(1, n // tp) * model.kv_channels for n in (model.num_attention_heads, model.num_query_groups or 1))
    hidden = attention = 0
    if model.hidden_dropout > 0:
        hidden = replayed_per_token(config, layout, b, fused=fused, experts=experts) + 3 * b * h_l
        tokens = config.rows_per_micro_batch * config.data.seq_length // layout.cp
        # Random bits of a mask are int64, made in pieces of at most DROPOUT_BITS elements.
        hidden += 3 * 8 * min(h_l, DROPOUT_BITS // tokens)
    if (scores := _per_position(config, layout, recompute, b)) and model.attention_dropout > 0:
        scores = 17 + 4 * (model.attn_logit_softcapping is not None) - (scores if recompute == "selective" else 0)
        attention = model.num_attention_heads // tp * scores * config.data.seq_length
        attention += b * (2 * h_l + q + 2 * k + 2 * q)
    return max(hidden, attention)
