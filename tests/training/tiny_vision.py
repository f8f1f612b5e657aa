"""Tiny vision-language folders: random weights, a tokenizer and a processor of the type's own classes, and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smp.data.tuning.processor import image_class

TEXT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 2},
}
WORDS = ["what is in the picture", "a red circle and a blue square", "which one is green", "the second of them"]
PARTS = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n" + PARTS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with content parts; IMAGE stands for the placeholder."""


def tokenizer_of(special: list[str], **named: str) -> Any:
    """A byte-level BPE; the special tokens come first, ``named`` become attributes of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    first = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>", *special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=first, initial_alphabet=alphabet)
    made.train_from_iterator(WORDS * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>", **named
    )


Made = tuple[Any, Any]
"""(configuration, processor)."""


def _qwen(kind: str) -> Made:
    import transformers

    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = tokenizer_of(special)
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    sizes = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 8} if kind != "qwen3_vl" else {}
    side = 14 if kind != "qwen3_vl" else 16
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=side,
        size={"shortest_edge": (2 * side) ** 2, "longest_edge": (2 * side) ** 2 * 8},
        **sizes,
    )
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": side}
    vision |= {"spatial_merge_size": 2, "out_hidden_size": 32, "intermediate_size": 48}
    text = {**TEXT, "vocab_size": 320, "head_dim": 8}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    if kind == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 56}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_ids(ids))
        processor = transformers.Qwen2_5_VLProcessor
    elif kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_ids(ids))
        processor = transformers.Qwen2VLProcessor
    else:
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_ids(ids))
        processor = transformers.Qwen3VLProcessor
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    return config, image_class(processor)(images, tokenizer, None, chat_template=TEMPLATE.replace("IMAGE", place))


def _ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }


MAKERS: dict[str, Callable[[], Made]] = {
    **{kind: (lambda kind=kind: _qwen(kind)) for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
}


def write_vision_type(folder: Path, kind: str) -> Path:
    """A folder with a tiny model of a ``model_type``, its processor, pictures and samples; returns it."""
    from transformers import AutoModelForImageTextToText

    config, processor = MAKERS[kind]()
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough that every part shows in the loss
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    save_processor(processor, folder)
    write_pictures(folder)
    return folder


def save_processor(processor: Any, folder: Path) -> None:
    """Part by part: transformers saves a processor without its video part not as a whole."""
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": type(processor).__name__}))


COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220)}


def write_pictures(folder: Path, count: int = 24) -> None:
    """vl.jsonl: questions about 0 to 3 pictures, in Hugging Face's content parts and in LLaVA's shape."""
    from PIL import Image, ImageDraw

    rows = []
    names = list(COLOURS)
    for i in range(count):
        pictures = []
        for j in range((0, 1, 1, 2, 3)[i % 5]):
            picture = Image.new("RGB", (40 + 8 * (i % 4), 36 + 10 * (j % 3)), "white")
            ImageDraw.Draw(picture).rectangle((4, 4, 24 + j, 28), fill=COLOURS[names[(i + j) % 3]])
            pictures.append(f"{i}-{j}.png")
            picture.save(folder / pictures[-1])
        answer = f"the picture is {names[i % 3]}, " + "and so on " * (i % 3)
        if i % 2:
            asked = "".join("<image>\n" for _ in pictures) + f"what is in picture {i}?"
            turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
            rows.append({"conversations": turns, "images": pictures})
        else:
            parts: list[Any] = [{"type": "image", "path": name} for name in pictures]
            parts.append({"type": "text", "text": f"what is in picture {i}?"})
            said = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
            rows.append({"messages": [{"role": "user", "content": parts}, said]})
    (folder / "vl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
