"""What a compiler makes of an ``autograd.Function``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend


class Outputs:
    """A backend that notes, of each ``autograd.Function``, the outputs that are another value of its forward pass, too:
    torch 2.11 loses their gradients (see :func:`smp.kernels.returned.returned`).

    Attributes:
        shared: their names.
        functions: number of those that were looked at.
    """

    def __init__(self, backend: str = "aot_eager") -> None:
        self.then: Callable[..., Any] = lookup_backend(backend)
        self.shared: list[str] = []
        self.functions = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for module in graph.modules():
            calls = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()
            for call in (node for node in calls if "autograd_function_apply" in str(node.target)):
                self._look_at(getattr(module, call.args[0].target).graph, call)
        return self.then(graph, inputs)

    def _look_at(self, forward: torch.fx.Graph, call: torch.fx.Node) -> None:
        self.functions += 1
        outputs, _ = forward.output_node().args[0]  # and what is kept
        # What is used: torch 2.11 adds others.
        used = [outputs[user.args[1]] for user in call.users if user.target is operator.getitem]
        values = [id(node.meta.get("example_value")) for node in forward.nodes]
        self.shared += [str(node) for node in used if values.count(id(node.meta["example_value"])) > 1]
