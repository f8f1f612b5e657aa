"""Samples with images: every shape of them gives the same tokens, and what is broken is named, line by line."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp.data.tuning.build import chat_template_of
from smp.data.tuning.encode import within
from smp.data.tuning.files import read_records
from smp.data.tuning.images import IMAGE_MARK
from smp.data.tuning.processor import open_processor
from smp.data.tuning.samples import Report, Samples, collect
from smp.data.tuning.tokenizer import open_tokenizer
from smp.data.tuning.vision import ImageProcessor, VisionEncoder

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from tests.training.tiny_vision import MAKERS, save_processor  # noqa: E402  (needs both)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    save_processor(MAKERS["qwen2_5_vl"]()[1], folder)
    picture().save(folder / "ok.png")
    return folder


def picture(mode: str = "RGB", size: tuple[int, int] = (48, 40)) -> Any:
    return Image.new(mode, size, 1)


def data_of(image: Any, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def encoder_of(folder: Path, **options: Any) -> VisionEncoder:
    tokenizer = open_tokenizer(folder)
    template = chat_template_of(None, tokenizer, IMAGE_MARK)
    assert template is not None
    processor = ImageProcessor(open_processor(folder), template)
    return VisionEncoder(tokenizer, template, processor, None, **options)


def read(folder: Path, rows: list[dict[str, Any]], threshold: float = 1.0, **options: Any) -> tuple[Samples, Report]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_file(folder, folder / "rows.jsonl", threshold, **options)


def read_file(folder: Path, file: Path, threshold: float = 1.0, **options: Any) -> tuple[Samples, Report]:
    limits: dict[str, Any] = {"seq_length": 200, "vocab_size": 320, "keep_end": False} | options
    encode = limits.pop("encode", None) or encoder_of(folder).sample
    return collect(read_records([str(file)]), encode, threshold=threshold, images=True, **limits)


def asked(*parts: Any, text: str = "what is it?") -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a red circle"}]}


def path(name: str) -> dict[str, str]:
    return {"type": "image", "path": name}


def llava(text: str, *images: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "a red circle"}]
    return {"conversations": turns, "images": list(images)}


def test_every_shape_of_an_image_gives_the_same_sample(folder: Path) -> None:
    code = base64.b64encode((folder / "ok.png").read_bytes()).decode()
    url = f"data:image/png;base64,{code}"
    rows = [
        asked(path("ok.png")),
        asked({"type": "image", "image": f"{folder}/ok.png"}),
        asked({"type": "image", "url": f"file://{folder}/ok.png"}),
        asked({"type": "image_url", "image_url": {"url": url}}),
        asked({"type": "input_image", "image_url": url}),
        asked({"type": "image", "base64": code}),
        asked({"type": "image"}) | {"images": ["ok.png"]},
        asked({"type": "image"}) | {"image": "ok.png"},
        llava("<image>\nwhat is it?", "ok.png"),
    ]
    samples, report = read(folder, rows, 0.0)
    first = samples[0]
    for i in range(1, len(rows)):
        assert np.array_equal(samples[i][0], first[0]) and np.array_equal(samples[i][1], first[1]), i
    assert len(report.images) == len(rows) and "held in memory" in " ".join(report.lines())
    said = encoder_of(folder).tokenizer.decode(first[0][first[1]].tolist())
    assert said == "a red circle<|im_end|>"


def test_the_added_beginning_is_neither_answer_nor_image(folder: Path) -> None:
    """Also where one of them begins the text."""
    encoder = encoder_of(folder)
    encoder.tokenizer.before = [7]
    ids, offsets = encoder._ids("a red circle", special=True)
    assert ids[0] == 7 and within(offsets, [(0, 12)]) == [False] + [True] * (len(ids) - 1)


def test_a_table_holds_bytes(folder: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    images = [[{"bytes": (folder / "ok.png").read_bytes(), "path": None}]]
    turns = [[{"role": "user", "content": "<image>what is it?"}, {"role": "assistant", "content": "a red circle"}]]
    parquet.write_table(arrow.table({"messages": turns, "images": images}), folder / "rows.parquet")
    samples, report = read_file(folder, folder / "rows.parquet", 0.0)
    whole, _ = read(folder, [asked(path("ok.png"))], 0.0)
    assert np.array_equal(samples[0][0], whole[0][0])
    assert report.images[0].data is not None and report.images[0].path is None


def test_several_images_keep_their_order_and_only_answers_are_trained(folder: Path) -> None:
    picture(size=(112, 56)).save(folder / "wide.png")
    row = asked(path("ok.png"), path("wide.png"), text="and now?")
    row["messages"] += [
        {"role": "user", "content": [path("ok.png"), {"type": "text", "text": "the third?"}]},
        {"role": "assistant", "content": "a blue square"},
    ]
    samples, _ = read(folder, [row], 0.0)
    encoder = encoder_of(folder)
    ids, trained = samples[0]
    assert encoder.tokenizer.decode(ids[trained].tolist()) == "a red circle<|im_end|>a blue square<|im_end|>"
    every = encoder_of(folder, mask_prompt=False)
    everything, _ = read(folder, [row], 0.0, encode=every.sample)
    kept = encoder.tokenizer.decode(everything[0][0][everything[0][1]].tolist())
    assert "image_pad" not in kept and "the third?" in kept, "images are never trained"
    assert samples.shown is not None and samples.shown[0] is not None
    assert [image.path for image in samples.shown[0].images] == [folder / n for n in ("ok.png", "wide.png", "ok.png")]


def test_pictures_of_other_modes_are_converted_and_counted(folder: Path) -> None:
    for mode, form in (("CMYK", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("L", "JPEG"), ("1", "PNG")):
        (folder / f"{mode}.img").write_bytes(data_of(picture(mode), form))
    _, report = read(folder, [asked(path(f"{mode}.img")) for mode in ("CMYK", "RGBA", "P", "L", "1")], 0.0)
    assert "5 converted to RGB" in " ".join(report.lines())


def test_an_upright_picture_is_what_its_camera_says(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = data_of(picture(size=(112, 56)), "JPEG", exif=exif)
    (folder / "turned.jpg").write_bytes(turned)
    samples, _ = read(folder, [asked(path("turned.jpg"))], 0.0)
    assert samples.shown is not None and samples.shown[0] is not None
    assert samples.shown[0].images[0].read().size == (56, 112)


Broken = tuple[Callable[[Path], dict[str, Any]], str]


def written(name: str, data: Callable[[], bytes]) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        (folder / name).write_bytes(data())
        return asked(path(name))

    return make


def of(row: dict[str, Any]) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: row


def animated() -> bytes:
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "green", "blue")]
    return data_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


def empty_png() -> bytes:
    """A header that says 0 x 0."""
    whole = bytearray(data_of(picture()))
    whole[16:24] = bytes(8)
    return bytes(whole)


BROKEN: dict[str, Broken] = {
    "missing file": (of(asked(path("none.png"))), "none.png cannot be read: No such file"),
    "a folder": (of(asked(path("."))), "cannot be read: Is a directory"),
    "truncated JPEG": (
        written("cut.jpg", lambda: data_of(picture(), "JPEG")[:-40]),
        "cannot be decoded: image file is truncated",
    ),
    "damaged PNG": (
        written("crc.png", lambda: data_of(picture())[:60] + b"xxxx" + data_of(picture())[64:]),
        "cannot be decoded",
    ),
    "0 x 0": (written("zero.png", empty_png), "cannot be decoded"),
    "empty file": (written("empty.png", bytes), "is empty"),
    "text": (written("text.png", lambda: b"no picture"), "cannot be decoded: cannot identify image file"),
    "animated": (written("moves.gif", animated), "is animated (3 frames)"),
    "huge": (
        written("huge.png", lambda: data_of(picture("1", (10_000, 10_000)))),
        "has 10000 x 10000 pixels, more than",
    ),
    "16 bits": (written("deep.png", lambda: data_of(picture("I;16"))), "has pixels of type I;16"),
    "very wide": (written("line.png", lambda: data_of(picture(size=(6000, 4)))), "refuses it: absolute aspect ratio"),
    "a URL": (
        of(asked({"type": "image", "url": "https://example.org/a.png"})),
        "is a URL (https://example.org/a.png): download it",
    ),
    "not base64": (of(asked({"type": "image", "base64": "?"})), "what should be base64 is not"),
    "data URL of text": (of(asked({"type": "image", "url": "data:image/png;base64,YWJj"})), "cannot be decoded"),
    "a number": (of(asked({"type": "image", "image": 7})), "is neither a path, nor a data URL, nor bytes"),
    "more places": (of(llava("<image>\n<image>\nwhat is it?", "ok.png")), "more places for images"),
    "more images": (
        of(llava("<image>\nwhat is it?", "ok.png", "ok.png")),
        "it has 2 images under images, and places for 1",
    ),
    "no images": (of(llava("<image>\nwhat is it?")), "than the 0 under images"),
    "no place": (of(llava("what is it?", "ok.png")), "it has 1 image under images, and places for 0"),
    "no source": (of(asked({"type": "image"})), "more places for images"),
    "a video": (of(asked({"type": "video", "path": "a.mp4"})), "a content part of type video"),
    "shown by the assistant": (
        of({"messages": [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [path("ok.png")]}]}),
        "the assistant shows an image",
    ),
    "a placeholder": (of(asked(text="say <|image_pad|>")), "it says <|image_pad|>, which stands for an image"),
    "a placeholder beside an image": (of(asked(path("ok.png"), text="say <|image_pad|>")), "2 times <|image_pad|>"),
    "a mark": (of(asked(text=f"say {IMAGE_MARK}")), "U+FDD5"),
    "texts": (of({"prompt": "<image>", "completion": "it", "images": ["ok.png"]}), "images need messages"),
    "longer than a sequence": (of(asked(*[path("ok.png")] * 70)), "would cut them: give a larger --seq-length"),
}


def test_what_is_broken_is_named_line_by_line(folder: Path) -> None:
    rows = [make(folder) for make, _ in BROKEN.values()]
    _, report = read(folder, [*rows, asked(path("ok.png"))])
    used = {f"{folder}/rows.jsonl:{i}" for i in range(1, len(BROKEN) + 1)} - {where for where, _ in report.bad}
    assert not used and report.used == 1 and len(BROKEN) >= 20
    for number, ((where, why), (name, (_, said))) in enumerate(zip(report.bad, BROKEN.items(), strict=True), start=1):
        assert where == f"{folder}/rows.jsonl:{number}", name
        assert said in why and "\n" not in why, (name, why)
    with pytest.raises(ValueError, match=r"27 of 28 samples cannot be used.*rows.jsonl:1: image .*none.png"):
        read(folder, [*rows, asked(path("ok.png"))], 0.5)


def test_a_text_is_cut_behind_its_images(folder: Path) -> None:
    row = asked(path("ok.png"), text="why? " * 3)
    row["messages"][1]["content"] = "a red circle " * 30
    samples, report = read(folder, [row], 0.0, seq_length=50)
    assert report.truncated == 1 and len(samples[0][0]) == 51
    _, report = read(folder, [row, asked(text="no image")], seq_length=50, keep_end=True)
    assert "its images take tokens" in report.bad[0][1] and "its last 51 would cut them" in report.bad[0][1]
