"""Vision-language models: what of them is trained, and where images are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VisionConfig:
    """Vision-language models: which of their parts are trained, and where images are."""

    freeze_vision_model: bool = False
    """Leave the part as it is that sees images."""
    freeze_projector: bool = False
    """Leave the part as it is that brings features of images to the width of the language model."""
    freeze_language_model: bool = False
    """Leave the decoder as it is, with its embedding and output matrix."""
    image_folder: str | None = None
    """Folder that relative paths of images begin at. Default: that of the file of samples which names them."""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parts that stay as they are."""
        return tuple(p for p in ("vision_model", "projector", "language_model") if getattr(self, f"freeze_{p}"))
