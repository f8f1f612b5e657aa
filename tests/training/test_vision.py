"""Vision-language models train as in a plain loop of transformers with its own processor, in every layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from smp.config import ConfigError
from smp.hf.run.documents import refuse_new_cache
from smp.models.foreign import vision_part
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE
from tests.programs import run_program
from tests.training.any_model_lab import LR, largest_error, tune_types
from tests.training.flag_runs import clean_process, proves
from tests.training.tiny_vision import MAKERS, write_vision_type
from tests.training.tuning_lab import together
from tests.training.vision_lab import load, vision_loop
from tests.training.vision_table import cell, measure, noise

pytest.importorskip("transformers")
pytest.importorskip("PIL")

ROOT = Path(__file__).resolve().parents[2]
COMMON = (
    f"--seq-length 256 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd --weight-decay 0 "
    "--train-iters 5 --model-implementation transformers"
)
LAYOUTS = {
    "alone": (1, ""),
    "packed": (1, "--packing best-fit"),
    "frozen": (1, "--freeze-vision-model --freeze-projector"),
    "projector": (1, "--freeze-vision-model --freeze-language-model"),
    "LoRA": (1, "--lora-rank 4"),
    "shard 2": (2, "--recompute-granularity full"),
    "tp 2": (2, "--tensor-model-parallel-size 2"),
    "LoRA, tp 2": (2, "--lora-rank 4 --tensor-model-parallel-size 2"),
    "frozen, shard 2": (2, "--freeze-vision-model --freeze-projector"),
    "bf16, shard 2": (2, "--bf16"),
}
KIND = "qwen2_5_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_type(tmp_path_factory.mktemp("vision") / KIND, KIND)


def flags_of(folder: Path, more: str) -> str:
    more = more if "--packing" in more else f"--packing off {more}"
    return f"--load {folder} --data-path {folder}/vl.jsonl --log-dir {folder}/logs {COMMON} {more}"


Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    out: Runs = {}
    for world in (1, 2):
        here = [layout for layout, (processes, _) in LAYOUTS.items() if processes == world]
        ranks = run_distributed(tune_types, world, [flags_of(folder, LAYOUTS[layout][1]) for layout in here])
        for i, layout in enumerate(here):
            every = [r[i] for r in ranks]
            out[layout] = every[0] if "refused" in every[0] else together(every)
    return out


@pytest.mark.parametrize("more", ["", "--freeze-vision-model --freeze-projector"])
def test_llama_4_equals_a_plain_loop(more: str, tmp_path: Path) -> None:
    """Its processor gives pixels in 16 bits, its language model has layers of experts and attention in chunks."""
    pytest.importorskip("torchvision")
    folder = write_vision_type(tmp_path / "llama4", "llama4")
    ((run,),) = run_distributed(tune_types, 1, [flags_of(folder, more)])
    frozen = ("vision_model", "multi_modal_projector") if more else ()
    errors = largest_error(run, vision_loop(folder, run["batches"], frozen))
    assert max(errors.values()) <= TOLERANCE, errors


def test_a_run_equals_a_plain_loop_of_transformers(runs: Runs, folder: Path) -> None:
    want = vision_loop(folder, runs["alone"]["batches"])
    assert len(set(want["losses"])) == 5
    for layout in ("alone", "shard 2", "tp 2"):
        errors = largest_error(runs[layout], want)
        assert max(errors.values()) <= TOLERANCE, (layout, errors)
    packed = runs["packed"]
    assert max(len(b.document_ids.unique()) for step in packed["batches"] for b in step) > 2
    assert max(largest_error(packed, vision_loop(folder, packed["batches"])).values()) <= TOLERANCE
    near = max(abs(a - b) / b for a, b in zip(runs["bf16, shard 2"]["losses"], want["losses"], strict=True))
    assert near < 0.02


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_models_that_do_not_name_use_cache_keep_packed_documents_apart(kind: str, tmp_path: Path) -> None:
    """With a cache, which they made where nobody said use_cache, transformers makes masks that know of no documents."""
    folder = write_vision_type(tmp_path / kind, kind)
    flags = flags_of(folder, "--packing best-fit --recompute-granularity full --train-iters 2")
    ((run,),) = run_distributed(tune_types, 1, [flags])
    assert max(len(b.document_ids.unique()) for step in run["batches"] for b in step) > 2
    assert max(largest_error(run, vision_loop(folder, run["batches"])).values()) <= TOLERANCE


def test_a_decoder_that_would_make_a_cache_in_training_is_refused(folder: Path) -> None:
    decoder = load(folder).get_decoder()
    decoder.register_forward_pre_hook(refuse_new_cache, with_kwargs=True)
    with pytest.raises(ConfigError, match="Qwen2_5_VLTextModel makes a cache of keys and values in training"):
        decoder(torch.zeros(1, 4, dtype=torch.long))
    decoder(torch.zeros(1, 4, dtype=torch.long), use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_every_type_equals_a_plain_loop(kind: str, tmp_path: Path) -> None:
    for column, error in measure([kind], tmp_path)[kind].items():
        if isinstance(error, str):
            assert cell(error).startswith(("refused", "not measured")), (column, error)
        else:
            assert error <= max(TOLERANCE, 10 * noise(tmp_path / kind)), (column, error)


def test_some_micro_batches_have_no_image_and_others_several(runs: Runs) -> None:
    batches = [batch for step in runs["alone"]["batches"] for batch in step]
    assert any(batch.images.filler is not None for batch in batches), "one stands in, so that ranks do the same"
    assert max(len(batch.images.values["image_grid_thw"]) for batch in batches) > 2


@proves("freeze_vision_model", "freeze_projector")
def test_frozen_parts_stay_as_they_are(runs: Runs, folder: Path) -> None:
    want = vision_loop(folder, runs["frozen"]["batches"], frozen=["visual."])
    assert {vision_part(name) for name in want["final"]} == {"language_model"}
    for layout in ("frozen", "frozen, shard 2"):
        assert max(largest_error(runs[layout], want).values()) <= TOLERANCE, layout


PARTS_OF = {
    "model.vision_tower.embeddings.patch_embeddings.projection.weight": "vision_model",  # InternVL
    "model.vision_tower.encoder.layer.0.attention.projection_layer.weight": "vision_model",
    "model.vision_tower.patch_embed.projection.weight": "vision_model",  # GOT-OCR 2
    "model.image_tower.encoder.layers.0.mlp.fc1.weight": "vision_model",  # Video-LLaVA
    "model.visual.patch_embed.proj.weight": "vision_model",
    "model.visual.merger.mlp.0.weight": "projector",
    "model.visual.deepstack_merger_list.0.norm.weight": "projector",
    "vision_model.vision_adapter.mlp.fc1.weight": "projector",  # Llama 4
    "model.vision_projection.linear_1.weight": "projector",  # LightOnOCR
    "model.embed_vision.embedding_projection.weight": "projector",  # Gemma 4
    "model.resampler_model.mlp.weight": "projector",  # Ernie 4.5 VL
    "model.image_newline": "projector",  # LLaVA-NeXT
    "model.language_model.layers.1.mlp.vision_moe.experts.gate_up_proj": "language_model",  # Ernie 4.5 VL
    "model.language_model.per_layer_model_projection.weight": "language_model",  # Gemma 4
    "lm_head.weight": "language_model",
}


@pytest.mark.parametrize("name", PARTS_OF)
def test_parts_that_are_frozen_are_told_by_their_names(name: str) -> None:
    assert vision_part(name) == PARTS_OF[name]


def test_a_frozen_tower_is_frozen_to_its_last_parameter(tmp_path: Path) -> None:
    """InternVL's has layers that are called projection, in front of it and in each of its blocks."""
    folder = write_vision_type(tmp_path / "internvl", "internvl")
    ((run,),) = run_distributed(tune_types, 1, [flags_of(folder, "--freeze-vision-model --train-iters 1")])
    names = {name for name, _ in load(folder).named_parameters()}
    assert run["final"].keys() == {name for name in names if not name.startswith("model.vision_tower")}


def test_other_frozen_parts_are_refused_on_a_resume(folder: Path, tmp_path: Path) -> None:
    flags = flags_of(folder, f"--save {tmp_path} --train-iters 2")
    words = [
        f"{flags} --freeze-projector --exit-interval 1",
        f"{flags} --resume",
        f"{flags} --resume --freeze-projector",
    ]
    ((_, other, same),) = run_distributed(tune_types, 1, words)
    assert (
        "was saved with --freeze-projector, and its optimizer has a state only for what was trained" in other["refused"]
    )
    assert len(same["losses"]) == 1


def test_experts_of_a_model_with_images_are_spread_over_ranks(tmp_path: Path) -> None:
    folder = write_vision_type(tmp_path / "qwen3_vl_moe", "qwen3_vl_moe")
    flags = flags_of(folder, "--packing off --train-iters 2")
    ((alone,),) = run_distributed(tune_types, 1, [flags])
    ranks = run_distributed(tune_types, 2, [f"{flags} --expert-model-parallel-size 2"])
    errors = largest_error(together([rank[0] for rank in ranks]), vision_loop(folder, alone["batches"]))
    assert max(errors.values()) <= TOLERANCE, errors


def test_a_line_says_what_is_trained(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"{flags_of(folder, '--freeze-vision-model --train-iters 1')} --log-dir {tmp_path} --no-tensorboard"
    with clean_process():
        assert finetune.main(words.split()) == 0
    sizes = {name: p.numel() for name, p in load(folder).named_parameters()}
    trained = sum(size for name, size in sizes.items() if vision_part(name) != "vision_model")
    assert f"trained parameters: {trained:,} of {sum(sizes.values()):,}" in capfd.readouterr().out


def test_adapters_are_on_the_language_model_and_equal_those_on_two_ranks(runs: Runs) -> None:
    one, two = runs["LoRA"], runs["LoRA, tp 2"]
    assert max(largest_error(two, one).values()) <= TOLERANCE
    assert all(name.startswith("model.language_model.layers.") for name in one["final"])
    assert {name.split(".")[-3] for name in one["final"]} >= {"q_proj", "down_proj"}


def run_on_two(folder: Path, words: list[str]) -> str:
    done = run_program(ROOT / "finetune.py", words, folder, 2)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_goes_on_in_another_layout_and_ends_as_a_folder_with_a_processor(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process's runs are in this one, which has imported what models with images need: seconds of each start."""

    def words(more: str) -> list[str]:
        quiet = f"--log-dir {tmp_path}/logs --no-tensorboard --no-progress-bar --log-interval 1"
        return f"{flags_of(folder, more)} {quiet}".split()

    with clean_process():
        assert finetune.main(words(f"--save {tmp_path}/whole --save-hf")) == 0
        assert "images: 32" in capfd.readouterr().out
        assert finetune.main(words(f"--save {tmp_path}/same --exit-interval 3")) == 0
        assert finetune.main(words(f"--save {tmp_path}/same --resume --save-hf")) == 0
        assert "at iteration 3" in capfd.readouterr().out
    run_on_two(tmp_path, words(f"--save {tmp_path}/other --exit-interval 3 --tensor-model-parallel-size 2"))
    assert "at iteration 3" in run_on_two(tmp_path, words(f"--save {tmp_path}/other --resume --save-hf"))
    whole, same, other = (load(tmp_path / name / "hf_model").state_dict() for name in ("whole", "same", "other"))
    assert whole.keys() == load(folder).state_dict().keys()
    for name, tensor in whole.items():
        assert torch.equal(same[name], tensor), name
        assert (other[name] - tensor).norm() <= TOLERANCE * tensor.norm().clamp(min=1e-3), name
    files = {path.name for path in (tmp_path / "whole/hf_model").iterdir()}
    assert files >= {"config.json", "preprocessor_config.json", "processor_config.json", "chat_template.jinja"}


@proves("image_folder")
def test_images_are_found_in_a_folder_of_their_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vl.jsonl").write_text((folder / "vl.jsonl").read_text())
    argv = flags_of(folder, "").replace(f"{folder}/vl.jsonl", f"{tmp_path}/vl.jsonl")
    with pytest.raises(ConfigError, match=r"vl.jsonl:2: image .*1-0.png cannot be read"):
        read_finetune_settings(argv.split(), 1)
    _, data = read_finetune_settings([*argv.split(), "--image-folder", str(folder)], 1)
    assert data is not None and "images: 32" in data.lines


@proves("freeze_language_model")
def test_a_frozen_language_model_leaves_the_projector_to_train(runs: Runs) -> None:
    names = set(runs["projector"]["final"])
    assert {vision_part(name) for name in names} == {"projector"} and runs["projector"]["losses"][1:] != runs["alone"][
        "losses"
    ][1:]
    assert len(set(runs["projector"]["losses"])) == 5


REFUSED = {
    "--objective dpo": "--objective dpo: --load is a vision-language model",
    "--compile": "--compile: --load is a vision-language model",
    "--lora-rank 2 --freeze-projector": "--freeze-projector: with adapters",
    "--freeze-vision-model --freeze-projector --freeze-language-model": "nothing is left to train",
    "--image-folder nowhere": "--image-folder nowhere: there is no such folder",
}


def test_what_does_not_go_with_images_is_refused_by_name(folder: Path) -> None:
    for words, said in REFUSED.items():
        argv = flags_of(folder, words)
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_finetune_settings(argv.split(), 1)
