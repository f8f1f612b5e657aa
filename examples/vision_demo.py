"""Teach a small vision-language model to name shapes and colours, on pictures that this script draws.

    python examples/vision_demo.py [FOLDER]

It writes a tokenizer, a processor, a random LLaVA of 0.3 million parameters and 1,200 samples to FOLDER (vision_demo),
trains on two processes with ``finetune.py``, loads what that leaves by transformers alone, and asks it about pictures
that it has not seen. Nothing is downloaded. It needs ``transformers`` and ``pillow``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 70), "blue": (50, 70, 220), "yellow": (235, 205, 50)}
SHAPES = ("circle", "square", "triangle")
QUESTION = "what is in the picture?"
SIDE, PATCH = 56, 14
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>\n{% else %}{{ p['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def draw(number: int) -> tuple[Any, str]:
    """Picture ``number`` and what is in it."""
    chance = random.Random(number)
    colour, shape = chance.choice(list(COLOURS)), chance.choice(SHAPES)
    picture = Image.new("RGB", (SIDE, SIDE), (245, 245, 245))
    size = chance.randint(24, 36)
    x, y = (chance.randint(2, SIDE - size - 2) for _ in range(2))
    box, pen = (x, y, x + size, y + size), ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=COLOURS[colour])
    return picture, f"a {colour} {shape}"


def asked(**image: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", **image}, {"type": "text", "text": QUESTION}]}]


def write_samples(folder: Path, count: int) -> None:
    """samples.jsonl, and a file for each picture."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        picture, name = draw(i)
        picture.save(folder / f"pictures/{i}.png")
        messages = [*asked(path=f"pictures/{i}.png"), {"role": "assistant", "content": name}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (folder / "samples.jsonl").write_text("".join(lines))


def write_model(folder: Path) -> None:
    """A LLaVA of random weights, with its processor."""
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<image>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [f"user\n{QUESTION} assistant\na {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    words.train_from_iterator(texts * 4, trainer)
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    images = hf.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = hf.LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    processor.chat_template = TEMPLATE
    tower = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tower, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "pad_token_id": 3}
    config = hf.LlavaConfig(
        text_config={"model_type": "llama", "bos_token_id": 0, "eos_token_id": 2, **text},
        vision_config={"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, **tower},
        image_token_index=special.index("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    hf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def train(folder: Path, words: list[str]) -> None:
    program = Path(__file__).resolve().parents[1] / "finetune.py"
    settings = (
        f"--load {folder}/model --data-path {folder}/samples.jsonl --packing off --seq-length 64 --micro-batch-size 16 "
        f"--global-batch-size 32 --train-iters 250 --lr 2e-3 --lr-warmup-iters 20 --log-interval 25 "
        f"--log-dir {folder}/logs --save {folder}/run --save-hf"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, str(program), *settings.split(), *words], check=True)


@torch.no_grad()
def score(folder: Path, first: int, count: int) -> float:
    """Which part of ``count`` pictures from number ``first`` on a model names right."""
    import transformers as hf

    model = hf.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor, right = hf.AutoProcessor.from_pretrained(folder), 0
    for i in range(first, first + count):
        picture, name = draw(i)
        text = processor.apply_chat_template(asked(), add_generation_prompt=True)
        inputs = processor(text=[text], images=[picture], return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        said = processor.tokenizer.decode(ids, skip_special_tokens=True).strip()
        right += said == name
        if i < first + 5:
            print(f"picture {i}: {name}; the model says: {said}")
    return right / count


def main(argv: list[str]) -> None:
    folder = Path(argv[0] if argv and not argv[0].startswith("-") else "vision_demo")
    write_samples(folder, 1200)
    write_model(folder / "model")
    train(folder, argv[1:])
    print(f"named right, of 100 that it has not seen: {100 * score(folder / 'run/hf_model', 10_000, 100):.0f} %")


if __name__ == "__main__":
    main(sys.argv[1:])
