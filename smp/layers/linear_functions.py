"""The column- and the row-parallel linear function, with their collectives and the overlap of these.

These two functions do the communication of every linear layer. The layer says which matrix product they run (see
``smp.kernels.product``), and where the gradient of its weight goes:

- without a sink, autograd gets it at once;
- with a sink, as zero-bubble schedules need it (Qi et al. 2023, arXiv 2401.10241), the backward pass computes only the
  gradient of the input, which the previous stage waits for. The sink computes the weight's gradient later.

Product and collective are one operator for graphs. torch.compile would otherwise keep the gathered input for the
backward pass and wait for a reduction too early, and selective recompute would keep both the partial products and their
sum, or repeat the collective. Operators take no objects, so a group comes as its fields. One rank needs no operator:
its products stay visible to the compiler.

In FP8 tensors are quantised before they are gathered and multiplied (``smp.layers.fp8``): an operand is then 8-bit
numbers and their scales, and so are what is kept and what an all-gather moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smp.kernels.precision.fp8 import Operand, Quantised
from smp.kernels.product import PRODUCTS, Product, Scaled
from smp.kernels.registry import define, first_derivative_only
from smp.kernels.swiglu import FusedSwiglu
from smp.layers.fp8.scaling import Operands, Scaling
from smp.parallel.collectives import (
    Group,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)

WeightGradients = Callable[[], list[tuple[Any, torch.Tensor]]]
"""Computes gradients of weights: pairs of a layer and what is to be added to the gradient of its local weight."""
Sink = Callable[[WeightGradients], None]
"""Called with the deferred computation of weight gradients, which it runs once, later. Until then it holds this rank's
slice of the layers' input and the gradient of their output. Not for ``torch.compile``: a compiled graph silently drops
the call."""


@dataclass(frozen=True)
class Linear:
    """Options of a call of a linear function: everything but its tensors.

    Attributes:
        group: the tensor-parallel ranks.
        sequence_parallel: tokens are split over them outside of the layer.
        product: a name in ``PRODUCTS``.
        scaling: in FP8, makes operands of tensors; None: tensors are operands.
    """

    group: Group
    sequence_parallel: bool
    product: str = "dense"
    scaling: Scaling | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """These options as text, which is how operators take them."""
        return f"{self.group.size} {self.group.rank} {int(self.sequence_parallel)} {self.product} {self.group.name}"

    @staticmethod
    def of(key: str) -> Linear:
        """The options that have this :attr:`key`, without a scaling."""
        size, rank, split, product, name = key.split(" ", 4)
        return Linear(Group(name, int(size), int(rank)), split == "1", product)

    @property
    def run(self) -> Product:
        """The product."""
        return PRODUCTS[self.product]

    @property
    def is_plain(self) -> bool:
        """Whether autograd's own product will do: nothing to communicate. ``F.linear`` saves its inputs before it
        computes, so that a replay for recompute ends before the last product of a block, where a Function runs it."""
        return self.group.size == 1 and self.run.differentiable and self.scaling is None

    def operands(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Operands:
        """Operands of a forward pass; without a scaling the tensors themselves."""
        return Operands(x, x, list(weights), []) if self.scaling is None else self.scaling.forward(x, weights)

    def again(self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[Operand]:
        """Operands of the weights for the input's gradient."""
        return list(weights) if self.scaling is None else self.scaling.weights(weights, scales)

    def gradients(self, grads: Sequence[torch.Tensor]) -> list[tuple[Operand, Operand]]:
        """Operands of the output gradient of each weight: one for the input's gradient, one for the weight's."""
        return [(grad, grad) for grad in grads] if self.scaling is None else self.scaling.gradients(grads)

    def start_gather(self, x: Operand) -> Operand:
        """Begin to gather an operand, (tokens [/p], ...) -> (tokens, ...). Of a quantised one the 8-bit numbers travel,
        as bytes, and scales of its rows."""
        if not self.sequence_parallel:
            return x
        if isinstance(x, torch.Tensor):
            return start_all_gather(x, self.group)
        # Scales of rows belong to the tokens; one of a whole tensor is the same on all ranks.
        scales = start_all_gather(x.inverse, self.group) if x.inverse.ndim else x.inverse
        return Quantised(start_all_gather(x.data.view(torch.uint8), self.group), scales)

    def wait(self, x: Operand, like: Operand) -> Operand:
        """Wait for the gather that ``start_gather(like)`` began; returns the operand with the tokens of all ranks."""
        if not self.sequence_parallel:
            return x
        if isinstance(x, torch.Tensor) or isinstance(like, torch.Tensor):
            return wait(x, self.group)  # type: ignore[arg-type]
        scales = wait(x.inverse, self.group) if x.inverse.ndim else x.inverse
        return Quantised(wait(x.data, self.group).view(like.data.dtype), scales)

    def gathered(self, x: Operand) -> Operand:
        """(tokens [/p], ...) -> (tokens, ...)."""
        return self.wait(self.start_gather(x), x)

    def start_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Begin the sum of what each rank computed, (tokens, ...) -> (tokens [/p], ...)."""
        return (start_reduce_scatter if self.sequence_parallel else start_all_reduce)(partial, self.group)


def column_parallel_function(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    linear: Linear,
    sink: Sink | None = None,
    layers: Sequence[Any] = (),
) -> tuple[torch.Tensor, ...]:
    """Products of one input with several weights; one collective each way for all of them.

    Args:
        x: (tokens [/p], ..., in).
        weights: this rank's rows of each, (out/p, in).
        linear: group and product.
        sink: who gets the weights' gradients, as those of ``layers``; None: autograd.
        layers: owners of the weights. One that is ``replicated`` gets its gradient at once: it is summed over the ranks
            by what made the local weight from the parameter.

    Returns:
        (tokens, ..., out/p) for each weight.
    """
    if linear.is_plain and sink is None:
        return tuple(linear.run.forward(x, weight) for weight in weights)
    return _Column.apply(x, linear, sink, tuple(layers), *weights)


def row_parallel_function(
    inputs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    linear: Linear,
    activation: FusedSwiglu | None = None,
    sink: Sink | None = None,
    layer: Any = None,
) -> torch.Tensor:
    """The product of ``activation(*inputs)``, or of the one input without an activation, summed over the ranks.

    Args:
        inputs: (tokens, ..., in/p) each.
        weight: this rank's columns, (out, in/p).
        linear, sink, layer: as for :func:`column_parallel_function`.
        activation: computed again in the backward pass; its result is not kept.

    Returns:
        (tokens [/p], ..., out).
    """
    if linear.is_plain and sink is None and activation is None:
        return linear.run.forward(inputs[0], weight)
    return _Row.apply(linear, activation, sink, layer, weight, *inputs)


class _Column(torch.autograd.Function):
    """Saves only this rank's slice of the input; the backward pass gathers it again. Weights that are frozen get no
    gradient, and when all are the input is not saved."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """x, linear, sink, layers, weights. (Were the first four parameters of their own, torch 2.13's compiler would
        take two weights without a gradient for a call that has no ``ctx``: it compares counts.)"""
        x, ctx.linear, ctx.sink, ctx.layers, *weights = inputs
        linear: Linear = ctx.linear
        made = linear.operands(x, weights)
        kept = _parts(made.kept) if any(ctx.needs_input_grad[4:]) else [x.new_empty(0)]
        # Saved tensors come back as one flat list: this says where the operand ends.
        ctx.kept = len(kept)
        ctx.save_for_backward(*kept, *weights, *made.scales)
        # No operator for one rank: the compiler sees the product and fuses what is around it.
        if linear.group.size == 1:
            return tuple(_column_products(made.x, made.weights, linear))
        if isinstance(made.x, Quantised):
            return tuple(_scaled_column_op(_parts(made.x, *made.weights), linear.key))
        return tuple(_column_op(x, weights, linear.key))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear: Linear = ctx.linear
        trained = list(ctx.needs_input_grad[4:])
        tensors, end = list(ctx.saved_tensors), ctx.kept + len(trained)
        x, weights = _operand(tensors[: ctx.kept]), tensors[ctx.kept : end]
        pairs = linear.gradients(grads)
        now = trained
        if ctx.sink is not None:
            now = [wanted and layer.replicated for layer, wanted in zip(ctx.layers, trained, strict=True)]
            owners = zip(ctx.layers, pairs, trained, now, strict=True)
            # A replicated weight (key/value heads shared by ranks) is summed over them by autograd,
            # which needs its gradient now; all others wait for the sink.
            later = [(layer, grad) for layer, (_, grad), t, n in owners if t and not n]
            # The closure holds this rank's slice of the input and the output's gradient until the sink runs it.
            ctx.sink(lambda: _later_gradients(x, later, linear))
        wanted, last_first = [ctx.needs_input_grad[0], *now], ctx.sink is not None
        if linear.group.size == 1 or linear.scaling is not None:  # nothing to hide from the compiler, or there is none
            used = linear.again(weights, tensors[end:]) if wanted[0] else []
            found = iter(_column_gradients(pairs, x, used, wanted, last_first, linear))
        else:
            found = iter(_column_gradients_op(list(grads), x, weights, wanted, last_first, linear.key))
        dx, *dws = (next(found) if want else None for want in wanted)
        return dx, None, None, None, *dws


def _parts(*operands: Operand) -> list[torch.Tensor]:
    """The tensors of all operands as a flat list, as operators and autograd take them."""
    return [part for operand in operands for part in ([operand] if isinstance(operand, torch.Tensor) else operand)]


def _operand(parts: Sequence[torch.Tensor]) -> Operand:
    """The operand that has these parts."""
    return parts[0] if len(parts) == 1 else Quantised(*parts)


def _quantised(parts: Sequence[torch.Tensor]) -> list[Operand]:
    """Operands from a flat list (data, scales, data, scales, ...)."""
    return [_operand(parts[i : i + 2]) for i in range(0, len(parts), 2)]


def _column_products(x: Operand, weights: Sequence[Operand], linear: Linear) -> list[torch.Tensor]:
    # (tokens, ..., in): every rank multiplies all tokens by its rows of the weights.
    full = linear.gathered(x)
    return [linear.run.forward(full, weight) for weight in weights]


def _column_gradients(
    grads: list[tuple[Operand, Operand]],
    x: Operand,
    weights: Sequence[Operand],
    wanted: list[bool],
    last_first: bool,
    linear: Linear,
) -> list[torch.Tensor]:
    """Gradients of the input and of each weight, those that are wanted; ``x`` is empty when no weight's is.

    The links are kept busy under the matrix products: the all-gather of the input runs under the input-gradient
    product, the reduction of the input gradient under the weight-gradient products.
    """
    gathers = linear.sequence_parallel and any(wanted[1:])
    gathering = linear.start_gather(x) if gathers else x
    dx = None
    if wanted[0]:
        pairs = [(grad, weight) for (grad, _), weight in zip(grads, weights, strict=True)]
        # Sums round by their order. One rank and split backward passes keep autograd's, which begins with the last use.
        first, *others = pairs[::-1] if last_first or linear.group.size == 1 else pairs
        dx = linear.run.input_gradient(*first)  # (tokens, ..., in), this rank's part of the sum
        for pair in others:
            # One input served several projections: its gradient is the sum over them.
            dx = dx + linear.run.input_gradient(*pair)
    # The gather had the time of the product above; the reduction has that of the products below.
    full = linear.wait(gathering, x) if gathers else x
    reducing = [] if dx is None else [linear.start_reduce(dx)]
    dws = [linear.run.weight_gradient(grad, full) for (_, grad), want in zip(grads, wanted[1:], strict=True) if want]
    return [*(wait(r, linear.group) for r in reducing), *dws]


def _dense_column_gradients(
    grads: list[torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    wanted: list[bool],
    last_first: bool,
    linear: Linear,
) -> list[torch.Tensor]:
    return _column_gradients(linear.gradients(grads), x, weights, wanted, last_first, linear)


def _later_gradients(x: Operand, pairs: list[tuple[Any, Operand]], linear: Linear) -> list[tuple[Any, Any]]:
    """The deferred weight gradients, which a sink computes: (layer, gradient of its local weight)."""
    full = linear.gathered(x)
    return [(layer, linear.run.weight_gradient(grad, full)) for layer, grad in pairs]


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """linear, activation, sink, layer, weight, inputs."""
        ctx.linear, ctx.activation, ctx.sink, ctx.layer, weight, *inputs = arguments
        linear: Linear = ctx.linear
        x = inputs[0] if ctx.activation is None else ctx.activation.forward(*inputs)  # (tokens, ..., in/p)
        made = linear.operands(x, [weight])
        # an activation is differentiated by its inputs; without one they serve the weight's gradient alone
        kept = inputs if ctx.activation is not None else _parts(made.kept)
        if ctx.activation is None and not ctx.needs_input_grad[4]:
            kept = [x.new_empty(0)]
        ctx.kept = len(kept)
        ctx.save_for_backward(weight, *kept, *made.scales)
        if linear.group.size == 1:
            return _row_product(made.x, made.weights[0], linear)
        if isinstance(made.x, Quantised):
            return _scaled_row_op(_parts(made.x, *made.weights), linear.key)
        return _row_op(x, weight, linear.key)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        kept, scales = tensors[: ctx.kept], tensors[ctx.kept :]
        linear, trained = ctx.linear, ctx.needs_input_grad[4]
        used, full, own = _row_gradients(grad, linear)
        dinputs: list[torch.Tensor | None] = [None] * (len(ctx.needs_input_grad) - 5)
        x: Operand = _operand(kept)
        if ctx.activation is not None:
            (operand,) = linear.again([weight], scales)
            dx = linear.run.input_gradient(used, operand)
            # The activation's result comes out of the same pass over its inputs: it was not kept.
            *dinputs, made = ctx.activation.backward(dx, *kept, again=trained)
            if trained:
                x = made if linear.scaling is None else linear.scaling.kept(made, scales)
        elif ctx.needs_input_grad[5]:
            (operand,) = linear.again([weight], scales)
            dinputs = [linear.run.input_gradient(used, operand)]
        dweight = None
        if trained and ctx.sink is None:
            dweight = linear.run.weight_gradient(full, x)
        elif trained:
            layer = ctx.layer  # what waits is this rank's slice of the gradient; it is gathered once more then
            ctx.sink(lambda: [(layer, linear.run.weight_gradient(linear.gathered(own), x))])
        return None, None, None, None, dweight, *dinputs


def _row_gradients(grad: torch.Tensor, linear: Linear) -> tuple[Operand, Operand, Operand]:
    """Operands from the gradient of a row-parallel output (tokens [/p], ...): the gathered one for the input's
    gradient, the gathered one for the weight's gradient, and this rank's slice of the latter, which a sink gathers
    again."""
    if linear.scaling is not None and linear.scaling.gathers_first:
        # The gradient of the split output: all of it on every rank.
        full = linear.gathered(grad)
        assert isinstance(full, torch.Tensor)
        ((used, kept),) = linear.gradients([full])
        return used, kept, grad
    ((own, _),) = linear.gradients([grad])
    full = linear.gathered(own)
    return full, full, own


def _row_product(x: Operand, weight: Operand, linear: Linear) -> torch.Tensor:
    """(tokens, ..., in/p) -> the sum over the ranks, (tokens [/p], ..., out)."""
    return wait(linear.start_reduce(linear.run.forward(x, weight)), linear.group)


def _column_fake(x: torch.Tensor, weights: list[torch.Tensor], linear: str) -> list[torch.Tensor]:
    call = Linear.of(linear)
    # The gather is inside of the operator, so the output has the tokens of all ranks.
    tokens = x.shape[0] * (call.group.size if call.sequence_parallel else 1)
    return [x.new_empty(tokens, *x.shape[1:-1], w.shape[0]) for w in weights]


def _column_gradients_fake(
    grads: list[torch.Tensor], _x: Any, weights: list[torch.Tensor], wanted: list[bool], _last_first: bool, linear: str
) -> list[torch.Tensor]:
    call = Linear.of(linear)
    # The gradient of the input is of this rank's tokens again, after the reduce-scatter.
    tokens = grads[0].shape[0] // (call.group.size if call.sequence_parallel else 1)
    dx = [grads[0].new_empty(tokens, *grads[0].shape[1:-1], call.run.in_features(weights[0]))] if wanted[0] else []
    return [*dx, *(w.new_empty(w.shape) for w, want in zip(weights, wanted[1:], strict=True) if want)]


def _row_fake(x: torch.Tensor, weight: torch.Tensor, linear: str) -> torch.Tensor:
    call = Linear.of(linear)
    # The output is reduce-scattered, so a rank has its share of the tokens.
    tokens = x.shape[0] // (call.group.size if call.sequence_parallel else 1)
    return x.new_empty(tokens, *x.shape[1:-1], weight.shape[0])


def _scaled_column(operands: list[torch.Tensor], linear: Linear) -> list[torch.Tensor]:
    x, *weights = _quantised(operands)
    return _column_products(x, weights, linear)


def _scaled_column_fake(operands: list[torch.Tensor], linear: str) -> list[torch.Tensor]:
    return _column_fake(_like_results(operands[0], linear), operands[2::2], linear)


def _scaled_row(operands: list[torch.Tensor], linear: Linear) -> torch.Tensor:
    x, weight = _quantised(operands)
    return _row_product(x, weight, linear)


def _scaled_row_fake(operands: list[torch.Tensor], linear: str) -> torch.Tensor:
    return _row_fake(_like_results(operands[0], linear), operands[2], linear)


def _like_results(x: torch.Tensor, linear: str) -> torch.Tensor:
    product = Linear.of(linear).run
    assert isinstance(product, Scaled)
    # A stand-in with the dtype of results: operands are 8-bit.
    return x.new_empty(x.shape, dtype=product.dtype)


def _operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator that takes the key of a :class:`Linear` as its last argument, and ``run`` the value."""
    return define(schema, fake, CompositeExplicitAutograd=lambda *given: run(*given[:-1], Linear.of(given[-1])))


_column_op = _operator(
    "column_parallel(Tensor x, Tensor[] weights, str linear) -> Tensor[]", _column_products, _column_fake
)
_column_gradients_op = _operator(
    "column_parallel_backward(Tensor[] grads, Tensor x, Tensor[] weights, bool[] wanted, bool last_first, str linear)"
    " -> Tensor[]",
    _dense_column_gradients,
    _column_gradients_fake,
)
_row_op = _operator("row_parallel(Tensor x, Tensor weight, str linear) -> Tensor", _row_product, _row_fake)
_scaled_column_op = _operator(
    "scaled_column_parallel(Tensor[] operands, str linear) -> Tensor[]", _scaled_column, _scaled_column_fake
)
_scaled_row_op = _operator(
    "scaled_row_parallel(Tensor[] operands, str linear) -> Tensor", _scaled_row, _scaled_row_fake
)
