"""The loss of a transformed causal language model, computed from this rank's part of the vocabulary.

The cross-entropies are those of ``smp.layers.heads.cross_entropy``, as in ``smp.layers.heads.head``. What is here puts
them into a forward pass that is Hugging Face's: it calls its head and its loss itself, with labels that are not shifted
yet, and returns logits; a ``MicroBatch`` and a ``ModelOutput`` do not pass through it.

Hugging Face's forward passes logits to ``model.loss_function``, which a model lets others set. With labels, and while
gradients are wanted, the head then makes this rank's columns only:

===============  ===================================================================  =====================
``loss=``        what is in memory                                                    ``outputs.logits``
===============  ===================================================================  =====================
gathered         all logits on every rank, and their fp32 copy: Hugging Face's loss   whole
vocab_parallel   this rank's columns                                                  a DTensor, Shard(-1)
chunked          this rank's columns of some tokens at a time                         None
===============  ===================================================================  =====================

Without labels, or without gradients (evaluation), logits are whole and the loss is Hugging Face's in all three.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from smp.config.command_line.fields import did_you_mean
from smp.config.schema import ConfigError
from smp.data.sample import IGNORE_INDEX
from smp.hf import products
from smp.hf.adapters import base_of
from smp.hf.modules import home_of, local_weight_and_bias
from smp.hf.planning.module_plan import Plan
from smp.hf.planning.rows import REPLICATE
from smp.hf.state import state
from smp.kernels.dispatch import choose_kernels
from smp.kernels.matmul import linear
from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy, vocab_parallel_cross_entropy
from smp.layers.heads.head import chunk_tokens
from smp.parallel.collectives import Group, copy_to_group

GATHERED, VOCAB_PARALLEL, CHUNKED = "gathered", "vocab_parallel", "chunked"
LOSSES = (GATHERED, VOCAB_PARALLEL, CHUNKED)
_BETWEEN = ("logits_scaling", "logit_scale", "final_logit_softcapping")
"""Config fields by which models scale or cap their logits before the loss."""


@dataclass
class Targets:
    """The rows and labels for which one call of the model computes a loss.

    Attributes:
        labels: int64 (tokens,), that of each place's successor; ``IGNORE_INDEX`` where it does not count.
        divisor: of the sum of the losses, 0-dim.
    """

    labels: torch.Tensor
    divisor: torch.Tensor

    @staticmethod
    def of(
        labels: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        **_: Any,
    ) -> Targets:
        """The targets from the arguments of a forward pass, read as transformers' ``ForCausalLMLoss`` does."""
        if shift_labels is None:
            # Labels arrive unshifted: position i predicts label i + 1, the last one nothing.
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shifted = shift_labels.flatten()
        shifted = shifted.masked_fill(shifted == ignore_index, IGNORE_INDEX)
        valid = (shifted != IGNORE_INDEX).sum()
        # num_items_in_batch: the trainer's count over all micro-batches, so that accumulation gives
        # the mean over all tokens.
        divisor = valid if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        return Targets(shifted, divisor.to(shifted.device))


@dataclass
class ParallelLoss:
    """This rank's part of the vocabulary, and what the running forward pass asks of it.

    Attributes:
        targets: None while logits are Hugging Face's.
        head: what the head gave instead of logits, or the columns.
        value: the loss, when the head made it.
        weight: of the head, a DTensor when it is cut.
    """

    kind: str
    shard: VocabShard
    backend: str
    targets: Targets | None = None
    head: torch.Tensor | None = None
    value: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    def forget(self) -> None:
        # Kept tensors would hold the graph of this micro-batch until the next one.
        self.targets = self.head = self.value = self.weight = None


def check(model: nn.Module, kind: str, tp_size: int, plan: Plan) -> None:
    """Check that ``kind`` works for ``model``, not cut yet, with the cuts of ``plan``.

    Raises:
        ConfigError: with the reason.
    """
    if kind not in LOSSES:
        raise ConfigError(f"transform(loss={kind!r}): there are {', '.join(LOSSES)}{did_you_mean(kind, LOSSES)}")
    if kind == GATHERED:
        return
    base, _ = base_of(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    what = f"transform(loss={kind!r})"
    if type(head) is not nn.Linear:
        raise ConfigError(f"{what}: the head of {type(base).__name__} is {type(head).__name__}, not nn.Linear")
    if head.out_features % tp_size:
        # For every tensor-parallel rank the same number of rows: the loss computes offsets from it.
        raise ConfigError(f"{what}: {head.out_features} ids are not divisible by tensor_parallel_degree {tp_size}")
    function = getattr(getattr(base, "loss_function", None), "__name__", None)
    if function != "ForCausalLMLoss":
        raise ConfigError(f"{what}: the loss of {type(base).__name__} is {function}, not ForCausalLMLoss")
    name = next(name for name, module in model.named_modules() if module is head)
    step = plan.steps.get(name)
    # The vocabulary-parallel loss needs rows of the head on each rank.
    if tp_size > 1 and (step is None or step.cuts["weight"] != 0):
        raise ConfigError(f"{what}: {name} is {step.style if step else REPLICATE}: its rows are not cut over the ranks")
    if kind == CHUNKED and head.bias is not None:
        raise ConfigError(f"{what}: the head has a bias; loss={VOCAB_PARALLEL!r} takes one")
    text = base.config.get_text_config()
    between = next((number for number in _BETWEEN if getattr(text, number, None) is not None), None)
    # The chunked loss never has the logits that such a model would scale.
    if kind == CHUNKED and between is not None:
        raise ConfigError(
            f"{what}: {type(base).__name__} computes between its head and its loss (config.{between}); "
            f"loss={VOCAB_PARALLEL!r} takes that"
        )


def install(model: nn.Module, kind: str, group: Group) -> None:
    """Give ``model``, which is cut, its loss."""
    if kind == GATHERED:
        return
    base, _ = base_of(model)
    head = base.get_output_embeddings()
    kernels, _ = choose_kernels("auto", torch.device(state.device_type), dtype=head.weight.dtype)
    vocabulary = head.weight.shape[0]
    # Rows of this rank: vocabulary / tp, checked before.
    shard = VocabShard.of(group, vocabulary // group.size, vocabulary)
    # Head and model share one state: the model's forward sets the targets, and the head reads them.
    base.smp_loss = head.smp_loss = ParallelLoss(kind, shard, kernels.cross_entropy)
    # A forward that the cut has installed already is kept for calls without labels.
    head.smp_whole = vars(head).get("forward")
    head.forward = MethodType(_head, head)
    base.loss_function = MethodType(_loss, base)
    base.smp_inner = vars(base).get("forward")  # of a model with parameters of its own, which are plain tensors in it
    base.forward = MethodType(_forward_of(type(base)), base)


def _forward_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward pass of a model of this class, which passes the targets to head and loss."""
    signature = inspect.signature(kind.forward)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Positional arguments count, too: labels may be one of them.
        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments |= arguments.pop(rest, {})
        loss: ParallelLoss = self.smp_loss
        inner = self.smp_inner or MethodType(type(self).forward, self)
        if arguments.get("labels") is None or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        wanted = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
        # For the time of this call only.
        loss.targets = Targets.of(**{name: arguments[name] for name in wanted if arguments.get(name) is not None})
        try:
            return _with_logits(inner(*args, **kwargs), loss)
        finally:
            loss.forget()

    return forward


def _with_logits(output: Any, loss: ParallelLoss) -> Any:
    """The model's output with logits as the table above says."""
    if not hasattr(output, "logits"):
        raise ConfigError(f"transform(loss={loss.kind!r}): call the model without return_dict=False")
    values = dict(output.items())
    logits = values.pop("logits")
    if loss.kind == VOCAB_PARALLEL and isinstance(loss.weight, DTensor):
        if torch.compiler.is_compiling():  # compiled code takes a plain zero for the gradient of a DTensor without one
            logits = logits.detach()
        mesh = loss.weight.device_mesh
        logits = DTensor.from_local(logits, mesh, [Shard(logits.ndim - 1)], run_check=False)
    return type(output)(**values, **({} if loss.kind == CHUNKED else {"logits": logits}))


def _head(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """(..., hidden) -> this rank's columns (..., ids/tp), or for "chunked" an expanded zero of the shape of logits."""
    loss: ParallelLoss = module.smp_loss
    if loss.targets is None:
        return products.forward(module, hidden) if module.smp_whole is None else module.smp_whole(hidden)
    # local_weight_and_bias gives this rank's rows as plain tensors; ``weight`` stays the DTensor
    # for the output.
    loss.weight = home_of(module, "weight")["weight"] if module.smp_whole else module.weight
    weight, bias = local_weight_and_bias(module) if module.smp_whole else (module.weight, module.bias)
    # The loss depends on all vocabulary parts: the gradient of hidden states is a sum over ranks.
    hidden = copy_to_group(hidden, loss.shard.group)
    if loss.kind == VOCAB_PARALLEL:
        return linear(hidden, weight, bias)
    loss.value = _chunked(hidden.flatten(0, -2), weight, loss)
    # An expanded zero takes no memory, and goes through the model's own code as logits do.
    loss.head = hidden.new_zeros(()).expand(*hidden.shape[:-1], loss.shard.vocab_size)
    return loss.head


def _chunked(hidden: torch.Tensor, weight: torch.Tensor, loss: ParallelLoss) -> torch.Tensor:
    """The loss, a chunk of tokens at a time, within the head's own forward pass: FSDP may free the head's weight after
    it."""
    targets = loss.targets
    assert targets is not None
    device = hidden.device.type
    # linear_cross_entropy is a custom function: autocast does not reach into it.
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    counts = targets.labels != IGNORE_INDEX
    weights = torch.where(counts, 1 / targets.divisor, 0.0).float()  # not a product: without labels it is 0 / 0
    chunk = chunk_tokens(weight)
    with torch.autocast(device, enabled=False):
        value = linear_cross_entropy(
            hidden, weight, targets.labels, weights, loss.shard, chunk_tokens=chunk, backend=loss.backend
        )
    # Hugging Face's mean of no loss is NaN; its gradients are zero.
    return torch.where(counts.any() | (targets.divisor != 0), value, value + torch.nan)


def _loss(model: Any, logits: torch.Tensor, labels: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """``model.loss_function``: the loss from what the head returned."""
    loss: ParallelLoss = model.smp_loss
    targets = loss.targets
    if targets is None:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(logits, labels, *args, **kwargs)
    if loss.kind == CHUNKED:
        # A model that changed the logits (scaling, slicing) has another tensor here.
        if logits is not loss.head:
            raise ConfigError(
                f"transform(loss={CHUNKED!r}): {type(model).__name__} computes between its head and its loss; "
                f"loss={VOCAB_PARALLEL!r} takes that"
            )
        return loss.value
    # [tokens, ids/tp]
    losses = vocab_parallel_cross_entropy(logits.flatten(0, -2), targets.labels, loss.shard, backend=loss.backend)
    return losses.sum() / targets.divisor
