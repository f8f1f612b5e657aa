"""How much of a model a plan cuts: printed by every ``transform``, a warning where a rank has a tenth more than its
share, an error where nothing is cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from smp.config.schema import ConfigError
from smp.hf.planning.module_plan import Plan
from smp.hf.planning.rows import pattern_of

MOST = 1.1
"""Warn when a rank has more than this multiple of its share of the parameters."""


@dataclass(frozen=True)
class Share:
    """Numbers of parameters (elements), shared ones counted once.

    Attributes:
        total, cut: of the model, and of what each rank has a part of.
        stacks: the same two numbers of each list of layers, by the pattern of its layers; vectors are not counted.
    """

    total: int
    cut: int
    stacks: dict[str, tuple[int, int]]

    @staticmethod
    def of(model: nn.Module, plan: Plan) -> Share:
        """The share that ``plan`` cuts of ``model``, which is not cut yet."""
        total = cut = 0
        stacks: dict[str, tuple[int, int]] = {}
        seen: set[int] = set()
        for name, module in model.named_modules():
            for own, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                step = plan.steps.get(name)
                part = 0 if step is None or step.cuts.get(own) is None else parameter.numel()
                total, cut = total + parameter.numel(), cut + part
                # A stack's key is the name up to the first layer number. Vectors are left out:
                # norms are whole everywhere.
                before, star, _ = pattern_of(f"{name}.{own}").partition(".*")
                if star and parameter.ndim > 1:
                    whole, known = stacks.get(f"{before}.*", (0, 0))
                    stacks[f"{before}.*"] = whole + parameter.numel(), known + part
        return Share(total, cut, stacks)

    @property
    def fraction(self) -> float:
        """Share of the elements that are cut, 0 to 1."""
        return self.cut / max(self.total, 1)

    def check(self, model: nn.Module, allowed: bool) -> None:
        """Raise ConfigError where nothing of the largest stack's matrices is cut and ``allowed`` is False.

        Raises:
            ConfigError: none is, and nobody has allowed that.
        """
        if self.stacks and not allowed and not self._largest_is_cut():
            raise ConfigError(
                f"{type(model).__name__}: nothing of {self._largest()} is cut, every rank would compute all of these "
                "layers: give transform(model, rows={...}) that cut them (docs/transform.md), or "
                "allow_whole_layers=True"
            )

    def _largest(self) -> str:
        return max(self.stacks, key=lambda stack: self.stacks[stack][0])

    def _largest_is_cut(self) -> bool:
        return self.stacks[self._largest()][1] > 0

    def lines(self, ranks: int) -> list[str]:
        """Lines for the user."""
        own = self.total - self.cut + self.cut // ranks
        said = [f"{self.fraction:.0%} of {self.total:,} parameters are cut, a rank has {own:,}"]
        layers, cut = (sum(numbers) for numbers in zip(*self.stacks.values(), strict=True)) if self.stacks else (0, 0)
        if self.fraction < 0.5 or cut < layers / 2:
            whole = [stack for stack, (_, part) in self.stacks.items() if part == 0]
            of_layers = f", {cut / layers:.0%} of the layers' matrices" if layers else ""
            nothing = f"; nothing of {', '.join(whole)}" if whole else ""
            said.append(
                f"warning: less than a half is cut ({self.fraction:.0%} of all{of_layers}{nothing}): memory and time "
                "of the rest are those of one process on every rank"
            )
        elif own * ranks > MOST * self.total:
            said.append(
                f"warning: a rank has {own / self.total:.0%} of the parameters, and 1/{ranks} of them is "
                f"{1 / ranks:.0%}: what is not cut is whole on every rank"
            )
        return said
