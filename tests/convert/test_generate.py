"""tools/generate.py: greedy tokens are those of transformers, whatever the format; and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.convert.formats import Format, open_checkpoint
from smp.generation import Generator, Request, Sampling
from smp.generation.sampling import choose
from smp.layers import VocabShard
from smp.parallel.collectives import Group
from tests.convert.conversion import convert
from tests.convert.tiny import DELTA_RULES, HYBRID, SPARSE, STATE_SPACE, TINY, save_theirs, their_model
from tests.distributed import run_distributed
from tests.training.tiny_hf import write_adapter, write_model, write_pieces, write_tokenizer
from tools.generate import end_ids, load_model, main, stream

pytest.importorskip("transformers")
Run = Callable[..., tuple[int, str, str]]
PROMPT, COUNT = [5, 17, 80, 3, 41, 9], 64
FAST = [
    *("llama3", "llama-mqa", "qwen3-yarn", "gpt2", "neox", "gemma2", "bloom", "phi3-long", "cohere2", "falcon"),
    *("mixtral", "deepseek-v2", "deepseek-v3", "gpt-oss", "llama4-scout"),
]
"""Each kind of positions, of attention and of what is kept of it. Logits of all are compared in test_logits.py."""
HYBRIDS = [*HYBRID, *STATE_SPACE, *DELTA_RULES, *SPARSE]
SLOW = [kind for kind in TINY if kind not in (*FAST, *HYBRIDS, "llama-dynamic")]
WITHOUT_CACHE = ("falcon-h1-norm", "mamba2")
"""Whose texts transformers writes without a cache: with one its steps leave out ``time_step_limit`` (5.23)."""
MONOTONOUS = ("gemma2", "gemma3", "bloom")
"""Tied models of random weights, which say a token or two again and again. That their cache changes nothing is tested
with weights that say more, in tests/generation/test_generator.py."""


def greedy(rank: int, world: int, folders: list[str]) -> list[list[int]]:
    out = []
    for folder in folders:
        model = load_model(open_checkpoint(Path(folder)), torch.device("cpu"))
        out.append(next(Generator(model).write([Request(PROMPT, COUNT)], Sampling(temperature=0))).ids)
    return out


def theirs(kind: str) -> list[int]:
    settings: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"use_cache": kind not in WITHOUT_CACHE}
    return their_model(kind).generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    "kinds",
    [FAST, *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in (SLOW, HYBRIDS))],
    ids=["fast", "slow", "hybrids"],
)
def test_greedy_tokens_are_theirs(tmp_path: Path, kinds: list[str]) -> None:
    folders = {kind: str(save_theirs(kind, tmp_path / kind)) for kind in kinds}
    (found,) = run_distributed(greedy, 1, list(folders.values()))
    for kind, ours in zip(kinds, found, strict=True):
        assert len(ours) == COUNT and (len(set(ours)) > 2 or kind in MONOTONOUS)
        assert ours == theirs(kind), kind


def beyond(rank: int, world: int, folder: str) -> list[int]:
    """Of a model that takes more positions than its file says: tokens of a text that grows past them."""
    model = load_model(open_checkpoint(Path(folder)), torch.device("cpu"))
    model.config = replace(model.config, max_position_embeddings=128)
    return next(Generator(model).write([Request(PROMPT, COUNT)], Sampling(temperature=0))).ids


def test_dynamic_rope_is_that_of_whole_sequences(tmp_path: Path) -> None:
    """transformers without a cache: with one it keeps keys that were rotated for a shorter text."""
    folder, model = save_theirs("llama-dynamic", tmp_path), their_model("llama-dynamic")
    settings: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(torch.tensor([PROMPT]), use_cache=False, **settings)[0, len(PROMPT) :].tolist()
    (found,) = run_distributed(beyond, 1, str(folder))
    assert found == wanted and len(set(found)) > 2
    (short,) = run_distributed(greedy, 1, [str(folder)])
    assert short[0] == wanted[: 24 - len(PROMPT)], "the model's own length ends it"


def test_every_format_gives_the_same_tokens(tmp_path: Path) -> None:
    source = save_theirs("qwen3", tmp_path / "hf")
    kinds: list[Format] = ["smp", "megatron"]
    folders = [source, *(convert(source, tmp_path / kind, kind) for kind in kinds)]
    (found,) = run_distributed(greedy, 1, [str(folder) for folder in folders])
    assert found[0] == found[1] == found[2] == theirs("qwen3")


def tokenizer(folder: Path) -> None:
    """Of words w3 ... w98, with <s> in front of every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 99)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command: exit code, output, errors."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_command_prints_what_the_model_writes(run: Run, tmp_path: Path) -> None:
    source = save_theirs("llama3", tmp_path / "hf")
    tokenizer(source)
    ours = convert(source, tmp_path / "smp", "smp")
    ids = [1, 5, 17]
    wanted = their_model("llama3").generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)[0].tolist()
    code, out, error = run("--load", ours, "--prompt", "w5 w17", "--max-new-tokens", "9", "--temperature", "0")
    assert (code, out.strip()) == (0, " ".join(f"w{i}" for i in wanted[1:] if i > 2)), error
    assert "longest sequence" not in error
    _, _, error = run("--load", ours, "--prompt", " ".join(["w5"] * 120), "--max-new-tokens", "50")
    assert "note: the longest sequence of this model, 128 tokens, ends here" in error


def test_an_adapter_writes_what_peft_writes(run: Run, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base, adapter = tmp_path / "hf", tmp_path / "adapter"
    write_tokenizer(base)
    write_model(base)
    write_adapter(base, adapter, target_modules="all-linear", r=4)
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), str(adapter))
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids = tokenizer("what is", return_tensors="pt").input_ids
    wanted = tokenizer.decode(model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0])
    greedy = ["--prompt", "what is", "--max-new-tokens", "12", "--temperature", "0"]
    code, out, error = run("--load", base, "--adapter", adapter, *greedy)
    assert (code, out) == (0, wanted.removesuffix("<|im_end|>") + "\n"), error
    assert "adapters are merged" in error
    assert run("--load", base, *greedy)[1] != out
    other = tmp_path / "other"
    write_tokenizer(other)
    write_model(other, layers=2)
    code, _, error = run("--load", other, "--adapter", adapter, *greedy)
    assert code == 2 and error.splitlines()[-1].endswith(
        "model.layers.2.mlp.down_proj is no linear layer of this model"
    )


def test_chat_answers_through_the_template(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two messages: the second answer follows the whole conversation, as transformers writes it."""
    import io

    transformers = pytest.importorskip("transformers")
    base = tmp_path / "hf"
    write_tokenizer(base)
    write_model(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    messages: list[dict[str, str]] = []
    wanted = []
    for text in ("what is", "one"):
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
        new = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        wanted.append(tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": wanted[-1]})
    flags = ["--load", base, "--chat", "--max-new-tokens", "5", "--temperature", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("what is\n\none\n"))
    code, out, error = run(*flags)
    assert (code, out) == (0, "".join(f"{answer}\n" for answer in wanted)), error
    assert run(*flags, "--prompt", "what is")[1] == wanted[0] + "\n"
    write_tokenizer(base, template=None)
    code, _, error = run(*flags)
    assert (code, error) == (2, f"error: --chat: {base} has no chat template\n")
    pieces = tmp_path / "pieces" / "tokenizer.model"
    write_pieces(pieces)
    for given in (pieces, pieces.parent):
        code, _, error = run(*flags, "--tokenizer-model", given)
        said = f"error: {pieces} is a sentencepiece model: --chat needs a folder with tokenizer.json\n"
        assert (code, error) == (2, said)


def test_sampling_flags_change_what_is_written(run: Run, tmp_path: Path) -> None:
    source = save_theirs("llama3", tmp_path / "hf")
    tokenizer(source)
    common = ["--load", source, "--prompt", "w5 w17", "--max-new-tokens", "12"]
    flags = [
        ["--temperature", "1.5"],
        ["--temperature", "1.5", "--seed", "1"],
        ["--temperature", "1.5", "--top-k", "2"],
    ]
    flags += [["--temperature", "1.5", "--top-k", "0", "--top-p", "0.3"], ["--temperature", "0.1"]]
    outputs = [run(*common, *more)[1] for more in flags]
    assert len(set(outputs)) == len(flags) and all(outputs)
    assert run(*common, *flags[0])[1] == outputs[0]
    assert run(*common, *flags[0], "--dtype", "fp32")[1] == outputs[0]
    assert outputs[0].startswith(run(*common, *flags[0], "--max-new-tokens", "3")[1].rstrip())


def test_weights_have_the_dtype_that_is_asked_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_theirs("llama3", tmp_path / "hf")
    tokenizer(source)
    dtypes = []

    def noted(model: Any, **named: Any) -> Any:
        dtypes.append({p.dtype for p in model.parameters()})
        return Generator(model, **named)

    monkeypatch.setattr("tools.generate.Generator", noted)
    for dtype in ("fp32", "bf16"):
        code, out, error = run("--load", source, "--prompt", "w5", "--max-new-tokens", "2", "--dtype", dtype)
        assert code == 0 and out
        assert ("note: weights are float32 in the files and bfloat16 here" in error) == (dtype == "bf16")
    assert dtypes == [{torch.float32}, {torch.bfloat16}]


def test_choices_are_those_of_transformers() -> None:
    """The order of temperature, top-k and top-p, and which of the likeliest tokens are left."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    generator, shard = torch.Generator().manual_seed(0), VocabShard.of(Group("alone", 1, 0), 20, 20)
    for temperature, k, p in ((0.7, 5, 0.8), (2.0, 0, 0.6), (1.0, 3, 1.0), (1.3, 20, 0.95)):
        logits = torch.randn(20, generator=generator) * 2
        warped = TemperatureLogitsWarper(temperature)(None, logits[None])
        warped = warped if k == 0 else TopKLogitsWarper(k)(None, warped)
        warped = TopPLogitsWarper(p)(None, warped)
        theirs = warped[0].softmax(-1)
        sampling = Sampling(temperature, k, p)
        keys = sampling.key(0, 0) + torch.arange(3000)
        counts = choose(logits.expand(3000, -1), shard, sampling, keys).ids.bincount(minlength=20)
        assert not counts[theirs == 0].any()
        assert (counts / 3000 - theirs).abs().max() < 0.04


def test_many_texts_are_lines_in_the_order_of_their_prompts(run: Run, tmp_path: Path) -> None:
    """The same ones in batches of any size, and alone; --stop cuts them."""
    source, output = save_theirs("llama3", tmp_path / "hf"), tmp_path / "out.jsonl"
    tokenizer(source)
    (tmp_path / "p.txt").write_text("w5 w17\n\nw9\nw7 w7 w7 w8\n")
    (tmp_path / "p.jsonl").write_text("".join(f'{{"q": "{q}"}}\n' for q in ("w5 w17", "w9", "w7 w7 w7 w8")))
    common = ["--load", source, "--max-new-tokens", "8", "--temperature", "1.5"]
    many = [*common, "--num-samples", "3", "--prompts", tmp_path / "p.txt"]
    code, out, error = run(*many)
    texts = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [(t["prompt"], t["sample"]) for t in texts] == [(i, k) for i in range(3) for k in range(3)], (
        error
    )
    assert len({t["text"] for t in texts}) == 9 and all(t["tokens"] == 8 and t["finish"] == "length" for t in texts)
    code, out, error = run(
        *many[:-2], "--prompts", tmp_path / "p.jsonl", "--json-key", "q", "--batch-size", "2", "--output", output
    )
    assert (code, out) == (0, ""), error
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [t["text"] for t in again] == [t["text"] for t in texts]
    one = run(*common, "--prompt", "w5 w17")[1]
    assert one.strip() == f"w5 w17 {texts[0]['text']}"
    stop = texts[0]["text"].split()[4]
    cut = texts[0]["text"].split(f" {stop}")[0]
    assert run(*common, "--prompt", "w5 w17", "--stop", "??", stop)[1].strip() == f"w5 w17 {cut}"
    found = [json.loads(line) for line in run(*many, "--stop", stop)[1].splitlines()]
    assert (
        found[0]["text"].strip() == cut and found[0]["finish"] == "string" and all(stop not in t["text"] for t in found)
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature and top-k must not be negative"),
        (["--top-p", "nan"], "top-p must be above 0 and at most 1"),
        (["--num-samples", "0"], "--num-samples and --batch-size must be 1 or more"),
        (["--stop", ""], "--stop '' would end every text"),
        (["--prompt", "a", "--prompts", "b.txt"], "give --prompt or --prompts, not both"),
        (["--json-key", "q"], "--json-key has no effect without --prompts"),
        (["--chat", "--num-samples", "2"], "--num-samples and --output need --prompt or --prompts"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        ([], "neither tokenizer.json nor tokenizer.model in this folder, as after an export without a tokenizer"),
        (["--chat"], "put the files of its tokenizer there, or name a folder that has them by --tokenizer-model"),
        (["--tokenizer-model", "nowhere.json"], "nowhere.json is not a tokenizer.json"),
        (["--reference", "nowhere"], "--reference nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, run: Run, tmp_path: Path) -> None:
    source = save_theirs("llama3", tmp_path / "hf")
    run("--load", "nowhere")  # also empties what transformers said
    code, _, error = run("--load", source, *flags)
    assert code == 2 and error.startswith("error: ") and message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "w5 " * 200], "the prompt has 201 tokens, this model takes 1 to 128"),
        (["--prompt", "w5", "--max-new-tokens", "-1"], "-1 new tokens cannot be"),
    ],
)
def test_what_cannot_be_continued_is_one_line(flags: list[str], message: str, run: Run, tmp_path: Path) -> None:
    source = save_theirs("llama3", tmp_path / "hf")
    tokenizer(source)
    run("--load", "nowhere")
    code, out, error = run("--load", source, *flags)
    assert (code, out) == (2, "") and error.startswith("error: ") and message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("text", ["[1]", "{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [2, 5]}', "{}"])
def test_what_ends_a_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    if text in ("{", '{"eos_token_id": "</s>"}'):
        with pytest.raises(
            ValueError, match=r"generation_config.json(: eos_token_id '</s>' is no| is damaged or cut off)"
        ):
            end_ids(tmp_path)
    else:
        assert end_ids(tmp_path) == ([2, 5] if "[2" in text else [7])


def test_characters_appear_when_they_are_complete() -> None:
    text = "naïve €".encode()
    shown: list[str] = []
    stream(text[2:], list(text[:2]), lambda ids: bytes(ids).decode(errors="replace"), shown.append)
    assert "".join(shown) == "ïve €"
    assert [part for part in shown if part] == ["ï", "v", "e", " ", "€"]
