"""The same training in plain torch: one process, float64, whole tensors, autograd, full logits, no accumulation.

Nothing of the package's layers, sharding, loss or optimizer is used. What is shared is what the package defines and no
book does: parameter names, initial weights (an argument) and which element a dropout key drops.
"""

from __future__ import annotations

import itertools
import math
from copy import copy

import torch
import torch.nn.functional as F

from smp.config import ModelConfig
from smp.config.layers import layer_specs
from smp.data.loader import RankBatch
from smp.kernels.dropout import keyed_dropout
from smp.parallel.rng import dropout_keys
from tests.parity.cases import SEED, Case, config_of
from tests.parity.data import global_batch
from tests.parity.result import Result

Weights = dict[str, torch.Tensor]


class Dropout:
    """Masks of one forward pass: three sites per block (probabilities, attention, MLP), then the embedding's."""

    def __init__(self, config: ModelConfig, sample_index: torch.Tensor, length: int) -> None:
        self.hidden, self.attention = config.hidden_dropout, config.attention_dropout
        self.keys = dropout_keys(SEED, 3 * (config.num_layers + (config.mtp_num_layers or 0)) + 1, torch.device("cpu"))
        self.numbers = sample_index[:, None] * length + torch.arange(length)  # (batch, length)

    def of_stream(self, x: torch.Tensor, site: int) -> torch.Tensor:
        """x (batch, length, hidden)."""
        return keyed_dropout(x.flatten(0, 1), self.keys[site], self.numbers.flatten(), self.hidden).view_as(x)

    def of_probabilities(self, x: torch.Tensor, site: int) -> torch.Tensor:
        """x (batch, heads, length, length)."""
        rows = self.numbers[:, None, :] * 65536 + torch.arange(x.shape[1])[:, None]  # (batch, heads, length)
        return keyed_dropout(x.flatten(0, 2), self.keys[site], rows.flatten(), self.attention).view_as(x)


class Layout:
    """Where each token stands, (batch, length), how many of its document are before it, which two are of one document,
    (batch, 1, length, length), and how many positions are counted without a new start."""

    def __init__(self, batch: RankBatch) -> None:
        shape = batch.input_ids[0].shape
        documents = torch.zeros(shape) if batch.document_ids is None else batch.document_ids[0]
        self.places = torch.arange(shape[1]).expand(shape) if batch.position_ids is None else batch.position_ids[0]
        self.together = (documents[:, :, None] == documents[:, None, :])[:, None]
        self.before = self.together[:, 0].tril(-1).sum(-1)
        whole = torch.full(shape, shape[1])
        self.lengths = whole if batch.position_ids is None else self.together[:, 0].sum(-1)
        self.weights = torch.zeros(shape)  # of tokens in the losses of indexers, which come here
        self.indexers: list[torch.Tensor] = []


def norm(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> torch.Tensor:
    """LayerNorm, or RMSNorm, which those of queries and keys always are."""
    bias = weights.get(f"{name}.bias")
    if config.normalization == "LayerNorm" and not name.endswith(("query_norm", "key_norm")):
        x = x - x.mean(-1, keepdim=True)
    weight = weights[f"{name}.weight"] + config.apply_layernorm_1p
    epsilon = config.norm_epsilon
    if config.latent_norm_epsilon is not None and name.endswith(("query_norm", "key_value_norm")):
        epsilon = config.latent_norm_epsilon
    x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    return x if bias is None else x + bias


def maybe_norm(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> torch.Tensor:
    """The norm if the model has it."""
    return norm(x, weights, name, config) if f"{name}.weight" in weights else x


def capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap x tanh(x / cap)."""
    return x if cap is None else cap * torch.tanh(x / cap)


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """x W^T + b."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def frequencies(config: ModelConfig, local_base: float | None) -> torch.Tensor:
    """RoPE's, with Llama 3.1's scaling written as its three cases; layers with a base of their own have none."""
    dim = round((config.kv_channels or 0) * config.rotary_percent)
    dim = config.qk_pos_emb_head_dim if config.multi_latent_attention else dim
    out = []
    for i in range(0, dim, 2):
        f = (local_base or config.rotary_base) ** (-i / dim)
        if local_base is not None:
            out.append(f)
            continue
        if config.use_rope_scaling and config.rope_scaling_type == "llama3":
            wavelength, original = 2 * math.pi / f, config.rope_original_max_position
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            if wavelength > original / low:
                f /= config.rope_scaling_factor
            elif wavelength > original / high:
                smooth = (original / wavelength - low) / (high - low)
                f = (1 - smooth) * f / config.rope_scaling_factor + smooth * f
        out.append(f)
    return torch.tensor(out, dtype=torch.float64)


def dynamic(config: ModelConfig, lengths: torch.Tensor) -> torch.Tensor:
    """RoPE's frequencies under dynamic NTK, of each token, (batch, 1, length, dim / 2), in Python's numbers."""
    dim, original = round((config.kv_channels or 0) * config.rotary_percent), config.rope_original_max_position

    def of(length: int) -> list[float]:
        growth = config.rope_scaling_factor * max(length, original) / original - (config.rope_scaling_factor - 1)
        base = config.rotary_base * growth ** (dim / (dim - 2))
        return [base ** (-i / dim) for i in range(0, dim, 2)]

    rows = [[of(length) for length in row] for row in lengths.tolist()]
    return torch.tensor(rows, dtype=torch.float64)[:, None]


def rotate(x: torch.Tensor, freqs: torch.Tensor, places: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """RoPE as a product of complex numbers; channel i pairs with channel i + dim / 2, interleaved 2 i with 2 i + 1.
    x (batch, heads, length, dim)."""
    half = freqs.shape[-1]
    angles = places.double()[:, None, :, None] * freqs
    turn = torch.polar(torch.ones_like(angles), angles)
    if interleaved:
        turned = torch.complex(x[..., 0 : 2 * half : 2].contiguous(), x[..., 1 : 2 * half : 2].contiguous()) * turn
        pairs = torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)
        return torch.cat((pairs, x[..., 2 * half :]), dim=-1)
    turned = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous()) * turn
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def mixed(
    x: torch.Tensor, weights: Weights, layer: int, config: ModelConfig, dropout: Dropout, layout: Layout
) -> torch.Tensor:
    """What a layer's mixer gives, or both of its mixers."""
    name = f"layers.{layer}.attention"
    if f"{name}.recurrence.output.weight" not in weights:
        return attention(x, weights, name, layer, config, dropout, layout)
    attended, recurred = (
        attention(x, weights, f"{name}.{part}", layer, config, dropout, layout) for part in ("attention", "recurrence")
    )
    return config.attention_out_multiplier * attended + config.ssm_out_multiplier * recurred


def attention(
    x: torch.Tensor, weights: Weights, name: str, layer: int, config: ModelConfig, dropout: Dropout, layout: Layout
) -> torch.Tensor:
    """Explicit softmax over a full (length, length) score matrix."""
    batch, length, _ = x.shape
    if f"{name}.decay_down.weight" in weights:
        return kimi_delta(x, weights, name, config, layout)
    if config.multi_latent_attention:
        q, k, v = latent(x, weights, name, config, layout)
        return attend(q, k, v, weights, name, layer, config, dropout, layout, config.window_size, x)

    def split(part: str) -> torch.Tensor:
        y = linear(x, weights, f"{name}.{part}")
        if config.qk_layernorm_across_heads and part != "value":
            y = norm(y, weights, f"{name}.{part}_norm", config)
        return y.view(batch, length, -1, config.kv_channels or 0).transpose(1, 2)

    if f"{name}.skip" in weights:
        return mamba(x, weights, name, config, layout)
    if f"{name}.decay_log" in weights:
        return delta_net(x, weights, name, config, layout)
    q, k, v = split("query"), split("key"), split("value")
    if config.qk_layernorm and not config.qk_layernorm_across_heads:
        q, k = norm(q, weights, f"{name}.query_norm", config), norm(k, weights, f"{name}.key_norm", config)
    kind = min(layer, config.num_layers - 1)  # layers behind the last are as it is
    full = config.window_attn_skip_freq is not None and (kind + 1) % int(config.window_attn_skip_freq) == 0
    window = None if full else config.window_size
    still = config.no_rope_freq is not None and (kind + 1) % int(config.no_rope_freq) == 0
    if config.position_embedding_type == "rope" and not still:
        freqs = frequencies(config, None if window is None else config.rotary_base_local)
        if config.use_rope_scaling and config.rope_scaling_type == "dynamic":
            freqs = dynamic(config, layout.lengths)
        q, k = (rotate(y, freqs, layout.places, config.rotary_interleaved) for y in (q, k))
    if config.qk_l2_norm and not still:
        q, k = (y / (y.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() for y in (q, k))
    if config.attn_temperature_tuning and still:
        steps = (layout.places[:, None, :, None] + 1) // config.floor_scale
        q = q * (1 + config.attn_scale * torch.log(1 + steps.double()))
    if config.attention_chunk_size is not None and not still:
        chunks = layout.before // config.attention_chunk_size
        layout = copy(layout)
        layout.together = layout.together & (chunks[:, :, None] == chunks[:, None, :])[:, None]
    return attend(q, k, v, weights, name, layer, config, dropout, layout, window, x)


def convolved(
    x: torch.Tensor, weights: Weights, name: str, width: int, layout: Layout, factor: float = 1.0
) -> torch.Tensor:
    """SiLU of a causal convolution, one token back after the other, of a projection; (batch, length, heads, width)."""
    y, kernel = factor * linear(x, weights, name), weights[f"{name}_conv"]
    out = torch.zeros_like(y) + weights.get(f"{name}_conv_bias", torch.zeros(()))
    for t in range(y.shape[1]):
        for back in range(min(kernel.shape[1], t + 1)):
            same = layout.together[:, 0, t, t - back, None]
            out[:, t] = out[:, t] + same * kernel[:, -1 - back] * y[:, t - back]
    return F.silu(out).unflatten(-1, (-1, width))


def mamba(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig, layout: Layout) -> torch.Tensor:
    """Mamba-2's recurrence, one token after the other, with a state that a document begins empty."""
    heads, groups = config.mamba_num_heads or 0, config.mamba_num_groups
    of_gate, of_v, of_b, of_c, of_step = map(float, (config.ssm_multipliers or "1 1 1 1 1").split())
    c = convolved(x, weights, f"{name}.query", config.mamba_state_dim, layout, of_c)
    b = convolved(x, weights, f"{name}.key", config.mamba_state_dim, layout, of_b)
    own = torch.arange(heads) // (heads // groups)  # the group of each head
    c, b = c[:, :, own], b[:, :, own]
    v = convolved(x, weights, f"{name}.value", config.mamba_head_dim, layout, of_v)
    step = F.softplus(of_step * linear(x, weights, f"{name}.step") + weights[f"{name}.step_bias"])
    step = step.clamp(config.mamba_dt_min, config.mamba_dt_max)
    kept = torch.exp(-weights[f"{name}.decay_log"].exp() * step)
    state, outs = torch.zeros(len(x), heads, config.mamba_head_dim, config.mamba_state_dim, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * (kept[:, t] * (layout.before[:, t, None] > 0))[..., None, None]
        state = state + torch.einsum("bh,bhp,bhn->bhpn", step[:, t], v[:, t], b[:, t])
        outs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + weights[f"{name}.skip"][:, None] * v[:, t])
    gated = torch.stack(outs, 1).flatten(2) * F.silu(of_gate * linear(x, weights, f"{name}.gate"))
    if not config.mamba_rms_norm:
        return linear(gated, weights, f"{name}.output")
    by_group = gated.unflatten(-1, (groups, -1))
    normed = by_group / (by_group.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
    return linear(normed.flatten(-2) * weights[f"{name}.norm.weight"], weights, f"{name}.output")


def delta_net(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig, layout: Layout) -> torch.Tensor:
    """Qwen3-Next's recurrence, one token of one head after the other, with a state that a document begins empty."""
    heads, served = config.linear_num_value_heads, config.linear_num_value_heads // config.linear_num_key_heads
    q, k = (convolved(x, weights, f"{name}.{part}", config.linear_key_head_dim, layout) for part in ("query", "key"))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v = convolved(x, weights, f"{name}.value", config.linear_value_head_dim, layout)
    z = linear(x, weights, f"{name}.gate")
    rate = linear(x, weights, f"{name}.beta").sigmoid() * (2 if config.linear_allow_neg_eigval else 1)
    step = F.softplus(linear(x, weights, f"{name}.decay") + weights[f"{name}.decay_bias"])
    kept = torch.exp(-weights[f"{name}.decay_log"].exp() * step)
    rows = []
    for row in range(x.shape[0]):
        outs = []
        for head in range(heads):
            state, out = torch.zeros(q.shape[-1], v.shape[-1], dtype=x.dtype), []
            for t in range(x.shape[1]):
                state = state * kept[row, t, head] * (layout.before[row, t] > 0)
                key = k[row, t, head // served]
                state = state + torch.outer(key, rate[row, t, head] * (v[row, t, head] - key @ state))
                out.append(q[row, t, head // served] @ state / math.sqrt(q.shape[-1]))
            outs.append(torch.stack(out))
        rows.append(torch.stack(outs, 1))
    mixed = torch.stack(rows)  # (batch, length, heads, width)
    mixed = mixed / (mixed.square().mean(-1, keepdim=True) + (config.linear_norm_epsilon or config.norm_epsilon)).sqrt()
    mixed = mixed * weights[f"{name}.norm.weight"]
    return linear(mixed.flatten(2) * F.silu(z), weights, f"{name}.output")


def kimi_delta(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig, layout: Layout) -> torch.Tensor:
    """Kimi-Linear's recurrence, one token after the other: as :func:`delta_net`, but rows of a state fade apart."""
    width = config.linear_key_head_dim
    q, k, v = (convolved(x, weights, f"{name}.{part}", width, layout) for part in ("query", "key", "value"))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    rate = linear(x, weights, f"{name}.beta").sigmoid()
    decay, gate = (linear(linear(x, weights, f"{name}.{p}_down"), weights, f"{name}.{p}_up") for p in ("decay", "gate"))
    steps = F.softplus(decay + weights[f"{name}.decay_bias"]).unflatten(-1, (-1, width))
    kept = torch.exp(-weights[f"{name}.decay_log"].exp()[:, None] * steps)
    state, outs = torch.zeros(*q[:, 0].shape, width, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * kept[:, t, :, :, None] * (layout.before[:, t] > 0)[:, None, None, None]
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", rate[:, t], k[:, t], missing)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / math.sqrt(width))
    mixed = torch.stack(outs, 1)
    mixed = mixed / (mixed.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
    mixed = mixed * weights[f"{name}.norm.weight"]
    return linear(mixed.flatten(2) * gate.sigmoid(), weights, f"{name}.output")


def latent(
    x: torch.Tensor, weights: Weights, name: str, config: ModelConfig, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values (batch, heads, length, ...) of multi-head latent attention, one head after the other.
    Channels 2i and 2i + 1 are rotated together."""
    plain, turning, low = config.qk_head_dim, config.qk_pos_emb_head_dim, config.kv_lora_rank
    angles = layout.places.double()[..., None] * frequencies(config, None)  # (batch, length, turning / 2)
    angles = angles * (config.position_embedding_type == "rope")

    def turned(y: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    if config.q_lora_rank is None:
        queries = linear(x, weights, f"{name}.query")
    else:
        low_queries = norm(linear(x, weights, f"{name}.query_down"), weights, f"{name}.query_norm", config)
        queries = linear(low_queries, weights, f"{name}.query_up")
    down = linear(x, weights, f"{name}.key_value_down")
    up = linear(norm(down[..., :low], weights, f"{name}.key_value_norm", config), weights, f"{name}.key_value_up")
    shared, q, k, v = turned(down[..., low:]), [], [], []
    for head in range(config.num_attention_heads):
        own = queries[..., head * (plain + turning) : (head + 1) * (plain + turning)]
        both = up[..., head * (plain + config.v_head_dim) : (head + 1) * (plain + config.v_head_dim)]
        q.append(torch.cat((own[..., :plain], turned(own[..., plain:])), -1))
        k.append(torch.cat((both[..., :plain], shared), -1))
        v.append(both[..., plain:])
    return torch.stack(q, 1), torch.stack(k, 1), torch.stack(v, 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: Weights,
    name: str,
    layer: int,
    config: ModelConfig,
    dropout: Dropout,
    layout: Layout,
    window: int | None,
    attended_of: torch.Tensor,
) -> torch.Tensor:
    """Scores, their softmax, the weighted sum, its gate and the output projection."""
    length, heads = q.shape[2], config.num_attention_heads
    shared = torch.arange(heads) // (heads // k.shape[1])  # the key/value head of each query head
    scale = config.softmax_scale or 1 / math.sqrt(q.shape[-1])
    scores = capped(q @ k[:, shared].transpose(-1, -2) * scale, config.attn_logit_softcapping)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if config.position_embedding_type == "alibi":  # of a power of two of heads
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
        scores = scores - slopes[:, None, None] * distance
    visible = (distance >= 0) & (distance < (window or length)) & layout.together
    if config.experimental_attention_variant == "dsa":
        visible = indexed(attended_of, weights, name, config, layout, visible, scores)
    scores = scores.masked_fill(~visible, -math.inf)
    if config.softmax_type == "learnable":
        sinks = weights[f"{name}.sinks"][:, None, None].expand(*scores.shape[:-1], 1)
        probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    probabilities = dropout.of_probabilities(probabilities, 3 * layer)
    merged = (probabilities @ v[:, shared]).transpose(1, 2).flatten(2)
    if config.attention_output_gate:
        merged = merged * linear(attended_of, weights, f"{name}.gate").sigmoid()
    return linear(merged, weights, f"{name}.output")


def indexed(
    x: torch.Tensor,
    weights: Weights,
    name: str,
    config: ModelConfig,
    layout: Layout,
    visible: torch.Tensor,
    attention_scores: torch.Tensor,
) -> torch.Tensor:
    """Which keys DeepSeek's indexer leaves, (batch, 1, length, length); adds its loss to the layout's."""
    x, own = x.detach(), f"{name}.indexer"
    low = norm(linear(x, weights, f"{name}.query_down"), weights, f"{name}.query_norm", config).detach()
    q = linear(low, weights, f"{own}.queries").unflatten(-1, (config.dsa_indexer_n_heads, -1)).transpose(1, 2)
    k = linear(x, weights, f"{own}.keys")
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    k = (k * weights[f"{own}.key_norm.weight"] + weights[f"{own}.key_norm.bias"])[:, None]
    q, k = (rotate(y, frequencies(config, None), layout.places, config.dsa_indexer_rope_interleaved) for y in (q, k))
    products = (q @ k.transpose(-1, -2) / math.sqrt(config.dsa_indexer_head_dim)).relu()
    share = linear(x, weights, f"{own}.weights") / math.sqrt(config.dsa_indexer_n_heads)
    scores = (products * share.transpose(1, 2)[..., None]).sum(1)
    kept = visible[:, 0].clone()
    if not config.dsa_indexer_warmup:
        for row, t in itertools.product(range(len(x)), range(x.shape[1])):
            seen = kept[row, t].nonzero().flatten().tolist()
            best = sorted(seen, key=lambda s: (scores[row, t, s].item(), s))[-config.dsa_indexer_topk :]
            kept[row, t] = torch.zeros_like(kept[row, t]).index_fill(0, torch.tensor(best), True)
    over = kept if config.dsa_indexer_use_sparse_loss else visible[:, 0]
    target = attention_scores.detach().masked_fill(~over[:, None], -math.inf).softmax(-1).mean(1)
    log_p = scores.masked_fill(~over, -math.inf).log_softmax(-1)
    divergence = (torch.xlogy(target, target) - torch.where(over, target * log_p, 0.0)).sum(-1)
    layout.indexers.append((divergence * layout.weights).sum())
    return kept[:, None]


def dense(x: torch.Tensor, weights: Weights, name: str, config: ModelConfig) -> torch.Tensor:
    """SwiGLU, a clamped QuickGELU, GEGLU, ReLU, squared ReLU or GELU."""
    up = linear(x, weights, f"{name}.up")
    of_gate, of_result = map(float, (config.mlp_multipliers or "1 1").split())
    if config.swiglu or config.quick_geglu:
        inner = gated(of_gate * linear(x, weights, f"{name}.gate"), up, config)
    elif config.geglu:
        gate = linear(x, weights, f"{name}.gate")
        inner = F.gelu(gate, approximate="tanh" if config.tanh_gelu else "none") * up
    elif config.relu:
        inner = F.relu(up)
    elif config.squared_relu:
        inner = F.relu(up) ** 2
    else:
        inner = F.gelu(up, approximate="tanh" if config.tanh_gelu else "none")
    return of_result * linear(inner, weights, f"{name}.down")


def gated(gate: torch.Tensor, up: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """SwiGLU, or the clamped one of QuickGELU."""
    if config.swiglu:
        return F.silu(gate) * up
    limit = config.activation_func_clamp_value or math.inf
    gate = torch.minimum(gate, torch.tensor(limit))
    up = torch.maximum(torch.minimum(up, torch.tensor(limit)), torch.tensor(-limit))
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + config.glu_linear_offset)


def largest(gates: torch.Tensor, limit: int) -> torch.Tensor:
    """Of one expert and sequence, (length,): the largest as they are, 0 for the others."""
    order = sorted(range(len(gates)), key=lambda t: -gates[t].item())
    return torch.where(
        torch.zeros_like(gates, dtype=torch.bool).index_fill(0, torch.tensor(order[:limit]), True), gates, 0
    )


def balanced(logits: torch.Tensor) -> torch.Tensor:
    """Of a sequence (length, experts): exp(logits) with equal sums of rows, and nearly equal ones of columns."""
    matrix = logits.exp()
    for _ in range(10):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True)
    return matrix


def experts(
    x: torch.Tensor,
    weights: Weights,
    layer: int,
    config: ModelConfig,
    labels: torch.Tensor,
    micro_batches: int,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A loop over experts, each on all tokens; the auxiliary losses by their definitions, which count loads in each
    of ``micro_batches`` parts of the rows apart, or in each row, and divide by ``total``; and the tokens of each
    expert."""
    name, k, count = f"layers.{layer}.mlp", config.moe_router_topk, config.num_experts or 0
    logits = linear(x, weights, f"{name}.router")  # (batch, length, experts)
    sigmoid = config.moe_router_score_function == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    values = scores + weights.get(f"{name}.router.expert_bias", torch.zeros(())).detach()
    if config.moe_router_load_balancing_type == "sinkhorn":
        values = torch.stack([balanced(row) for row in logits.detach()])
    if config.moe_router_num_groups is not None:
        best = config.moe_router_group_topk or 0
        grouped = values.unflatten(-1, (config.moe_router_num_groups, -1))
        summed = 1 if config.moe_router_group_score == "max" else k // best
        worth = grouped.sort(-1, descending=True).values[..., :summed].sum(-1)
        far = worth < worth.topk(best, dim=-1).values[..., -1:]
        values = torch.where(far[..., None], -1.0, grouped).flatten(-2)
    kept = values >= values.topk(k, dim=-1).values[..., -1:]
    assert (kept.sum(-1) == k).all(), "a tie, which this reference does not decide"
    gates = torch.where(kept, scores, 0.0)
    if k > 1 and not config.moe_router_pre_softmax:
        gates = gates / gates.sum(-1, keepdim=True)
    gates = gates * (config.moe_router_topk_scaling_factor or 1.0)
    if config.moe_expert_capacity_factor is not None:
        limit = math.ceil(config.moe_expert_capacity_factor * (x.shape[1] * k) / count)
        gates = torch.stack([torch.stack([largest(row[:, e], limit) for e in range(count)], -1) for row in gates])
    y = torch.zeros_like(x)
    for e in range(count):
        own = {part: w[e] for part, w in weights.items() if part.startswith(f"{name}.experts.")}
        gate, read = gates[..., e, None], x
        if config.moe_apply_probs_on_input:  # experts without biases make nothing of nothing
            gate, read = torch.ones_like(gate), gate * x
        y = y + gate * dense(read, own, f"{name}.experts", config)
    if config.moe_shared_expert_intermediate_size is not None:
        shared = dense(x, weights, f"{name}.shared_experts", config)
        gate = (x @ weights[f"{name}.shared_expert_gate.weight"].t()).sigmoid() if config.moe_shared_expert_gate else 1
        y = y + gate * shared
    valid = (labels != -100).double()
    weight, p = valid / total, scores / scores.sum(-1, keepdim=True)
    aux = (config.moe_z_loss_coeff or 0.0) * (weight * logits.logsumexp(-1) ** 2).sum()
    kind, per_row = config.moe_router_load_balancing_type, (kept * valid[..., None]).sum(1)  # (batch, experts)
    together = len(x) if kind == "seq_aux_loss" else micro_batches
    for rows in torch.arange(len(x)).chunk(together):
        chosen = (per_row[: rows[-1] + 1] if kind == "global_aux_loss" else per_row[rows]).sum(0)
        if valid[rows].any():
            load = count * chosen / chosen.sum()
            aux = aux + config.moe_aux_loss_coeff * (weight[rows][..., None] * p[rows] * load).sum()
    return y, aux, per_row.sum(0)


def mean_loss(
    weights: Weights, config: ModelConfig, batch: RankBatch, micro_batches: int
) -> tuple[torch.Tensor, torch.Tensor, Weights]:
    """Mean cross-entropy over the valid tokens of the global batch, the auxiliary losses, and the tokens of each expert
    by the name of its layer's bias."""
    seen: Weights = {}
    tokens, labels = batch.input_ids[0], batch.labels[0]
    dropout, layout = Dropout(config, batch.sample_index[0], tokens.shape[1]), Layout(batch)
    x = weights["embedding.weight"][tokens] * config.embedding_multiplier
    if config.position_embedding_type == "learned_absolute":
        x = x + weights["positions.weight"][layout.places + config.position_embedding_offset]
    x = maybe_norm(x, weights, "embedding_norm", config)
    x, aux = dropout.of_stream(x, -1), torch.zeros((), dtype=torch.float64)
    state = batch, micro_batches, dropout, layout, seen
    for layer in range(config.num_layers):
        x, more = block(x, weights, layer, config, labels, state)
        aux = aux + more
    head = weights["head.weight"] if config.untie_embeddings_and_output_weights else weights["embedding.weight"]

    def loss_of(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A sum over tokens, of the number that have a label in the model's own loss."""
        logits = capped(hidden @ head.t() * config.logit_scale, config.final_logit_softcapping)
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")  # it leaves out -100
        return summed / (batch.labels[0] != -100).sum()

    hidden = norm(x, weights, "final_norm", config)
    loss = loss_of(hidden, labels)
    for k in range(1, (config.mtp_num_layers or 0) + 1):
        hidden, labels, more = further(hidden, weights, k, config, labels, state)
        share = config.mtp_loss_scaling_factor / (config.mtp_num_layers or 1)
        aux = aux + more + share * loss_of(hidden, labels)
    if config.dsa_indexer_loss_coeff and layout.indexers:
        aux = aux + config.dsa_indexer_loss_coeff * sum(layout.indexers)
    return loss, aux, seen


State = tuple[RankBatch, int, Dropout, Layout, Weights]


def block(
    x: torch.Tensor, weights: Weights, layer: int, config: ModelConfig, labels: torch.Tensor, state: State
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """One block, and the auxiliary losses of its router, which count the tokens of ``labels``."""
    batch, micro_batches, dropout, layout, seen = state
    layout.weights = (labels != -100).double() / (batch.labels[0] != -100).sum()
    name, added = f"layers.{layer}", config.residual_multiplier
    first = maybe_norm(x, weights, f"{name}.attention_norm", config)
    letter = (config.hybrid_layer_pattern or " " * (layer + 1))[layer]
    attended = torch.zeros_like(x)
    if letter not in "-E":
        attended = mixed(first, weights, layer, config, dropout, layout)
        attended = maybe_norm(attended, weights, f"{name}.attention_post_norm", config)
        attended = added * dropout.of_stream(attended, 3 * layer + 1)
    if letter in "M*":
        return x + attended, 0.0
    inner = first
    more: torch.Tensor | float = 0.0
    if not config.parallel_residual_shared_norm:
        inner = x if config.parallel_residual else x + attended
        inner = maybe_norm(inner, weights, f"{name}.mlp_norm", config)
    if layer_specs(config)[layer].has_experts:
        bias = f"layers.{layer}.mlp.router.expert_bias"
        total = (batch.labels[0] != -100).sum()
        fed, aux, seen[bias] = experts(inner, weights, layer, config, labels, micro_batches, total)
        fed, more = maybe_norm(fed, weights, f"{name}.mlp_post_norm", config), aux
    else:
        fed = maybe_norm(dense(inner, weights, f"{name}.mlp", config), weights, f"{name}.mlp_post_norm", config)
    return x + attended + added * dropout.of_stream(fed, 3 * layer + 2), more


def further(
    hidden: torch.Tensor, weights: Weights, k: int, config: ModelConfig, labels: torch.Tensor, state: State
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """What layer ``k`` of multi-token prediction makes of the hidden states of the one before, and the labels that it
    predicts, of those that this one did: those of each sequence one further, as long as the document lasts."""
    batch, _, _, layout, _ = state
    name, tokens, length = f"predictions.{k - 1}", batch.input_ids[0], hidden.shape[1]
    ids, next_labels = torch.zeros_like(tokens), torch.full_like(labels, -100)
    for place in range(length - k):
        same = layout.together[:, 0, place, place + k]
        ids[:, place] = tokens[:, place + k]
        next_labels[:, place] = torch.where(same, batch.labels[0][:, place + k], -100)
    embedded = weights["embedding.weight"][ids] * config.embedding_multiplier
    halves = (
        norm(embedded, weights, f"{name}.embedding_norm", config),
        norm(hidden, weights, f"{name}.hidden_norm", config),
    )
    x = torch.cat(halves, -1) @ weights[f"{name}.projection.weight"].t()
    x, more = block(x, weights, config.num_layers + k - 1, config, next_labels, state)
    return norm(x, weights, f"{name}.norm", config), next_labels, more


def train(case: Case, initial: Weights) -> Result:
    """Steps of SGD with weight decay and clipping, starting from ``initial``."""
    config = config_of(case.one_rank_fp32)
    weights = {name: w.double().requires_grad_() for name, w in initial.items()}
    for name, w in weights.items():
        w.requires_grad_(".indexer." in name or not config.model.dsa_indexer_warmup)
    trained = [w for name, w in weights.items() if not name.endswith(".expert_bias") and w.requires_grad]
    biases = [w for name, w in weights.items() if name.endswith(".bias")]
    vectors = [w for w in trained if w.ndim <= 1 or any(w is bias for bias in biases)]
    matrices = [w for w in trained if not any(w is vector for vector in vectors)]
    decayed = [{"params": matrices, "weight_decay": config.optim.weight_decay}, {"params": vectors}]
    optimizer = torch.optim.SGD(decayed, lr=config.optim.lr)
    losses, norms, gradients = [], [], {}
    for step in range(case.problem.steps):
        optimizer.zero_grad()
        batch = global_batch(case.problem, step)
        loss, aux, seen = mean_loss(weights, config.model, batch, case.one_rank_fp32.spread.accumulation)
        (loss + aux).backward()
        if step in case.problem.recorded_steps:
            gradients[step] = {name: _gradient(w) for name, w in weights.items()}
        limit = config.optim.clip_grad or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(trained, limit).item())
        losses.append(loss.item())
        optimizer.step()
        # The indexer's warm-up trains nothing else, experts' biases included.
        for name in () if config.model.dsa_indexer_warmup else seen.keys() & weights.keys():
            with torch.no_grad():
                weights[name] += config.model.moe_router_bias_update_rate * (seen[name].mean() - seen[name]).sign()
    final = {name: w.detach() for name, w in weights.items()}
    return Result(losses, norms, initial, gradients, final)


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
