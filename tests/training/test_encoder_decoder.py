"""An encoder of prompts with a decoder of answers (T5) trains as in a plain loop of transformers, in every layout."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import finetune
from smp.config import ConfigError
from smp.convert.huggingface.foreign import UNLIMITED, choose_model
from smp.data.tuning.apart import ApartEncoder
from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.messages import BadSampleError
from smp.data.tuning.tokenizer import open_tokenizer
from smp.hf.run.apart import Shift
from smp.models.foreign import parts_of
from smp.models.micro_batch import MicroBatch
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.hf import architectures
from tests.parity.result import TOLERANCE
from tests.training.any_model_lab import LR, largest_error, load, lora_loop, plain_loop, tune_types, write_type
from tests.training.flag_runs import clean_process
from tests.training.measured_memory import compare
from tests.training.tiny_hf import TEMPLATE
from tests.training.tuning_lab import together
from tools.generate import main as generate

transformers = pytest.importorskip("transformers")
CONFIG_MAPPING = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING

COMMON = (
    f"--seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd --weight-decay 0 "
    "--train-iters 3 --packing off"
)
LAYOUTS = {
    "alone": (1, ""),
    "validated": (1, "--eval-interval 3 --eval-iters 1"),
    "its dropout is off": (1, ""),
    "offloaded": (1, "--offload-activations --min-offloaded-tensor-size 1"),
    "offloaded and computed again": (1, "--offload-activations --recompute-granularity full"),
    "LoRA": (1, "--lora-rank 4 --lora-alpha 8"),
    "tp 2": (2, "--tensor-model-parallel-size 2"),
    "shard 2": (2, "--recompute-granularity full"),
    "replicas 2": (2, "--hybrid-shard-degree 1"),
    "LoRA, tp 2": (2, "--lora-rank 4 --lora-alpha 8 --tensor-model-parallel-size 2"),
}


def write_ends(folder: Path) -> None:
    """Let the tokenizer put its end token behind each text, as T5's does."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    end = {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    content["post_processor"] = {
        **{"type": "TemplateProcessing", "single": single, "pair": pair},
        "special_tokens": {"<|im_end|>": end},
    }
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_type(tmp_path_factory.mktemp("t5") / "t5", "t5")
    write_ends(made)
    return made


def with_dropout(folder: Path) -> Path:
    """The same folder, whose config.json has a dropout."""
    made = folder.with_name("dropout")
    shutil.copytree(folder, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "dropout_rate": 0.4}))
    return made


def flags_of(folder: Path, more: str) -> str:
    return f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {folder}/logs {COMMON} {more}"


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for world in (1, 2):
        here = [layout for layout, (processes, _) in LAYOUTS.items() if processes == world]
        folders = [with_dropout(folder) if "dropout" in layout else folder for layout in here]
        flags = [flags_of(of, LAYOUTS[layout][1]) for of, layout in zip(folders, here, strict=True)]
        ranks = run_distributed(tune_types, world, flags)
        for i, layout in enumerate(here):
            assert "refused" not in ranks[0][i], ranks[0][i]
            out[layout] = together([rank[i] for rank in ranks])
    return out


def test_a_run_equals_a_plain_loop_of_transformers(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    alone, adapted = runs["alone"], runs["LoRA"]
    whole, lora = plain_loop(folder, alone["batches"]), lora_loop(folder, adapted, scale=2.0)
    assert len(set(whole["losses"])) == 3 and runs["validated"]["validation"]
    assert {name.partition(".")[0] for name in lora["final"]} == {"encoder", "decoder"}, "adapters are in both"
    for layout, run in runs.items():
        errors = largest_error(run, lora if "LoRA" in layout else whole)
        assert max(errors.values()) <= TOLERANCE, (layout, errors)


def test_an_encoder_and_a_decoder_with_configurations_of_their_own(tmp_path: Path) -> None:
    """T5Gemma: layers with the name of Mllama's, which attend to images there; logits that are capped."""
    gemma = write_type(tmp_path / "t5gemma", "t5gemma")
    words = [flags_of(gemma, "--tensor-model-parallel-size 2"), flags_of(gemma, "--lora-rank 4 --lora-alpha 8")]
    ranks = run_distributed(tune_types, 2, words)
    cut, adapted = (together([rank[i] for rank in ranks]) for i in range(2))
    assert max(largest_error(cut, plain_loop(gemma, cut["batches"])).values()) <= TOLERANCE
    # Each of two ranks has read half of a batch.
    batches = [[*mine, *other] for mine, other in zip(*(rank[1]["batches"] for rank in ranks), strict=True)]
    want = lora_loop(gemma, adapted | {"batches": batches}, scale=2.0)
    assert max(largest_error(adapted, want).values()) <= TOLERANCE


def test_prompt_and_answer_are_the_tokens_that_transformers_gives(folder: Path) -> None:
    theirs, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    assert tokenizer.after == [tokenizer.eos]
    [(ids, trained)] = ApartEncoder(tokenizer, None, 0).sample({"prompt": "what is 7? ", "completion": "it is seven"})
    assert ids[~trained].tolist() == theirs("what is 7? ").input_ids
    assert ids[trained].tolist() == theirs(text_target="it is seven").input_ids
    turns = [{"role": "user", "content": "what is 7?"}, {"role": "assistant", "content": "seven"}]
    encoder = ApartEncoder(tokenizer, ChatTemplate(TEMPLATE, tokenizer.template_tokens), 0)
    [(ids, trained)] = encoder.sample({"messages": turns})
    assert tokenizer.decode(ids[trained].tolist()) == "seven<|im_end|>"
    assert tokenizer.decode(ids[~trained].tolist()).endswith("<|im_start|>assistant\n") and trained[-1]
    for record, said in (
        ({"messages": turns * 2}, "it has several answers"),
        ({"text": "it is seven"}, "an encoder reads a prompt, and its decoder gives the answer"),
    ):
        with pytest.raises(BadSampleError, match=said):
            encoder.sample(record)


def test_the_token_that_a_decoder_begins_with_is_not_repeated(folder: Path) -> None:
    """A tokenizer that puts one in front of texts (Gemma's), which T5Gemma's decoder begins with."""
    tokenizer = open_tokenizer(folder)
    tokenizer.before, tokenizer.after = [0], []
    [(ids, trained)] = ApartEncoder(tokenizer, None, 0).sample({"prompt": "a", "completion": "b"})
    assert ids.tolist() == [0, *tokenizer.encode("a"), *tokenizer.encode("b"), tokenizer.eos]
    assert trained.tolist() == [False, False, True, True]
    with pytest.raises(BadSampleError, match="its prompt is empty"):
        tokenizer.before = []
        ApartEncoder(tokenizer, None, 0).sample({"prompt": "", "completion": "b"})
    tokenizer.before = [0]
    [(ids, _)] = ApartEncoder(tokenizer, None, 2).sample({"prompt": "a", "completion": "b"})
    assert ids[2] == 0, "BART's answers begin with one that its decoder does not begin with"


def test_positions_that_a_type_does_not_read_limit_no_text() -> None:
    """T5's and FLAN-T5's files have an n_positions of 512, of the data that they were trained on."""
    t5 = choose_model({**transformers.T5Config().to_dict(), "n_positions": 512}, "config.json")
    assert t5.max_position_embeddings == UNLIMITED
    gpt = choose_model(transformers.GPT2Config(n_positions=96).to_dict(), "config.json", "transformers")
    assert gpt.max_position_embeddings == 96


def test_layers_of_both_parts_are_counted() -> None:
    for kind in ("t5", "t5gemma", "t5gemma2", "pegasus_x"):
        content = architectures.tiny(CONFIG_MAPPING[kind]).to_json_string(use_diff=False)
        model = choose_model(json.loads(content), "config.json")
        assert model.transformers_config is not None
        assert model.num_layers == len(parts_of(model.transformers_config).blocks), kind


def test_a_row_is_taken_apart_where_its_answer_begins(folder: Path) -> None:
    shift = Shift(load(folder))
    ids = torch.tensor([[5, 6, 7, 8, 9, 0], [5, 6, 7, 8, 2, 0], [1, 1, 1, 1, 1, 1]])
    labels = torch.tensor([[-100, -100, 8, 9, 2, -100], [6, 7, 8, 2, -100, -100], [-100] * 6])
    labels[1, :1], weights = -100, (labels >= 0).float() / 6
    weights[1, 0] = labels[1, 0] = 0
    labels[1, 0] = -100
    arguments, answers = shift.apart(MicroBatch(ids, labels=labels, loss_weights=weights))
    assert arguments["input_ids"].tolist() == [[5, 6, 7], [5, 6, 0], [1, 0, 0]]
    assert arguments["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert arguments["decoder_input_ids"].tolist() == [[0, 8, 9], [0, 7, 8], [0, 0, 0]]
    assert answers.labels is not None and answers.loss_weights is not None
    assert answers.labels.tolist() == [[8, 9, 2], [7, 8, 2], [-100, -100, -100]]
    assert answers.loss_weights.sum(1).tolist() == pytest.approx([0.5, 0.5, 0.0])


def test_adapters_are_those_of_peft_for_two_parts(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    words = f"{flags_of(folder, '--lora-rank 4 --no-tensorboard --no-progress-bar')} --save {tmp_path} --train-iters 1"
    with clean_process():
        assert finetune.main(words.split()) == 0
    assert "t5 as transformers computes it, 4 blocks" in capfd.readouterr().out
    model = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    assert model.peft_config["default"].task_type == "SEQ_2_SEQ_LM"
    assert sum(p.abs().sum() for name, p in model.named_parameters() if "lora_B" in name) > 0


def test_a_dry_run_tries_a_step_whose_rows_are_half_prompt_and_half_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Beside real steps on such rows, also of an embedding that four modules share; what it prints is a recipe."""
    made = write_type(tmp_path / "t5", "t5", num_layers=2, d_model=64)
    write_ends(made)
    rows = json.dumps({"prompt": "x" * 127, "completion": "x" * 128}) + "\n"
    (made / "even.jsonl").write_text(rows * 80)
    words = f"--load {made} --data-path {made}/even.jsonl --packing off --global-batch-size 4 --split 1,0,0"
    compare({1: [words, f"{words} --recompute-granularity full"]}, tmp_path, steps=1)
    capfd.readouterr()
    with clean_process():
        assert finetune.main(f"{words} --seq-length 256 --micro-batch-size 2 --dry-run".split()) == 0
    out = capfd.readouterr().out
    assert "half of a row's tokens are its prompt's" in out
    assert yaml.safe_load(out)["seq_length"] == 256


REFUSED = {
    "--objective orpo": "--objective orpo: the model is an encoder with a decoder, which read a prompt and its answer",
    "--packing best-fit": "--packing best-fit: the model is an encoder with a decoder",
    "--truncation-side left": "--truncation-side left: the model is an encoder with a decoder",
    "--no-mask-prompt": "--no-mask-prompt: the model is an encoder with a decoder",
    "--tensor-model-parallel-size 2 --sequence-parallel": "--sequence-parallel: the model is an encoder with a decoder",
    "--compile": "--compile: the model is an encoder with a decoder, which read a prompt and its answer apart, of",
    "--lora-rank 2 --lora-dropout 0.1": "--lora-dropout 0.1: masks go by tokens of one sequence",
}


def test_what_needs_one_sequence_is_refused_by_name(folder: Path) -> None:
    for words, said in REFUSED.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_finetune_settings(flags_of(folder, words).split(), 2)


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_other_encoders_with_a_decoder_are_refused_with_the_reason(implementation: str) -> None:
    for name, said in {
        "MBartConfig": "the tokenizer of mbart marks languages",
        "MarianConfig": "the tokenizer of marian has a model for each language",
        "ProphetNetConfig": "prophetnet learns several next tokens at once",
        "WhisperConfig": "whisper is an encoder with a decoder, and does not read texts alone",
    }.items():
        content = getattr(transformers, name)().to_dict()
        if implementation == "auto" and name == "WhisperConfig":
            said = "whisper"
        with pytest.raises(ConfigError, match=said):
            choose_model(content, "config.json", implementation)


def test_it_is_trained_and_not_used_by_tools(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(["--load", str(folder), "--prompt", "a"]) != 0
    assert "the tools write no texts with an encoder and a decoder" in capsys.readouterr().err
