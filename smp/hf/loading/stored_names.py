"""Tensors of a Hugging Face folder as parameters of a model: what transformers renames, merges and splits on loading.

A folder has the names of the first publication: ``experts.7.w1.weight``, where the model has one stack ``gate_up_proj``
of all experts. The rules are transformers' own, by class and model type (``transformers.conversion_mapping``); they run
on the tensors of one rule at a time. Of a stack of experts a rank reads those that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from smp.checkpoint import CheckpointError
from smp.hf.loading.twins import twin_of

Read = Callable[[str], torch.Tensor]
"""Returns a stored tensor, whole, on the CPU."""


@dataclass
class Source:
    """Stored tensors that become one or several of the model's.

    Attributes:
        targets: names in the model.
        stored: names in the files, by the pattern of the rule that they match, in transformers' order.
        rule: of transformers; None: one tensor, under this name or another one.
    """

    targets: tuple[str, ...]
    stored: dict[str, list[str]] = field(default_factory=dict)
    rule: Any = None

    def stacks(self, shape: torch.Size) -> bool:
        """Whether each row of a target of ``shape`` is made of one stored tensor of each pattern, so that a rank can
        read only its rows."""
        # Any other operation may mix rows, and needs all of them.
        from transformers import core_model_loading as loading

        first, *others = self.rule.operations
        inside = all(
            (isinstance(op, loading.Concatenate) and op.dim > 0)
            or (isinstance(op, loading.Transpose) and 0 not in (op.dim0, op.dim1))
            for op in others
        )
        stacks = isinstance(first, loading.MergeModulelist) and first.dim == 0 and len(self.targets) == 1
        return stacks and inside and all(len(names) == shape[0] for names in self.stored.values())

    def made(self, twin: Any, read: Read, rows: slice) -> dict[str, torch.Tensor]:
        """The targets by name: whole, or of a stack the given rows.

        Args:
            twin: of the model, whole.
            read: all of a stored tensor, in the model's dtype.
            rows: of a stack.

        Raises:
            CheckpointError: transformers' rule does not fit what is stored.
        """
        # A rule collects tensors: each use needs a fresh one.
        rule = deepcopy(self.rule)
        for pattern, names in self.stored.items():
            # Only the stored tensors of the wanted rows are read.
            for name in names[rows]:
                rule.add_tensor(self.targets[0], name, pattern, partial(read, name))
        try:
            found = rule.convert(self.targets[0], model=twin, config=twin.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as wrong:
            every = [name for names in self.stored.values() for name in names]
            raise CheckpointError(
                f"{self.targets[0]}: transformers' rule fails for the {len(every)} tensors {every[0]} ...: "
                f"{type(wrong).__name__}: {str(wrong).splitlines()[0]}"
            ) from wrong
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def rules_of(twin: Any, legacy: bool = True) -> list[Any]:
    """transformers' rules for the model of ``twin``; of models that are not transformers' none.

    Args:
        legacy: with those for names of older versions, which are read and not written.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(twin, add_legacy=legacy) if isinstance(twin, PreTrainedModel) else []


def written_by(model: nn.Module) -> None:
    """Let ``save_pretrained`` of ``model`` write the names that its class has in folders. A model that was not loaded
    has no rules for it, and after ``fully_shard`` its class is not one that transformers knows."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import PrefixChange

    if isinstance(model, PreTrainedModel) and getattr(model, "_weight_conversions", None) is None:
        rules = [rule for rule in rules_of(twin_of(model), legacy=False) if not isinstance(rule, PrefixChange)]
        model._weight_conversions = rules  # type: ignore[assignment]


def sources_of(twin: Any, rules: Iterable[Any], stored: Collection[str]) -> list[Source]:
    """The sources of the tensors of ``twin``'s model, found as transformers does; stored tensors that match nothing are
    left out."""
    from transformers import core_model_loading as loading

    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known, prefix = twin.state_dict(keep_vars=True), getattr(twin, "base_model_prefix", None)
    sources: dict[str, Source] = {}
    # Natural order: experts.2 before experts.10, as rows of a stack.
    for name in sorted(stored, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        # A rule may also match a name that is the model's already: then without rules.
        if target not in known and name in known:
            target, pattern = loading.rename_source_key(name, [], [], prefix, known)
        if target not in known:
            continue
        rule = None if pattern is None else by_pattern[pattern]
        source = sources.setdefault(target, Source(_targets(target, rule), rule=rule))
        source.stored.setdefault(pattern or "", []).append(name)
    return list(sources.values())


def _targets(first: str, rule: Any) -> tuple[str, ...]:
    patterns = [""] if rule is None else rule.target_patterns
    return tuple(first.replace(patterns[0], pattern) for pattern in patterns)
