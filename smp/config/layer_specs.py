"""What a layer of a model can be: a mixer (attention, latent attention, a recurrence, several in parallel, or a
registered one) and a feed-forward network (MLP or mixture of experts), with norms and a residual connection around
each. Each is a value with its own settings; :mod:`smp.config.layers` says which layer has which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScalingSpec:
    """How RoPE's frequencies are scaled; fields are the settings of the same names."""

    kind: Literal["llama3", "linear", "yarn", "longrope", "dynamic"]
    factor: float
    original_max_position: int
    max_position: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def __str__(self) -> str:
        # LongRoPE has lists of factors: its growth is the ratio of the lengths.
        growth = self.max_position / self.original_max_position if self.kind == "longrope" else self.factor
        return f"{self.kind} x{growth:g}"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of queries and keys (arXiv 2104.09864).

    Attributes:
        base: theta.
        channels: of a head that are rotated.
        interleaved: neighbouring channels are pairs, not the two halves of a head.
        scaling: of the frequencies.
        local: the base is --rotary-base-local's.
    """

    base: float
    channels: int
    interleaved: bool = False
    scaling: RopeScalingSpec | None = None
    local: bool = False

    def __str__(self) -> str:
        return f"RoPE {self.base:g}{f' {self.scaling}' if self.scaling else ''}"


@dataclass(frozen=True)
class QueryTemperature:
    """--attn-temperature-tuning: queries are scaled up with their position (Llama 4)."""

    floor_scale: int
    scale: float


@dataclass(frozen=True)
class AttentionMixer:
    """Attention with grouped key/value heads.

    Attributes:
        heads, groups, head_dim: query heads, key/value heads, channels of each.
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        chunk: a token sees those before it in its own chunk of so many; None: chunks do not matter.
        rope: None: nothing is rotated.
        temperature: of queries; None: they stay.
        scale: of scores; None: 1 / sqrt(head_dim).
        softcap: limit of scores.
        alibi: scores fall with the distance.
        sinks: each head has a learned score that belongs to no key.
        bias, qkv_bias: of the output projection, of the others.
        gate: the output is multiplied by the sigmoid of a projection of the input.
        norm: of queries and keys: learned per head, learned over all heads, or "l2" without a weight.
        norm_eps, norm_one_plus: of that norm.
        dropout: of attention probabilities.
    """

    heads: int
    groups: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None
    rope: RopeSpec | None = None
    temperature: QueryTemperature | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    bias: bool = False
    qkv_bias: bool = False
    gate: bool = False
    norm: Literal["per head", "all heads", "l2"] | None = None
    norm_eps: float = 1e-5
    norm_one_plus: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        seen = _seen(self.window, self.chunk)
        has = {
            "ALiBi": self.alibi,
            "sinks": self.sinks,
            "output gate": self.gate,
            f"norm of queries and keys ({self.norm})": self.norm is not None,
            # Without a cap there is no number to format: its key is never shown.
            f"scores capped at {self.softcap:g}" if self.softcap else "": self.softcap is not None,
            "biases": self.bias or self.qkv_bias,
        }
        kind = "attention" if seen else "full attention"
        return ", ".join([kind, *seen, str(self.rope or "no RoPE"), *(name for name, there in has.items() if there)])


@dataclass(frozen=True)
class IndexerSpec:
    """The indexer of DeepSeek's sparse attention (DeepSeek-V3.2).

    Attributes:
        heads, head_dim: of its queries, and the width of its key.
        topk: keys that a token sees.
        interleaved: RoPE pairs neighbouring channels.
        stage: of training: attention to all keys, or what the indexer's loss is over.
    """

    heads: int
    head_dim: int
    topk: int
    interleaved: bool
    stage: Literal["warm-up", "dense loss", "sparse loss"]

    @property
    def chosen(self) -> int | None:
        """The most keys that a token sees; None: all."""
        return None if self.stage == "warm-up" else self.topk

    def __str__(self) -> str:
        stage = " (warm-up: all)" if self.stage == "warm-up" else ""
        return f"{self.topk} keys chosen by {self.heads} heads of {self.head_dim}{stage}"


@dataclass(frozen=True)
class LatentMixer:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        heads: of queries, keys and values.
        kv_rank, q_rank: width of the latent vectors; q_rank None: queries are projected directly.
        plain_dim, rope_dim, value_dim: channels of a head's query and key without and with RoPE, and of its value.
        rope: of the ``rope_dim`` channels; None: nothing is rotated.
        norm: latent vectors are normalized.
        norm_eps, window, dropout: as of :class:`AttentionMixer`.
        indexer: chooses the keys that a token sees; None: all.
    """

    heads: int
    kv_rank: int
    q_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec | None
    norm: bool = False
    norm_eps: float = 1e-5
    window: int | None = None
    dropout: float = 0.0
    indexer: IndexerSpec | None = None
    # Callers read window and chunk of any attention.
    chunk: None = field(default=None, init=False)

    def __str__(self) -> str:
        latents = f"latent attention {self.kv_rank}{'' if self.q_rank is None else f' + {self.q_rank}'}"
        chosen = [] if self.indexer is None else [str(self.indexer)]
        return ", ".join([latents, *chosen, *_seen(self.window, None), str(self.rope or "no RoPE")])


@dataclass(frozen=True)
class Recurrence:
    """What mixers with a linear recurrence have in common; see :mod:`smp.layers.recurrences.mixer`.

    Attributes:
        key_heads, value_heads: of queries and keys, and of values and states.
        key_dim, value_dim: channels of each.
        conv: tokens that the convolution sees.
        norm_eps: of the norm of the output.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    norm_eps: float

    def own_keys(self, tp: int) -> int:
        """Channels of a token's queries (or keys) on one of ``tp`` processes; a single head is on all of them."""
        return max(1, self.key_heads // tp) * self.key_dim

    def own_values(self, tp: int) -> int:
        """Channels of a token's values on one of ``tp`` processes."""
        return self.value_heads // tp * self.value_dim


@dataclass(frozen=True)
class DeltaNetMixer(Recurrence):
    """A gated delta net (Qwen3-Next, arXiv 2412.06464), see :mod:`smp.layers.recurrences.delta_net`; the norm is per
    head.

    Attributes:
        negative: rates go up to 2.
    """

    negative: bool = False

    def __str__(self) -> str:
        return f"gated delta net, {self.value_heads} states of {self.key_dim} x {self.value_dim}"


@dataclass(frozen=True)
class KimiDeltaMixer(Recurrence):
    """Kimi delta attention, see :mod:`smp.layers.recurrences.kimi_delta`: key and value heads have the same number and
    width; the norm is per head."""

    def __str__(self) -> str:
        return f"Kimi delta attention, {self.value_heads} states of {self.key_dim} x {self.value_dim}"


@dataclass(frozen=True)
class MambaMixer(Recurrence):
    """Mamba-2 (arXiv 2405.21060), see :mod:`smp.layers.recurrences.mamba`: key heads are its groups, value heads its
    heads. The norm is per group.

    Attributes:
        steps: the least and the largest step; None: no limit.
        norm: the output is normalized.
        multipliers: of gates, values, keys, queries and steps, as projections give them.
    """

    steps: tuple[float, float | None] = (0.0, None)
    norm: bool = True
    multipliers: tuple[float, ...] = (1.0,) * 5

    def __str__(self) -> str:
        return f"Mamba-2, {self.value_heads} states of {self.key_dim} x {self.value_dim} in {self.key_heads} groups"


@dataclass(frozen=True)
class Branch:
    """One of several mixers of a layer.

    Attributes:
        name: of the module.
        mixer: its spec.
        multiplier: of its result.
    """

    name: str
    mixer: Any
    multiplier: float = 1.0


@dataclass(frozen=True)
class ParallelMixer:
    """Mixers that read the same input and whose outputs are added; see :mod:`smp.layers.parallel_mixers`."""

    branches: tuple[Branch, ...]

    def __str__(self) -> str:
        return " next to ".join(str(branch.mixer) for branch in self.branches)


def single_mixers(mixer: Any) -> tuple[Any, ...]:
    """The mixers of which a layer's mixer consists: itself, or those of its branches; () for None."""
    if isinstance(mixer, ParallelMixer):
        return tuple(branch.mixer for branch in mixer.branches)
    return () if mixer is None else (mixer,)


@dataclass(frozen=True)
class Activation:
    """Activation of an MLP.

    Attributes:
        kind: of the function.
        gated: the MLP has three matrices.
        clamp, linear_offset: of quick_geglu.
    """

    kind: Literal["swiglu", "quick_geglu", "geglu", "tanh_geglu", "relu", "squared_relu", "gelu", "tanh_gelu"]
    clamp: float | None = None
    linear_offset: float = 0.0

    @property
    def gated(self) -> bool:
        return self.kind.endswith("glu")

    @property
    def clamped(self) -> str:
        """The clamp as text; "" without one."""
        return "" if self.clamp is None else f" (clamped at {self.clamp:g})"


@dataclass(frozen=True)
class MLPSpec:
    """A dense feed-forward network of this width.

    Attributes:
        gate_multiplier, multiplier: of the gate, before the activation, and of the result.
    """

    width: int
    activation: Activation
    bias: bool = False
    gate_multiplier: float = 1.0
    multiplier: float = 1.0

    def __str__(self) -> str:
        return f"MLP {self.width}{self.activation.clamped}"


@dataclass(frozen=True)
class CapacitySpec:
    """--moe-expert-capacity-factor and the settings that depend on it."""

    factor: float
    policy: Literal["probs", "position"]
    pad: bool


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts.

    Attributes:
        count, topk: experts of the layer, and of a token.
        expert: each of them.
        shared: an MLP that every token uses; None: there is none.
        shared_gate: its output is weighed per token.
        score_function, pre_softmax, scaling_factor: of the router.
        bias_update_rate: of the experts' bias; None: there is no bias.
        num_groups, group_topk, group_score: groups of experts.
        balancing: how loads are balanced.
        capacity: None: no choice is dropped.
        weighs_input: an expert's input is multiplied by its weight, not its output.
    """

    count: int
    topk: int
    expert: MLPSpec
    shared: MLPSpec | None
    shared_gate: bool
    score_function: Literal["softmax", "sigmoid"]
    pre_softmax: bool
    scaling_factor: float | None
    bias_update_rate: float | None
    num_groups: int | None
    group_topk: int | None
    group_score: Literal["sum", "max"]
    balancing: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
    capacity: CapacitySpec | None
    weighs_input: bool

    def __str__(self) -> str:
        shared = "" if self.shared is None else f" and a shared one of {self.shared.width}"
        return f"{self.topk} of {self.count} experts of {self.expert.width}{self.expert.activation.clamped}{shared}"


@dataclass(frozen=True)
class NormSpec:
    """A normalization of the residual stream."""

    kind: Literal["RMSNorm", "LayerNorm"]
    eps: float
    one_plus: bool
    bias: bool


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
        mixer: what lets tokens see each other: a spec of this file, or one that a caller has registered; None: the
            layer is a feed-forward network alone.
        feed_forward: what follows it, of each token alone; None: the layer is a mixer alone.
        norm: of all norms around both.
        norm_before, norm_after: there is one of what each reads, of what each gives.
        parallel: both read the layer's input.
        shared_norm: with ``parallel``, one norm for both.
        multiplier: of what each adds to the residual stream.
        dropout: on what each adds to the residual stream.
    """

    mixer: Any
    feed_forward: MLPSpec | ExpertsSpec | None
    norm: NormSpec
    norm_before: bool = True
    norm_after: bool = False
    parallel: bool = False
    shared_norm: bool = False
    multiplier: float = 1.0
    dropout: float = 0.0

    @property
    def mixers(self) -> tuple[Any, ...]:
        """Specs of its mixers, each alone; one in most layers."""
        return single_mixers(self.mixer)

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward network is a mixture of experts."""
        return isinstance(self.feed_forward, ExpertsSpec)

    @property
    def parts(self) -> int:
        """Mixers and feed-forward network: under tensor parallelism each gathers what it reads and reduces what it
        gives."""
        return len(self.mixers) + (self.feed_forward is not None)

    def __str__(self) -> str:
        return "; ".join(str(part) for part in (self.mixer, self.feed_forward) if part is not None)


def _seen(window: int | None, chunk: int | None) -> list[str]:
    """Which tokens a token sees, as text; [] where it sees all before it."""
    return [f"window {window}"] * (window is not None) + [f"chunks of {chunk}"] * (chunk is not None)
