"""A part of the decoder: the layers of one pipeline stage. Imports no torch, so that it works on a login node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelPart:
    """Layers ``first`` to ``first + count - 1``, and whether the ends of the model belong to it.

    ``embedding`` is the token and position embedding, ``head`` the final norm, the output layer and the loss.
    """

    first: int
    count: int
    embedding: bool = False
    head: bool = False

    def __str__(self) -> str:
        # A list times a boolean: the word, or nothing.
        names = ["embedding"] * self.embedding
        names += [f"layers {self.first}-{self.first + self.count - 1}"] if self.count > 1 else []
        names += [f"layer {self.first}"] if self.count == 1 else []
        names += ["head"] * self.head
        return ", ".join(names) or "nothing"

    @property
    def layers(self) -> range:
        """Global numbers of its layers."""
        return range(self.first, self.first + self.count)


def whole(num_layers: int) -> ModelPart:
    """The part that is the whole decoder."""
    return ModelPart(0, num_layers, embedding=True, head=True)
