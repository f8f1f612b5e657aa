"""Operators that graphs see: ``torch.ops.smp.*``.

An operator has one schema and takes the name of its backend as an argument: which kernel runs is data, not state. It is
opaque to the compiler and has no autograd formula; the functions of this package's operation files put an
``autograd.Function`` around it, which costs a third of what ``torch.library.custom_op`` does per call.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from smp.config.schema import ConfigError

_LIBRARY = torch.library.Library("smp", "FRAGMENT")
BODIES: dict[Any, Callable[..., Any]] = {}
"""The CPU implementation of each operator, for tools that count operations inside of it (FLOPs, memory)."""


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, which needs no GPU. Read when a kernel's file is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def define(
    schema: str,
    fake: Callable[..., Any],
    *,
    body: Callable[..., Any] | None = None,
    leaf: bool = False,
    **run: Callable[..., Any],
) -> Any:
    """Define ``smp::<schema>``. ``fake`` returns outputs of the right shapes for tracing; ``run`` computes them, by
    dispatch key. Tools that count operations call ``body`` instead of ``run``, where ``run`` depends on the values of
    tensors; a ``leaf`` counts as one call.

    Returns:
        The operator: bind it to a name once, and call that.
    """
    name = schema.partition("(")[0]
    # Says that the operator traces: it has a fake version and changes what its schema says.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, function in run.items():
        # No autograd key: the ``autograd.Function`` around the operator has the gradient.
        _LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"smp::{name}", fake, lib=_LIBRARY)
    # Bound once: looking an operator up costs microseconds in each call.
    operator = getattr(torch.ops.smp, name).default
    if not leaf:
        BODIES[operator] = body or next(iter(run.values()))
    return operator


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of the backward pass of a Function that calls operators of this package, exchanges tensors, or keeps
    its gradients from the forward pass: torch would take the result for a constant, and a second derivative would be
    wrong, with a warning at most.

    Raises:
        ConfigError: the backward pass is one with ``create_graph=True``.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        # Autograd runs a backward pass with gradients enabled only for ``create_graph=True``.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "create_graph=True: layers that exchange tensors, fused kernels and chunked losses have first "
                "derivatives only"
            )
        return backward(ctx, *grads)

    return checked


def shapes_of(run: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """A fake implementation made from ``run``, which returns several tensors: it runs on tensors without data,
    which no kernel takes. Arguments are tensors, lists of them, and anything else."""

    def shapeless(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return torch.empty_like(given, device="meta")
        return [shapeless(each) for each in given] if isinstance(given, list) else given

    def fake(*given: Any) -> list[torch.Tensor]:
        device = (given[0] if isinstance(given[0], torch.Tensor) else given[0][0]).device
        # On the meta device, which computes shapes and strides only.
        made = run(*map(shapeless, given))
        # Strides as well: a compiler lays out what follows by them.
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in made]

    return fake


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator whose last argument is its backend, on CPU and CUDA, by :func:`define`."""
    return define(schema, fake, CPU=_where_it_can(schema.partition("(")[0], run), CUDA=_on_its_device(run))


def on_any_device(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation of operator ``name``, whose last argument is its backend, for every device."""
    on_gpu, elsewhere = _on_its_device(run), _where_it_can(name, run)

    def wrapped(*arguments: Any) -> Any:
        return (on_gpu if _device_of(arguments).type == "cuda" else elsewhere)(*arguments)

    return wrapped


def dispatched(operation: str, launcher: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's implementation: ``reference`` with the backend torch, else that launcher of ``operation``."""

    def run(*arguments: Any) -> Any:
        *given, backend = arguments
        return (reference if backend == "torch" else getattr(kernels_of(operation, backend), launcher))(*given)

    return run


def _where_it_can(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """On a CPU there are PyTorch, C++ and Triton's interpreter. Every operator's last argument is its backend."""

    def wrapped(*arguments: Any) -> Any:
        backend = arguments[-1]
        if backend not in ("torch", "cpp") and not (backend == "triton" and interpreted()):
            hint = "; TRITON_INTERPRET=1 in the environment interprets it" if backend == "triton" else ""
            raise RuntimeError(f"the {backend} kernel of {name} needs a CUDA device, this tensor is on a CPU{hint}")
        return run(*arguments)

    return wrapped


def _on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Launchers use the current device's stream; a tensor may be on another one."""

    def wrapped(*arguments: Any) -> Any:
        if arguments[-1] == "cpp":  # it would read a GPU's addresses as the host's
            raise RuntimeError("the cpp kernels are for CPUs, and this tensor is on a GPU")
        with torch.cuda.device(_device_of(arguments)):
            return run(*arguments)

    return wrapped


def _device_of(arguments: Sequence[Any]) -> torch.device:
    """Device of the first argument, a tensor or a list of tensors."""
    first = arguments[0]
    return torch.device((first[0] if isinstance(first, list) else first).device)


@cache
def kernels_of(operation: str, backend: str) -> Any:
    """The module with the launchers of ``operation`` in ``backend``, such as ``smp.kernels.triton.rope``."""
    # Only when a kernel is used: without triton the import fails.
    return importlib.import_module(f"smp.kernels.{backend}.{operation}")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)
