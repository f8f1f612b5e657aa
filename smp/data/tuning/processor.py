"""The processor of a Hugging Face folder: images and a rendered text to a vision-language model's inputs.

transformers makes the video part of a processor only where torchvision is installed. Nothing here needs that part, so
without torchvision the same class is made of its tokenizer and its image processor alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.commands import pip_install

FILES = ("processor_config.json", "preprocessor_config.json")
"""Every folder with a processor has one of them."""


def open_processor(folder: str | Path) -> Any:
    """transformers' processor of a folder.

    Raises:
        ConfigError: there is none, it cannot be made, or it takes no images.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in FILES):
        raise ConfigError(
            f"--load {folder} has no processor ({' or '.join(FILES)}), which a vision-language model needs: save it "
            "into the folder by transformers' AutoProcessor"
        )
    try:
        import PIL.Image  # noqa: F401
        from transformers import AutoProcessor
    except ImportError as missing:
        raise ConfigError(f"images need {missing.name}: {pip_install('pillow', 'transformers')}") from None
    # AutoProcessor would fail on video processors, which need torchvision.
    made = _tried(folder, lambda: AutoProcessor.from_pretrained(folder) if _has_torchvision() else _of_images(folder))
    if getattr(made, "image_processor", None) is None or not hasattr(made, "tokenizer"):
        raise ConfigError(f"--load {folder}: {type(made).__name__} takes no images with text")
    return made


def image_class(kind: type) -> Any:
    """A subclass of a processor that takes None for parts other than tokenizer and image processor."""
    # ProcessorMixin's constructor checks the class of each part by this method; here any class will
    # do.
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})


def _of_images(folder: Path) -> Any:
    """The processor without the parts that need torchvision."""
    import transformers

    name = _class_name(folder)
    kind = getattr(transformers, name or "", None)
    if kind is None:
        raise ValueError(f"it names no processor of transformers ({name})")
    files, _ = kind.get_processor_dict(str(folder))
    parts = {
        "image_processor": transformers.AutoImageProcessor.from_pretrained(folder),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    # Positional, in the order of the class's attributes.
    return image_class(kind).from_args_and_dict([parts.get(part) for part in kind.get_attributes()], files)


def _class_name(folder: Path) -> str | None:
    # Newer folders name it in processor_config.json, older ones in either of the others.
    for file in (*FILES, "tokenizer_config.json"):
        if (folder / file).is_file():
            named = json.loads((folder / file).read_text("utf-8")).get("processor_class")
            if named:
                return str(named)
    return None


def _has_torchvision() -> bool:
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


def _tried(folder: Path, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ImportError as missing:
        said = " ".join(str(missing).split())[:200]
        raise ConfigError(f"--load {folder}: its processor needs what is not installed: {said}") from None
    except Exception as error:  # of any kind: each class reads its own files
        raise ConfigError(
            f"--load {folder}: its processor cannot be made: {' '.join(str(error).split())[:300]}"
        ) from None
