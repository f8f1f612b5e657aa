"""The output matrix of a transformers model in a run: it returns a loss, computed in chunks of tokens, and no logits.

Hugging Face's forward pass calls its output matrix and returns the logits, perhaps scaled or capped. While a loss is
wanted the matrix computes it there, in its own forward pass, with the weights that FSDP has gathered for it, and what
it returns only stands for logits. What the model does to logits is found out once, by numbers: its forward pass runs
around a stand-in of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from smp.config import ConfigError
from smp.hf.modules import local_weight_and_bias
from smp.layers.heads.answers import linear_answers
from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy
from smp.layers.heads.distillation import linear_divergence
from smp.layers.heads.head import DISTILLED, ModelOutput, chunk_tokens
from smp.layers.parameter import local
from smp.models.foreign import reads_apart
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group, copy_to_group


class OutputMatrix:
    """The output matrix of ``module`` and what its forward pass computes.

    Args:
        module: cut, not yet sharded.
        backend: of the cross-entropy.

    Attributes:
        shard: the columns of the logits that this rank makes.

    Raises:
        ConfigError: it is no linear layer, or the model computes something unknown with its logits.
    """

    def __init__(self, module: Any, backend: str) -> None:
        head: Any = module.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"--model-implementation transformers: the output matrix of {type(module).__name__} is "
                f"{type(head).__name__}, not nn.Linear"
            )
        # The forward pass before this one, which may be that of a cut layer.
        self._plain = vars(head).get("forward") or MethodType(type(head).forward, head)
        self._module = module
        self._batch: MicroBatch | None = None
        self._bias: torch.Tensor | None = None
        self._result = Result()
        self._backend = backend
        self._logits = Logits.of(module, head)
        self.shard = _shard_of(head, self._logits.softcap)
        cast(Any, head).forward = MethodType(self._forward, head)

    @contextmanager
    def wanted(self, batch: MicroBatch) -> Iterator[Result]:
        """Within the block the forward pass computes what ``batch`` asks for, unless that is logits, and stores it in
        the result."""
        self._batch, self._result = batch, Result()
        with _bias_apart(self._module, "meta") if batch.labels is not None else nullcontext() as self._bias:
            try:
                yield self._result
            finally:
                self._batch = None

    def _forward(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        """(batch, length, hidden) -> logits, or what stands for them."""
        batch = self._batch
        if batch is not None and batch.own_cache is not None:
            # Generation needs the logits of the last token only.
            hidden = hidden[:, -1:]
        if batch is None or batch.labels is None or batch.loss_weights is None:
            whole: torch.Tensor = self._plain(hidden)
            return whole
        self._result.output = self._loss(head, hidden, batch, batch.labels, batch.loss_weights)
        # Without memory: some models scale, cap or widen logits, which would make them after all.
        return hidden.new_empty((*hidden.shape[:-1], self.shard.vocab_size), device="meta")

    def _loss(
        self, head: Any, hidden: torch.Tensor, batch: MicroBatch, labels: torch.Tensor, weights: torch.Tensor
    ) -> ModelOutput:
        weight, bias = local_weight_and_bias(head) if hasattr(head, "smp_cut") else (head.weight, head.bias)
        if self._bias is not None:
            own = self._bias[0, self.shard.start : self.shard.start + len(weight)].to(weight.dtype)
            bias = own if bias is None else bias + own
        hidden = hidden[:, : labels.shape[1]]  # after them are tokens that only make ranks even
        # The backward of copy_to_group sums the gradient: each rank's columns give a part of it.
        x = copy_to_group(hidden, self.shard.group).flatten(0, -2)  # (tokens, hidden)
        # Scaling hidden states scales logits, without a copy of the logits.
        if self._logits.scale != 1.0:
            x = x * self._logits.scale
        if bias is not None:  # as one more column, which every token has a 1 for
            x = torch.cat((x, x.new_full((len(x), 1), self._logits.scale)), -1)
            weight = torch.cat((weight, bias[:, None]), -1)
        arguments = x, weight.to(x.dtype), labels.flatten(), weights.flatten(), self.shard
        if batch.answers is not None and batch.answers.states is not None:
            # A teacher: the student's loss multiplies its hidden states by this matrix.
            batch.answers.states(weight)
            return ModelOutput(values=x)
        options: dict[str, Any] = {"chunk_tokens": chunk_tokens(weight), "backend": self._backend}
        if batch.distilled is not None:
            options["chunk_tokens"] = chunk_tokens(weight, share=DISTILLED)
            return ModelOutput(loss=linear_divergence(*arguments, batch.distilled, **options))
        if batch.answers is None:
            return ModelOutput(loss=linear_cross_entropy(*arguments, **options))
        shape = labels.shape[0], labels.shape[1]
        values, result = linear_answers(*arguments, batch.answers, shape, **options)
        return ModelOutput(values=values) if result is None else ModelOutput(loss=result.loss, metrics=result.metrics)


BIAS = "final_logits_bias"
"""A buffer that BART and its kind add to logits behind the output matrix; no gradient trains it."""


@contextmanager
def _bias_apart(module: Any, device: str) -> Iterator[torch.Tensor | None]:
    """Within the block zeros on ``device`` replace a model's bias of logits, which is given; None: it has
    none."""
    bias = module._buffers.get(BIAS)
    if bias is not None:
        module._buffers[BIAS] = torch.zeros_like(bias, device=device)
    try:
        yield bias
    finally:
        if bias is not None:
            module._buffers[BIAS] = bias


@dataclass
class Result:
    """The output of a forward pass; None where it gives logits alone."""

    output: ModelOutput | None = None


def _shard_of(head: Any, softcap: float | None) -> VocabShard:
    """Which rows of the output matrix this rank has."""
    weight, vocabulary = head.weight, head.out_features
    group = Group("", 1, 0)
    if isinstance(weight, DTensor) and any(isinstance(p, Shard) and p.dim == 0 for p in weight.placements):
        group = Group.of(weight.device_mesh)
    return VocabShard.of(group, vocabulary // group.size, vocabulary, softcap)


@dataclass(frozen=True)
class Logits:
    """How a model changes what its output matrix gives: z becomes softcap x tanh(scale x z / softcap).

    Attributes:
        softcap: None: scale x z.
    """

    scale: float
    softcap: float | None

    @staticmethod
    def of(module: Any, head: Any) -> Logits:
        """Found by numbers that a stand-in of the matrix gives.

        Raises:
            ConfigError: it is something else.
        """
        columns = torch.linspace(-4.0, 4.0, head.out_features)
        columns[-2:] = torch.tensor((1e-3, 1e6))
        try:
            out = _logits_of(module, head, columns)
        except Exception as error:  # of any kind: what the class does is not known
            raise _unknown(module, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
        if out.shape != columns.shape:
            raise _unknown(module, f"its logits are {tuple(out.shape)}, not {tuple(columns.shape)}")
        scale, largest = float(out[-2] / columns[-2]), float(out[-1])
        if torch.allclose(out, columns * scale, rtol=1e-5):
            near = round(scale, 6)
            return Logits(1.0 if near == 1.0 else scale, None)
        # tanh rounds small numbers: the slope at 0 is 1 within its precision where nothing scales
        scale = 1.0 if abs(scale - 1.0) < 1e-4 else scale
        if torch.allclose(out[:-1], largest * torch.tanh(columns[:-1] * scale / largest), rtol=1e-4, atol=1e-6):
            return Logits(scale, largest)
        raise _unknown(module, "logits become neither scaled nor capped ones")


def _unknown(module: Any, why: str) -> ConfigError:
    return ConfigError(
        f"--model-implementation transformers: {type(module).__name__} computes between its output matrix and its "
        f"loss what is not known here: {why}"
    )


@torch.no_grad()
def check_scores(module: Any) -> None:
    """Check that a text's score is the product of its last hidden state and ``score``: tried with numbers, as logits
    are.

    Raises:
        ConfigError: it is something else.
    """
    head = module.score
    if not isinstance(head, nn.Linear) or head.bias is not None or head.out_features != 1:
        raise ConfigError(f"--objective reward: {type(module).__name__}.score is no row without a bias")
    given = torch.tensor([0.5, -2.0])
    text = module.config.get_text_config()
    # Two tokens, neither of them padding: classes look for the last token that is not.
    ids = torch.full((1, 2), 0 if text.pad_token_id != 0 else 1)
    base, table = module.base_model, module.get_input_embeddings()
    stand_ins: dict[Any, Callable[..., Any]] = {
        base: lambda *args, **kwargs: _Decoded(given),
        table: lambda *args, **kwargs: given,
        # Known scores instead of computed ones: the output must be the last one.
        head: lambda hidden: given.clone().view(1, 2, 1),
    }
    try:
        with _replaced(stand_ins):
            out = module(input_ids=ids).logits
    except Exception as error:  # of any kind: what the class does is not known
        raise _unknown(module, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    if out.shape != (1, 1) or out.item() != given[-1]:
        raise _unknown(module, "its score is not that of the last token")


def row_of(head: Any, dtype: torch.dtype) -> torch.Tensor:
    """(1, hidden) of a head of scores, which every rank has as a whole."""
    weight = head.weight
    return local(weight, dtype) if isinstance(weight, DTensor) else weight.to(dtype)


@contextmanager
def _replaced(forwards: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, modules have these forward passes."""
    kept = {part: vars(part).get("forward") for part in forwards}
    for part, forward in forwards.items():
        part.forward = forward
    try:
        yield
    finally:
        for part, before in kept.items():
            del part.forward
            # del shows the class's forward again; an instance attribute from before is put back.
            if before is not None:
                part.forward = before


@torch.no_grad()
def _logits_of(module: Any, head: Any, columns: torch.Tensor) -> torch.Tensor:
    """What the model makes of ``columns`` (ids,) as the output of its output matrix. Its decoder does not run."""
    bases = [module.get_encoder(), module.get_decoder()] if reads_apart(module) else [_decoder_around(module, head)]
    # Nothing but ``columns`` has values: all else is on the meta device.
    hidden = torch.zeros(1, 1, head.in_features, device="meta")
    table = module.get_input_embeddings()
    stand_ins: dict[Any, Callable[..., Any]] = {
        **dict.fromkeys(bases, lambda *args, **kwargs: _Decoded(hidden)),
        table: lambda *args, **kwargs: hidden,
        head: lambda *args, **kwargs: columns.clone().view(1, 1, -1),
    }
    ids = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    with _replaced(stand_ins), _bias_apart(module, "cpu"):
        out: torch.Tensor = module(input_ids=ids, **({"decoder_input_ids": ids} if len(bases) == 2 else {})).logits
    return out.view(-1).float()


def _decoder_around(module: Any, head: Any) -> Any:
    """The largest part of ``module`` that returns hidden states and does not contain ``head``."""
    base = module.base_model
    while any(part is head for part in base.modules()):  # Llama 4's is in a language model inside
        inner = base.get_decoder()
        inner = getattr(base, "model", base) if inner is base else inner
        if inner is base:
            raise ValueError("it has no decoder of its own")
        base = inner
    return base


class _Decoded:
    """A decoder's output with hidden states only: any other attribute is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key in (0, "last_hidden_state") else ()

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) or default
