"""What a model costs, by formula: parameters, FLOPs per token, bytes per process. No torch, so it runs on a login node.

Symbols: h hidden size, q = heads x head width, k = key/value heads x head width, f = MLP width, T = tokens of a
micro-batch, s = sequence length, b = bytes of the compute precision, tp = tensor-parallel processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from smp.config import Config, Layout, ModelConfig, TrainingConfig, resolve
from smp.models.part import ModelPart, whole


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters, without vocabulary padding.

    Attributes:
        embedding: token embedding, learned positions and, unless it is tied, the output matrix.
        non_embedding: everything else: the blocks and the final norm.
        per_layer: one block.
    """

    embedding: int
    non_embedding: int
    per_layer: int

    @property
    def total(self) -> int:
        """All parameters; a tied matrix counts once."""
        return self.embedding + self.non_embedding


@dataclass(frozen=True)
class _Sizes:
    """Widths on one of ``tp`` processes; see the module's docstring."""

    h: int
    q: int
    k: int  # columns that are computed
    k_stored: int  # columns that are stored: all of them when there are fewer key/value heads than processes
    f: int
    heads: int
    head_dim: int
    gated: bool


def _filled(model: ModelConfig, vocab_size: int) -> ModelConfig:
    """``model`` with its derived defaults, by the rules of ``smp.config.resolve``."""
    run = TrainingConfig(dry_run=True)
    return resolve(Config(model=replace(model, vocab_size=vocab_size), training=run), world_size=1).model


def _sizes(model: ModelConfig, tp: int = 1) -> _Sizes:
    d, groups, heads = model.kv_channels, model.num_query_groups, model.num_attention_heads
    assert d is not None and groups is not None and model.ffn_hidden_size is not None, "resolved before"
    return _Sizes(
        h=model.hidden_size,
        q=heads // tp * d,
        k=max(1, groups // tp) * d,
        k_stored=groups * d // tp if groups % tp == 0 else groups * d,
        f=model.ffn_hidden_size // tp,
        heads=heads // tp,
        head_dim=d,
        gated=model.swiglu,
    )


def _block_matrices(s: _Sizes) -> int:
    """Elements of a block's matrices on one process: query, output, key, value and two or three of the MLP."""
    return 2 * s.h * s.q + 2 * s.h * s.k_stored + (3 if s.gated else 2) * s.h * s.f


def _norm(model: ModelConfig) -> int:
    return model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)


def _block_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of one block on one of ``tp`` processes."""
    s, bias = _sizes(model, tp), not model.disable_bias_linear
    count = _block_matrices(s) + 2 * _norm(model)
    if bias or model.add_qkv_bias:
        count += s.q + 2 * s.k_stored
    if bias:
        count += s.h + (2 if s.gated else 1) * s.f + s.h
    return count + (2 * s.head_dim if model.qk_layernorm else 0)


def _positions(model: ModelConfig) -> int:
    learned = model.position_embedding_type == "learned_absolute"
    return model.max_position_embeddings * model.hidden_size if learned else 0


def count_parameters(model: ModelConfig, vocab_size: int) -> ParameterCount:
    """Parameters of the whole model.

    Args:
        model: resolved or not.
        vocab_size: number of token ids, whatever ``model`` says.

    Raises:
        ConfigError: the model's sizes do not fit together.
    """
    model = _filled(model, vocab_size)
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    layer = _block_parameters(model)
    return ParameterCount(
        embedding=matrices * vocab_size * model.hidden_size + _positions(model),
        non_embedding=model.num_layers * layer + _norm(model),
        per_layer=layer,
    )


def count_part(model: ModelConfig, part: ModelPart) -> int:
    """Parameters of a part of a resolved model. With a tied output layer both ends hold the vocabulary's matrix."""
    assert model.vocab_size is not None, "resolved before"
    matrices = part.embedding + part.head
    if part.embedding and part.head and not model.untie_embeddings_and_output_weights:
        matrices = 1
    ends = matrices * model.vocab_size * model.hidden_size + part.embedding * _positions(model)
    return part.count * _block_parameters(model) + ends + part.head * _norm(model)


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs per token of a forward pass: of one layer, of the token embedding (it copies and adds), of the output layer
    with the loss."""

    layer: float
    embedding: float
    head: float


def forward_flops(model: ModelConfig, seq_length: int) -> ForwardFlops:
    """Where a resolved model's FLOPs are; see :func:`training_flops_per_token` for what counts."""
    assert model.vocab_size is not None, "resolved before"
    s = _sizes(model)
    attention = 4 * s.q * _visible_pairs(seq_length, model.window_size) / seq_length
    return ForwardFlops(2 * _block_matrices(s) + attention, 2 * s.h, 2 * s.h * model.vocab_size)


def training_flops_per_token(model: ModelConfig, seq_length: int, vocab_size: int) -> float:
    """Model FLOPs of one training step divided by its tokens; what MFU is measured in (PaLM, arXiv 2204.02311, app. B).

    Forward per token: 2 x elements of all matrices (a multiply and an add), output matrix included, and per layer 4 q
    x tokens seen (scores, then the weighted sum). A causal token i sees min(i + 1, window) tokens, so (s + 1) / 2 on
    average without a window: half of what full attention computes. The backward pass is twice the forward. Norms,
    biases, activations, softmax and lookups are left out, and so is everything that is computed again under
    recompute.

    Args:
        model: resolved or not.
        seq_length: tokens per sequence, each a document of its own.
        vocab_size: number of token ids, whatever ``model`` says.

    Raises:
        ConfigError: the model's sizes do not fit together.
    """
    flops = forward_flops(_filled(model, vocab_size), seq_length)
    return 3 * (model.num_layers * flops.layer + flops.head)


def _visible_pairs(length: int, window: int | None) -> int:
    """Pairs (token, token it sees) of a causal sequence: the first tokens see 1, 2, ..., the rest see ``window``."""
    w = min(window or length, length)
    return w * (w + 1) // 2 + (length - w) * w


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one process; see :func:`estimate_memory`."""

    parameters: int
    gradients: int
    optimizer: int
    units: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of the parts. They do not all peak at once, but the allocator's rounding wants room too."""
        return self.parameters + self.gradients + self.optimizer + self.units + self.activations + self.logits


@dataclass(frozen=True)
class Tuned:
    """What is different when a model is fine-tuned.

    Attributes:
        adapters: elements of all adapters on one of the tensor-parallel processes; 0: all weights are trained.
        rows: sequences of a sample: 2 when it is a pair.
        copies: of the model, frozen.
    """

    adapters: int = 0
    rows: int = 1
    copies: int = 0


def estimate_memory(
    config: Config,
    layout: Layout,
    chunk_bytes: int,
    parts: Sequence[ModelPart] | None = None,
    held: int = 1,
    losses: int = 1,
    tuned: Tuned = Tuned(),
) -> MemoryEstimate:
    """Memory of one process of a training run: an estimate to choose a layout by, not a bound.

    With n = parameters on one of tp processes (vocabulary padding included) and d = ``layout.dp_shard``:

    - parameters 4 n / d and gradients 4 n / d: fp32 masters, sharded by FSDP.
    - optimizer 8 n / d for Adam's two moments, 4 n / d for SGD with momentum, 0 without.
    - units: what FSDP holds unsharded. In compute precision two blocks (one in use, one on its way) and the vocabulary
      matrix at the loss; of the largest unit the gradient, in compute precision and as the fp32 input of its reduction.
      Without FSDP (one data-parallel rank and no pipeline) the gradient of the largest unit on its way to the sum, and
      in bf16 runs the cast weights, which layers keep for the backward pass (under recompute those of one block).
    - activations: layers x what a block keeps (``_kept_per_token`` x T), as much as one whole block for the gradients
      in flight, under recompute one more for the block that is replayed, and what the output layer takes and gives
      back.
    - logits: one chunk; logits of all tokens never exist. The output matrix's gradient, summed over chunks in fp32 and
      kept in compute precision from the forward pass, where the loss computes it: one for each of the ``losses``.

    Of a pipeline's process n counts its own parts. Their gradients are whole, 4 n, until they are reduced, and the
    weights are gathered for the whole step (without --pipeline-reshard). Activations are there ``held`` times for an
    average part.

    Frozen weights (the model under adapters, and copies of it) take b bytes instead of 4, and have neither gradients
    nor optimizer state. What layers keep is counted as if they were trained, so with adapters activations are fewer.

    Key/value heads are counted as repeated for their query heads; without recompute, a block whose attention backend
    takes them as they are keeps 2 b (q - k) per token less.

    Left out: the CUDA context, NCCL's buffers, fragmentation, RoPE tables and a window's mask. Activations are those of
    fused kernels (a GPU); on a CPU torch's RMSNorm keeps two fp32 copies of its input instead of the input. With
    Triton's SwiGLU, which a GPU runs without --compile, a block keeps 2 f less per token.

    Args:
        config: resolved.
        layout: degrees of the mesh.
        chunk_bytes: size of one chunk of fp32 logits, ``smp.layers.head.CHUNK_BYTES`` of the device.
        parts: of the model that the process holds; by default all of it.
        held: most activations that it holds at once, in micro-batches of one part.
        losses: most micro-batches at once between their loss and its backward pass.
        tuned: of fine-tuning.
    """
    model, data = config.model, config.data
    assert model.vocab_size is not None and data.seq_length is not None, "resolved before"
    b, tokens = (2 if config.parallel.bf16 else 4), tuned.rows * data.micro_batch_size * data.seq_length
    block, rows = _block_parameters(model, layout.tp), _vocabulary_rows(model, layout.tp)
    parts = parts or (whole(model.num_layers),)
    layers, first, last = sum(p.count for p in parts), any(p.embedding for p in parts), any(p.head for p in parts)
    vocabulary = rows * model.hidden_size if first or last else 0
    both = first and last and model.untie_embeddings_and_output_weights
    ends = vocabulary * (2 if both else 1) + first * _positions(model) + last * _norm(model)
    n = layers * block + ends
    adapters = tuned.adapters * layers // model.num_layers
    trained, frozen = (adapters, n * (tuned.copies + 1)) if adapters else (n, n * tuned.copies)
    largest = adapters // layers if adapters else max(block, vocabulary)
    if layout.pp == 1 and layout.data_parallel == 1:
        cast = 0 if b == 4 or tuned.adapters else _cast_weights(config, layers, block) + vocabulary
        units = b * cast + (4 if b == 4 else b + 4) * largest
    else:
        gathered = 2 * block + vocabulary if layout.pp == 1 or config.parallel.pipeline_reshard else n
        units = b * gathered + (b + 4) * largest
    head = 0 if adapters else vocabulary * (b * losses + (4 if b < 4 else 0))
    return MemoryEstimate(
        parameters=(4 * trained + b * frozen) // layout.dp_shard,
        gradients=4 * trained // (layout.dp_shard if layout.pp == 1 else 1),
        optimizer=_optimizer_bytes(config) * trained // layout.dp_shard,
        units=units,
        activations=int(tokens * _activations_per_token(config, layout, b, layers * held / len(parts), last)),
        logits=last * (_logits_bytes(tokens, rows, chunk_bytes, b) + head),
    )


def _cast_weights(config: Config, layers: int, block: int) -> int:
    """Weights of blocks that are there in bf16 at once without FSDP: a replay casts those of its block again."""
    return block * (layers if config.parallel.recompute_granularity == "none" else 1)


def _vocabulary_rows(model: ModelConfig, tp: int) -> int:
    """Rows of a vocabulary matrix on one process, padding included."""
    assert model.vocab_size is not None
    multiple = model.make_vocab_size_divisible_by
    return -(-model.vocab_size // (multiple * tp)) * multiple


def _optimizer_bytes(config: Config) -> int:
    """Bytes of optimizer state per parameter."""
    if config.optim.optimizer == "sgd":
        return 4 if config.optim.sgd_momentum > 0 else 0
    return 8


def _logits_bytes(tokens: int, rows: int, chunk_bytes: int, b: int) -> int:
    """A chunk of logits, which turn into their gradient in place."""
    return min(tokens, max(1, chunk_bytes // (4 * rows))) * rows * b


def _activations_per_token(config: Config, layout: Layout, b: int, layers: float, head: bool) -> float:
    """Bytes per token of a micro-batch, of ``layers`` and the output layer."""
    model, recompute = config.model, config.parallel.recompute_granularity
    split = layout.tp if config.parallel.sequence_parallel else 1
    one_block = _kept_per_token(config, layout.tp, b, "none")
    kept = layers * _kept_per_token(config, layout.tp, b, recompute)
    ends = head * b * (2 * model.hidden_size // split + 2 * model.hidden_size)
    return kept + one_block * (1 if recompute == "none" else 2) + ends


def _kept_per_token(config: Config, tp: int, b: int, recompute: Literal["none", "selective", "full"]) -> int:
    """Bytes per token that one block keeps for its backward pass on one of ``tp`` processes.

    With h_l = h / tp under sequence parallelism, else h, and all other widths local:

    - none: input and output of both norms 4 h_l; query, key, value (repeated for their query heads) and output of
      attention 4 q; MLP 4 f with SwiGLU (gate, up, SiLU, product), else 2 f; with qk-norm its inputs q + k;
      log-sum-exp, 4 bytes per head, or with attention dropout per head and position the probabilities in fp32, the mask
      in one byte and the dropped probabilities in compute precision.
    - selective: input h_l; results of matrix products q + 2 k + (2 or 1) f + 2 h_l (the last after their reduction)
      and of attention q; log-sum-exp, or with attention dropout the scores in compute precision.
    - full: input h_l.
    """
    model, s, parallel = config.model, _sizes(config.model, tp), config.parallel
    h_l = s.h // tp if parallel.sequence_parallel else s.h
    if recompute == "full":
        return b * h_l
    if recompute == "selective":
        elements = 3 * h_l + 2 * s.q + 2 * s.k + (2 if s.gated else 1) * s.f
        return b * elements + _attention_extra(config, s.heads, b)
    elements = 4 * h_l + 4 * s.q + (4 if s.gated else 2) * s.f + (s.q + s.k if model.qk_layernorm else 0)
    return b * elements + _attention_extra(config, s.heads, 4 + 1 + b)


def _attention_extra(config: Config, heads: int, bytes_per_position: int) -> int:
    """Bytes per token: the log-sum-exp, or what attention dropout materialises for each position."""
    assert config.data.seq_length is not None, "resolved before"
    return heads * (4 if config.model.attention_dropout == 0 else bytes_per_position * config.data.seq_length)


# Words of a device's name -> peak of dense matrix products in TFLOP/s (bf16, fp32 as TF32). The entry with most words
# wins. From the vendors' data sheets; NVIDIA's often print twice as much, for 2:4 sparsity.
_PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "A100": (312, 156),  # NVIDIA A100 data sheet, SXM and PCIe alike
    "A10G": (70, 35),  # NVIDIA A10G data sheet
    "L4": (121, 60),  # NVIDIA L4 data sheet
    "L40S": (362, 183),  # NVIDIA L40S data sheet
    "H100": (989, 494.5),  # NVIDIA H100 data sheet, SXM
    "H100 PCIe": (756, 378),  # NVIDIA H100 data sheet
    "H100 NVL": (835, 417.5),  # NVIDIA H100 NVL data sheet
    "H200": (989, 494.5),  # NVIDIA H200 data sheet, SXM
    "H200 NVL": (835.5, 417.5),  # NVIDIA H200 data sheet
    "GH200": (989, 494.5),  # NVIDIA GH200 data sheet
    "B200": (2250, 1125),  # NVIDIA DGX B200 data sheet / 8
    "GB200": (2500, 1250),  # NVIDIA GB200 NVL72 page / 72
    "MI300X": (1307.4, 653.7),  # AMD Instinct MI300X data sheet
}


def peak_flops(device_name: str, dtype: Literal["bf16", "fp32"]) -> float | None:
    """Largest possible FLOP/s of a device in dense matrix products, or None when it is not in the table.

    Args:
        device_name: as ``torch.cuda.get_device_name()`` says it, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: compute precision; fp32 products run as TF32.
    """
    words = set(device_name.replace("-", " ").split())
    known = [name for name in _PEAK_TFLOPS if set(name.split()) <= words]
    if not known or "MIG" in words:  # a slice of a device has a slice of its peak
        return None
    best = max(known, key=lambda name: len(name.split()))
    return _PEAK_TFLOPS[best][("bf16", "fp32").index(dtype)] * 1e12
