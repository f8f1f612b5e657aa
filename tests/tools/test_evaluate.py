"""tools/evaluate.py: perplexity and the harness's requests give transformers' numbers."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from smp.data.tuning.tokenizer import open_tokenizer
from smp.models.scoring import windows
from smp.training.texts.evaluation import TextScorer, harness_model
from smp.training.texts.text_model import alone, folder_tokenizer, load_model, open_model
from tests.training.tiny_hf import WORDS, write_adapter, write_model, write_pieces, write_tokenizer
from tools.convert_checkpoint import main as convert
from tools.evaluate import main

transformers = pytest.importorskip("transformers")
LENGTH, STRIDE = 24, 10
TEXTS = [" ".join(WORDS * n) for n in (1, 3, 4)] + ["é", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path, layers=2)
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def theirs(folder: Path) -> tuple[Any, Any]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """Of the tokens from the second on, fp64."""
    logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_windows_score_each_token_once_with_as_much_before_it_as_fits() -> None:
    assert list(windows(1, 4, 2)) == [] and list(windows(3, 4, 2)) == [(0, 1, 3)]
    assert list(windows(11, 4, 4)) == [(0, 1, 5), (4, 5, 9), (6, 9, 11)]
    for count, length, stride in ((50, 7, 3), (20, 5, 1), (33, 8, 8)):
        found = list(windows(count, length, stride))
        assert [n for w in found for n in range(w.scored, w.end)] == list(range(1, count))
        assert all(w.begin < w.scored and w.end - 1 - w.begin <= length for w in found)
        assert all(w.begin == max(0, w.end - 1 - length) for w in found)


def perplexity_of_theirs(folder: Path) -> tuple[float, int, int]:
    """(log-probability, tokens, bytes) by windows as docs/evaluation.md states them."""
    model, tokenizer = theirs(folder)
    total, tokens = 0.0, 0
    for text in TEXTS:
        ids = [tokenizer.bos_token_id, *tokenizer.encode(text)]
        scored = 1
        while scored < len(ids):
            end = min(len(ids), scored + (LENGTH if scored == 1 else STRIDE))
            total += float(log_probs(model, ids[max(0, end - 1 - LENGTH) : end])[scored - end :].sum())
            scored = end
        tokens += len(ids) - 1
    return total, tokens, sum(len(text.encode()) for text in TEXTS)


def test_perplexity_is_that_of_transformers_in_every_format(folder: Path, tmp_path: Path) -> None:
    assert convert(["--load", str(folder), "--save", str(tmp_path / "ours")]) == 0
    total, tokens, size = perplexity_of_theirs(folder)
    results = []
    for load in (folder, tmp_path / "ours"):
        output = tmp_path / f"{load.name}.json"
        words = ["--load", load, "--data-path", folder / "texts.jsonl", "--seq-length", LENGTH, "--stride", STRIDE]
        assert main([*map(str, words), "--output", str(output)]) == 0
        results.append(json.loads(output.read_text())["results"])
    assert results[0] == results[1]
    found = results[0]
    assert (found["documents"], found["tokens"], found["bytes"]) == (len(TEXTS), tokens, size) and tokens > 100
    assert found["loss"] == pytest.approx(-total / tokens, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-5)
    assert found["bits per byte"] == pytest.approx(-total / math.log(2) / size, rel=1e-6)
    assert found["bits per token"] == pytest.approx(-total / math.log(2) / tokens, rel=1e-6)


def test_flags_change_what_is_measured(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(*words: object) -> float:
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        common = ["--load", folder, "--data-path", folder / "texts.jsonl", "--output", output]
        assert main(list(map(str, [*common, *words]))) == 0
        return float(json.loads(output.read_text())["results"]["loss"])

    pytest.importorskip("peft")
    write_adapter(folder, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    whole = loss()
    assert loss("--seq-length", 64) == whole and loss("--seq-length", LENGTH) != whole
    assert loss("--seq-length", LENGTH) == loss("--seq-length", LENGTH, "--stride", LENGTH // 2)
    assert loss("--seq-length", LENGTH, "--stride", 3) != loss("--seq-length", LENGTH)
    assert loss("--adapter", tmp_path / "adapter") != whole and loss("--dtype", "bf16") != whole
    capsys.readouterr()
    for words, message in (
        (["--stride", "9", "--seq-length", "8"], "--stride 9 is not between 1 and --seq-length 8"),
        (["--seq-length", "65"], "--seq-length 65 is not between 2 and the model's longest sequence, 64"),
        (["--limit", "3"], "--limit has no effect without --tasks"),
        (["--limit", "0"], "--limit has no effect without --tasks"),
        (["--num-fewshot", "0"], "--num-fewshot has no effect without --tasks"),
        (["--apply-chat-template"], "--apply-chat-template has no effect without --tasks"),
        (["--tasks", "x"], "give --data-path, whose text is scored, or --tasks"),
        (["--json-key", "other"], "texts.jsonl:1: not a JSON object with a string under 'other'"),
    ):
        assert main(["--load", str(folder), "--data-path", f"{folder}/texts.jsonl", *words]) == 2
        assert message in capsys.readouterr().err


def harness(folder: Path, model: Any) -> Any:
    opened = open_model(folder)
    tokenizer = folder_tokenizer(opened, None)
    return harness_model(TextScorer(model, tokenizer, (tokenizer.eos,), 64, 64), "tiny")


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's class of models, where it is not installed."""
    try:
        import lm_eval.api.model  # noqa: F401
    except ImportError:
        modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
        modules["lm_eval.api.model"].LM = type("LM", (), {})  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)


def test_requests_of_the_harness(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own class for transformers answers them: contexts and answers are encoded together."""
    stand_in(monkeypatch)
    model, tokenizer = theirs(folder)
    device = torch.device("cpu")
    with alone(device):
        ours = harness(folder, load_model(open_model(folder), device))
        asked = [
            ("what is the answer", " to everything"),
            ("what is the answer ", "it"),
            ("", "one two"),
            ("seven", ""),
        ]
        for (context, text), (score, greedy) in zip(asked, ours.loglikelihood(requests(*asked)), strict=True):
            before = tokenizer.encode(context.rstrip()) or [tokenizer.bos_token_id]
            whole = tokenizer.encode(context + text) if context else [*before, *tokenizer.encode(text)]
            want = log_probs(model, whole)[len(before) - 1 :] if text else torch.zeros(0)
            assert score == pytest.approx(float(want.sum()), rel=1e-6) and greedy == (not text)
        long = " ".join(WORDS * 2)  # longer than the model's longest sequence
        assert ours.loglikelihood(requests((long, " course")))[0][0] < 0
        (rolled,) = ours.loglikelihood_rolling(requests((WORDS[0],)))
        ids = [tokenizer.bos_token_id, *tokenizer.encode(WORDS[0])]
        assert rolled == pytest.approx(float(log_probs(model, ids).sum()), rel=1e-6)
        prompt = tokenizer(WORDS[1], return_tensors="pt")
        new = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        greedy_settings = {"until": [], "max_gen_toks": 12}
        assert ours.generate_until(requests((WORDS[1], greedy_settings))) == [text]
        mark = text[3]
        assert ours.generate_until(requests((WORDS[1], greedy_settings | {"until": [mark]}))) == [
            text[: text.index(mark)]
        ]
        with pytest.raises(ValueError, match="the task asks for num_beams, which is not supported"):
            ours.generate_until(requests((WORDS[1], {"num_beams": 2})))
        messages = [{"role": "user", "content": "hi"}]
        assert ours.apply_chat_template(messages) == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


def test_a_sentencepiece_model_asks_no_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    write_pieces(tmp_path / "tokenizer.model")
    scorer = TextScorer(None, open_tokenizer(tmp_path), (1,), 64, 64)  # type: ignore[arg-type]
    said = f"{tmp_path}/tokenizer.model is a sentencepiece model: --apply-chat-template needs a folder with tokenizer."
    with pytest.raises(ValueError, match=re.escape(said)):
        harness_model(scorer, "tiny").apply_chat_template([{"role": "user", "content": "hi"}])


class MergingTokenizer:
    """Two characters are a token, and so is what is left over."""

    before: tuple[int, ...] = ()
    bos, eos = None, 0

    def encode(self, text: str) -> list[int]:
        return [1] * ((len(text) + 1) // 2)

    begun = encode


def test_a_continuation_that_merges_into_its_context_is_not_scored() -> None:
    scorer = TextScorer(None, MergingTokenizer(), (0,), 64, 64)  # type: ignore[arg-type]
    assert scorer.continuation("abc", "") == (0.0, True)
    with pytest.raises(ValueError, match="the continuation 'd' has no token of its own after 'abc': no score"):
        scorer.continuation("abc", "d")


def test_without_the_library_it_says_how_to_get_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--load", str(folder), "--tasks", "hellaswag"]) == 2
    assert capsys.readouterr().err == "error: --tasks needs lm-evaluation-harness: pip install lm-eval\n"


def test_a_task_gives_the_same_numbers_through_transformers(folder: Path, tmp_path: Path) -> None:
    """With the library itself, on a task of our own."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is optional: pip install lm-eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"q": f"{WORDS[i % 3]} {i}:", "a": WORDS[(i + 1) % 3], "b": WORDS[i % 3], "gold": i % 2} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
    choice = 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{[a, b]}}"\ndoc_to_target: gold\n'
    rolling = 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}} {{a}}"\n'
    (tmp_path / "choose.yaml").write_text(f"task: choose\n{shared}{choice}")
    (tmp_path / "roll.yaml").write_text(f"task: roll\n{shared}{rolling}")
    words = ["--load", folder, "--tasks", "choose", "roll", "--include-path", tmp_path, "--output", tmp_path / "out"]
    assert main(list(map(str, words))) == 0
    ours = json.loads((tmp_path / "out").read_text())["results"]
    manager = TaskManager(include_path=str(tmp_path))
    their = HFLM(pretrained=theirs(folder)[0], tokenizer=theirs(folder)[1], max_length=64)
    want = lm_eval.simple_evaluate(model=their, tasks=["choose", "roll"], task_manager=manager)["results"]
    numbers = {(task, name) for task in want for name, value in want[task].items() if isinstance(value, float)}
    assert len(numbers) >= 4
    for task, name in numbers:
        assert ours[task][name] == pytest.approx(want[task][name], rel=1e-6), (task, name)
