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
    **{"num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 2},
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


def tokenizer_of(special: list[str], **named: Any) -> Any:
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
    old = kind.startswith("qwen2")
    sizes = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 8} if old else {}
    side = 14 if old else 16
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
    elif kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    else:
        vision |= {"num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0]} if "qwen3_vl" in kind else {}
    if "qwen3_5" in kind:
        text |= {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_interleaved": True}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    if kind.endswith("_moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        text |= {"shared_expert_intermediate_size": 24} if "qwen3_5" in kind else {}
    config_class, processor = {
        "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLProcessor),
        "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLProcessor),
        "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLProcessor),
        "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLProcessor),
        "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3VLProcessor),
        "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3VLProcessor),
    }[kind]
    config = config_class(text_config=text, vision_config=vision, **_ids(ids))
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


def _text(**more: Any) -> dict[str, Any]:
    return {**TEXT, "vocab_size": 320, "pad_token_id": 3, **more}


_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _chat(place: str) -> str:
    return TEMPLATE.replace("IMAGE", place)


def _llava() -> Made:
    import transformers as hf

    tokenizer = tokenizer_of(["<image>"])
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    vision = {"model_type": "clip_vision_model", **_TOWER, "image_size": 28, "patch_size": 14}
    config = hf.LlavaConfig(
        text_config={"model_type": "llama", **_text()},
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    kind = image_class(hf.LlavaProcessor)
    made = kind(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    made.chat_template = _chat("<image>\n")
    return config, made


def _gemma3() -> Made:
    import transformers as hf

    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = tokenizer_of(list(names.values()), extra_special_tokens=names)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}
    for name, number in ids.items():
        setattr(tokenizer, name, number)
    siglip = {"image_size": 28, "patch_size": 7, "vision_use_head": False}  # as in Google's
    images = hf.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    config = hf.Gemma3Config(
        text_config=_text(head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
        vision_config={"model_type": "siglip_vision_model", **_TOWER, **siglip},
        mm_tokens_per_image=4,
        boi_token_index=ids["boi_token_id"],
        eoi_token_index=ids["eoi_token_id"],
        image_token_index=ids["image_token_id"],
    )
    made = image_class(hf.Gemma3Processor)(images, tokenizer, image_seq_length=4)
    made.chat_template = _chat("<start_of_image>")
    return config, made


def _idefics3(kind: str) -> Made:
    import transformers as hf

    special = ["<image>", "<fake_token_around_image>", "<global-img>"]
    tokenizer = tokenizer_of(special)
    smol = kind == "smolvlm"
    images = (hf.SmolVLMImageProcessorPil if smol else hf.Idefics3ImageProcessorPil)(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True
    )
    sizes = {
        "vision_config": {**_TOWER, "image_size": 28, "patch_size": 7},
        "text_config": {"model_type": "llama", **_text()},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
        "pad_token_id": 3,
    }
    config = hf.SmolVLMConfig(**sizes) if smol else hf.Idefics3Config(**sizes)
    made = image_class(hf.SmolVLMProcessor if smol else hf.Idefics3Processor)(
        *([images, tokenizer, None] if smol else [images, tokenizer]), image_seq_len=4
    )
    made.chat_template = _chat("<image>")
    return config, made


def _mllama() -> Made:
    import transformers as hf

    tokenizer = tokenizer_of(["<|image|>"])
    images = hf.MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=2)
    vision = {**_TOWER, "num_global_layers": 1, "attention_heads": 4, "image_size": 28, "patch_size": 14}
    vision |= {"max_num_tiles": 2, "intermediate_layers_indices": [0], "vision_output_dim": 64}
    vision |= {"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
    text = _text(cross_attention_layers=[1], num_hidden_layers=3)
    token = tokenizer.convert_tokens_to_ids("<|image|>")
    # as Meta's: the placeholder is behind the output matrix's rows
    config = hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=token)
    made = image_class(hf.MllamaProcessor)(images, tokenizer)
    made.chat_template = "{{ bos_token }}" + _chat("<|image|>")  # the processor writes it, else
    return config, made


def _llama4() -> Made:
    """Its processor needs torchvision."""
    import transformers as hf

    special = ["<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>"]
    tokenizer = tokenizer_of([*special, "<|tile_y_separator|>"])
    images = hf.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=2)
    vision = {**_TOWER, "intermediate_size": 128, "image_size": 28, "patch_size": 7, "vision_output_dim": 64}
    vision |= {"projector_input_dim": 64, "projector_output_dim": 64}
    text = _text(head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=32)
    config = hf.Llama4Config(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>")
    )
    made = image_class(hf.Llama4Processor)(images, tokenizer, patch_size=7)
    made.chat_template = _chat("<|image|>")
    return config, made


def _internvl() -> Made:
    import transformers as hf

    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = tokenizer_of(list(names.values()), extra_special_tokens=names)
    for name, text in names.items():
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
    images = hf.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=False)
    vision = {**_TOWER, "image_size": [28, 28], "patch_size": [7, 7], "use_mean_pooling": True}
    config = hf.InternVLConfig(
        vision_config=vision,
        text_config={"model_type": "qwen2", **_text()},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    made = image_class(hf.InternVLProcessor)(images, tokenizer, None, image_seq_length=4)
    made.chat_template = _chat("<IMG_CONTEXT>\n")
    return config, made


def _mistral3() -> Made:
    import transformers as hf

    tokenizer = tokenizer_of(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    images = hf.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14})
    vision = {"model_type": "pixtral", **_TOWER, "head_dim": 8, "image_size": 56, "patch_size": 7}
    config = hf.Mistral3Config(
        vision_config=vision,
        text_config={"model_type": "mistral", **_text(head_dim=8)},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    made = image_class(hf.PixtralProcessor)(images, tokenizer, patch_size=7, spatial_merge_size=2)
    made.chat_template = _chat("[IMG]")
    return config, made


def _glm4v(kind: str) -> Made:
    import transformers as hf

    special = [
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|video|>",
    ]
    tokenizer = tokenizer_of(special)
    ids = dict(zip(special, tokenizer.convert_tokens_to_ids(special), strict=True))
    images = hf.Glm4vImageProcessorPil(patch_size=14, size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 16})
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 14, "image_size": 56, "out_hidden_size": 32}
    text = _text(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]})
    if kind == "glm4v_moe":
        text |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
        text |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
    config = (hf.Glm4vMoeConfig if kind == "glm4v_moe" else hf.Glm4vConfig)(
        vision_config={**vision, "intermediate_size": 48},
        text_config=text,
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
    )
    made = image_class(hf.Glm4vProcessor)(images, tokenizer, None)
    made.chat_template = _chat("<|begin_of_image|><|image|><|end_of_image|>")
    return config, made


def _gemma4(kind: str) -> Made:
    """Its two sorts: dense with embeddings per layer and keys that later layers reuse, or with experts."""
    import transformers as hf

    names = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    names |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    tokenizer = tokenizer_of([*names.values(), "<|video|>"], extra_special_tokens=names)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(text) for name, text in names.items()}
    for name, number in ids.items():
        setattr(tokenizer, name, number)
    # 70 is the smallest number of soft tokens that it takes: pictures of up to 70 * 2 * 2 patches
    images = hf.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    vision = {**_TOWER, "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "patch_size": 4}
    sorts = ["sliding_attention", "full_attention"] * 2
    text = _text(head_dim=8, global_head_dim=16, sliding_window=16, num_hidden_layers=4, layer_types=sorts)
    text |= {"vocab_size_per_layer_input": 320, "use_bidirectional_attention": "vision"}
    if kind == "gemma4_moe":
        text |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
        text |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
    else:
        text |= {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    config = hf.Gemma4Config(
        text_config=text,
        vision_config={**vision, "position_embedding_size": 64},
        audio_config=None,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        **{("eoa_token_index" if name == "eoa_token_id" else name): number for name, number in ids.items()},
    )
    made = image_class(hf.Gemma4Processor)(None, images, tokenizer, None, image_seq_length=70)
    made.chat_template = _chat("<|image|>")
    return config, made


def _llava_next(kind: str) -> Made:
    import transformers as hf

    tokenizer = tokenizer_of(["<image>", "<video>"])
    one = kind == "llava_onevision"
    grid = [[28, 28], [28, 56], [56, 28]]
    sizes: dict[str, Any] = {"image_grid_pinpoints": grid}
    images = (
        hf.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, **sizes)
        if one
        else hf.LlavaNextImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, **sizes)
    )
    tower = "siglip_vision_model" if one else "clip_vision_model"
    vision = {"model_type": tower, **_TOWER, "image_size": 28, "patch_size": 14}
    vision |= {"vision_use_head": False} if one else {}
    named = {"vision_feature_select_strategy": "full" if one else "default", "vision_feature_layer": -1}
    config = (hf.LlavaOnevisionConfig if one else hf.LlavaNextConfig)(
        text_config={"model_type": "qwen2" if one else "llama", **_text()},
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=grid,
        **({"video_token_index": tokenizer.convert_tokens_to_ids("<video>")} if one else {}),
        **named,
    )
    strategy = named["vision_feature_select_strategy"]
    if one:
        made = image_class(hf.LlavaOnevisionProcessor)(
            images, tokenizer, None, num_image_tokens=4, vision_feature_select_strategy=strategy
        )
    else:
        made = image_class(hf.LlavaNextProcessor)(
            images, tokenizer, patch_size=14, vision_feature_select_strategy=strategy, num_additional_image_tokens=1
        )
    made.chat_template = _chat("<image>\n")
    return config, made


MAKERS: dict[str, Callable[[], Made]] = {
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "qwen3_vl_moe": lambda: _qwen("qwen3_vl_moe"),
    "qwen3_5": lambda: _qwen("qwen3_5"),
    "qwen3_5_moe": lambda: _qwen("qwen3_5_moe"),
    "llava": _llava,
    "llava_next": lambda: _llava_next("llava_next"),
    "llava_onevision": lambda: _llava_next("llava_onevision"),
    "gemma3": _gemma3,
    "gemma4": lambda: _gemma4("gemma4"),
    "gemma4_moe": lambda: _gemma4("gemma4_moe"),
    "idefics3": lambda: _idefics3("idefics3"),
    "smolvlm": lambda: _idefics3("smolvlm"),
    "mllama": _mllama,
    "llama4": _llama4,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "glm4v": lambda: _glm4v("glm4v"),
    "glm4v_moe": lambda: _glm4v("glm4v_moe"),
}


def write_vision_type(folder: Path, kind: str) -> Path:
    """A folder with a tiny model of a ``model_type``, its processor, pictures and samples; returns it."""
    from transformers import AutoModelForImageTextToText

    config, processor = MAKERS[kind]()
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that every part shows in the loss; Gemma 4 amplifies rounding then, by 1e3 in five steps.
            if parameter.ndim > 1 and not kind.startswith("gemma4"):
                parameter.mul_(3.0)
            elif parameter.numel() == 1:  # a gate, which is closed in the beginning
                parameter.fill_(0.7)
    model.save_pretrained(folder)
    save_processor(processor, folder)
    write_pictures(folder)
    return folder


_SETTINGS = (
    *("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "image_seq_length"),
    *("image_seq_len", "spatial_merge_size", "num_image_tokens"),
)
"""What some classes of processors take beside their parts."""


def save_processor(processor: Any, folder: Path) -> None:
    """Part by part: transformers saves a processor without its video part not as a whole."""
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    settings = {name: value for name in _SETTINGS if (value := getattr(processor, name, None)) is not None}
    settings["processor_class"] = type(processor).__name__
    (folder / "processor_config.json").write_text(json.dumps(settings))


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
